"""Constants that are kept once they are made, up to so many bytes: the least recently used goes first."""

from __future__ import annotations

import functools
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Made = TypeVar("_Made")


class Kept:
    """A decorator of functions that make an array, or a tuple of arrays, from whole numbers given by position.

    All functions under one `Kept` share `most_bytes`. The `least` last used results stay, however large they are. Two
    threads that ask at once may both make it, and get the same one.
    """

    def __init__(self, most_bytes: int, least: int) -> None:
        self._most_bytes, self._least = most_bytes, least
        self._made: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._lock = Lock()

    def __call__(self, make: Callable[..., _Made]) -> Callable[..., _Made]:
        """The same function, which makes only what is not kept."""

        @functools.wraps(make)
        def kept(*args: int) -> _Made:
            key = (make, *args)
            found = self._look_up(key)
            return self._keep(key, make(*args)) if found is None else found  # type: ignore[no-any-return]

        return kept

    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(_nbytes(made) for made in list(self._made.values()))

    def _look_up(self, key: tuple[Any, ...]) -> Any:
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
            return self._made.get(key)

    def _keep(self, key: tuple[Any, ...], made: Any) -> Any:
        with self._lock:
            made = self._made.setdefault(key, made)
            while len(self._made) > self._least and self.nbytes() > self._most_bytes:
                self._made.popitem(last=False)
        return made


def _nbytes(made: Any) -> int:
    arrays = made if isinstance(made, tuple) else (made,)
    return sum(int(array.nbytes) for array in arrays)
