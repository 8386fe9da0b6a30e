"""Dealing out bits under a budget: to whatever lowers the divergence most for its bytes, one step at a time.

Each unit has a curve of (bits, divergence). Steps that win less for their bytes than a later one are left out, so that
the curve is convex and every step is as good as its place in the order says: reverse water-filling on measured curves
(Shoham and Gersho, IEEE Trans. ASSP 36, 1988). What comes out is at most one step worse than the best there is.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ROUNDING = 1e-9
"""Bits a number that sums of floats may be off by."""


class Unit(NamedTuple):
    """What gets bits as a whole: its numbers for each token, and the steps it can go up, each worth less than the last.

    `bits` of codes, `stored` bits a number with scales and all, and `kl` are of one step each, ascending in bits.
    """

    numbers: float
    bits: tuple[int, ...]
    stored: tuple[float, ...]
    kl: tuple[float, ...]

    def cost(self, step: int) -> float:
        """Bits for each token, to go up from this step to the next."""
        return self.numbers * (self.stored[step + 1] - self.stored[step])

    def slope(self, step: int) -> float:
        """Divergence won for each of these bits, negative."""
        return (self.kl[step + 1] - self.kl[step]) / self.cost(step)


def unit(numbers: float, curve: Sequence[tuple[int, float]], stored: Callable[[float], float]) -> Unit:
    """The convex part of a curve of (code bits, KL), ascending in bits; `stored` bits a number for code bits."""
    hull: list[tuple[int, float]] = []
    for bits, kl in curve:
        if hull and kl >= hull[-1][1]:
            continue  # more bits for nothing: noise
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], (bits, kl)):
            hull.pop()
        hull.append((bits, kl))
    return Unit(
        numbers, tuple(bits for bits, _ in hull), tuple(stored(bits) for bits, _ in hull), tuple(kl for _, kl in hull)
    )


def deal(units: Sequence[Unit], budget: float) -> list[int]:
    """Code bits of every unit, together at most `budget` stored bits a number.

    More budget never leaves more divergence. Raises MethodRefused where the least there is costs more.
    """
    numbers = sum(one.numbers for one in units)
    left = budget * numbers - sum(one.numbers * one.stored[0] for one in units)
    if left < -_ROUNDING * numbers:
        least = budget - left / numbers
        raise MethodRefused(f"a budget of {budget:g} bits a number, and the least is {least:g}", hint="give more bits")
    steps = [0] * len(units)
    waiting = [(one.slope(0), at) for at, one in enumerate(units) if len(one.kl) > 1]
    heapq.heapify(waiting)
    while waiting:
        _, at = heapq.heappop(waiting)
        one, step = units[at], steps[at]
        if one.cost(step) > left + _ROUNDING * numbers:
            continue  # another's step may be smaller
        left -= one.cost(step)
        steps[at] = step + 1
        if step + 2 < len(one.kl):
            heapq.heappush(waiting, (one.slope(step + 1), at))
    return [one.bits[step] for one, step in zip(units, steps, strict=True)]


def _slope(start: tuple[int, float], end: tuple[int, float]) -> float:
    return (start[1] - end[1]) / (end[0] - start[0])
