"""What `bench/line_coverage.py` counts: every file in one room, lines as coverage reports them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import line_coverage
import pytest
from line_coverage import File

ROOT = Path(__file__).parents[2]


def test_every_package_is_a_room_or_in_one_and_every_room_has_tests() -> None:
    """A new package is counted as itself, not with the modules below all rooms."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    for package in named["packages"]:
        top, _, rest = package.partition(".")
        folder = Path(named["package-dir"][top], *rest.split(".")).as_posix().rstrip("/.")
        expected = {"plugins": "plugins", "launchd": "service"}.get(folder, rest.partition(".")[0] or "config")
        assert line_coverage.room_of(f"{folder}/__init__.py") == expected
    for room in line_coverage.ROOMS.values():
        assert all((ROOT / path).exists() for path in (*room.code, *room.tests))


def test_a_report_gives_statements_and_the_lines_that_were_missed() -> None:
    """Paths are relative to where coverage ran, or absolute."""
    one = {"summary": {"num_statements": 10, "percent_covered": 70.0}, "missing_lines": [3, 4, 9]}
    report = {"files": {"veloxquant/planner/plan.py": one, str(ROOT / "plugins/kivi.py"): one}}
    assert list(line_coverage.files(report)) == [
        File("veloxquant/planner/plan.py", 10, (3, 4, 9)),
        File("plugins/kivi.py", 10, (3, 4, 9)),
    ]


@pytest.mark.parametrize(
    ("room", "missing", "met"), [("planner", 0, True), ("planner", 1, False), ("ctl", 50, True), ("ctl", 51, False)]
)
def test_one_line_is_too_many_where_all_are_to_be_reached(room: str, missing: int, met: bool) -> None:
    """And one in twenty is not elsewhere. The share is of all files together."""
    files = [File("a.py", 900, tuple(range(missing))), File("b.py", 100, ())]
    line = line_coverage.figure(room, files, "all tests")
    assert (line["requirement"], line["met"]) == ("R40", met)
    assert line["value"] == (1000 - missing) / 10
    assert line["what"] == f"lines of {room} by all tests, {1000 - missing:,} of 1,000"


def test_missed_lines_are_told_as_spans() -> None:
    """Two in a row are one, too."""
    assert list(line_coverage.spans((3, 4, 5, 9, 11, 12))) == ["3-5", "9", "11-12"]
    assert list(line_coverage.spans(())) == []


def test_a_file_that_is_written_to_while_tests_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines have moved under what was counted."""
    monkeypatch.setattr(line_coverage, "REPOSITORY", tmp_path)
    for name, written in (("before.py", 1000), ("after.py", 1002)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (written, written))
    assert line_coverage.written_since(1001.0, ("before.py", "after.py")) == ["after.py"]


def test_a_process_whose_environment_was_cleaned_is_counted_too(tmp_path: Path) -> None:
    """Coverage is asked for while it starts, and of that nothing is left for what runs there."""
    settings = line_coverage.prepare(tmp_path)
    (tmp_path / "coverage.py").write_text(
        "import os\ndef process_startup(): print(os.environ['COVERAGE_PROCESS_START'])\n"
    )
    code = "import os; print('COVERAGE_PROCESS_START' in os.environ)"
    env = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(settings), "False"]
