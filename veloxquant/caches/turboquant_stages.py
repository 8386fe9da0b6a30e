"""TurboQuant's first algorithm (arXiv 2504.19874) for vectors of one width: rotate, then a level for each coordinate.

A vector is stored as its root mean square s in the input's number format and what is left once s is divided out, so
that no norm is squared or multiplied by sqrt(width) in 16 bits. Everything else is computed in float32. Codes live in
rotated space, padded to a multiple of 32 coordinates: queries are brought there once a call, and sums of values are
brought back once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Protocol

import mlx.core as mx

from veloxquant.caches import codebook, ordered, packing
from veloxquant.caches.rotation import rotation, rotation_parts

if TYPE_CHECKING:
    from veloxquant.caches.codec import Arrays

_AT_ONCE = 15
"""Thresholds compared at a time, one byte a coordinate each: all of them up to 4 bits."""


class Stage(Protocol):
    """What quantizes all channels of one width alike; a codec is one of these, or two with channels dealt out."""

    @property
    def arrays(self) -> int:
        """How many arrays it stores."""

    @property
    def space(self) -> int:
        """Coordinates of the space that ready queries and mixed values are in."""

    def encode(self, x: mx.array) -> Arrays:
        """(..., tokens, width) -> arrays (..., tokens, what is stored)."""

    def decode(self, stored: Arrays) -> mx.array:
        """(..., tokens, width) in float32."""

    def ready(self, queries: mx.array) -> mx.array:
        """Queries (..., n, width) -> (..., n, space) in float32."""

    def scores(self, ready: mx.array, stored: Arrays) -> mx.array:
        """Ready queries -> products (..., n, tokens) in float32."""

    def mix(self, weights: mx.array, stored: Arrays) -> mx.array:
        """Weights (..., n, tokens) in float32 -> sums (..., n, space)."""

    def settle(self, mixed: mx.array) -> mx.array:
        """Sums (..., n, space) -> (..., n, width)."""


@dataclass(frozen=True)
class MeanSquare:
    """Algorithm 1: the nearest Lloyd-Max level of each rotated coordinate. Stores words and the root mean square."""

    width: int
    bits: int
    seed: int
    unbiased: bool = False
    """Whether the stored size is stretched until sum(x y) = sum(x x) for what is read back, y (EDEN, arXiv 2108.08842).

    The levels that lose least are means of their cells, and so shorter than what was there. Errors vanish where
    attention averages values; that they are short does not.
    """

    arrays: ClassVar[int] = 2

    @property
    def space(self) -> int:
        """The width, padded."""
        return packing.padded(self.width)

    def encode(self, x: mx.array) -> Arrays:
        """Words uint32, root mean square (..., 1) in the dtype of x."""
        rotated, scale = to_rotated(x, self.width, self.seed)
        words = packing.pack(self.codes(rotated), self.bits)
        return words, self._stretched(rotated, words, scale) if self.unbiased else scale

    def codes(self, rotated: mx.array) -> mx.array:
        """The number of thresholds below each coordinate."""
        return nearest(rotated, self.bits, self.width)

    def levels(self, words: mx.array) -> mx.array:
        """Words -> levels in units of the root mean square, (..., space)."""
        return packing.lookup(words, self.bits, scaled_levels(self.bits, self.width))

    def decode(self, stored: Arrays) -> mx.array:
        """The root mean square comes last, so that nothing overflows on the way."""
        words, scale = stored
        decoded: mx.array = self.settle(self.levels(words)) * scale.astype(mx.float32)
        return decoded

    def ready(self, queries: mx.array) -> mx.array:
        """Rotated; zero in the padding."""
        return widened(queries.astype(mx.float32) @ rotation(self.width, self.seed).T, self.space)

    def scores(self, ready: mx.array, stored: Arrays) -> mx.array:
        """Products with levels, each times its token's root mean square."""
        words, scale = stored
        return (ready @ self.levels(words).swapaxes(-1, -2)) * as_row(scale)

    def mix(self, weights: mx.array, stored: Arrays) -> mx.array:
        """Root mean squares go into the weights."""
        words, scale = stored
        return (weights * as_row(scale)) @ self.levels(words)

    def settle(self, mixed: mx.array) -> mx.array:
        """Rotated back."""
        return mixed[..., : self.width] @ rotation(self.width, self.seed)

    def _stretched(self, rotated: mx.array, words: mx.array, scale: mx.array) -> mx.array:
        product = ordered.mean_product(rotated, self.levels(words)[..., : self.width])
        ratio = ordered.mean_square(rotated) / mx.where(product == 0, 1.0, product)
        stretched = scale.astype(mx.float32) * mx.where(product == 0, 1.0, ratio)
        return mx.minimum(stretched, mx.finfo(scale.dtype).max).astype(scale.dtype)


def to_rotated(x: mx.array, width: int, seed: int) -> tuple[mx.array, mx.array]:
    """Rotated coordinates in units of the stored root mean square, and that, (..., 1) in the dtype of x."""
    rows, size = ordered.normalized(x)
    scale = size.astype(x.dtype)
    stored = scale.astype(mx.float32)
    ratio = size / mx.where(stored == 0, 1.0, stored)
    return ordered.product(rows, rotation_parts(width, seed)) * ratio, scale


def nearest(rotated: mx.array, bits: int, width: int) -> mx.array:
    """Codes uint32 of the levels nearest to each coordinate: how many thresholds lie below it.

    Comparing with all of them is many times faster than searching with gathers, on a CPU at any number of bits.
    """
    counts = [(rotated[None] > ends).sum(axis=0) for ends in _thresholds(bits, width, rotated.ndim)]
    return sum(counts[1:], counts[0]).astype(mx.uint32)


@lru_cache(maxsize=256)
def scaled_levels(bits: int, width: int) -> tuple[float, ...]:
    """Levels for coordinates of a vector of root mean square 1, whose length is sqrt(width)."""
    return tuple(level * math.sqrt(width) for level in codebook.levels(bits, width))


def widened(x: mx.array, space: int) -> mx.array:
    """The last axis with zeros up to `space`."""
    missing = space - x.shape[-1]
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def as_row(scale: mx.array) -> mx.array:
    """(..., tokens, 1) -> (..., 1, tokens) in float32."""
    return scale.astype(mx.float32).swapaxes(-1, -2)


@lru_cache(maxsize=256)
def level_table(bits: int, width: int) -> mx.array:
    """The scaled levels, (2**bits,) float32."""
    table = mx.array(scaled_levels(bits, width), dtype=mx.float32)
    mx.eval(table)
    return table


@lru_cache(maxsize=256)
def _thresholds(bits: int, width: int, ndim: int) -> tuple[mx.array, ...]:
    """Ends of cells, some at a time, shaped (some, 1, ..., 1) to be compared with arrays of `ndim` axes."""
    ends = [end * math.sqrt(width) for end in codebook.thresholds(bits, width)]
    some = [ends[first : first + _AT_ONCE] for first in range(0, len(ends), _AT_ONCE)]
    tables = tuple(mx.array(part, dtype=mx.float32).reshape(-1, *[1] * ndim) for part in some)
    mx.eval(tables)
    return tables
