"""With how many query heads a model's attention reads each of its caches: its own calls, noted as they come."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CLASSES = ("KVCache", "RotatingKVCache", "ChunkedKVCache", "ConcatenateKVCache")
"""Of mlx_lm.models.cache: those that give attention K and V."""


class _Noted:
    """Calls of caches and of attention, in turn."""

    def __init__(self) -> None:
        self.heads: dict[int, int] = {}
        """Rows of queries a token, by id of the cache."""
        self._given: dict[int, tuple[Any, int, int]] = {}
        """id of an array of keys -> the array itself, the cache that gave it, tokens of the call."""
        self._last: tuple[Any, int, int] | None = None

    def update(self, cache: Any, keys: Any, result: Any) -> None:
        """A cache was given new keys, (batch, KV heads, tokens, width), and gave back all of them and the values."""
        self._last = self._given[id(result[0])] = (result[0], id(cache), keys.shape[2])

    def attend(self, queries: Any, keys: Any) -> None:
        """Attention was called. Keys that a model changed on the way are those of the cache that was called last."""
        known = self._given.get(id(keys), self._last)
        if known is not None:
            _, cache, tokens = known
            rows = -(-math.prod(queries.shape[:-1]) // tokens)
            self.heads[cache] = max(rows, self.heads.get(cache, 0))


@contextmanager
def noting() -> Iterator[Mapping[int, int]]:
    """Query heads by the id of the cache, while the block runs; the most where several layers read the same K and V.

    A cache is missing whose K and V never come to `mx.fast.scaled_dot_product_attention`: such a model computes
    attention itself, and packed caches cannot serve it.
    """
    from mlx_lm.models import cache as engine

    noted, fused = _Noted(), mx.fast.scaled_dot_product_attention
    classes = [getattr(engine, name) for name in CLASSES if hasattr(engine, name)]
    updates = {cls: cls.update_and_fetch for cls in classes}

    def noting_fused(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
        noted.attend(q, k)
        return fused(q, k, v, *args, **options)

    def noting_update(update: Any) -> Any:
        def noting(cache: Any, keys: Any, values: Any, *args: Any, **options: Any) -> Any:
            result = update(cache, keys, values, *args, **options)
            noted.update(cache, keys, result)
            return result

        return noting

    try:
        for cls, update in updates.items():
            cls.update_and_fetch = noting_update(update)
        mx.fast.scaled_dot_product_attention = noting_fused
        yield noted.heads
    finally:
        mx.fast.scaled_dot_product_attention = fused
        for cls, update in updates.items():
            cls.update_and_fetch = update
