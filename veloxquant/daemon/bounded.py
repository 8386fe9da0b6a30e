"""Values by key, kept until together they weigh too much."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

K = TypeVar("K")
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """The least lately used goes first. `weigh` gives a value's bytes; `gone` is told each key whose value left.

    For one thread.
    """

    def __init__(
        self, limit_bytes: int, weigh: Callable[[K, V], int], gone: Callable[[K], None] = lambda _key: None
    ) -> None:
        self.bytes = 0
        self._limit = limit_bytes
        self._weigh = weigh
        self._gone = gone
        self._held: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._held)

    def get(self, key: K) -> V | None:
        """The value, now the most lately used; None when there is none."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key]

    def put(self, key: K, value: V) -> None:
        """Keep it, in the place of any other of this key; one that is too heavy by itself is not kept."""
        self.drop(key)
        weight = self._weigh(key, value)
        if weight > self._limit:
            return
        self._held[key] = value
        self.bytes += weight
        while self.bytes > self._limit:
            self.drop(next(iter(self._held)))

    def oldest(self) -> tuple[K, V] | None:
        """The least lately used; None when there is none."""
        return next(iter(self._held.items()), None)

    def drop(self, key: K) -> None:
        """Let go of it, if it is there."""
        if key in self._held:
            self.bytes -= self._weigh(key, self._held.pop(key))
            self._gone(key)

    def drop_where(self, unwanted: Callable[[V], bool]) -> None:
        """Let go of each value for which this is true."""
        for key in [key for key, value in self._held.items() if unwanted(value)]:
            self.drop(key)
