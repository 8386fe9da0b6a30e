"""The batch twin of the bounded cache: rows of unequal length, each of which drops tokens at its own positions."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from veloxquant.caches import batch_masks
from veloxquant.caches import saved as saved_state
from veloxquant.caches.evicting import LAYOUT, Evicting, EvictingKVCache
from veloxquant.caches.rows import Rows
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.evicting_attention import Coming
    from veloxquant.caches.evicting_slots import Slots


class BatchEvictingKVCache(Evicting):
    """Several sequences as EvictingKVCache holds them: rows x the bytes of a single cache of the longest row."""

    rows: Rows

    @classmethod
    def merged(cls, caches: Sequence[EvictingKVCache]) -> BatchEvictingKVCache:
        """Rows from single caches, which are not touched. Raises MethodRefused unless they are all alike."""
        first = caches[0]
        for cache in caches:
            first.check_like(cache)
            if not cache.empty() and cache.slots.arrays[0].shape[0] != 1:
                raise MethodRefused("a cache of several sequences cannot be one row", hint="merge caches of one each")
        twin = cls(first.slots.key_codec, first.slots.value_codec, first.policy, *first.rule)
        twin.rows = Rows([cache.offset for cache in caches])
        twin.slots.arrays = twin._stacked([(cache.slots, 1) for cache in caches])
        return twin

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Coming, Coming]:
        """Take a call's tokens, (rows, KV heads, tokens, width), of which each row's own are written.

        Raises MethodRefused for arrays of other widths, or of another batch or count of heads than what is held.
        """
        self._check(keys, values)
        if keys.shape[0] != self.rows.count:
            raise MethodRefused(
                f"{keys.shape[0]} rows for a batch of {self.rows.count}", hint="filter or extend it first"
            )
        return self._take(keys, values, self.rows.advance(keys.shape[2]))

    @property
    def offset(self) -> Any:
        """int32 (rows,): true positions of the next call's token 0."""
        return self.rows.offset

    def prepare(self, **options: Any) -> None:
        """What of the coming prompt is padding: `left_padding`, `lengths`, `right_padding`; see `Rows.prepare`."""
        self.rows.prepare(**options)

    def finalize(self) -> None:
        """The padded prompt is over."""
        self.rows.finalize()

    def make_mask(self, N: int, return_array: bool = False, **options: Any) -> Any:  # noqa: N803 -- mlx-lm's own list
        """What mlx-lm's own twin would make, for the layers that have one; ours see by position."""
        columns = self.rows.columns
        return batch_masks.causal(columns - self.rows.shift, columns, N, options.get("window_size"))

    def filter(self, batch_indices: Any) -> None:
        """Only these rows, in this order; the slots of a longer row that left go too."""
        import mlx.core as mx

        chosen = mx.array(self.rows.filter(batch_indices), dtype=mx.int32)
        self.slots.arrays = [array[chosen] for array in self.slots.arrays]
        self.slots.arrays = self.slots.resized(self.rule.slots(self.rows.longest))

    def extend(self, other: BatchEvictingKVCache) -> None:
        """The other's rows behind these. Raises MethodRefused unless they drop tokens as these do."""
        self.check_like(other)
        sides = [(self.slots, self.rows.count), (other.slots, other.rows.count)]
        self.rows.extend(other.rows)
        self.slots.arrays = self._stacked(sides)

    def extract(self, idx: int) -> EvictingKVCache:
        """A row as the single cache that it would be."""
        import mlx.core as mx

        slots = self.slots
        single = EvictingKVCache(slots.key_codec, slots.value_codec, self.policy, *self.rule)
        single.offset = int(self.rows.held[idx])
        room = self.rule.slots(single.offset)
        row = idx % self.rows.count
        if room:
            single.slots.arrays = [mx.contiguous(array[row : row + 1, :, :room]) for array in slots.arrays]
        return single

    @property
    def state(self) -> tuple[Any, ...]:
        """All that makes the twin: arrays and a text."""
        return tuple(self.slots.arrays), self._described(rows=self.rows.describe())

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        """Raises MethodRefused for a state that is not one of ours."""
        saved = saved_state.read(state, LAYOUT, groups=1)
        with saved_state.reading():
            rows = Rows.described(saved.text["rows"])
        self._restore(saved, rows.longest, rows.count)
        self.rows = rows

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> BatchEvictingKVCache:
        """A twin from a saved state (mlx_lm's load_prompt_cache)."""
        twin = cls.__new__(cls)
        twin.state = state
        return twin

    def size(self) -> int:
        """Columns, as mlx-lm's own twin counts: the tokens of the longest row, and padding."""
        return self.rows.columns

    def _stacked(self, sides: Sequence[tuple[Slots, int]]) -> list[Any]:
        """Arrays of all rows together, with the room that the longest needs; sides without arrays are empty rows."""
        import mlx.core as mx

        known = next((slots for slots, _ in sides if slots.arrays), None)
        if known is None:
            return []
        room = self.rule.slots(self.rows.longest)
        stacked = []
        for slots, count in sides:
            filled = copy.copy(slots)
            if not slots.arrays:
                filled.arrays = [
                    mx.zeros((count, array.shape[1], 0, array.shape[3]), array.dtype) for array in known.arrays
                ]
            stacked.append(filled.resized(room))
        return [mx.concatenate(list(same)) for same in zip(*stacked, strict=True)]
