"""How far two Apple chips are apart: by generation within a tier, and by tier.

What a record says of speed was measured through a chip's memory bandwidth, so that is the ruler. A record of another
chip is off by the ratio of the two bandwidths and by what else changed between generations; the closeness says both.
"""

from __future__ import annotations

import re
from functools import lru_cache

TIERS = ("base", "pro", "max", "ultra")
# GB/s of the narrowest and of the widest variant of each tier, by generation. A name does not say which variant it is.
# Apple's figures, as hardware/data/apple_chips.json has them with their sources; this room may not import that one, so
# a test holds the two equal.
BANDWIDTHS: dict[str, dict[int, tuple[float, float]]] = {
    "base": {1: (68.25, 68.25), 2: (100, 100), 3: (100, 100), 4: (120, 120), 5: (153, 153), 6: (170, 170)},
    "pro": {1: (200, 200), 2: (200, 200), 3: (150, 150), 4: (273, 273), 5: (307, 307)},
    "max": {1: (400, 400), 2: (400, 400), 3: (300, 400), 4: (410, 546), 5: (460, 614)},
    "ultra": {1: (800, 800), 2: (800, 800), 3: (819, 819), 5: (1200, 1200)},
}
_USUAL_GROWTH = 1.25
"""From one generation to the next where the table does not say: base chips grew 1.22 times a generation, M1 to M5."""
_GENERATION_FACTOR = 0.9
"""For all but bandwidth: another GPU family, other kernels. With the threshold at 0.6, 0.9 / ratio passes up to 1.5."""
_TIER_FACTORS = (1.0, 0.5, 0.4, 0.3)
"""Neighbouring tiers have 1.5 to 2.9 times the bandwidth and about twice the cores: none passes alone."""
_FLOOR = 0.25
"""As little as any two Apple chips have in common; chips of two makers have less."""

# What hardware.chips reads, which a test holds, and more: people write their records' chips as they like, run together
# or with hyphens, and with the cores or the memory of the machine behind it.
_APPLE_CHIP = re.compile(
    r"(?:apple[ _-]*)?m([1-9][0-9]?)(?:[ _-]*(pro|max|ultra))?"
    r"(?:[ ,_-]+\(?[0-9]{1,4}[ -]?(?:gi?b|cores?(?: [cg]pu)?)\)?)*",
    re.ASCII | re.IGNORECASE,
)

Chip = tuple[int, int]
"""(generation, index of the tier)"""


@lru_cache(maxsize=1024)
def apple_chip(name: str) -> Chip | None:
    """Generation and tier by the name, None for anything that is not plainly an Apple M chip."""
    found = _APPLE_CHIP.fullmatch(" ".join(name.split()))
    return (int(found[1]), TIERS.index((found[2] or "base").lower())) if found else None


def closeness(ours: Chip, theirs: Chip) -> float:
    """0.25..1, 1 for the same generation and tier; a product of steps, so it falls with each generation and tier.

    Each generation costs a tenth and the widest ratio of bandwidths that its two names allow, in the tier where that
    is worse. So M1 and M4, 68 and 120 GB/s, are at 0.9^3 x 68 / 120 = 0.41, M2 and M3, equal in bandwidth, at 0.9.
    """
    first, last = sorted((ours[0], theirs[0]))
    steps = min(_along(tier, first, last) for tier in {ours[1], theirs[1]})
    return max(_FLOOR, steps * _TIER_FACTORS[abs(ours[1] - theirs[1])])


def _along(tier: int, first: int, last: int) -> float:
    factor = 1.0
    for generation in range(first, last):
        factor *= _GENERATION_FACTOR / _ratio(BANDWIDTHS[TIERS[tier]], generation)
    return factor


def _ratio(bandwidths: dict[int, tuple[float, float]], generation: int) -> float:
    """The most by which the bandwidth may change from this generation to the next, at least 1."""
    here, then = bandwidths.get(generation), bandwidths.get(generation + 1)
    if here is None or then is None:
        return _USUAL_GROWTH
    return max(then[1] / here[0], here[1] / then[0])
