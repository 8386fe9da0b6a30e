"""Runs every script beside it and prints what they measured as one table: `make reliability`, or with `--full`.

A script that does not end well is a line of its own; a figure beyond its target is said and fails nothing, since it
moves with what else the machine does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reliability import figures

HERE = Path(__file__).resolve().parent
LIMIT_S = {False: 600, True: 7200}
_HEAD = ("", "what", "value", "target", "", "load")


def main() -> int:
    """0 when every script ran to its end, whatever it measured."""
    full = figures.options(__doc__ or "").full
    rows: list[tuple[str, ...]] = []
    broken = []
    for script in sorted(HERE.glob("r[0-9][0-9]_*.py")):
        print(f"{script.name} ...", file=sys.stderr, flush=True)
        found, trouble = _measured(script, full)
        rows += [_row(one) for one in found]
        if trouble:
            broken.append(f"{script.name}: {trouble}")
    for line in _columns([_HEAD, *rows]):
        print(line)
    print("\n".join(broken), file=sys.stderr)
    return 1 if broken else 0


def _measured(script: Path, full: bool) -> tuple[list[dict[str, Any]], str]:
    """The figures of one script, and what went wrong with it."""
    words = [sys.executable, str(script), *(["--full"] if full else [])]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S[full])
    except subprocess.TimeoutExpired:
        return [], f"it was ended after {LIMIT_S[full]} s"
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last = done.stderr.strip().splitlines()[-1:] or ["no word"]
    return lines, "" if done.returncode == 0 else f"exit {done.returncode}: {last[0]}"


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    value = one["value"]
    shown = f"{value:,.4g}" if isinstance(value, (int, float)) else str(value)
    verdict = "met" if one["met"] else "NOT MET"
    return one["requirement"], one["what"], f"{shown} {one['unit']}", str(one["target"]), verdict, str(one["load"])


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    raise SystemExit(main())
