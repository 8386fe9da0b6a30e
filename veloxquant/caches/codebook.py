"""Lloyd-Max levels of one coordinate of a random unit vector, computed when first asked for.

A coordinate x of a vector drawn evenly from the unit sphere in d dimensions has a density proportional to
(1 - x^2)^((d - 3) / 2) (arXiv 2504.19874). The levels that lose least in the mean square are those where each level is
the mean of its cell and cells end midway between levels (Lloyd 1957, Max 1960). With x = sin(a) the density in a is
cos(a)^(d - 2), smooth for d >= 2; cells are integrated in a by Gauss-Legendre panels, and the equations solved by
Newton's method on the upper half, since the levels are symmetric.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

MAX_BITS = 8
_NODES = (
    (0.1834346424956498, 0.3626837833783620),
    (0.5255324099163290, 0.3137066458778873),
    (0.7966664774136267, 0.2223810344533745),
    (0.9602898564975363, 0.1012285362903763),
)
"""Half of the 8-point Gauss-Legendre rule on [-1, 1] (Abramowitz and Stegun, table 25.4)."""

_PANEL = 0.25
"""Widest panel, in standard deviations of the coordinate."""
_NEGLIGIBLE = 1e-30
"""Density, relative to its peak, beyond which nothing is integrated."""
_GRID = 8192
"""Points on which the start is placed."""
_STEPS = 200
_CONVERGED = 1e-12


class _Cell(NamedTuple):
    """Probability and mean of a cell, and how its mean moves with its two ends."""

    mean: float
    by_left: float
    by_right: float


@lru_cache(maxsize=256)
def levels(bits: int, width: int) -> tuple[float, ...]:
    """2**bits ascending levels for a coordinate of a unit vector of `width`; bits from 1 to 8.

    In one dimension a unit vector is -1 or 1, and so are its levels, each repeated.
    """
    count = 2**bits
    upper = [1.0] * (count // 2) if width == 1 else _solve(_start(count, width), width)
    return (*(-level for level in reversed(upper)), *upper)


@lru_cache(maxsize=256)
def thresholds(bits: int, width: int) -> tuple[float, ...]:
    """The 2**bits - 1 ends of cells, midway between neighbouring levels."""
    known = levels(bits, width)
    return tuple((low + high) / 2 for low, high in pairwise(known))


def _start(count: int, width: int) -> list[float]:
    """Levels as dense as the cube root of the density, which is best for many levels (Panter and Dite 1951)."""
    reach = _end(width)
    angles = [reach * (index + 0.5) / _GRID for index in range(_GRID)]
    shares = list(accumulate(math.cos(angle) ** (width / 3) for angle in angles))
    wanted = [shares[-1] * (2 * index + 1) / count for index in range(count // 2)]
    return [math.sin(angles[bisect_left(shares, share)]) for share in wanted]


def _solve(upper: list[float], width: int) -> list[float]:
    """Newton's method for level = mean of its cell; a step that would cross levels is replaced by Lloyd's own."""
    for _ in range(_STEPS):
        ends = [0.0, *((low + high) / 2 for low, high in pairwise(upper)), math.sin(_end(width))]
        cells = [_cell(left, right, width) for left, right in pairwise(ends)]
        step = _newton_step(upper, cells)
        moved = [level + change for level, change in zip(upper, step, strict=True)]
        inside = all(left < level < right for left, level, right in zip(ends, moved, ends[1:], strict=False))
        upper = moved if inside else [cell.mean for cell in cells]
        if inside and max(abs(change) for change in step) < _CONVERGED:
            break
    return upper


def _newton_step(upper: list[float], cells: list[_Cell]) -> list[float]:
    """Solve the three-banded linear system by elimination (Thomas). The innermost end, 0, does not move."""
    last = len(upper) - 1
    beyond: list[float] = []
    right_side: list[float] = []
    for index, (level, cell) in enumerate(zip(upper, cells, strict=True)):
        below = -cell.by_left / 2 if index else 0.0
        above = -cell.by_right / 2 if index < last else 0.0
        pivot = 1.0 + below + above - (below * beyond[-1] if index else 0.0)
        beyond.append(above / pivot)
        rest = cell.mean - level - (below * right_side[-1] if index else 0.0)
        right_side.append(rest / pivot)
    for index in range(last - 1, -1, -1):
        right_side[index] -= beyond[index] * right_side[index + 1]
    return right_side


def _cell(left: float, right: float, width: int) -> _Cell:
    """Mean of the density between two ends, and its derivatives: density at the end x distance / probability."""
    start, end = math.asin(left), math.asin(right)
    panels = max(1, math.ceil((end - start) * math.sqrt(width) / _PANEL))
    half = (end - start) / panels / 2
    probability = moment = 0.0
    for panel in range(panels):
        middle = start + (2 * panel + 1) * half
        for node, weight in _NODES:
            for angle in (middle - node * half, middle + node * half):
                part = weight * half * math.cos(angle) ** (width - 2)
                probability += part
                moment += part * math.sin(angle)
    mean = moment / probability
    by_left = _density(left, width) * (mean - left) / probability
    by_right = _density(right, width) * (right - mean) / probability
    return _Cell(mean, by_left, by_right)


def _density(x: float, width: int) -> float:
    """Proportional to the density in x; only asked for at ends within (-1, 1) or where the answer is not used."""
    rest = 1.0 - x * x
    return rest ** ((width - 3) / 2) if rest > 0 else 0.0


def _end(width: int) -> float:
    """The angle beyond which the density is negligible."""
    return math.acos(_NEGLIGIBLE ** (1 / (width - 2))) if width > 2 else math.pi / 2  # noqa: PLR2004 -- flat at 2
