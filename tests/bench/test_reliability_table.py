"""The table of reliability figures shows what each script measured, and which did not end well."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from reliability import figures, table

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_figure_is_a_line_of_json_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """The line for programs, the sentence on standard error."""
    figures.at_most("R99", "bolts left over", 3, "bolts", 2)
    out, err = capsys.readouterr()
    line = json.loads(out)
    assert (line["requirement"], line["value"], line["met"], line["unit"]) == ("R99", 3, False, "bolts")
    assert "bolts left over: 3 bolts, target <= 2 bolts: NOT MET" in err


def test_a_percentile_is_one_of_the_values() -> None:
    """Nearest rank: 99 of 100 values stay within the last but one."""
    assert figures.percentile([float(n) for n in range(1, 101)], 99) == 100.0
    assert figures.percentile([5.0, 1.0, 3.0], 50) == 3.0
    assert figures.percentile([2.0], 99) == 2.0


def test_the_table_has_every_figure_and_says_what_broke(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that measured and then died is in both."""
    line = {
        "requirement": "R98",
        "what": "nuts",
        "value": 0.25,
        "unit": "s",
        "target": "<= 1 s",
        "met": True,
        "load": 1,
    }
    script = f"print('''{json.dumps(line)}''')\nraise SystemExit('out of nuts')\n"
    (short_folder / "r98_nuts.py").write_text(script, encoding="utf-8")
    (short_folder / "helper.py").write_text("raise SystemExit(9)\n", encoding="utf-8")
    monkeypatch.setattr(table, "HERE", short_folder)
    monkeypatch.setattr("sys.argv", ["table.py"])
    assert table.main() == 1
    out, err = capsys.readouterr()
    assert "R98  nuts  0.25 s  <= 1 s  met  1" in out
    assert "r98_nuts.py: exit 1: out of nuts" in err
    assert "helper" not in err
