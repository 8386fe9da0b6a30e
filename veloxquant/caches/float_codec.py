"""The codec that stores numbers as they are, or in another float format: the reference the others are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from veloxquant.caches.limits import WIDEST, whole
from veloxquant.errors import InvalidParams, quoted

if TYPE_CHECKING:
    from veloxquant.caches.codec import Arrays

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


@dataclass(frozen=True)
class FloatCodec:
    """Stores (…, width) in `dtype` ("float16", "bfloat16", "float32"), or in the format given where that is None."""

    width: int
    dtype: str | None = None

    def __post_init__(self) -> None:
        whole(self.width, "width", 1, WIDEST)
        if self.dtype is not None and self.dtype not in tuple(DTYPES):  # a list of them has no hash
            known = ", ".join(DTYPES)
            raise InvalidParams(f"no such float format: {quoted(self.dtype)}", hint=f"use {known}", field="dtype")

    tokens = 1
    """Each token is a slot of its own."""
    native = True
    """Nothing is unpacked."""

    @property
    def space(self) -> int:
        """The width."""
        return self.width

    def describe(self) -> dict[str, int | float | str]:
        """Name, width and, where one is set, dtype."""
        described: dict[str, int | float | str] = {"name": "float", "width": self.width}
        return described if self.dtype is None else {**described, "dtype": self.dtype}

    def start(self, first: Any) -> Arrays:
        """Nothing."""
        return ()

    def encode(self, x: Any, fixed: Arrays) -> Arrays:
        """One array (batch, heads, tokens, width)."""
        return (x if self.dtype is None else x.astype(DTYPES[self.dtype]),)

    def decode(self, stored: Arrays, fixed: Arrays, dtype: Any) -> Any:
        """As stored, in `dtype`."""
        return stored[0].astype(dtype)

    def ready(self, queries: Any, fixed: Arrays) -> Any:
        """Queries in float32."""
        return queries.astype(mx.float32)

    def scores(self, ready: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Products in float32."""
        return ready @ stored[0].astype(mx.float32).swapaxes(-1, -2)

    def mix(self, weights: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Weighted sums in float32."""
        return weights.astype(mx.float32) @ stored[0].astype(mx.float32)

    def settle(self, mixed: Any, fixed: Arrays) -> Any:
        """Nothing to bring back."""
        return mixed
