"""Saved states read back: a file may come from anywhere, so what does not fit together is refused before it is used.

A state is a sequence: groups of arrays, then whole numbers, then a JSON text that has the layout's number, the codecs'
descriptions and what else is no array (mlx-lm's `save_prompt_cache` keeps the three kinds).
"""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from veloxquant.caches.limits import whole
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from veloxquant.caches.codec import Arrays, Codec

MOST_TOKENS = 2**31 - 1
"""Positions are 32-bit numbers."""
_HINT = "make the prompt cache again"
_UNREADABLE = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError)


class Saved(NamedTuple):
    """A state taken apart."""

    groups: list[list[Any]]
    """Arrays, by references of their own: writing would otherwise write to the cache that the state came from."""
    numbers: list[int]
    """Each from 0 to `MOST_TOKENS`."""
    text: dict[str, Any]


@contextmanager
def reading() -> Iterator[None]:
    """Raises MethodRefused where what is done to a state within shows that it is none."""
    try:
        yield
    except _UNREADABLE as error:
        raise MethodRefused(f"the saved cache cannot be read: {type(error).__name__}: {error}", hint=_HINT) from error


def read(state: Sequence[Any], layout: int, groups: int, numbers: int = 0) -> Saved:
    """So many groups of arrays and numbers. Raises MethodRefused for another layout, and for what is no state."""
    with reading():
        *rest, text = state
        described = json.loads(text)
        found = described["layout"]
        if found != layout:
            message = f"the saved cache has layout {found!r:.40} and this version reads {layout}"
            raise MethodRefused(message, hint=_HINT)
        if len(rest) != groups + numbers:
            raise refusal(f"{len(rest)} parts where {groups + numbers} belong")
        arrays = [_own(group) for group in rest[:groups]]
        return Saved(arrays, [whole(number, "a number", 0, MOST_TOKENS) for number in rest[groups:]], described)


def rows_and_heads(*stored: Sequence[Any]) -> tuple[int, int]:
    """Of the first group that holds arrays (rows, KV heads, ...); no rows and heads where none does."""
    for group in stored:
        for array in group:
            with reading():
                rows, heads = array.shape[:2]
            return rows, heads
    return 0, 0


def check(codec: Codec, stored: Sequence[Any], fixed: Sequence[Any], shape: tuple[int, int], slots: int) -> None:
    """Raises MethodRefused unless the codec stores such arrays for (rows, KV heads) in so many slots; without, none."""
    like = mx.zeros((*shape, codec.tokens, codec.width))  # for the shapes: nothing is computed
    wanted_fixed = codec.start(like[:, :, :1])
    _compare(stored, codec.encode(like, wanted_fixed) if slots else (), slots)
    _compare(fixed, wanted_fixed, None)


def refusal(why: str) -> MethodRefused:
    """To raise for a state whose parts do not fit together."""
    return MethodRefused(f"the saved cache does not fit together: {why}", hint=_HINT)


def _own(group: Any) -> list[Any]:
    """A saved file has a mapping in the place of an empty list."""
    arrays = [copy.copy(array) for array in group] if group else []
    if any(not isinstance(array, mx.array) for array in arrays):
        raise refusal("something else where arrays belong")
    return arrays


def _compare(found: Sequence[Any], wanted: Arrays, slots: int | None) -> None:
    """Kinds and shapes, with `slots` along axis 2; floats may have any format."""
    kinds = [[_kind(array.dtype), *array.shape] for array in found]
    expected = [[_kind(array.dtype), *array.shape] for array in wanted]
    if slots is not None:
        expected = [[*kind[:3], slots, *kind[4:]] for kind in expected]
    if kinds != expected:
        raise refusal(f"arrays {kinds} where {expected} belong")


def _kind(dtype: Any) -> str:
    return "float" if mx.issubdtype(dtype, mx.floating) else str(dtype)
