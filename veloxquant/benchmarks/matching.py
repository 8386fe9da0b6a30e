"""How close two measurements are: one factor in 0..1 for each axis, and their product.

Every factor is 1 for equal values, symmetric, and falls as the values move apart, so the product is too. The factors
are conventions of this store, not physics: they order evidence and decide, with a threshold, which of it is too far
away to use. Default threshold 0.6, so alone on its axis: a context or batch up to 6 times larger or smaller passes;
of two Apple chips those of one tier pass whose bandwidths are within 1.5 times (M3 and M4, M4 and M5, not M1 and M4);
another tier, another maker's chip and a chip that nobody names do not.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from veloxquant.benchmarks.chip_distance import TIERS, apple_chip, closeness
from veloxquant.benchmarks.fingerprint import known

THRESHOLD = 0.6
UNSTATED = -1
"""A context or batch that a query leaves out."""
ANY = "any"
"""A chip or version that a query leaves out; unlike "unknown", which is never equal to anything."""

OCTAVE_COST = 0.25
_UNRELATED_CHIP = 0.2
_UNKNOWN_CHIP = 0.5
"""It may be this very chip or not. Below the threshold, or a record of no known origin would count everywhere."""
_UNKNOWN_VERSION = 0.9
# (factor at no distance, most that distance can cost, distance at which half of that is spent) for a first difference
# in major, minor and patch: each range lies wholly below the next one.
_VERSION_COSTS = ((0.7, 0.2, 2.0), (0.97, 0.22, 4.0), (1.0, 0.03, 4.0))
Numbers = tuple[int, int, int]
"""Major, minor and patch."""
_VERSION = re.compile(r"v?(\d{1,9})(?:\.(\d{1,9}))?(?:\.(\d{1,9}))?")


def size_factor(ours: float, theirs: float) -> float:
    """Closeness of two lengths or batches by their ratio: 1 / (1 + octaves apart / 4). 0 for an impossible size."""
    if not (1 <= ours < math.inf and 1 <= theirs < math.inf):
        return 0.0
    return 1.0 / (1.0 + OCTAVE_COST * abs(math.log2(ours) - math.log2(theirs)))


def reach(threshold: float) -> float:
    """The largest ratio of two sizes whose factor still reaches the threshold; infinite for a threshold of 0."""
    if threshold <= 0:
        return math.inf
    return math.pow(2.0, min(400.0, max(0.0, (1.0 / threshold - 1.0) / OCTAVE_COST) + 1e-9))


@lru_cache(maxsize=4096)
def chip_factor(ours: str, theirs: str) -> float:
    """Closeness of two chips, by `chip_distance` for Apple's; an unknown one is close to none, not even to another."""
    if ANY in (ours, theirs):
        return 1.0
    if not (known(ours) and known(theirs)):
        return _UNKNOWN_CHIP
    if chip_key(ours) == chip_key(theirs):
        return 1.0
    mine, other = apple_chip(ours), apple_chip(theirs)
    return _UNRELATED_CHIP if mine is None or other is None else closeness(mine, other)


@lru_cache(maxsize=4096)
def version_factor(ours: str, theirs: str) -> float:
    """Closeness of two MLX versions by the first number in which they differ, and by how much."""
    if ANY in (ours, theirs):
        return 1.0
    if not (known(ours) and known(theirs)):
        return _UNKNOWN_VERSION
    mine, other = version_numbers(ours), version_numbers(theirs)
    if mine is None or other is None:
        return 1.0 if ours == theirs else _UNKNOWN_VERSION
    return numbers_factor(mine, other)


def numbers_factor(ours: Numbers, theirs: Numbers) -> float:
    """Closeness of two versions in numbers; falls with the distance on either side."""
    for (start, most, half), a, b in zip(_VERSION_COSTS, ours, theirs, strict=True):
        if a != b:
            return start - most * abs(a - b) / (abs(a - b) + half)
    return 1.0


@lru_cache(maxsize=4096)
def chip_key(chip: str) -> str:
    """Form in which two spellings of one chip are equal; empty for an unknown one."""
    if not known(chip):
        return ""
    apple = apple_chip(chip)
    if apple is not None:
        return f"m{apple[0]} {TIERS[apple[1]]}" if apple[1] else f"m{apple[0]}"
    plain = " ".join(chip.casefold().split())
    return f"({plain})" if plain == ANY != chip else plain


@lru_cache(maxsize=4096)
def version_numbers(text: str) -> Numbers | None:
    """Major, minor and patch, None for anything that does not start with a number."""
    found = _VERSION.match(text.strip())
    return (int(found[1]), int(found[2] or 0), int(found[3] or 0)) if found else None
