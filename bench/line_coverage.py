"""Which lines the tests reach: a room's tests are run and the lines of that room are counted, or all of both.

    python bench/line_coverage.py [planner wire ...] [--whole] [--jobs 2]

coverage (extra `audit`) counts. Child processes count too, and so do those with a clean environment, such as the traces
of models: all see PYTHONPATH, and a `sitecustomize` on it starts coverage where the variable that asks for that is
missing. A process that is killed leaves nothing. Prints one line of JSON for each room, and on standard error the lines
of each file that nothing reached. Tests that hold to a clock or to memory may fail under it: they are named, and what
they reached counts. A file that is written to meanwhile is counted wrong, and named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

REPOSITORY = Path(__file__).parents[1]
ALL_LINES, MOST_LINES = 100.0, 95.0
EXACT = {"models", "planner", "wire"}
"""Rooms of which every line is to be reached."""


class Room(NamedTuple):
    """Files and folders that are counted, and the tests that are to reach them."""

    code: tuple[str, ...]
    tests: tuple[str, ...]


class File(NamedTuple):
    """How many statements a file has, and the lines of those that were not reached."""

    path: str
    statements: int
    missing: tuple[int, ...]


_ALIKE = ("profiles", "hardware", "models", "caches", "profiling", "benchmarks", "planner", "wire", "daemon")
_CLIENT = ("_fake", "_fallback", "_limit", "_question", "_transport", "client", "local", "views")
ROOMS = {
    **{name: Room((f"veloxquant/{name}",), (f"tests/{name}",)) for name in (*_ALIKE, "serve", "ctl")},
    "methods": Room(("veloxquant/methods",), ("tests/methods", "tests/plugins/test_bounded.py")),
    "service": Room(("veloxquant/service", "launchd"), ("tests/service",)),
    "measure": Room(("veloxquant/measure",), ("tests/measure", "tests/conformance")),
    "client": Room(tuple(f"veloxquant/{name}.py" for name in _CLIENT), ("tests/client", "tests/test_local.py")),
    "plugins": Room(("plugins",), ("tests/plugins",)),
    "config": Room(("veloxquant",), ("tests/config",)),  # what no other claims: the modules below all rooms
}

SETTINGS = """\
[run]
source = {source}
data_file = {data}
parallel = true
sigterm = true
patch = _exit
disable_warnings = no-data-collected, module-not-measured, module-not-imported
"""
START = """\
import os

if "COVERAGE_PROCESS_START" not in os.environ:
    import coverage

    os.environ["COVERAGE_PROCESS_START"] = {settings!r}
    coverage.process_startup()
    del os.environ["COVERAGE_PROCESS_START"]
"""


def measure(tests: Sequence[str], jobs: int) -> dict[str, File]:
    """Run the tests with everything counted; each file of ours by its path from the repository."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = prepare(folder)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": os.pathsep.join(paths)}
        began = time.time()
        command = ["-m", "pytest", "-p", "no:cacheprovider", "-rfE", "--tb=line", "-o", "timeout=600", *tests]
        spread = ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
        done = subprocess.run([sys.executable, *command, *spread], cwd=REPOSITORY, env=env, check=False, stdout=2)
        if done.returncode not in (0, 1):
            sys.exit(f"pytest ended with {done.returncode}")
        _coverage("combine", "--quiet", f"--rcfile={settings}")
        _coverage("json", "--quiet", f"--rcfile={settings}", "-o", str(folder / "found.json"))
        found = list(files(json.loads((folder / "found.json").read_text(encoding="utf-8"))))
        for path in written_since(began, (file.path for file in found)):
            print(f"# {path} was written to meanwhile: its lines are those of another text", file=sys.stderr)
        return {file.path: file for file in found}


def written_since(began: float, paths: Iterable[str]) -> list[str]:
    """Those that are not as they were when the tests began, in seconds since the epoch."""
    return [path for path in paths if (REPOSITORY / path).stat().st_mtime > began]


def prepare(folder: Path) -> Path:
    """Coverage's settings, and what starts it in processes whose environment was cleaned; the settings' path."""
    settings = folder / "settings.ini"
    source = "".join(f"\n    {REPOSITORY / name}" for name in ("veloxquant", "plugins", "launchd"))
    settings.write_text(SETTINGS.format(source=source, data=folder / "counted"), encoding="utf-8")
    (folder / "sitecustomize.py").write_text(START.format(settings=str(settings)), encoding="utf-8")
    return settings


def _coverage(*words: str) -> None:
    """One of its commands; what it warns of are data that a killed process had half written."""
    command = [sys.executable, "-W", "ignore", "-m", "coverage", *words]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=2)


def files(found: Mapping[str, Any]) -> Iterator[File]:
    """What coverage's JSON report says of each file."""
    for path, one in found["files"].items():
        place = Path(REPOSITORY, path).relative_to(REPOSITORY).as_posix()
        yield File(place, one["summary"]["num_statements"], tuple(one["missing_lines"]))


def room_of(path: str) -> str:
    """The first room that claims a file, by its path from the repository."""
    return next(
        name for name, room in ROOMS.items() if any(path == code or path.startswith(f"{code}/") for code in room.code)
    )


def figure(name: str, counted: Iterable[File], tests: str) -> dict[str, Any]:
    """One room's share of lines that were reached, as the line that is printed."""
    counted = list(counted)
    statements = sum(file.statements for file in counted)
    reached = statements - sum(len(file.missing) for file in counted)
    target = ALL_LINES if name in EXACT else MOST_LINES
    return {
        "requirement": "R40",
        "what": f"lines of {name} by {tests}, {reached:,} of {statements:,}",
        "value": round(100 * reached / statements, 2),
        "unit": "%",
        "target": f">= {target:g} %",
        "met": 100 * reached >= target * statements,
        "load": round(os.getloadavg()[0], 2),
    }


def say(name: str, found: Mapping[str, File], tests: str) -> None:
    """The line of a room, and the lines that nothing reached."""
    counted = [file for path, file in sorted(found.items()) if room_of(path) == name]
    print(json.dumps(figure(name, counted, tests)), flush=True)
    for file in counted:
        if file.missing:
            print(f"# {file.path}: {', '.join(spans(file.missing))}", file=sys.stderr, flush=True)


def spans(lines: Sequence[int]) -> Iterator[str]:
    """Ascending line numbers as they are read: 3, 4, 5, 9 are 3-5 and 9."""
    first = 0
    for at, line in enumerate(lines):
        if at + 1 == len(lines) or lines[at + 1] != line + 1:
            yield str(line) if first == at else f"{lines[first]}-{line}"
            first = at + 1


def main() -> int:
    """Measure the rooms; 0 when all of it ran, whatever was reached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(sorted(ROOMS))}; all when none is named")
    parser.add_argument(
        "--whole", action="store_true", help="all tests in one run, which may reach what a room's do not"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that run tests, default 1")
    options = parser.parse_args()
    if unknown := set(options.rooms) - set(ROOMS):
        parser.error(f"no such room: {', '.join(sorted(unknown))}")
    rooms = options.rooms or sorted(ROOMS)
    whole = measure(["tests"], options.jobs) if options.whole else {}
    for name in rooms:
        found = whole or measure(ROOMS[name].tests, options.jobs)
        say(name, found, "all tests" if whole else "its own tests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
