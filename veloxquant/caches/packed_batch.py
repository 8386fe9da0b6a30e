"""The batch of packed caches: what `PackedKVCache.merge` makes and mlx-lm's BatchGenerator fills, filters and extends.

Every row is laid out from its first token on, so that its codes, and the blocks attention takes, are those of its own
single run, bit for bit (native codecs' steps of one token: to rounding, see `attention`); padding is never packed and
never stored. A step costs the same calls whatever the number of rows and heads.

Bytes: rows x what one cache of the longest row holds that grew token by token, `step` slots at a time: slots = step x
ceil(longest / step), whatever the calls. A single cache that took a long chunk on top of a length that is no multiple
of the step may hold up to a step more (the engine's rule, `profiles.slots.kv_slots`); in a batch that is given back.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from veloxquant.caches import incoming, registration
from veloxquant.caches import saved as saved_state
from veloxquant.caches.attention import Packed, attend
from veloxquant.caches.packed import LAYOUT, PackedKVCache, check_saved, check_step, encoded, refuse_unfit
from veloxquant.caches.row_masking import RowMask, Seen
from veloxquant.caches.row_store import RowStore
from veloxquant.caches.rows import Rows
from veloxquant.errors import MethodRefused, quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.codec import Arrays, Codec


class BatchPacked(Packed):
    """Keys or values of all rows of a layer, on their way from the twin to attention."""

    def __init__(self, codec: Codec, stored: Sequence[Any], fixed: Arrays, seen: Seen) -> None:
        super().__init__(codec, stored, fixed, seen.tokens)
        self.seen = seen

    def attend(self, queries: Any, values: Packed, scale: float, mask: Any = None) -> Any:
        """As `attention.attend`, each row by its own positions; array masks come in mlx-lm's columns."""
        return attend(queries, self, values, scale, RowMask(mask, queries.shape, self.stored[0].shape[1], self.seen))


