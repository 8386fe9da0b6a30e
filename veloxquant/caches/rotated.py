"""A codec behind a Hadamard rotation: another codec packs rotated vectors, in which no channel is loud.

Turning queries with the keys leaves every score as it is, and a sum of turned values is turned back once, so that a
step costs two small transforms and the inner codec's own kernels (QuaRot, arXiv 2404.00456). A vector narrower than
what the inner codec packs (80 numbers, in groups of 32) has zeros behind it: the rotation spreads it over all 96, each
smaller by sqrt(80 / 96), and of the error what falls into the zeros is dropped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from veloxquant.caches import hadamard
from veloxquant.caches.limits import whole
from veloxquant.errors import MAX_WHOLE, InvalidParams, quoted

if TYPE_CHECKING:
    from veloxquant.caches.codec import Arrays, Codec


@dataclass(frozen=True)
class RotatedCodec:
    """Vectors of `width`, widened to the inner codec's with zeros and rotated with the signs of `seed`.

    A token with a NaN or an infinity is one for the inner codec, in every number. What a rotation makes larger than
    float16 holds becomes its largest number.
    """

    width: int
    inner: Codec
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.inner, RotatedCodec):
            raise InvalidParams("a rotation of a rotation is a rotation", hint="rotate once", field="inner")
        whole(self.seed, "seed", 0, MAX_WHOLE)
        whole(self.width, "width", 1, self.inner.width)
        hadamard.block(self.inner.width)

    @property
    def tokens(self) -> int:
        """The inner codec's."""
        return self.inner.tokens

    @property
    def space(self) -> int:
        """The inner codec's."""
        return self.inner.space

    @property
    def native(self) -> bool:
        """Whether products with a few rows read what is stored: the inner codec's."""
        return bool(getattr(self.inner, "native", False))

    def describe(self) -> dict[str, int | float | str]:
        """Name, width, seed, and the inner codec's description as JSON."""
        inner = json.dumps(self.inner.describe(), sort_keys=True)
        return {"name": "rotated", "width": self.width, "seed": self.seed, "inner": inner}

    def start(self, first: Any) -> Arrays:
        """The inner codec's, from the first token rotated."""
        return self.inner.start(self._rotated(first, first.dtype))

    def encode(self, x: Any, fixed: Arrays) -> Arrays:
        """The inner codec's, of rotated vectors in the dtype of x."""
        return self.inner.encode(self._rotated(x, x.dtype), fixed)

    def decode(self, stored: Arrays, fixed: Arrays, dtype: Any) -> Any:
        """(batch, heads, tokens, width) in `dtype`; what it cannot hold becomes its largest number."""
        return _within(self._turned_back(self.inner.decode(stored, fixed, mx.float32)), dtype)

    def ready(self, queries: Any, fixed: Arrays) -> Any:
        """Rotated, then the inner codec's."""
        return self.inner.ready(self._rotated(queries, mx.float32), fixed)

    def scores(self, ready: Any, stored: Arrays, fixed: Arrays) -> Any:
        """The inner codec's: products are those before the rotation."""
        return self.inner.scores(ready, stored, fixed)

    def mix(self, weights: Any, stored: Arrays, fixed: Arrays) -> Any:
        """The inner codec's."""
        return self.inner.mix(weights, stored, fixed)

    def settle(self, mixed: Any, fixed: Arrays) -> Any:
        """The inner codec's, turned back: float32."""
        return self._turned_back(self.inner.settle(mixed, fixed))

    def _rotated(self, x: Any, dtype: Any) -> Any:
        missing = self.inner.width - x.shape[-1]
        x = x.astype(mx.float32)
        wide = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
        return _within(hadamard.rotate(wide, self.seed), dtype)

    def _turned_back(self, x: Any) -> Any:
        return hadamard.unrotate(x, self.seed)[..., : self.width]


def described(width: int, inner: str, seed: int = 0) -> RotatedCodec:
    """The codec that `describe()` described. Raises InvalidParams."""
    from veloxquant.caches import codecs

    try:
        return RotatedCodec(width, codecs.make(json.loads(inner)), seed)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"this describes no inner codec: {quoted(inner)}"
        raise InvalidParams(message, hint="give a description as describe() writes it", field="inner") from error


def _within(x: Any, dtype: Any) -> Any:
    """Float32 in another format; a NaN stays one."""
    if dtype == mx.float32:
        return x
    limit = mx.finfo(dtype).max
    return mx.clip(x, -limit, limit).astype(dtype)
