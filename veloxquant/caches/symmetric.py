"""Uniform levels on both sides of zero: one scale a group and no bias, for numbers without a preferred sign.

After a random rotation they have none. A code c stands for (c - (2**bits - 1) / 2) x scale. A group of 64 stores 16
bits less than the affine format, a quarter of a bit a number; words are laid out as mx.quantize's, and the biases that
MLX's kernels want are made from the scales in each call.

The scale is the best of a few by least squares, from ranges narrower and narrower, then stretched so that what is read
back is not shrunk: sum(x y) = sum(x x) (EDEN, arXiv 2108.08842; why: `refit`). Mean KL of SmolLM2-135M, simulated with
4 sinks and 64 recent tokens, rotated values at 2, 3, 4 bits: mx.quantize 0.0115, 0.0022, 0.00074; symmetric 0.0082,
0.0022, 0.00075 at a quarter of a bit less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from veloxquant.caches.affine_codec import AffineCodec
from veloxquant.caches.packing import pack
from veloxquant.caches.refit import grouped, in_pieces, nearest, positive, summed

if TYPE_CHECKING:
    from veloxquant.caches.codec import Arrays

_NARROWEST = {2: 0.6, 3: 0.7, 4: 0.8, 5: 0.88, 6: 0.94, 8: 0.98}
"""By bits: the narrowest of the ranges that are tried, over the group's own; best for normal numbers by 64."""
_RANGES = 4
_ROUNDS = 2
_AT_ONCE = 2**15
"""Numbers that are fitted at a time; there are as many for each range in each array."""


@dataclass(frozen=True)
class SymmetricCodec(AffineCodec):
    """Stores words as mx.quantize lays them out, and scales; products run on MLX's own quantized kernels.

    A group with a NaN or an infinity has a scale of NaN. A group of zeros is zeros; no other number is read as zero.
    """

    def describe(self) -> dict[str, int | float | str]:
        """Name, width, bits, group."""
        return {**super().describe(), "name": "symmetric"}

    def encode(self, x: Any, fixed: Arrays) -> Arrays:
        """Words (..., width x bits / 32), scales (..., width / group) in the dtype of x."""
        stored = in_pieces(grouped(x, self.group), partial(_symmetric, bits=self.bits), _AT_ONCE)
        return tuple(array.flatten(-2) for array in stored)

    def decode(self, stored: Arrays, fixed: Arrays, dtype: Any) -> Any:
        """What mx.dequantize gives in float32, in `dtype`."""
        return super().decode(self._with_bias(stored), fixed, dtype)

    def _product(self, rows: Any, stored: Arrays, *, transpose: bool) -> Any:
        return super()._product(rows, self._with_bias(stored), transpose=transpose)

    def _with_bias(self, stored: Arrays) -> Arrays:
        """Scales in float32 hold the bias exactly where they were 16 bits: 11 of them times half a number below 256."""
        words, scales = stored
        scales = scales.astype(mx.float32)
        return words, scales, scales * (-(2**self.bits - 1) / 2)


def _symmetric(rows: Any, bits: int) -> Arrays:
    """Rows (groups, group) -> words, scales (groups, 1) in their dtype."""
    columns = mx.contiguous(rows.astype(mx.float32).T)
    away = _away(columns, _best(columns[:, None], bits), bits)
    scale = summed(columns * columns) / positive(summed(away * columns))
    sound = mx.isfinite(columns).all(axis=0, keepdims=True)
    codes = away + (2**bits - 1) / 2
    return pack(codes.T, bits), mx.where(sound, scale, mx.nan).T.astype(rows.dtype)


def _best(columns: Any, bits: int) -> Any:
    """Groups (group, 1, groups) -> the scale of the least squared error from all starts, (1, groups)."""
    peak = mx.abs(columns).max(axis=0, keepdims=True)
    scale = peak * _starts(bits)
    for _ in range(_ROUNDS):
        away = _away(columns, scale, bits)
        # Squares of half numbers up to 127.5, at most 128 of them: exact in float32, in whatever order.
        scale = summed(away * columns) / (away * away).sum(axis=0, keepdims=True)
    error = summed((_away(columns, scale, bits) * scale - columns) ** 2)
    chosen = mx.argmin(mx.where(mx.isfinite(error), error, mx.inf), axis=1, keepdims=True)
    return mx.take_along_axis(scale, chosen, axis=1)[:, 0]


def _away(columns: Any, scale: Any, bits: int) -> Any:
    """Codes less their middle: the nearest of the half numbers from -(2**bits - 1) / 2 on."""
    half = (2**bits - 1) / 2
    return nearest(columns, scale, scale * -half, 2**bits - 1) - half


@lru_cache(maxsize=16)
def _starts(bits: int) -> Any:
    """Scales that are tried first, for a peak of 1: (1, starts, 1) float32."""
    narrowest, top = _NARROWEST[bits], 2**bits - 1
    ranges = [1 - (1 - narrowest) * step / (_RANGES - 1) for step in range(_RANGES)]
    made = mx.array([2 / top * one for one in ranges], dtype=mx.float32).reshape(1, -1, 1)
    mx.eval(made)
    return made
