"""Which query of a call sees which token, where K and V are in tiers and rows have lengths of their own.

A query at position t of a row has a boundary b = S + packed(t + 1) (`tiered_layout`) and a limit: t + 1 under a causal
mask, else the length of its row. It sees sinks p < limit, packed tokens p < b, and recent columns of b <= p < limit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from veloxquant.caches.rows import ints, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from veloxquant.caches.rows import Ints
    from veloxquant.caches.tiered_layout import Layout


class Sight:
    """Positions of one call. `firsts`, `lengths`, `starts`: a number for each row, or one for all where they are equal.

    The least and greatest are looked up once, as every block of attention asks for them.
    """

    def __init__(
        self,
        layout: Layout,
        firsts: Sequence[int] | Ints,
        lengths: Sequence[int] | Ints,
        starts: Sequence[int] | Ints | None,
        columns: int,
    ) -> None:
        self.layout = layout
        self.firsts = ints(firsts)
        """Position of the call's first query; negative where padding on the left is."""
        self.lengths = ints(lengths)
        """Tokens held, those of the call counted."""
        self.starts = None if starts is None else ints(starts)
        """Recent columns are in order from this position on; None: they are the ring's slots."""
        self.columns = columns
        """Recent columns."""
        shortest, self.longest = spread(self.lengths)
        """Tokens of the longest row."""
        self._least, self._most = spread(self.firsts)
        self._equal = self._least == self._most and shortest == self.longest

    def boundaries(self, first: int, stop: int) -> tuple[int, int]:
        """Packed tokens seen by the queries first ... stop - 1: least and greatest over rows."""
        packed = self.layout.packed  # grows with the tokens
        held = packed(self.longest)
        return min(held, packed(self._least + first + 1)), min(held, packed(self._most + stop))

    def recent(self, first: int, stop: int, *, causal: bool) -> tuple[int, int]:
        """Recent columns that the queries first ... stop - 1 of some row may see: first and last + 1."""
        if self.starts is None:
            return 0, self.columns
        sinks = self.layout.sinks
        group = self.layout.group
        low = int((self.layout.groups(self.firsts + (first + 1)) * group - self.starts).min()) + sinks
        high = int((self.firsts - self.starts).max()) + stop if causal else self.columns
        return max(0, min(low, self.columns)), max(0, min(high, self.columns))

    def places(self, first: int, stop: int) -> Any:
        """Positions of the recent columns first ... stop - 1: (rows or 1, columns); below S where nothing is."""
        columns = mx.arange(first, stop)
        if self.starts is not None:
            return _column(self.starts) + columns
        last = _column(self.lengths - (1 + self.layout.sinks))
        return last - mx.remainder(last - columns, self.layout.ring) + self.layout.sinks

    def seen_from(self, first: int, stop: int) -> Any:
        """Where the packed tokens end for each query: (rows or 1, queries, 1)."""
        sinks, recent, group, _ = self.layout
        positions = _column(self.firsts) + mx.arange(first, stop)
        return (mx.maximum(positions + (1 - sinks - recent), 0) // group * group + sinks)[..., None]

    def limits(self, first: int, stop: int, *, causal: bool) -> Any:
        """One more than the last position that each query sees: (rows or 1, queries or 1, 1)."""
        if causal:
            return (_column(self.firsts) + mx.arange(first + 1, stop + 1))[..., None]
        return _column(self.lengths)[..., None]

    def plain(self, rows: tuple[int, int], columns: tuple[int, int], sinks: int, *, causal: bool) -> Any:
        """Which of the first `sinks` sinks, and then of some recent columns, each query sees.

        bool (rows or 1, queries, sinks + columns).
        """
        if self._equal and self.starts is None and rows[1] - rows[0] == 1:
            held, ring = self._held(self._least + rows[0], sinks, causal=causal)
            return mx.array(np.concatenate([held, ring[slice(*columns)]])[None, None])
        limits = self.limits(*rows, causal=causal)
        places = self.places(*columns)[:, None]
        recent = (places >= self.seen_from(*rows)) & (places < limits)
        if not sinks:
            return recent
        first = mx.broadcast_to(mx.arange(sinks) < limits, (*recent.shape[:2], sinks))
        return mx.concatenate([first, recent], axis=-1)

    def _held(self, position: int, sinks: int, *, causal: bool) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which sinks and which of the ring's slots one query sees where rows are equal: it needs no device."""
        limit = position + 1 if causal else self.longest
        ring = np.zeros(self.layout.ring, dtype=np.bool_)
        for low, high in self.layout.slots(self.layout.packed(position + 1), limit - self.layout.sinks):
            ring[low:high] = True
        return np.arange(sinks) < limit, ring


class Hiding:
    """A mask as mlx-lm gives it, over absolute positions, together with who sees what."""

    def __init__(self, mask: Any, queries: tuple[int, int], groups: int, sight: Sight) -> None:
        heads, _ = queries
        if heads % groups:
            raise ValueError(f"{heads} query heads over {groups} KV heads: not a multiple")
        if isinstance(mask, str) and mask != "causal":
            raise ValueError(f"the mask {mask!r} is not known")
        self.sight = sight
        self.causal = isinstance(mask, str)
        self._array = None if mask is None or self.causal else _grouped(mask, queries, groups, sight.longest)

    def hides_packed(self, rows: tuple[int, int], columns: tuple[int, int]) -> bool:
        """Whether anything of these packed tokens is hidden from, or changed for, some query."""
        return self._array is not None or self.sight.boundaries(*rows)[0] < columns[1]

    def packed(self, scores: Any, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
        """Scores (rows, KV heads, queries a KV head x n, columns) with what is hidden at -inf, for packed tokens.

        Columns are counted from the first packed token on.
        """
        sinks = self.sight.layout.sinks
        scores = self._masked(scores, rows, slice(sinks + columns[0], sinks + columns[1]))
        if self.sight.boundaries(*rows)[0] >= columns[1]:
            return scores
        return _where(mx.arange(*columns) + sinks < self.sight.seen_from(*rows), scores, rows)

    def plain(self, scores: Any, rows: tuple[int, int], columns: tuple[int, int], sinks: int) -> Any:
        """The same for the first sinks, and then some recent columns."""
        if self._array is not None:
            places = mx.clip(self.sight.places(*columns), 0, self.sight.longest - 1)
            first = mx.broadcast_to(mx.arange(sinks), (places.shape[0], sinks))
            scores = self._masked(scores, rows, mx.concatenate([first, places], axis=-1))
        return _where(self.sight.plain(rows, columns, sinks, causal=self.causal), scores, rows)

    def _masked(self, scores: Any, rows: tuple[int, int], places: Any) -> Any:
        """With the array on them; `places` is a slice, or positions (rows or 1, columns)."""
        if self._array is None:
            return scores
        mask = self._array if self._array.shape[-2] == 1 else self._array[..., slice(*rows), :]
        if mask.shape[-1] > 1:
            mask = mask[..., places] if isinstance(places, slice) else _taken(mask, places)
        apart = _apart(scores, rows)
        least = mx.finfo(mx.float32).min
        if mask.dtype == mx.bool_:  # a finite number, as mlx-lm does: a query that sees nothing gets a mean
            return mx.where(mask, apart, least).reshape(scores.shape)
        added = mx.maximum(mask.astype(mx.float32) * math.log2(math.e), least)  # scores are for powers of 2
        return (apart + mx.where(mask == -mx.inf, -mx.inf, added)).reshape(scores.shape)


def _grouped(mask: Any, queries: tuple[int, int], groups: int, tokens: int) -> Any:
    """(rows or 1, KV heads or 1, queries a KV head or 1, n or 1, tokens or 1)."""
    heads, count = queries
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    _, given, rows, columns = shape
    if given not in (1, heads) or rows not in (1, count) or columns not in (1, tokens):
        raise ValueError(f"a mask of shape {mask.shape} for {heads} x {count} x {tokens} scores")
    apart = (groups, heads // groups) if given == heads else (1, 1)
    return mask.reshape(shape[0], *apart, rows, columns)


def _taken(mask: Any, places: Any) -> Any:
    """Columns of a mask at other places in each row."""
    if places.shape[0] == 1:
        return mx.take(mask, places[0], axis=-1)
    mask = mx.broadcast_to(mask, (places.shape[0], *mask.shape[1:]))
    return mx.take_along_axis(mask, places[:, None, None, None], axis=-1)


def _apart(scores: Any, rows: tuple[int, int]) -> Any:
    """(rows, KV heads, queries a KV head, n, columns)."""
    return scores.reshape(*scores.shape[:2], -1, rows[1] - rows[0], scores.shape[-1])


def _where(seen: Any, scores: Any, rows: tuple[int, int]) -> Any:
    """-inf where `seen`, (rows or 1, queries or 1, columns), is False."""
    return mx.where(seen[:, None, None], _apart(scores, rows), -mx.inf).reshape(scores.shape)


def _column(numbers: Ints) -> Any:
    return mx.array(numbers, dtype=mx.int32)[:, None]
