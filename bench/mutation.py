"""How much the tests notice: faults are put into a room one at a time, and its tests are asked whether they see them.

    python bench/mutation.py planner wire store [--sample 300] [--seed 1] [--minutes 60] [--keep FOLDER]

mutmut (extra `audit`) makes the faults and runs, for each, the tests that reach the changed function. This script gives
it a copy of the tree, names what is to be changed and which tests judge it, and draws a sample: all 5,000 faults of one
room take hours. A fault is caught when a test fails, the run hangs or the process dies; one that no test reaches
counts as missed, and so does one that changes nothing anybody could see. With --minutes it ends early and judges what
it came to. Prints one line of JSON for each room and a difference for each fault that was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[1]
COPIED = (
    "veloxquant",
    "tests",
    "plugins",
    "bench",
    "docs",
    "launchd",
    "config",
    "README.md",
    "CHANGELOG.md",
    "Makefile",
)
TARGET = 0.80
SAMPLE = 300

# mutmut with the collector of cycles off: around each call it sets a variable of the context, and CPython 3.11 dies
# when a collection meanwhile ends a generator whose own call does the same.
# An example that shows a fault is not made smaller, which takes longer than finding it. Faults are run in the order
# given and not the quick ones first, so that a run which is cut short has judged a fair sample. A loop that never ends
# may heap up objects: 4 GiB are enough for any test that ends.
MUTMUT = """
import gc, resource, signal, sys
from hypothesis import Phase, settings
from mutmut import __main__ as program
gc.disable()
resource.setrlimit(resource.RLIMIT_DATA, (2**32, resource.getrlimit(resource.RLIMIT_DATA)[1]))
settings.register_profile("mutation", deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
program.estimated_worst_case_time = sys.argv.index
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where this was started in the background
program.cli()
"""

# What mutmut writes for a fault: pytest's exit code, or one of its own.
MISSED = {0: "survived", 5: "no test", 33: "no test"}
SKIPPED = {34, 37}


class Room(NamedTuple):
    """What is changed, and the tests that are to notice."""

    changed: tuple[str, ...]
    tests: tuple[str, ...]
    left_out: str = ""
    """Tests that start programs, which mutmut cannot follow, or hold to a clock, which it slows; by pytest's -k."""


_PROGRAMS = "program or processes or child_process or cuts_off or stopped or killed"
_TIMED = "test_watch.py or test_waiting or test_processes or test_faults or test_peer or test_record_groups"
_STORE = ("storage", "folder", "directory", "benchmark_db", "index", "adding", "eviction", "handed_out", "lock")
_MERGE = ("merging", "merge_plan", "merge_run", "merge_journal", "record_names", "record_text", "validation", "verify")
ROOMS = {
    "planner": Room(("veloxquant/planner/*",), ("tests/planner",)),
    "wire": Room(("veloxquant/wire/*",), ("tests/wire",)),
    "store": Room(
        tuple(f"veloxquant/benchmarks/{name}.py" for name in (*_STORE, *_MERGE)),
        ("tests/benchmarks",),
        f"{_PROGRAMS} or {_TIMED}",
    ),
}

SETTINGS = """

[tool.mutmut]
source_paths = ["veloxquant"]
only_mutate = {changed}
also_copy = {copied}
pytest_add_cli_args = ["-p", "no:randomly", "-p", "no:cacheprovider", "-o", "timeout=900",
    "--hypothesis-profile=mutation", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-k", "{chosen}"]
pytest_add_cli_args_test_selection = {tests}
use_setproctitle = false
track_dependencies = false
use_git_change_detection = false
timeout_constant = 60.0
timeout_multiplier = 4.0
"""


def prepare(room: Room, copy: Path) -> None:
    """Lay a copy of the tree, with mutmut's settings beside ours."""
    copy.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        elif source.exists():
            shutil.copy(source, copy / name)
    shutil.copytree(REPOSITORY / "plugins", copy / "veloxquant_plugins", dirs_exist_ok=True)
    copied = json.dumps(["veloxquant_plugins", *(name for name in COPIED if name not in ("veloxquant", "tests"))])
    chosen = f"not ({room.left_out})" if room.left_out else ""
    text = SETTINGS.format(changed=json.dumps(room.changed), copied=copied, tests=json.dumps(room.tests), chosen=chosen)
    (copy / "pyproject.toml").write_text((REPOSITORY / "pyproject.toml").read_text() + text)


def mutmut(copy: Path, *words: str, most_s: float | None = None) -> str:
    """What mutmut says. Its exit code tells nothing of use: it is 1 for a name that matches none, too."""
    command = [sys.executable, "-c", MUTMUT, *words]
    with subprocess.Popen(command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        try:
            said, _ = running.communicate(timeout=most_s)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)  # it stops its tests and keeps what it found
            said, _ = running.communicate()
    return said


def verdicts(copy: Path) -> dict[str, int | None]:
    """Every fault by its name, and the exit code of the tests that ran for it; None where none did yet."""
    found: dict[str, int | None] = {}
    for path in sorted(copy.glob("mutants/veloxquant/**/*.meta")):
        found |= json.loads(path.read_text())["exit_code_by_key"]
    return found


def make(copy: Path) -> list[str]:
    """Make the faults and find which tests reach what, which mutmut does before it runs any; the names."""
    said = mutmut(copy, "run", "--max-children", "1", "no.such.fault")
    names = sorted(verdicts(copy))
    if not names or "nothing matches" not in said:
        sys.exit(f"mutmut made no faults, or the tests fail without any:\n{said[-3000:]}")
    return names


def judge(name: str, sample: int, seed: int, copy: Path, most_s: float | None) -> dict[str, Any]:
    """Run a sample of one room's faults, for so long at most, and tell the score of those that were run."""
    began = time.monotonic()
    prepare(ROOMS[name], copy)
    names = make(copy)
    drawn = names if sample >= len(names) else random.Random(seed).sample(names, sample)  # noqa: S311 -- no secret
    said = mutmut(copy, "run", "--max-children", "1", *drawn, most_s=most_s)
    found = {one: code for one, code in verdicts(copy).items() if one in set(drawn) and code not in SKIPPED}
    codes = {one: code for one, code in found.items() if code is not None}
    if not codes or (len(codes) < len(found) and most_s is None):
        sys.exit(f"mutmut ran {len(codes)} of {len(found)} faults of {name}:\n{said[-3000:]}")
    missed = {one: MISSED[code] for one, code in codes.items() if code in MISSED}
    for one, why in sorted(missed.items()):
        print(f"# {why}: {one}\n{mutmut(copy, 'show', one)}", file=sys.stderr, flush=True)
    score = 1 - len(missed) / len(codes)
    return {
        "requirement": "R40",
        "what": f"mutation score of {name}, {len(codes)} of {len(names)} faults, {len(drawn)} drawn with seed {seed}",
        "value": round(score, 4),
        "unit": "of 1",
        "target": TARGET,
        "met": score >= TARGET,
        "missed": sorted(missed),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "load": os.getloadavg()[0],
    }


def main() -> int:
    """Judge the rooms; 0 when all of it ran, whatever the scores."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("rooms", nargs="+", choices=sorted(ROOMS))
    parser.add_argument("--sample", type=int, default=SAMPLE, help=f"faults of each room, default {SAMPLE}")
    parser.add_argument("--seed", type=int, default=1, help="of the sample, default 1")
    parser.add_argument(
        "--minutes", type=float, help="for each room, beside making its faults; default as long as it takes"
    )
    parser.add_argument("--keep", type=Path, help="where the copies are laid and left, to look at a fault later")
    options = parser.parse_args()
    most_s = None if options.minutes is None else 60 * options.minutes
    for name in options.rooms:
        with tempfile.TemporaryDirectory() as folder:
            copy = (options.keep or Path(folder)) / name
            print(json.dumps(judge(name, options.sample, options.seed, copy, most_s)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
