"""Coverage-guided fuzzing of everything that reads what others wrote: `make fuzz MINUTES=10`.

Each target (targets.py) runs in a process of its own under atheris, starting from the corpus in tests/data/corpus and
from what earlier runs reached. A find is written to .cache/fuzz/finds and ends this program with 1; `--merge` adds to
the kept corpus what reaches code that nothing in it reaches. A line of JSON for each target says how many inputs were
tried.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WORK = Path(__file__).resolve().parents[2] / ".cache" / "fuzz"
FINDS = WORK / "finds"
WORDS = WORK / "words.dict"
LONGEST = 4096
KEPT_LONGEST = 1024
"""Inputs that are merged into the kept corpus: a repository is no place for long ones."""
_COMMON = (f"-dict={WORDS}", "-rss_limit_mb=2048", "-timeout=20")
_COUNT = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_COVERED = re.compile(r"cov: (\d+)")


def main() -> int:
    """0 when nothing was found, 1 for a find, 2 where atheris is missing."""
    options = _options()
    if importlib.util.find_spec("atheris") is None:
        print(
            "fuzz_unavailable: atheris is not installed for this Python: it comes as wheels for Linux on x86-64 and "
            "CPython 3.11 to 3.14.\n  pip install 'veloxquant[fuzz]' there; `make test` runs the corpus everywhere",
            file=sys.stderr,
        )
        return 2
    if options.target:
        return _fuzz(options.target, options.rest)
    return _all(options)


def _options() -> Any:
    parser = argparse.ArgumentParser(description="Fuzz what reads what others wrote.")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--only", action="append", default=[], help="these targets alone")
    parser.add_argument("--runs", type=int, default=-1, help="at most so many inputs a target")
    parser.add_argument("--merge", action="store_true", help="add to the kept corpus what reaches new code")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def _fuzz(name: str, rest: list[str]) -> int:
    """In a child: instrument our code, then hand over to libFuzzer, which ends the process."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["veloxquant", "veloxquant_plugins"]):
        from fuzz import targets
    # libFuzzer starts itself again to merge, by its first argument.
    again = WORK / f"{name}.sh"
    again.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" --target {name} -- "$@"\n', encoding="utf-8")
    again.chmod(0o700)
    atheris.Setup([str(again), *rest], targets.TARGETS[name])
    atheris.Fuzz()
    return 0


def _all(options: Any) -> int:
    """Every target in turn."""
    from fuzz import targets, words

    FINDS.mkdir(parents=True, exist_ok=True)
    WORDS.write_text("".join(f'"{word}"\n' for word in words.known()), encoding="ascii")
    names = options.only or list(targets.TARGETS)
    if options.merge:
        for name in names:
            _child(name, ["-merge=1", f"-max_len={KEPT_LONGEST}", *_folders(name)[::-1]])
        return 0
    share_s = max(1, round(options.minutes * 60 / len(names)))
    broken = [name for name in names if not _hunt(name, share_s, options.runs)]
    print(f"finds of {', '.join(broken)} in {FINDS}" if broken else "nothing was found", file=sys.stderr)
    return 1 if broken else 0


def _hunt(name: str, seconds: int, runs: int) -> bool:
    """Fuzz one target and say how far it came; False for a find."""
    done = _child(
        name,
        [f"-max_total_time={seconds}", f"-runs={runs}", f"-max_len={LONGEST}", "-print_final_stats=1", *_folders(name)],
    )
    inputs, edges = _COUNT.findall(done.stderr), _COVERED.findall(done.stderr)
    found = {"inputs": int(inputs[-1]) if inputs else 0, "edges": int(edges[-1]) if edges else 0}
    print(json.dumps({"target": name, **found, "found_nothing": done.returncode == 0}), flush=True)
    if done.returncode:
        print(_what_happened(done), file=sys.stderr)
    return done.returncode == 0


def _folders(name: str) -> list[str]:
    """Where inputs that reach new code go, then where the kept ones are."""
    from fuzz import targets

    grown = WORK / name
    grown.mkdir(exist_ok=True)
    return [str(grown), str(targets.CORPUS / name)]


def _child(name: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """One target in a process of its own, its files in memory where the system offers it."""
    memory = "/dev/shm"  # noqa: S108 -- the folder inside is private
    with tempfile.TemporaryDirectory(prefix="vq-", dir=memory if os.access(memory, os.W_OK) else None) as folder:
        return subprocess.run(
            [sys.executable, __file__, "--target", name, "--", *_COMMON, f"-artifact_prefix={FINDS}/{name}-", *words],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=os.environ | {"TMPDIR": folder, "HF_HUB_OFFLINE": "1"},
        )


def _what_happened(done: subprocess.CompletedProcess[str]) -> str:
    """The traceback, or what libFuzzer says of memory and time, without its progress."""
    told = (done.stdout + done.stderr).splitlines()
    return "\n".join(line for line in told if not line.startswith(("#", "INFO", "WARNING")))[-4000:]


if __name__ == "__main__":
    raise SystemExit(main())
