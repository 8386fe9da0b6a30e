"""docs/reliability.md: a row for each of R1 to R40, and every test and script that a row names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| R")]
UNNAMED = {"R13", "R32", "R40"}
"""What shows them is a target of the Makefile, or a measurement of the tests themselves."""


def test_there_is_one_row_for_each_requirement_in_order() -> None:
    """R1 to R40, after the row that names the columns."""
    assert [row[0] for row in ROWS if row[0] != "R"] == [f"R{number}" for number in range(1, 41)]


@pytest.mark.parametrize("row", [row for row in ROWS if row[0] != "R"], ids=lambda row: row[0])
def test_a_row_names_what_shows_it_and_what_was_seen(row: list[str]) -> None:
    """Requirement, tests and scripts, figure; each that is named exists, some with the requirement's number in it."""
    number, what, shown_by, seen = row
    assert what
    assert seen
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)(\*?)`", shown_by)
    scripts = re.findall(r"`(bench/[\w/]+\.py)", shown_by)
    assert shown_by.count("::") == len(tests)
    for file, name, more in tests:
        text = (ROOT / file).read_text(encoding="utf-8")
        rest = r"\w+" if more else ""
        assert re.search(rf"^\s*(?:async )?def {name}{rest}\(", text, re.MULTILINE), name
    for file in scripts:
        assert (ROOT / file).is_file(), file
    named = [name for _, name, _ in tests] + [Path(file).stem for file in scripts]
    assert number in UNNAMED or any(f"r{int(number[1:]):02d}_" in name for name in named)
