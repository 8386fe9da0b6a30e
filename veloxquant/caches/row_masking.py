"""Masks of a batch whose rows are laid out from their first token on: what a query sees is said by its position.

A mask that our twins made says no more than positions do, and is never computed here; any other comes in mlx-lm's
columns and is brought to places first (`caches.batch_masks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.caches import batch_masks
from veloxquant.caches.masking import Mask
from veloxquant.caches.rows import spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.rows import Ints


class Seen(NamedTuple):
    """What the rows of one call may see."""

    offsets: Ints
    """Position of the call's token 0 in each row; below 0 where the row begins with padding."""
    tokens: int
    """Places held: those of the longest row."""
    columns: int
    """Columns of a mask in mlx-lm's layout."""


class RowMask(Mask):
    """A query at position t of its row sees places 0 to t, or the last `window` of them, where the mask shows them.

    Raises ValueError for a mask of another shape than (rows or 1, heads or 1, n or 1, columns or 1).
    """

    def __init__(self, mask: Any, queries: Sequence[int], groups: int, seen: Seen) -> None:
        self._offsets, self._window = seen.offsets, None
        self._least, self._most = spread(seen.offsets)
        said = batch_masks.made(mask) if mask is not None and not isinstance(mask, str) else None
        if said is not None:
            self._window = said.window
        given = None if said is not None else mask
        if given is not None and not isinstance(given, str):
            given = _by_place(given, queries, seen)
        super().__init__(given, queries, groups, seen.tokens)

    def seen(self, last: int) -> int:
        """Places that some row's query tokens before `last` may see."""
        return max(1, min(self.tokens, self._most + last))

    def hide(self, scores: Any, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
        """As for one sequence, each row by its own positions."""
        import mlx.core as mx

        shape = scores.shape
        apart = self._masked(scores.reshape(*shape[:3], -1, rows[1] - rows[0], shape[-1]), rows, columns)
        if columns[1] > self._least + rows[0] + 1 or self._window is not None:
            offsets = mx.array(self._offsets, dtype=mx.int32).reshape(-1, 1, 1, 1, 1, 1)
            positions = offsets + mx.arange(*rows, dtype=mx.int32)[:, None]
            places = mx.arange(*columns, dtype=mx.int32).reshape(shape[2], 1, 1, -1)
            visible = places <= positions
            if self._window is not None:
                visible = visible & (places > positions - self._window)
            apart = mx.where(visible, apart, -mx.inf)
        return apart.reshape(shape)


def _by_place(mask: Any, queries: Sequence[int], seen: Seen) -> Any:
    import mlx.core as mx

    if mask.shape[-1] not in (1, seen.columns):
        raise ValueError(f"a mask of shape {mask.shape} for {seen.columns} columns of a batch")
    before = mx.array(seen.offsets, dtype=mx.int32)
    return batch_masks.by_position(mask, before, queries[2], mx.arange(seen.tokens, dtype=mx.int32)[None])
