"""The tokens that a bounded cache holds: K, V, true positions and sums of attention, slot by slot, rising by position.

Heads hold different tokens after an eviction, but each head of a row equally many, in its first slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.caches import saved
from veloxquant.caches.eviction import LONGEST, MOST, Held, Policy, Rule, keep
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.codec import Arrays, Codec
    from veloxquant.caches.rows import Ints, Taken


class Slots:
    """Arrays of shape (rows, KV heads, slots, ...), all with the same slots; none before the first token."""

    def __init__(self, key_codec: Codec, value_codec: Codec, policy: Policy) -> None:
        self.key_codec, self.value_codec, self.policy = key_codec, value_codec, policy
        self.arrays: list[Any] = []
        """What the key codec stores, what the value codec stores, positions, and sums of attention if any are kept."""
        self._keys = _stored(key_codec)
        self._extra = 2 if policy.watches else 1
        _stored(value_codec)  # refuses what the key codec is refused for

    def restore(self, arrays: list[Any], slots: int, rows: int | None) -> None:
        """Take over saved arrays. Raises MethodRefused for others than these codecs store in so many slots."""
        import mlx.core as mx

        shape = saved.rows_and_heads(arrays)
        if not slots:  # room is made as the first token comes
            if any(array.size for array in arrays):
                raise saved.refusal("arrays where no token is held")
            return
        if rows not in (None, shape[0]):
            raise saved.refusal(f"{shape[0]} rows where {rows} belong")
        keys, values, marks = arrays[: self._keys], arrays[self._keys : -self._extra], arrays[-self._extra :]
        saved.check(self.key_codec, keys, (), shape, slots)
        saved.check(self.value_codec, values, (), shape, slots)
        if any(mark.dtype != mx.int32 or tuple(mark.shape) != (*shape, slots, 1) for mark in marks):
            raise saved.refusal(f"positions and sums of another shape than {(*shape, slots, 1)}, or no whole numbers")
        self.arrays = arrays

    def coded(self, keys: Any, values: Any, positions: Any) -> list[Any]:
        """New tokens as they are stored, without sums of attention; positions (rows, 1, tokens, 1)."""
        import mlx.core as mx

        stored = (*self.key_codec.encode(keys, ()), *self.value_codec.encode(values, ()))
        return [*stored, mx.broadcast_to(positions, (*keys.shape[:3], 1))]

    def grow(self, keys: Any, values: Any, slots: int) -> None:
        """Room for so many, as the first token is stored."""
        import mlx.core as mx

        if not self.arrays:
            first = self.coded(keys[:, :, :1], values[:, :, :1], mx.zeros((1, 1, 1, 1), dtype=mx.int32))
            watching = [first[-1]] if self.policy.watches else []
            self.arrays = [array[:, :, :0] for array in (*first, *watching)]
        self.arrays = self.resized(slots)

    def resized(self, slots: int) -> list[Any]:
        """With empty slots added, or the last ones cut off."""
        return [_resized(array, slots, fill) for array, fill in zip(self.arrays, self.fills, strict=True)]

    @property
    def fills(self) -> list[int]:
        """What an empty slot has in each array."""
        return [*[0] * (len(self.arrays) - self._extra), LONGEST, 0][: len(self.arrays)]

    def write(self, new: Sequence[Any], segment: Taken, firsts: Ints) -> None:
        """New tokens, (rows, KV heads, tokens, ...), behind the first `firsts` slots of each row.

        What of them is padding is not written: those slots get back what they have.
        """
        import mlx.core as mx

        tokens = new[0].shape[2]
        if segment.equal:
            first = int(firsts[0])
            for array, more in zip(self.arrays, new, strict=False):
                array[:, :, first : first + tokens] = more
            return
        slots = self.arrays[0].shape[2]
        steps = mx.arange(tokens, dtype=mx.int32)
        at = ((_column(firsts) + steps) % slots)[:, None, :, None]
        own = None if segment.counts.min() == tokens else (steps < _column(segment.counts))[:, None, :, None]
        for index, more in enumerate(new):
            array = self.arrays[index]
            put = more if own is None else mx.where(own, more, mx.take_along_axis(array, at, axis=2))
            self.arrays[index] = mx.put_along_axis(array, at, put, axis=2)

    def keys(self, slots: int) -> Arrays:
        """What is stored of the keys in the first slots."""
        return tuple(array[:, :, :slots] for array in self.arrays[: self._keys])

    def values(self, slots: int) -> Arrays:
        """What is stored of the values in the first slots."""
        return tuple(array[:, :, :slots] for array in self.arrays[self._keys : len(self.arrays) - self._extra])

    def positions(self, slots: int) -> Any:
        """(rows, KV heads, slots)."""
        return self.arrays[-self._extra][:, :, :slots, 0]

    def watch(self, weights: Any) -> None:
        """Add attention, (rows, KV heads, slots) in 1 / UNIT, to the first slots."""
        import mlx.core as mx

        slots = weights.shape[-1]
        sums = self.arrays[-1]
        sums[:, :, :slots] = mx.minimum(sums[:, :, :slots] + weights[..., None], MOST)

    def evict(self, rule: Rule, rows: Ints, ends: Ints) -> None:
        """Drop all but `budget` tokens of each head of these rows, which have seen so many tokens."""
        import mlx.core as mx

        some = len(rows) < self.arrays[0].shape[0]
        chosen = mx.array(rows, dtype=mx.int32)
        arrays = [array[chosen] for array in self.arrays] if some else self.arrays
        stays = _flat(self._order(arrays, rule.budget, ends), arrays[0].shape[2])
        for index, (array, fill) in enumerate(zip(arrays, self.fills, strict=True)):
            array[:, :, : rule.budget] = _gathered(array, stays)
            if index >= len(arrays) - self._extra:
                array[:, :, rule.budget :] = fill
            if index == len(arrays) - 1 and self.policy.watches > 0:
                array[:, :, : rule.budget] = 0  # the next window's sums begin anew
            if some:
                self.arrays[index][chosen] = array

    def _order(self, arrays: Sequence[Any], budget: int, ends: Ints) -> Any:
        import mlx.core as mx

        def keys() -> Any:
            return self.key_codec.decode(tuple(arrays[: self._keys]), (), mx.float32)

        attention = arrays[-1][..., 0] if self.policy.watches else None
        end = _column(ends)[:, None]
        return keep(self.policy, budget, Held(arrays[-self._extra][..., 0], end, attention, keys))


def _flat(stays: Any, slots: int) -> Any:
    """Slots of each row and head, (rows, KV heads, n), counted through all rows and heads."""
    import mlx.core as mx

    rows, heads, _ = stays.shape
    return stays + (mx.arange(rows * heads, dtype=mx.int32) * slots).reshape(rows, heads, 1)


def _gathered(array: Any, flat: Any) -> Any:
    """Whole slots are copied at once, which take_along_axis does number by number (20 times slower on the CPU)."""
    return array.reshape(-1, array.shape[-1])[flat]


def _stored(codec: Codec) -> int:
    """How many arrays the codec stores. Raises MethodRefused for one that does not pack each token by itself alone."""
    import mlx.core as mx

    if codec.tokens != 1:
        raise MethodRefused(
            f"its slots are groups of {codec.tokens} tokens, and tokens are dropped one by one",
            hint="use a codec that packs each token by itself, such as the affine one",
        )
    one = mx.zeros((1, 1, 1, codec.width))
    if codec.start(one):
        raise MethodRefused(
            "it is led by the first token, which may be dropped", hint="use a codec without outliers, such as affine"
        )
    return len(codec.encode(one, ()))


def _resized(array: Any, slots: int, fill: int) -> Any:
    import mlx.core as mx

    more = slots - array.shape[2]
    if more <= 0:
        return mx.contiguous(array[:, :, :slots]) if more else array
    room = mx.full((*array.shape[:2], more, array.shape[3]), fill, dtype=array.dtype)
    return mx.concatenate([array, room], axis=2)


def _column(numbers: Ints) -> Any:
    """int32 (rows, 1)."""
    import mlx.core as mx

    return mx.array(numbers, dtype=mx.int32)[:, None]