class BatchPackedKVCache:
    """K and V of one layer for several sequences, each in the format that its PackedKVCache has.

    Raises EngineUnavailable where mlx-lm cannot serve it.
    """

    bits = group_size = "codec"
    """As of PackedKVCache."""

    def __init__(self, key_codec: Codec, value_codec: Codec, step: int, rows: int) -> None:
        registration.register()
        self.step = step
        self.rows = Rows([0] * rows)
        self.key_store, self.value_store = RowStore(key_codec), RowStore(value_codec)
        self._offsets = self.rows.held

    @property
    def offset(self) -> Any:
        """int32 (rows,): the position of each row's next token."""
        return self.rows.offset

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[BatchPacked, BatchPacked]:
        """Pack the rows' own tokens of a call, arrays (rows, KV heads, n, width); return what attention takes.

        Raises MethodRefused for arrays of other widths, or of another count of rows or heads than what is held.
        """
        self._check(keys, values)
        tokens = keys.shape[2]
        taken = self.rows.advance(tokens)
        slots = max(self.step, self._slots())
        after: Arrays = ()
        for store, new in ((self.key_store, keys), (self.value_store, values)):
            store.begin(new, taken)
            after = encoded(store.codec, new, store.fixed, after)
            store.fit(max(slots, store.slots), after)
            store.write(after, taken, tokens)
        self._offsets = taken.offsets
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[BatchPacked, BatchPacked]:
        """What attention takes, for all tokens held, as the queries of the last call see them."""
        seen = Seen(self._offsets, max(1, self.rows.longest), self.rows.columns)
        keys, values = (BatchPacked(store.codec, store.stored, store.fixed, seen) for store in self.stores)
        return keys, values

    def prepare(self, **padding: Any) -> None:
        """What the coming calls bring: `left_padding`, `lengths`, `right_padding`, see `Rows.prepare`."""
        self.rows.prepare(**padding)

    def finalize(self) -> None:
        """A prompt with padding on the right is over. Nothing moves: padding was never stored."""
        self.rows.finalize()

    def filter(self, keep: Any) -> None:
        """Only these rows, in this order; bytes of the others, and slots that only a longer row had, are given back."""
        chosen = self.rows.filter(keep)
        for store in self.stores:
            store.choose(chosen, self._slots())
        self._offsets = self.rows.held

    def extend(self, other: BatchPackedKVCache) -> None:
        """Other rows after these. Raises MethodRefused for other codecs and in the middle of a padded prompt."""
        _refuse_foreign(other, BatchPackedKVCache)
        _refuse_unlike(self, other)
        counts = self.rows.count, other.rows.count
        self.rows.extend(other.rows)
        for mine, more in zip(self.stores, other.stores, strict=True):
            mine.join([*zip((mine, more), counts, strict=True)], self._slots())
        self._offsets = self.rows.held

    def extract(self, row: int) -> PackedKVCache:
        """One row as a cache of its own, without slack; the batch stays as it is."""
        cache = PackedKVCache(self.key_store.codec, self.value_store.codec, self.step)
        cache.offset = int(self.rows.held[row])
        if cache.offset:
            (cache.keys, cache.key_fixed), (cache.values, cache.value_fixed) = (
                store.row(row, cache.offset) for store in self.stores
            )
        return cache

    @classmethod
    def merge(cls, caches: Sequence[PackedKVCache]) -> BatchPackedKVCache:
        """What `PackedKVCache.merge` says."""
        for cache in caches:
            _refuse_foreign(cache, PackedKVCache)
        first = caches[0]
        batch = cls(first.key_codec, first.value_codec, first.step, len(caches))
        batch.rows = Rows([cache.offset for cache in caches])
        ones = [cls._row(cache) for cache in caches]
        _refuse_unlike(batch, *ones)
        for at, store in enumerate(batch.stores):
            store.join([(one.stores[at], 1) for one in ones], batch._slots())
        batch._offsets = batch.rows.held
        return batch

    @classmethod
    def _row(cls, cache: PackedKVCache) -> BatchPackedKVCache:
        """A batch of this one sequence, on the cache's own arrays."""
        batch = cls(cache.key_codec, cache.value_codec, cache.step, 1)
        batch.key_store = RowStore.of(cache.key_codec, cache.keys, cache.key_fixed, cache.offset)
        batch.value_store = RowStore.of(cache.value_codec, cache.values, cache.value_fixed, cache.offset)
        return batch

    def make_mask(self, *args: Any, **options: Any) -> Any:
        """An array for the next tokens, as mlx-lm's own batch cache makes it."""
        return self.rows.make_mask(*args, **options)

    def is_trimmable(self) -> bool:
        """Always: each token is packed by itself."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last n tokens of every row; how many of the longest. Buffers stay until a row leaves or joins.

        Their slots become zeros, as of PackedKVCache.
        """
        trimmed = self.rows.trim(n)
        for store in self.stores if trimmed else ():
            store.clear(self.rows.held)
        self._offsets = self.rows.held
        return trimmed

    def size(self) -> int:
        """Tokens of the longest row."""
        return self.rows.longest

    def empty(self) -> bool:
        """Whether no row holds a token."""
        return not self.rows.longest

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held, slack included."""
        return sum(store.nbytes for store in self.stores)

    @property
    def state(self) -> tuple[Any, ...]:
        """All that makes the batch: arrays of K, of V, what does not grow of each, and a text."""
        keys, values = self.stores
        text = json.dumps({**self.describe(), "layout": LAYOUT, "rows": self.rows.describe()}, sort_keys=True)
        return tuple(keys.stored), tuple(values.stored), tuple(keys.fixed), tuple(values.fixed), text

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        """Raises MethodRefused for a state that is not one of ours."""
        from veloxquant.caches import codecs

        saved = saved_state.read(state, LAYOUT, groups=4)
        with saved_state.reading():
            made = [codecs.make(saved.text[name]) for name in ("keys", "values")]
            rows, step = Rows.described(saved.text["rows"]), saved.text["step"]
        refuse_unfit(*made)
        check_step(step)
        check_saved(made, saved.groups, rows.longest, rows.count)
        self.step, self.rows = step, rows
        self.key_store, self.value_store = (RowStore(codec) for codec in made)
        for store, stored, fixed in zip(self.stores, saved.groups[:2], saved.groups[2:], strict=True):
            store.stored, store.fixed = stored, tuple(fixed)
        self._offsets = rows.held

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> BatchPackedKVCache:
        """A batch from a saved state."""
        registration.register()
        batch = cls.__new__(cls)
        batch.state = state
        return batch

    @property
    def stores(self) -> tuple[RowStore, RowStore]:
        """Of K and of V."""
        return self.key_store, self.value_store

    def _slots(self) -> int:
        """Room for the longest row, in whole steps; none where no row holds a token."""
        return -(-self.rows.longest // self.step) * self.step

    def describe(self) -> dict[str, Any]:
        """What caches of one batch have in common."""
        keys, values = (store.codec.describe() for store in self.stores)
        return {"keys": keys, "values": values, "step": self.step}

    def heads(self) -> int | None:
        """KV heads; None before the first token."""
        return int(self.key_store.stored[0].shape[1]) if self.key_store.stored else None

    def _check(self, keys: Any, values: Any) -> None:
        incoming.check_widths(keys, values, self.key_store.codec, self.value_store.codec)
        incoming.check_rows(keys, self.rows.count, self.heads())


def _refuse_foreign(cache: Any, ours: type) -> None:
    if not isinstance(cache, ours):
        raise MethodRefused(
            f"a {type(cache).__name__} cannot be a row of a batch of packed caches",
            hint="build all caches of a batch from one plan",
        )


def _refuse_unlike(batch: BatchPackedKVCache, *others: BatchPackedKVCache) -> None:
    ours = batch.describe()
    for theirs in (other.describe() for other in others):
        different = [name for name in ours if ours[name] != theirs[name]]
        if different:
            raise MethodRefused(
                f"caches whose {', '.join(different)} differ cannot be one batch: {quoted(ours)} and {quoted(theirs)}",
                hint="build all caches of a batch from one plan",
            )
    heads = {one.heads() for one in (batch, *others)} - {None}
    if len(heads) > 1:
        raise MethodRefused(f"caches of {quoted(heads)} KV heads cannot be one batch", hint="use caches of one model")
