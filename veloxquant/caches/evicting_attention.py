"""Attention of a call over a bounded cache: cut where rows evict, so that each query sees what was held at its time.

Between two evictions a call's queries see all tokens held and those of the call before them: by their true positions,
as only these are the same however a prompt is cut. One segment is at work at a time, in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from veloxquant.caches import batch_masks
from veloxquant.caches.attention import Packed
from veloxquant.caches.eviction import MOST, UNIT, Rule
from veloxquant.caches.rows import Taken, alike, spread
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.evicting_slots import Slots

SCORES = 2**22
"""Most scores of one sequence at a time: 16 MiB in float32. More cut a segment in smaller ones."""
_VOTES = MOST // UNIT - 1
"""Most query rows of one KV head at a time: all they have to give, on top of MOST, is an int32 still."""


class Coming(Packed):
    """New keys or values on their way to attention, where the queries are known that decide what is kept."""

    def __init__(self, new: Any, call: Call) -> None:
        self.new, self.call = new, call

    def attend(self, queries: Any, values: Packed, scale: float, mask: Any = None) -> Any:
        """softmax(scale x queries . keys + mask) . values over what each query may see; see `Call.attend`."""
        if not isinstance(values, Coming) or values.call is not self.call:
            raise MethodRefused("keys and values are not of the same call", hint="choose another method for this model")
        return self.call.attend(queries, self.new, values.new, scale, mask)


class Call:
    """One call of a layer: tokens come in with `update_and_fetch`, queries with attention, once."""

    def __init__(self, slots: Slots, rule: Rule, taken: Taken) -> None:
        self.slots, self.rule, self.taken = slots, rule, taken
        self.done = False

    def attend(self, queries: Any, keys: Any, values: Any, scale: float, mask: Any) -> Any:
        """Write the new tokens, attend, and evict where it is due; (batch, query heads, n, value width).

        A token is never seen by an earlier one, also where `mask` is None. Raises MethodRefused when asked a second
        time, as by a layer that shares K and V with another: what the first queries did not want is gone.
        """
        import mlx.core as mx

        if self.done:
            raise MethodRefused(
                "a second attention over the same tokens, of which some may be gone",
                hint="keep the engine's cache here",
            )
        self.done = True
        masking = _Masking(mask, queries, keys.shape[1], self.taken)
        heads, room = queries.shape[1], self.rule.budget + self.rule.stride
        tile = max(1, min(SCORES // (heads * room), _VOTES * keys.shape[1] // heads))
        outputs: list[Any] = []
        cut = segments(self.taken, self.rule.stride, tile)
        for segment in cut:
            inputs = [_cut(array, segment) for array in (queries, keys, values)]
            if outputs:  # one segment at a time: lazy ones would all hold their scores together
                inputs = mx.depends(inputs, outputs[-1:])
            outputs.append(self._segment(segment, inputs, scale, masking))
        return _together(outputs, cut, queries.shape[2]) if cut else _nothing(queries, values)

    def _segment(self, segment: Taken, inputs: Sequence[Any], scale: float, masking: _Masking) -> Any:
        """Queries, keys and values of some tokens: written, attended to, counted, and dropped where it is due."""
        import mlx.core as mx

        slots, rule = self.slots, self.rule
        queries, keys, values = inputs
        ends = segment.ends
        times = _times(segment, keys.shape[2])
        new = slots.coded(keys, values, times[:, None, :, None])
        slots.write(new, segment, rule.held_rows(segment.starts))
        room = rule.slots(spread(ends)[1])
        batch, heads, count, width = queries.shape
        rows = (batch, keys.shape[1], heads // keys.shape[1] * count)
        ready = slots.key_codec.ready((queries.astype(mx.float32) * scale).reshape(*rows, width), ())
        scores = slots.key_codec.scores(ready, slots.keys(room), ()).astype(mx.float32)
        hidden = masking.hide(scores.reshape(*rows[:2], -1, count, room), slots.positions(room), times, segment)
        weights = mx.softmax(hidden, axis=-1)
        mixed = slots.value_codec.mix(weights.reshape(*rows, room), slots.values(room), ())
        out = slots.value_codec.settle(mixed, ()).astype(queries.dtype).reshape(batch, heads, count, -1)
        self._watch(weights, segment, times)
        if slots.policy.watches:  # decode asks for `out` alone: sums left lazy would keep the weights of every step
            (out,) = mx.depends([out], slots.arrays[-1:])
        rows_due = ((segment.counts > 0) & rule.due_rows(ends)).nonzero()[0]
        if rows_due.size:
            slots.evict(rule, rows_due, ends[rows_due])
        return out

    def _watch(self, weights: Any, segment: Taken, times: Any) -> None:
        """Add the attention of the queries that the policy watches."""
        import mlx.core as mx

        watches, stride = self.slots.policy.watches, self.rule.stride
        if not watches or not _watched(watches, self.rule, segment):
            return
        own = mx.arange(times.shape[1]) < mx.array(segment.counts, dtype=mx.int32)[:, None]
        if watches > 0:
            own = own & (times % stride >= stride - watches) & (times - times % stride + stride >= self.rule.first)
        counted = mx.where(own[:, None, None, :, None], mx.round(weights * UNIT), 0)
        self.slots.watch(counted.astype(mx.int32).sum(axis=(2, 3)))


def segments(taken: Taken, stride: int, tile: int) -> list[Taken]:
    """A call cut so that no row goes over a multiple of `stride` within a segment, and none takes more than `tile`."""
    firsts, left, starts = taken
    cut = []
    while left.any():
        counts = np.minimum(np.minimum(left, stride - starts % stride), tile)
        cut.append(Taken(firsts, counts, starts))
        firsts, left, starts = firsts + counts, left - counts, starts + counts
    return cut


class _Masking:
    """Which scores count: by position, and what the engine's mask says."""

    def __init__(self, mask: Any, queries: Any, groups: int, taken: Taken) -> None:
        _, heads, self.count, _ = queries.shape
        if heads % groups:
            raise ValueError(f"{heads} query heads over {groups} KV heads: not a multiple")
        if isinstance(mask, str) and mask != "causal":
            raise ValueError(f"the mask {mask!r} is not known")
        made = None if mask is None or isinstance(mask, str) else batch_masks.made(mask)
        self.window = made.window if made else None
        self.offsets = taken.offsets
        self.mask = None if mask is None or isinstance(mask, str) or made else _grouped(mask, heads, groups)

    def hide(self, scores: Any, positions: Any, times: Any, segment: Taken) -> Any:
        """Scores (batch, KV heads, queries a KV head, n, slots) of queries at `times` (batch, n), the mask on them."""
        import mlx.core as mx

        least = mx.finfo(mx.float32).min
        at, now = positions[:, :, None, None], times[:, None, None, :, None]
        seen = at <= now if self.window is None else (at <= now) & (at > now - self.window)
        if self.mask is not None:
            mask = self._at(positions, segment)
            # Half of what hides a token that is not there: a row of nothing else has a mean of those that are.
            scores = mx.where(mask, scores, least / 2) if mask.dtype == mx.bool_ else scores + mask.astype(mx.float32)
        return mx.where(seen, scores, least)

    def _at(self, positions: Any, segment: Taken) -> Any:
        """The mask for the segment's queries and the stored positions."""
        import mlx.core as mx

        mask: Any = self.mask
        columns = mask.shape[-1]
        if mask.shape[-2] > 1:
            apart = mask.reshape(mask.shape[0], -1, *mask.shape[-2:])
            apart = mx.broadcast_to(apart, (positions.shape[0], *apart.shape[1:]))
            mask = _cut(apart, segment).reshape(positions.shape[0], *mask.shape[1:3], -1, columns)
        if columns == 1:
            return mask
        # The call's token j is in column columns - count + j, and at position offset + j.
        shift = mx.array(columns - self.count - self.offsets, dtype=mx.int32)
        at = mx.clip(mx.minimum(positions, columns) + shift[:, None, None], 0, columns - 1)
        return mx.take_along_axis(mask, at[:, :, None, None], axis=-1)


