"""The batch of caches in tiers: what `TieredKVCache.merge` makes and mlx-lm's BatchGenerator fills, filters, extends.

Every row is laid out from its first token on and has its own sinks, its own ring and its own count of packed groups:
the arrays of its single run, bit for bit. A row packs a group when its own position says so; a decode step in which no
row does encodes nothing, and one in which some do gathers, encodes and writes the groups of all of them at once, in as
many calls for eight rows as for one. Padding is never packed and never stored.

Bytes: rows x what a single cache of the longest row holds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from veloxquant.caches import batch_masks, incoming, registration
from veloxquant.caches import saved as saved_state
from veloxquant.caches.limits import whole
from veloxquant.caches.rows import Rows
from veloxquant.caches.tiered import LAYOUT, TieredKVCache, described_tiers, restored
from veloxquant.caches.tiered_attention import Tier, Tiered
from veloxquant.caches.tiered_batch_moves import Moves
from veloxquant.caches.tiered_batch_part import BatchPart, refuse_unlike
from veloxquant.caches.tiered_sight import Sight
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.rows import Ints
    from veloxquant.caches.tiered_part import Part


class BatchTiered(Tiered):
    """Keys or values of all rows of a layer, on their way from the twin to attention."""

    def __init__(self, tier: Tier, sight: Sight, columns: int) -> None:
        super().__init__(tier, sight)
        self.columns = columns
        """Of a mask in mlx-lm's layout (`batch_masks`)."""

    def attend(self, queries: Any, values: Any, scale: float, mask: Any = None) -> Any:
        """As `Tiered.attend`, each row by its own positions; array masks come in mlx-lm's columns."""
        return super().attend(queries, values, scale, self._by_place(mask, queries.shape[2]))

    def _by_place(self, mask: Any, count: int) -> Any:
        """Raises ValueError for a mask of another count of columns."""
        import mlx.core as mx

        if mask is None or isinstance(mask, str):
            return mask
        said = batch_masks.made(mask)
        if said is not None and said.window is None:
            return "causal"
        if mask.shape[-1] not in (1, self.columns):
            raise ValueError(f"a mask of shape {mask.shape} for {self.columns} columns of a batch")
        before = mx.array(self.sight.firsts, dtype=mx.int32)
        return batch_masks.by_position(mask, before, count, mx.arange(self.sight.longest, dtype=mx.int32)[None])


