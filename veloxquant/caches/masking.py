"""Masks as mlx-lm gives them, cut to the blocks that attention over packed caches works on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class Mask:
    """Which scores of a call count, cut to a tile of queries and some blocks of keys."""

    def __init__(self, mask: Any, queries: Sequence[int], groups: int, tokens: int) -> None:
        _, heads, self.count, _ = queries
        self.groups, self.tokens = groups, tokens
        self._causal = isinstance(mask, str)
        self._array: Any = None
        if heads % self.groups:
            raise ValueError(f"{heads} query heads over {self.groups} KV heads: not a multiple")
        if self._causal and mask != "causal":
            raise ValueError(f"the mask {mask!r} is not known")
        if mask is not None and not self._causal:
            self._array = self._grouped(mask, heads)

    def _grouped(self, mask: Any, heads: int) -> Any:
        """(batch or 1, KV heads or 1, queries a KV head or 1, n or 1, tokens or 1)."""
        shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        _, given, rows, columns = shape
        if given not in (1, heads) or rows not in (1, self.count) or columns not in (1, self.tokens):
            raise ValueError(f"a mask of shape {mask.shape} for {heads} x {self.count} x {self.tokens} scores")
        groups, repeats = (self.groups, heads // self.groups) if given == heads else (1, 1)
        return mask.reshape(shape[0], groups, repeats, rows, columns)

    @property
    def adds(self) -> bool:
        """Whether numbers are added to scores; what is only hidden is so in any unit."""
        import mlx.core as mx

        return self._array is not None and self._array.dtype != mx.bool_

    def seen(self, last: int) -> int:
        """Stored tokens that query tokens before `last` may see at all."""
        return self.tokens - self.count + last if self._causal else self.tokens

    def hide(self, scores: Any, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
        """Scores (batch, KV heads, blocks, queries a KV head x n, block) with the mask on them.

        `rows` are first and last + 1 of the call's query tokens, `columns` of the stored ones.
        """
        import mlx.core as mx

        shape = scores.shape
        apart = self._masked(scores.reshape(*shape[:3], -1, rows[1] - rows[0], shape[-1]), rows, columns)
        last = self._last(*rows)
        if columns[1] > (last if isinstance(last, int) else self.seen(rows[0]) + 1):
            places = mx.arange(*columns).reshape(shape[2], 1, 1, -1)
            apart = mx.where(places < last, apart, -mx.inf)
        return apart.reshape(shape)

    def _masked(self, apart: Any, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
        """Scores, query heads and query tokens apart, with an array mask on them."""
        import mlx.core as mx

        if self._array is None:
            return apart
        mask = self._cut(rows, columns, apart.shape[2])
        hidden = mask.dtype == mx.bool_  # by a finite number, as mlx-lm does: a row of nothing else has a mean
        return mx.where(mask, apart, mx.finfo(mx.float32).min) if hidden else apart + mask.astype(mx.float32)

    def _last(self, first: int, last: int) -> Any:
        """Stored tokens that each query token may see, (n, 1), or one number for all."""
        import mlx.core as mx

        return mx.arange(self.seen(first), self.seen(last))[:, None] + 1 if self._causal else self.tokens

    def _cut(self, rows: tuple[int, int], columns: tuple[int, int], blocks: int) -> Any:
        """The mask over some blocks, as scores are taken apart; zero or False after the last token."""
        import mlx.core as mx

        cut = self._array if self._array.shape[-2] == 1 else self._array[..., slice(*rows), :]
        if cut.shape[-1] == 1:
            return cut[:, :, None]
        cut = cut[..., slice(*columns)]
        missing = columns[1] - columns[0] - cut.shape[-1]
        cut = mx.pad(cut, [(0, 0)] * (cut.ndim - 1) + [(0, missing)]) if missing else cut
        return mx.moveaxis(cut.reshape(*cut.shape[:-1], blocks, -1), -2, 2)
