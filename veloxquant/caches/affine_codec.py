"""MLX's own affine format: uniform levels between the least and the greatest number of each group along the width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from veloxquant.caches.limits import WIDEST, one_of, whole
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from veloxquant.caches.codec import Arrays

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
"""What mx.quantize takes."""

MANY_ROWS = 32
"""From so many rows on what is stored is unpacked once and multiplied as floats: on the CPU backend the kernel that
reads packed numbers unpacks them for each row."""


@dataclass(frozen=True)
class AffineCodec:
    """Stores words, scales and biases as mx.quantize makes them; products run on MLX's own quantized kernels."""

    width: int
    bits: int
    group: int = 64

    def __post_init__(self) -> None:
        whole(self.width, "width", 1, WIDEST)
        one_of(self.bits, "bits", BITS)
        one_of(self.group, "group", GROUPS)
        if self.width % self.group:
            fitting = [group for group in GROUPS if self.width % group == 0]
            hint = f"use groups of {fitting[-1]}" if fitting else "choose a method without groups"
            message = f"groups of {self.group} do not divide the width {self.width}"
            raise MethodRefused(message, hint=hint, field="group")

    tokens = 1
    """Each token is a slot of its own."""
    native = True
    """Products with a few rows read what is stored; more rows unpack it first (`MANY_ROWS`)."""

    @property
    def space(self) -> int:
        """The width."""
        return self.width

    def describe(self) -> dict[str, int | float | str]:
        """Name, width, bits, group."""
        return {"name": "affine", "width": self.width, "bits": self.bits, "group": self.group}

    def start(self, first: Any) -> Arrays:
        """Nothing."""
        return ()

    def encode(self, x: Any, fixed: Arrays) -> Arrays:
        """Words (..., width x bits / 32), scales and biases (..., width / group) in the dtype of x."""
        return tuple(mx.quantize(x, group_size=self.group, bits=self.bits))

    def decode(self, stored: Arrays, fixed: Arrays, dtype: Any) -> Any:
        """What mx.dequantize gives, in `dtype`."""
        words, scales, biases = stored
        return mx.dequantize(words, scales, biases, group_size=self.group, bits=self.bits).astype(dtype)

    def ready(self, queries: Any, fixed: Arrays) -> Any:
        """Queries in float32."""
        return queries.astype(mx.float32)

    def scores(self, ready: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Products in float32."""
        return self._product(ready, stored, transpose=True)

    def mix(self, weights: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Weighted sums in float32."""
        return self._product(weights.astype(mx.float32), stored, transpose=False)

    def settle(self, mixed: Any, fixed: Arrays) -> Any:
        """Nothing to bring back."""
        return mixed

    def _product(self, rows: Any, stored: Arrays, *, transpose: bool) -> Any:
        packed, scales, biases = stored
        wide = (scales.astype(mx.float32), biases.astype(mx.float32))
        how: Any = {"group_size": self.group, "bits": self.bits}
        if rows.shape[-2] < MANY_ROWS:
            return mx.quantized_matmul(rows, packed, *wide, transpose=transpose, **how)
        unpacked = mx.dequantize(packed, *wide, **how)
        return rows @ (unpacked.swapaxes(-1, -2) if transpose else unpacked)