class BatchTieredKVCache:
    """K and V of one layer for several sequences, each as its TieredKVCache has it.

    Made empty for rows like those of a single cache. Raises EngineUnavailable where mlx-lm cannot serve it.
    """

    bits = group_size = "codec"
    """As of TieredKVCache."""

    def __init__(self, like: TieredKVCache, rows: int) -> None:
        registration.register()
        self.layout = like.layout
        self.rows = Rows([0] * rows)
        self.key_part, self.value_part = _empty(like.key_part), _empty(like.value_part)
        self._last = 0
        """Tokens of the last call, padding counted."""

    @property
    def offset(self) -> Any:
        """int32 (rows,): the position of each row's next token."""
        return self.rows.offset

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[BatchTiered, BatchTiered]:
        """Take the rows' own tokens of a call, arrays (rows, KV heads, n, width); return what attention takes.

        Raises MethodRefused for arrays of other widths, or of another count of rows or heads than what is held.
        """
        self._check(keys, values)
        self._last = keys.shape[2]
        moves = Moves(self.layout, self.rows.advance(self._last), self._last)
        columns = self.key_part.write_rows(keys, moves), self.value_part.write_rows(values, moves)
        return self._handles(columns, moves.offsets, moves.begins)

    def keys_and_values(self) -> tuple[BatchTiered, BatchTiered]:
        """As of TieredKVCache: after a call of one token. Raises MethodRefused after a call of more."""
        if self._last != 1:
            raise MethodRefused(
                "a cache in tiers gives what a call of several tokens saw once, and other layers ask for it too",
                hint="keep the engine's cache in layers that share K and V",
            )
        columns = tuple(self.key_part.recent), tuple(self.value_part.recent)
        return self._handles(columns, self.rows.held - 1, None)

    def prepare(self, **padding: Any) -> None:
        """What the coming calls bring: `left_padding`, `lengths`, `right_padding`, see `Rows.prepare`.

        Raises MethodRefused for padding on the left of a row that holds tokens.
        """
        left = padding.get("left_padding")
        numbers = [] if left is None else left.tolist() if hasattr(left, "tolist") else left
        if any(more and held for more, held in zip(numbers, self.rows.lengths, strict=False)):
            raise MethodRefused("padding on the left of tokens that are held", hint="pad prompts on the right")
        self.rows.prepare(**padding)

    def finalize(self) -> None:
        """A prompt with padding on the right is over. Nothing moves: padding was never stored."""
        self.rows.finalize()

    def filter(self, keep: Any) -> None:
        """Only these rows, in this order; bytes of the others, and room that only a longer row had, are given back."""
        chosen = self.rows.filter(keep)
        for part in self._parts:
            part.choose(chosen, self._room(part), self.rows.longest)

    def extend(self, other: BatchTieredKVCache) -> None:
        """Other rows after these. Raises MethodRefused for other codecs or tiers, heads or formats."""
        _refuse_unlike(self, other)
        for part, more in zip(self._parts, other._parts, strict=True):
            refuse_unlike([part, more])  # before anything is changed
        held = self.rows.count, other.rows.count
        self.rows.extend(other.rows)
        for part, more in zip(self._parts, other._parts, strict=True):
            part.join([(part, held[0]), (more, held[1])], self._room(part))

    def extract(self, row: int) -> TieredKVCache:
        """One row as a cache of its own; the batch stays as it is."""
        cache = _single(self)
        cache.offset = int(self.rows.held[row])
        if cache.offset:
            for mine, its in zip(self._parts, (cache.key_part, cache.value_part), strict=True):
                its.restore(mine.row(row, self.layout.capacity(cache.offset) // mine.codec.tokens))
        return cache

    @classmethod
    def merge(cls, caches: Sequence[TieredKVCache]) -> BatchTieredKVCache:
        """One row for each single cache. Raises MethodRefused for caches of several sequences, or unlike each other."""
        batch = cls(_tiered(caches[0]), 0)
        for cache in caches:
            _refuse_unlike(batch, cache)
            if cache.key_part.recent and cache.key_part.recent[0].shape[0] != 1:
                raise MethodRefused("a cache of several sequences cannot be a row", hint="merge single sequences")
        batch.rows = Rows([cache.offset for cache in caches])
        for part, name in zip(batch._parts, ("key_part", "value_part"), strict=True):
            part.join([(getattr(cache, name), 1) for cache in caches], batch._room(part))
        return batch

    def make_mask(self, *args: Any, **options: Any) -> Any:
        """An array for the next tokens, as mlx-lm's own batch cache makes it."""
        return self.rows.make_mask(*args, **options)

    def is_trimmable(self) -> bool:
        """Never, as of TieredKVCache."""
        return False

    def trim(self, n: int) -> int:
        """Nothing for n < 1. Raises MethodRefused for more."""
        return _single(self).trim(n)

    def size(self) -> int:
        """Tokens of the longest row."""
        return self.rows.longest

    def empty(self) -> bool:
        """Whether no row holds a token."""
        return not self.rows.longest

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held, slack included."""
        return sum(int(array.nbytes) for part in self._parts for held in part.arrays for array in held)

    @property
    def state(self) -> tuple[Any, ...]:
        """All that makes the batch: the arrays of K, of V, and a text."""
        text = {**described_tiers(self), "layout": LAYOUT, "rows": self.rows.describe(), "last": self._last}
        return (*self.key_part.arrays, *self.value_part.arrays, json.dumps(text, sort_keys=True))

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        """Raises MethodRefused for a state that is not one of ours."""
        saved = saved_state.read(state, LAYOUT, groups=10)
        layout, parts = restored(saved, BatchPart)
        with saved_state.reading():
            rows = Rows.described(saved.text["rows"])
            last = whole(saved.text["last"], "last", 0, saved_state.MOST_TOKENS)
        count, heads = saved_state.rows_and_heads(parts[0].recent)
        if rows.longest and count != rows.count:
            raise saved_state.refusal(f"arrays of {count} rows for {rows.count}")
        for part in parts:
            part.check(rows.longest, layout, (count, heads))
        self.layout, (self.key_part, self.value_part) = layout, parts
        self.rows, self._last = rows, last

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> BatchTieredKVCache:
        """A batch from a saved state."""
        registration.register()
        batch = cls.__new__(cls)
        batch.state = state
        return batch

    @property
    def _parts(self) -> tuple[BatchPart, BatchPart]:
        return self.key_part, self.value_part

    def _room(self, part: Part) -> int:
        """Slots for what is packed of the longest row."""
        return self.layout.capacity(self.rows.longest) // part.codec.tokens

    def _handles(self, columns: Sequence[Any], firsts: Ints, begins: Ints | None) -> tuple[BatchTiered, BatchTiered]:
        sight = Sight(self.layout, firsts, self.rows.held, begins, int(columns[0][0].shape[2]))
        keys, values = (
            BatchTiered(part.tier(held), sight, self.rows.columns)
            for part, held in zip(self._parts, columns, strict=True)
        )
        return keys, values

    def _check(self, keys: Any, values: Any) -> None:
        incoming.check_widths(keys, values, self.key_part.codec, self.value_part.codec)
        recent = self.key_part.recent
        incoming.check_rows(keys, self.rows.count, recent[0].shape[1] if recent else None)


def _empty(part: Part) -> BatchPart:
    return BatchPart(part.codec, part.recent_codec)


def _single(batch: BatchTieredKVCache) -> TieredKVCache:
    """An empty cache as the batch's rows are."""
    keys, values, layout = batch.key_part, batch.value_part, batch.layout
    return TieredKVCache(
        keys.codec,
        values.codec,
        sinks=layout.sinks,
        recent=layout.recent,
        recent_key_codec=keys.recent_codec,
        recent_value_codec=values.recent_codec,
        step=layout.step,
    )


def _tiered(cache: Any) -> Any:
    if not isinstance(cache, TieredKVCache | BatchTieredKVCache):
        name = type(cache).__name__
        raise MethodRefused(f"a {name} in a batch of caches in tiers", hint="build all caches of one plan")
    return cache


def _refuse_unlike(batch: BatchTieredKVCache, other: Any) -> None:
    ours, theirs = described_tiers(batch), described_tiers(_tiered(other))
    if ours != theirs:
        raise MethodRefused(f"caches of {ours} and of {theirs} in one batch", hint="build all caches of one plan")
