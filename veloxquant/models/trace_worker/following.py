"""Following a forward call of the real model: which packed cache was called last, and in which block the call is."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class Enough(Exception):
    """All caches that were waited for have been called, and the block that called the last of them is done."""


class Following:
    """Follows the calls of packed caches; ends each forward call early with Enough once all of `wanted` were called.

    Without `wanted` the model runs to its end. A cache that cannot be followed is never seen as called.
    """

    def __init__(self, model: Any, caches: Mapping[int, Any], wanted: Collection[int] = ()) -> None:
        self._caches = caches
        self._wanted = frozenset(wanted)
        self._seen: set[int] = set()
        self._blocks = {id(block): at for at, block in enumerate(getattr(model, "layers", ()))}
        self._classes = {type(block) for block in getattr(model, "layers", ())}
        self._originals: dict[type, Any] = {}
        self.layer: int | None = None
        self.called_in: int | None = None
        self.block: int | None = None

    def __enter__(self) -> Self:
        for index, cache in self._caches.items():
            with contextlib.suppress(AttributeError, TypeError):  # a class with slots cannot be followed
                cache.update_and_fetch = self._noting(index, cache.update_and_fetch)
        for cls in self._classes:
            if "__call__" in vars(cls):
                self._originals[cls] = cls.__call__
                setattr(cls, "__call__", self._entering(cls.__call__))  # noqa: B010 -- mypy forbids the plain form
        return self

    def __exit__(self, *_: object) -> None:
        for cls, original in self._originals.items():
            setattr(cls, "__call__", original)  # noqa: B010 -- as above
        for cache in self._caches.values():
            with contextlib.suppress(AttributeError):
                del cache.update_and_fetch

    def _noting(self, index: int, update: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            self.layer, self.called_in = index, self.block
            self._seen.add(index)
            return update(*args, **options)

        return noted

    def _entering(self, original: Any) -> Any:
        def entered(block: Any, *args: Any, **options: Any) -> Any:
            at = self._blocks.get(id(block))
            if at is None:
                return original(block, *args, **options)
            self.block = at
            result = original(block, *args, **options)
            self.block = None
            if self._wanted and self._seen >= self._wanted:
                self._seen.clear()
                raise Enough
            return result

        return entered
