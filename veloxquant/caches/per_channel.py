"""Keys quantized channel by channel: MLX's affine format grouped along tokens instead of along the width.

Keys have a few channels that are large in every token; a scale for each channel keeps them from spoiling the others
(KIVI, arXiv 2402.02750, section 3). A slot is a group of `group` tokens, stored transposed (width x tokens), so that a
product of queries with it is mx.quantized_matmul(..., transpose=False): MLX's own kernel, nothing unpacked.

Stored for each slot of each head: words (width, group x bits / 32), a scale and a bias (width, 1) in the format of the
source, so that a number costs bits + 2 x 8 x itemsize / group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from veloxquant.caches.affine_codec import BITS, GROUPS, MANY_ROWS
from veloxquant.caches.limits import WIDEST, one_of, whole
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from veloxquant.caches.codec import Arrays


@dataclass(frozen=True)
class PerChannelCodec:
    """Uniform levels between the least and the greatest number of a channel in `group` tokens."""

    width: int
    bits: int
    group: int = 64

    native = True
    """Products with a few rows read what is stored."""

    def __post_init__(self) -> None:
        whole(self.width, "width", 1, WIDEST)
        one_of(self.bits, "bits", BITS)
        one_of(self.group, "group", GROUPS)

    @property
    def tokens(self) -> int:
        """The group."""
        return self.group

    @property
    def space(self) -> int:
        """The width."""
        return self.width

    def describe(self) -> dict[str, int | float | str]:
        """Name, width, bits, group."""
        return {"name": "per_channel", "width": self.width, "bits": self.bits, "group": self.group}

    def start(self, first: Any) -> Arrays:
        """Nothing."""
        return ()

    def encode(self, x: Any, fixed: Arrays) -> Arrays:
        """Words, scales and biases of whole groups, slots along axis -3.

        Raises MethodRefused for tokens that fill no whole groups.
        """
        if x.shape[-2] % self.group:
            message = f"{x.shape[-2]} tokens are no whole groups of {self.group}"
            raise MethodRefused(message, hint="keep the rest of a group in another tier")
        apart = x.reshape(*x.shape[:-2], -1, self.group, self.width).swapaxes(-1, -2)
        return self._quantized(apart)

    def decode(self, stored: Arrays, fixed: Arrays, dtype: Any) -> Any:
        """What mx.dequantize gives, tokens x width again, in `dtype`."""
        words, scales, biases = stored
        apart = mx.dequantize(words, scales, biases, group_size=self.group, bits=self.bits).swapaxes(-1, -2)
        return apart.reshape(*apart.shape[:-3], -1, self.width).astype(dtype)

    def ready(self, queries: Any, fixed: Arrays) -> Any:
        """Queries in float32."""
        return queries.astype(mx.float32)

    def grouped_scores(self, ready: Any, stored: Arrays) -> Any:
        """Products in float32 as the kernel leaves them, (..., slots, n, tokens of a slot): nothing is moved."""
        return self._product(ready[..., None, :, :], stored, transpose=False)

    def scores(self, ready: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Products in float32, (..., n, tokens)."""
        apart = self.grouped_scores(ready, stored).swapaxes(-3, -2)
        return apart.reshape(*apart.shape[:-2], -1)

    def mix(self, weights: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Weighted sums in float32, (..., n, width)."""
        apart = weights.astype(mx.float32).reshape(*weights.shape[:-1], -1, self.group).swapaxes(-3, -2)
        return self._product(apart, stored, transpose=True).sum(axis=-3)

    def settle(self, mixed: Any, fixed: Arrays) -> Any:
        """Nothing to bring back."""
        return mixed

    def _quantized(self, apart: Any) -> Arrays:
        """Of groups along the last axis."""
        return tuple(mx.quantize(apart, group_size=self.group, bits=self.bits))

    def _product(self, rows: Any, stored: Arrays, *, transpose: bool) -> Any:
        words, scales, biases = stored
        wide = (scales.astype(mx.float32), biases.astype(mx.float32))
        how: Any = {"group_size": self.group, "bits": self.bits}
        if rows.shape[-2] < MANY_ROWS:
            return mx.quantized_matmul(rows, words, *wide, transpose=transpose, **how)
        unpacked = mx.dequantize(words, *wide, **how)
        return rows @ (unpacked.swapaxes(-1, -2) if transpose else unpacked)
