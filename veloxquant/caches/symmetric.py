"""Uniform levels on both sides of zero: one scale a group and no bias, for numbers without a preferred sign.

After a random rotation they have none. A code c stands for (c - (2**bits - 1) / 2) x scale. A group of 64 stores 16
bits less than the affine format, a quarter of a bit a number; words are laid out as mx.quantize's, and the biases that
MLX's kernels want are made from the scales in each call. The scale is the best by least squares (`refit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from veloxquant.caches import refit
from veloxquant.caches.affine_codec import AffineCodec
from veloxquant.caches.packing import pack

if TYPE_CHECKING:
    from veloxquant.caches.codec import Arrays

_ROUNDS = 2


@dataclass(frozen=True)
class SymmetricCodec(AffineCodec):
    """Stores words as mx.quantize lays them out, and scales; products run on MLX's own quantized kernels.

    A group with a NaN or an infinity has a scale of NaN. A group of zeros is zeros; no other number is stored as zero.
    """

    def describe(self) -> dict[str, int | float | str]:
        """Name, width, bits, group."""
        return {**super().describe(), "name": "symmetric"}

    def encode(self, x: Any, fixed: Arrays) -> Arrays:
        """Words (..., width x bits / 32), scales (..., width / group) in the dtype of x."""
        stored = refit.in_pieces(x.reshape(*x.shape[:-1], -1, self.group), self.bits, _symmetric)
        return tuple(array.reshape(*x.shape[:-1], -1) for array in stored)

    def decode(self, stored: Arrays, fixed: Arrays, dtype: Any) -> Any:
        """What mx.dequantize gives in float32, in `dtype`."""
        return super().decode(self._with_bias(stored), fixed, dtype)

    def _product(self, rows: Any, stored: Arrays, *, transpose: bool) -> Any:
        return super()._product(rows, self._with_bias(stored), transpose=transpose)

    def _with_bias(self, stored: Arrays) -> Arrays:
        """Scales in float32 hold the bias exactly: half a whole number below 256 times 11 bits."""
        words, scales = stored
        scales = scales.astype(mx.float32)
        return words, scales, scales * (-(2**self.bits - 1) / 2)


def _symmetric(rows: Any, bits: int) -> Arrays:
    """Rows (groups, group) -> words, scales (groups, 1) in their dtype."""
    columns = mx.contiguous(rows.astype(mx.float32).T)
    scale = _scale(columns[:, None], bits, rows.dtype)
    fit = refit.best(columns[:, None], scale, scale * (-(2**bits - 1) / 2), 2**bits - 1)
    sound = mx.isfinite(columns).all(axis=0, keepdims=True)
    return pack(fit.codes.T, bits), mx.where(sound, fit.scale, mx.nan).T.astype(rows.dtype)


def _scale(columns: Any, bits: int, dtype: Any) -> Any:
    """Scales from all starts, (1, starts, groups), rounded to `dtype`; zero for a group of zeros."""
    top = 2**bits - 1
    peak = mx.abs(columns).max(axis=0, keepdims=True)
    scale = peak * (2 / top) * refit.ranges(bits)
    for _ in range(_ROUNDS):
        away = refit.levels(columns, scale, scale * (-top / 2), top) - top / 2
        # Squares of half numbers up to 127.5, at most 128 of them: exact in float32, in whatever order.
        scale = mx.where(peak > 0, refit.summed(away * columns) / (away * away).sum(axis=0, keepdims=True), 0.0)
    return scale.astype(dtype).astype(mx.float32)
