"""Keys or values of all rows of a batch in tiers: `tiered_part` for rows that have lengths of their own.

Every row's arrays are what its own single cache would hold, slot for slot and bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from veloxquant.caches.row_store import beside, fitted
from veloxquant.caches.tiered_part import ENCODE_NUMBERS, Part
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.codec import Arrays
    from veloxquant.caches.tiered_batch_moves import Moves
    from veloxquant.caches.tiered_layout import Layout

_LISTS = ("sinks", "recent", "packed", "fixed", "recent_fixed")


class BatchPart(Part):
    """Arrays of shape (rows, KV heads, slots, ...). Every list is empty before the first token of any row."""

    def write_rows(self, x: Any, moves: Moves) -> Arrays:
        """The rows' own tokens of a call, x (rows, KV heads, n, width); the recent columns that its attention needs."""
        layout = moves.layout
        if moves.begin:
            self._start(x, moves)
        coded = self.recent_codec.encode(x, self.recent_fixed)
        if not self.recent:
            self.sinks = [_zeros(x, layout.sinks)] if layout.sinks else []
            self.recent = [_zeros(new, layout.ring) for new in coded]
        if moves.sink:
            self.sinks = [_put(old, x, *moves.sink_tokens) for old in self.sinks]
        if moves.tokens == 1:
            self._write_slots(coded, moves)
            columns = tuple(self.recent)
        else:
            before = (_taken(array, moves.ring_order) for array in self.recent)
            columns = tuple(mx.concatenate([old, new], axis=2) for old, new in zip(before, coded, strict=True))
            if moves.ring.size:
                self.recent = [_put(old, new, *moves.ring_tokens) for old, new in zip(self.recent, coded, strict=True)]
        if moves.groups:
            self._pack_groups(columns, x.dtype, moves)
        return columns

    def choose(self, rows: Sequence[int], room: int, tokens: int) -> None:
        """Only these rows, `room` slots of what is packed; nothing where no row holds a token."""
        chosen = mx.array(list(rows)) if tokens else None
        self.packed = [fitted(array, room) for array in self.packed] if room else []
        for name in _LISTS:
            self._set(name, [] if chosen is None else [array[chosen] for array in getattr(self, name)])

    def join(self, parts: Sequence[tuple[Part, int]], room: int) -> None:
        """All rows of some parts of the same codecs, each with its count of rows, in this order.

        Raises MethodRefused as `refuse_unlike` does.
        """
        refuse_unlike([part for part, _ in parts])
        found = {name: [list(getattr(part, name)) for part, _ in parts] for name in _LISTS}
        found["packed"] = [[fitted(array, room) for array in held] for held in found["packed"]]
        for name, lists in found.items():
            like: list[Any] = next((held for held in lists if held), [])
            empty = [[_none_of(one, count) for one in like] for _, count in parts]
            filled = [held or rest for held, rest in zip(lists, empty, strict=True)]
            self._set(name, [mx.concatenate(list(same)) for same in zip(*filled, strict=True)] if like else [])

    def row(self, at: int, room: int) -> tuple[list[Any], ...]:
        """One row's arrays, in the order of `Part.arrays`, as copies, `room` slots of what is packed."""
        only = mx.array([at])
        packed = [array[:, :, :room] for array in self.packed] if room else []
        lists = (self.sinks, self.recent, packed, self.fixed, self.recent_fixed)
        return tuple([array[only] for array in held] for held in lists)

    def _set(self, name: str, arrays: list[Any]) -> None:
        setattr(self, name, tuple(arrays) if name.endswith("fixed") else arrays)

    def _start(self, x: Any, moves: Moves) -> None:
        """What does not grow, of rows that have their first token here."""
        index, begins = moves.first_tokens
        first = _taken(x, index)
        for name, codec in (("fixed", self.codec), ("recent_fixed", self.recent_codec)):
            new, old = codec.start(first), getattr(self, name)
            if old:
                new = tuple(mx.where(beside(begins, a), a, b) for a, b in zip(new, old, strict=True))
            self._set(name, list(new))

    def _write_slots(self, coded: Arrays, moves: Moves) -> None:
        """One token a row, for those rows whose token is none for the sinks and no padding."""
        if not moves.ring.size:
            return
        rows, slots = moves.ring_slots
        every = moves.ring.size == moves.rows
        for buffer, new in zip(self.recent, coded, strict=True):
            buffer[rows, :, slots] = new[:, :, 0] if every else new[rows, :, 0]

    def _pack_groups(self, columns: Arrays, dtype: Any, moves: Moves) -> None:
        """Encode the groups that are complete by now, of all rows together, and write them at once.

        In pieces, one after the other, where a prompt completes many: lazy pieces would all be computed together.
        """
        layout, slots = moves.layout, moves.layout.group // self.codec.tokens
        numbers = columns[0].shape[1] * max(self.codec.width, self.codec.space) * layout.group
        size = max(1, ENCODE_NUMBERS // numbers) * moves.rows
        after: Arrays = ()
        for first in range(0, moves.groups, size):
            rows, at, places = moves.places(first, first + size)
            held = [mx.moveaxis(array[rows, :, places], 1, 2) for array in columns]
            held = mx.depends(held, list(after)) if after else held
            fixed, recent_fixed = (
                tuple(array[rows[:, 0]] for array in arrays) for arrays in (self.fixed, self.recent_fixed)
            )
            after = self.codec.encode(self.recent_codec.decode(tuple(held), recent_fixed, dtype), fixed)
            self._fit(after, layout, moves.longest, moves.rows)
            where = at * slots + mx.arange(slots)
            for buffer, new in zip(self.packed, after, strict=True):
                buffer[rows, :, where] = mx.moveaxis(new, 2, 1)

    def _fit(self, coded: Arrays, layout: Layout, longest: int, rows: int) -> None:
        room = layout.capacity(longest) // self.codec.tokens
        if self.packed:
            self.packed = [fitted(array, room) for array in self.packed]
        else:
            self.packed = [mx.zeros((rows, new.shape[1], room, *new.shape[3:]), dtype=new.dtype) for new in coded]


def _taken(array: Any, index: Any) -> Any:
    """Slots `index` (rows, k) of each row."""
    return mx.take_along_axis(array, index.reshape(index.shape[0], 1, -1, *[1] * (array.ndim - 3)), axis=2)


def _put(old: Any, new: Any, index: Any, valid: Any) -> Any:
    """`old` (rows, heads, k, ...) with slot s of a row from `new` at `index`, where that is valid, (rows, k) each."""
    shape = (valid.shape[0], 1, -1, *[1] * (old.ndim - 3))
    return mx.where(valid.reshape(shape), _taken(new, index).astype(old.dtype), old)


def _zeros(like: Any, slots: int) -> Any:
    return mx.zeros((*like.shape[:2], slots, *like.shape[3:]), dtype=like.dtype)


def _none_of(like: Any, rows: int) -> Any:
    return mx.zeros((rows, *like.shape[1:]), dtype=like.dtype)


def refuse_unlike(parts: Sequence[Part]) -> None:
    """Raises MethodRefused for parts whose arrays are of other heads, widths or formats than the first one's."""
    for name in _LISTS:
        held = [getattr(part, name) for part in parts if getattr(part, name)]
        found = [[_kind(array, grows=name == "packed") for array in arrays] for arrays in held]
        if any(kinds != found[0] for kinds in found):
            raise MethodRefused(
                f"caches that hold arrays of {found[0]} and of {next(one for one in found if one != found[0])}",
                hint="join caches of one model",
            )


def _kind(array: Any, *, grows: bool) -> str:
    shape = [*array.shape[1:2], *array.shape[3:]] if grows else array.shape[1:]
    return f"{tuple(shape)} {array.dtype}"
