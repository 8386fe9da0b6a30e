"""What the reliability scripts have in common: their options, and a figure beside its target as one line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any


def options(description: str) -> Any:
    """`--full` for the counts of the requirement; without it a short form."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--full", action="store_true", help="the whole count, which may take many minutes")
    return parser.parse_args()


def say(requirement: str, what: str, value: float, unit: str, target: str, *, met: bool) -> None:
    """One line of JSON on standard output, one sentence on standard error."""
    line = {"requirement": requirement, "what": what, "value": round(value, 4), "unit": unit, "target": target}
    print(json.dumps(line | {"met": met, "load": round(os.getloadavg()[0], 2)}), flush=True)
    verdict = "met" if met else "NOT MET"
    print(f"{requirement}: {what}: {value:,.4g} {unit}, target {target}: {verdict}", file=sys.stderr, flush=True)


def at_most(requirement: str, what: str, value: float, unit: str, target: float) -> None:
    """A figure whose target is an upper bound."""
    say(requirement, what, value, unit, f"<= {target:g} {unit}", met=value <= target)


def percentile(values: list[float], rank: float) -> float:
    """The value that `rank` percent stay within (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(rank / 100 * len(ordered)))]
