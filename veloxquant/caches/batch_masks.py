"""Masks of a batch whose rows have lengths of their own, in the one layout that mlx-lm's batch caches use.

A model makes one mask from the cache of one layer and gives it to all of them, and some of these may hold the engine's
own caches. So every batch twin makes the mask that the engine's BatchKVCache would make there: (batch, 1, n, columns +
n), rows of tokens *right-aligned* in its columns. `columns` is what that class counts in `_idx`: the longest row at
`merge`, more by n with each call of n tokens, whatever a row's padding is, and less by the least padding at `filter`.

Ours store rows left-aligned and see by true position. A mask that was made here says nothing that positions do not, so
that attention never computes it; any other array is brought to positions first (`by_position`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.caches.engine import cache_module

if TYPE_CHECKING:
    from veloxquant.caches.rows import Ints


class Made(NamedTuple):
    """A mask made here: a token sees itself and those before it, `window` of them in all if one is set."""

    window: int | None


_MADE: dict[int, tuple[Any, Made]] = {}
"""By the id of the array, as long as it lives; arrays have no hash by identity."""


def causal(lengths: Ints, columns: int, count: int, window: int | None = None) -> Any:
    """The engine's mask for `count` new tokens of rows that hold so many tokens each; lazy, never computed by ours."""
    import mlx.core as mx

    padding = mx.array(columns - lengths, dtype=mx.int32)
    mask = cache_module().create_causal_mask(count, offset=columns, window_size=window, left_padding=padding)
    key = id(mask)
    _MADE[key] = (weakref.ref(mask, lambda _: _MADE.pop(key, None)), Made(window))
    return mask


def made(mask: Any) -> Made | None:
    """What a mask says that was made here; None for any other.

    Writing to it in place (`&=`, `mask[...] = x`) would go unseen: MLX leaves the object what it was. No model of
    mlx-lm's does so; one that must takes a new array.
    """
    found = _MADE.get(id(mask))
    return found[1] if found is not None and found[0]() is mask else None


def by_position(mask: Any, before: Any, count: int, positions: Any) -> Any:
    """An array mask in the engine's layout, (batch or 1, heads or 1, n or 1, columns + n), cut to positions.

    `before` (batch,) are the tokens that rows held before the call of `count` tokens; `positions` (batch, k) or (1, k)
    are places in the row; those that the mask has no column for give what its first or last column says. Returns
    (batch or 1, heads or 1, n or 1, k).
    """
    import mlx.core as mx

    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    mask = mask.reshape(shape)
    if shape[-1] == 1:
        return mask
    at = mx.clip(positions + (shape[-1] - count) - before[:, None], 0, shape[-1] - 1)[:, None, None]
    batch = max(shape[0], at.shape[0])
    mask = mx.broadcast_to(mask, (batch, *shape[1:]))
    return mx.take_along_axis(mask, mx.broadcast_to(at, (batch, *shape[1:3], at.shape[-1])), axis=-1)
