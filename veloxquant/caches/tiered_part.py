"""Keys or values of one layer in tiers, and how tokens are written where every row has as many of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from veloxquant.caches import saved
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.caches.tiered_attention import Tier
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.codec import Arrays, Codec
    from veloxquant.caches.tiered_layout import Layout

ENCODE_NUMBERS = 2**19
"""Most numbers of one sequence that are packed at a time: 2 MiB in float32, and a codec has some such arrays."""


class Part:
    """The arrays of three tiers and the codecs that they are made by. Every list is empty before the first token."""

    def __init__(self, codec: Codec, recent_codec: Codec) -> None:
        if recent_codec.tokens != 1 or recent_codec.width != codec.width or hasattr(recent_codec, "heads"):
            raise MethodRefused("the recent tier needs a codec of one token a slot, of the same width, for all heads")
        self.codec, self.recent_codec = codec, recent_codec
        self.sinks: list[Any] = []
        """One array (batch, KV heads, S, width), or none without sinks."""
        self.recent: list[Any] = []
        """What the recent codec stores, slots of the ring along axis 2."""
        self.packed: list[Any] = []
        """What the codec stores; empty before the first group too."""
        self.fixed: Arrays = ()
        self.recent_fixed: Arrays = ()

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All that is held, in the order of the saved state."""
        return tuple(self.sinks), tuple(self.recent), tuple(self.packed), tuple(self.fixed), tuple(self.recent_fixed)

    def restore(self, arrays: Sequence[Any]) -> None:
        """From lists of `arrays`."""
        held = [list(group) for group in arrays]
        self.sinks, self.recent, self.packed = held[:3]
        self.fixed, self.recent_fixed = tuple(held[3]), tuple(held[4])

    def check(self, tokens: int, layout: Layout, shape: tuple[int, int]) -> None:
        """Raises MethodRefused unless the arrays are those of so many tokens, for (rows, KV heads)."""
        if not tokens:
            if any(self.arrays):
                raise saved.refusal("arrays without tokens")
            return
        floats = FloatCodec(self.codec.width)
        saved.check(floats, self.sinks, (), shape, layout.sinks)
        saved.check(self.recent_codec, self.recent, self.recent_fixed, shape, layout.ring)
        saved.check(self.codec, self.packed, self.fixed, shape, layout.capacity(tokens) // self.codec.tokens)

    def allocate(self, x: Any, layout: Layout) -> None:
        """Sinks and ring, empty, for tokens such as x (batch, KV heads, tokens, width)."""
        first = x[:, :, :1]
        self.fixed, self.recent_fixed = self.codec.start(first), self.recent_codec.start(first)
        batch, heads, _, width = x.shape
        self.sinks = [mx.zeros((batch, heads, layout.sinks, width), dtype=x.dtype)] if layout.sinks else []
        self.recent = [
            mx.zeros((*new.shape[:2], layout.ring, *new.shape[3:]), dtype=new.dtype)
            for new in self.recent_codec.encode(first, self.recent_fixed)
        ]

    def write(self, x: Any, before: int, layout: Layout) -> Arrays:
        """Tokens x (batch, KV heads, tokens, width) after the `before` first; the recent columns for attention.

        Those are the ring for one token, else tokens in order from the first that was not packed before the call.
        """
        tokens = x.shape[2]
        early = max(0, min(layout.sinks - before, tokens))
        if early:
            self.sinks[0][:, :, before : before + early] = x[:, :, :early]
        new = self.recent_codec.encode(x[:, :, early:], self.recent_fixed) if early < tokens else ()
        at = max(0, before - layout.sinks)
        start, end = layout.packed(before), layout.packed(before + tokens)
        if tokens == 1:
            self._write_ring(new, at, layout)
            columns, due = self.recent, layout.slots(start, end)
        else:
            columns, due = self._columns(new, at, before, layout), [(0, end - start)]
            self._write_ring(new, at, layout)
        if start < end:
            coded = self._coded(_runs(columns, due), x.dtype)
            room = layout.capacity(before + tokens) // self.codec.tokens
            self.packed = stored(self.packed, coded, start // self.codec.tokens, room)
        return tuple(columns)

    def tier(self, columns: Arrays) -> Tier:
        """As attention takes it."""
        sinks = self.sinks[0] if self.sinks else None
        return Tier(self.codec, tuple(self.packed), self.fixed, self.recent_codec, columns, self.recent_fixed, sinks)

    def _columns(self, new: Arrays, at: int, before: int, layout: Layout) -> list[Any]:
        """What is in the ring and not packed, in order, then the new tokens: the first is `at` after the sinks."""
        held = _runs(self.recent, layout.slots(layout.packed(before), at) or [(0, 0)])
        if not new:
            return list(held)
        return [
            mx.concatenate([old, more], axis=2) if old.shape[2] else more for old, more in zip(held, new, strict=True)
        ]

    def _write_ring(self, new: Arrays, at: int, layout: Layout) -> None:
        """Tokens `at`, at + 1, ... after the sinks; of more than the ring has slots, the last."""
        if not new:
            return
        end = at + new[0].shape[2]
        first = max(at, end - layout.ring)
        done = first - at
        for low, high in layout.slots(first, end):
            for buffer, array in zip(self.recent, new, strict=True):
                buffer[:, :, low:high] = array[:, :, done : done + high - low]
            done += high - low

    def _coded(self, held: Arrays, dtype: Any) -> Arrays:
        """Whole groups of recent columns packed, piece after piece: lazy ones would all be computed together."""
        _, heads, tokens = held[0].shape[:3]
        unit = self.codec.tokens
        size = max(1, ENCODE_NUMBERS // (heads * max(self.codec.width, self.codec.space) * unit)) * unit
        pieces: list[Arrays] = []
        for start in range(0, tokens, size):
            piece = [array[:, :, start : start + size] for array in held]
            piece = mx.depends(piece, list(pieces[-1])) if pieces else piece
            floats = self.recent_codec.decode(tuple(piece), self.recent_fixed, dtype)
            pieces.append(self.codec.encode(floats, self.fixed))
        if len(pieces) == 1:
            return pieces[0]
        return tuple(mx.concatenate(list(same), axis=2) for same in zip(*pieces, strict=True))


def stored(buffers: Sequence[Any], coded: Arrays, start: int, room: int) -> list[Any]:
    """Buffers of `room` slots (axis 2) that hold `coded` from slot `start` on; written in place where they are long.

    In the number formats that they have.
    """
    if buffers:
        coded = tuple(new.astype(old.dtype) for old, new in zip(buffers, coded, strict=True))
    if buffers and buffers[0].shape[2] == room:
        for buffer, new in zip(buffers, coded, strict=True):
            buffer[:, :, start : start + new.shape[2]] = new
        return list(buffers)
    slack = room - start - coded[0].shape[2]
    pieces = [[old[:, :, :start], new] if buffers else [new] for old, new in zip(buffers or coded, coded, strict=True)]
    for piece in pieces:
        shape = piece[-1].shape
        piece.extend([mx.zeros((*shape[:2], slack, *shape[3:]), dtype=piece[-1].dtype)] if slack else [])
    return [piece[0] if len(piece) == 1 else mx.concatenate(piece, axis=2) for piece in pieces]


def _runs(arrays: Sequence[Any], runs: Sequence[tuple[int, int]]) -> Arrays:
    """Some slots of each array, joined."""
    cut = [[array[:, :, first:stop] for first, stop in runs] for array in arrays]
    return tuple(pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2) for pieces in cut)
