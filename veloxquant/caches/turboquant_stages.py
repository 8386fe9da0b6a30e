"""The two quantizers of TurboQuant (arXiv 2504.19874) for vectors of one width, without outliers.

A vector is stored as its root mean square s in the input's number format and what is left once s is divided out, so
that no norm is squared or multiplied by sqrt(width) in 16 bits. Everything else is computed in float32. Codes live in
rotated space, padded to a multiple of 32 coordinates: queries are brought there once a call, and sums of values are
brought back once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import mlx.core as mx

from veloxquant.caches import codebook, ordered, packing
from veloxquant.caches.rotation import rotation, rotation_parts

if TYPE_CHECKING:
    from veloxquant.caches.codec import Arrays


@dataclass(frozen=True)
class MeanSquare:
    """Algorithm 1: rotate, then the nearest Lloyd-Max level of each coordinate. Stores (words, root mean square)."""

    width: int
    bits: int
    seed: int

    arrays = 2

    @property
    def space(self) -> int:
        """Coordinates of the space codes live in."""
        return packing.padded(self.width)

    def encode(self, x: mx.array) -> Arrays:
        """(..., width) -> words (..., words), root mean square (..., 1) in the dtype of x."""
        rotated, scale = self.rotated(x)
        return packing.pack(self.codes(rotated), self.bits), scale

    def rotated(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Rotated coordinates in units of the stored root mean square, and that, as stored."""
        rows, size = ordered.normalized(x)
        scale = size.astype(x.dtype)
        stored = scale.astype(mx.float32)
        ratio = size / mx.where(stored == 0, 1.0, stored)
        return ordered.product(rows, rotation_parts(self.width, self.seed)) * ratio, scale

    def codes(self, rotated: mx.array) -> mx.array:
        """The number of thresholds below each coordinate, found by halving."""
        table = _thresholds(self.bits, self.width)
        found = mx.zeros(rotated.shape, dtype=mx.uint32)
        for bit in reversed(range(self.bits)):
            tried = found + 2**bit
            found = mx.where(rotated > mx.take(table, tried - 1), tried, found)
        return found

    def levels(self, words: mx.array) -> mx.array:
        """Words -> levels in units of the root mean square, (..., space) float32."""
        return packing.lookup(words, self.bits, _scaled_levels(self.bits, self.width))

    def decode(self, stored: Arrays) -> mx.array:
        """(..., width) in float32. The root mean square comes last, so that nothing overflows on the way."""
        words, scale = stored
        return self.settle(self.levels(words)) * scale.astype(mx.float32)

    def ready(self, queries: mx.array) -> mx.array:
        """Queries (..., width) -> rotated (..., space), zero in the padding."""
        return _widened(queries.astype(mx.float32) @ rotation(self.width, self.seed).T, self.space)

    def scores(self, ready: mx.array, stored: Arrays) -> mx.array:
        """Ready queries (..., n, space) -> products (..., n, tokens)."""
        words, scale = stored
        return (ready @ self.levels(words).swapaxes(-1, -2)) * _as_row(scale)

    def mix(self, weights: mx.array, stored: Arrays) -> mx.array:
        """Weights (..., n, tokens) -> sums (..., n, space)."""
        words, scale = stored
        return (weights * _as_row(scale)) @ self.levels(words)

    def settle(self, mixed: mx.array) -> mx.array:
        """Sums (..., space) -> (..., width), rotated back."""
        return mixed[..., : self.width] @ rotation(self.width, self.seed)


@lru_cache(maxsize=256)
def _scaled_levels(bits: int, width: int) -> tuple[float, ...]:
    """Levels for coordinates of a vector of root mean square 1, whose length is sqrt(width)."""
    return tuple(level * math.sqrt(width) for level in codebook.levels(bits, width))


@lru_cache(maxsize=256)
def _thresholds(bits: int, width: int) -> mx.array:
    table = mx.array([end * math.sqrt(width) for end in codebook.thresholds(bits, width)], dtype=mx.float32)
    mx.eval(table)
    return table


def _widened(x: mx.array, space: int) -> mx.array:
    missing = space - x.shape[-1]
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _as_row(scale: mx.array) -> mx.array:
    """(..., tokens, 1) -> (..., 1, tokens) in float32."""
    return scale.astype(mx.float32).swapaxes(-1, -2)