def _nothing(queries: Any, values: Any) -> Any:
    """For a call of padding alone."""
    import mlx.core as mx

    return mx.zeros((*queries.shape[:3], values.shape[3]), dtype=queries.dtype)


def _grouped(mask: Any, heads: int, groups: int) -> Any:
    """(batch or 1, KV heads or 1, queries a KV head or 1, n or 1, columns or 1)."""
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if shape[1] not in (1, heads):
        raise ValueError(f"a mask of shape {mask.shape} for {heads} query heads")
    split = (groups, heads // groups) if shape[1] == heads else (1, 1)
    return mask.reshape(shape[0], *split, *shape[2:])


def _cut(array: Any, segment: Taken) -> Any:
    """The segment's tokens of an array (batch, heads, n, width), from each row's first on; padding has any."""
    import mlx.core as mx

    count, first, tokens = spread(segment.counts)[1], int(segment.firsts[0]), array.shape[2]
    if alike(segment.firsts) and first + count <= tokens:
        return array if count == tokens else array[:, :, first : first + count]
    at = mx.minimum(mx.array(segment.firsts, dtype=mx.int32)[:, None] + mx.arange(count), tokens - 1)
    return mx.take_along_axis(array, at[:, None, :, None], axis=2)


def _times(segment: Taken, count: int) -> Any:
    """Positions of the segment's tokens, int32 (rows, n); of padding, those that tokens there would have."""
    import mlx.core as mx

    return mx.array(segment.starts, dtype=mx.int32)[:, None] + mx.arange(count, dtype=mx.int32)


def _watched(watches: int, rule: Rule, segment: Taken) -> bool:
    """Whether some row has a query in the segment that is watched: one of the last `watches` before an eviction."""
    if watches < 0:
        return True
    boundaries = rule.stride * -(-segment.ends // rule.stride)
    return bool((rule.due_rows(boundaries) & (segment.ends > boundaries - watches)).any())


def _together(outputs: Sequence[Any], cut: Sequence[Taken], count: int) -> Any:
    """Outputs of segments as the call's tokens are laid out; what padding gets has no meaning."""
    import mlx.core as mx

    joined = outputs[0] if len(outputs) == 1 else mx.concatenate(list(outputs), axis=2)
    if joined.shape[2] == count and not cut[0].firsts.any() and all(alike(segment.counts) for segment in cut):
        return joined
    places, tokens, before = mx.zeros((len(cut[0].starts), count), dtype=mx.int32), mx.arange(count), 0
    for segment, output in zip(cut, outputs, strict=True):
        firsts, counts = (mx.array(n, dtype=mx.int32)[:, None] for n in (segment.firsts, segment.counts))
        inside = tokens - firsts
        places = mx.where((inside >= 0) & (inside < counts), inside + before, places)
        before += output.shape[2]
    return mx.take_along_axis(joined, places[:, None, :, None], axis=2)
