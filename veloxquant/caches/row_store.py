"""What one codec stores for all rows of a batch: arrays (rows, KV heads, slots, ...), each row from slot 0 on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.codec import Arrays, Codec
    from veloxquant.caches.rows import Ints, Taken


class RowStore:
    """Keys or values of a batch. Tokens and slots are counted by whoever holds it."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.stored: list[Any] = []
        """Empty before the first token of any row."""
        self.fixed: Arrays = ()
        """The rows' arrays that do not grow, (rows, ...); without meaning for a row without tokens."""

    @property
    def slots(self) -> int:
        """Of each row."""
        return int(self.stored[0].shape[2]) if self.stored else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        return sum(int(array.nbytes) for array in (*self.stored, *self.fixed))

    def begin(self, x: Any, taken: Taken) -> None:
        """Take what does not grow from the first token of the rows that have it in this call, x (rows, heads, n, w)."""
        import mlx.core as mx

        begins = (taken.starts == 0) & (taken.counts > 0)
        if not begins.any():
            return
        first = mx.array(np.minimum(taken.firsts, x.shape[2] - 1), dtype=mx.int32)
        fixed = self.codec.start(x[mx.arange(len(begins)), :, first][:, :, None])
        if self.fixed and not begins.all():
            chosen = mx.array(begins)
            fixed = tuple(mx.where(beside(chosen, new), new, old) for new, old in zip(fixed, self.fixed, strict=True))
        self.fixed = fixed

    def fit(self, slots: int, like: Arrays) -> None:
        """Room for so many slots a row, of arrays like these."""
        import mlx.core as mx

        if not self.stored:
            self.stored = [mx.zeros((*one.shape[:2], slots, *one.shape[3:]), dtype=one.dtype) for one in like]
        elif slots != self.slots:
            self.stored = [fitted(array, slots) for array in self.stored]

    def write(self, coded: Arrays, taken: Taken, tokens: int) -> None:
        """Put the rows' own of `tokens` coded tokens to their places.

        One write for all rows in a step; one for each row where those of a prompt begin or end apart.
        """
        import mlx.core as mx

        if taken.equal:
            self._write_run(slice(None), coded, taken, 0)
        elif tokens == 1:
            rows = mx.array(taken.rows, dtype=mx.int32)
            places = mx.array(taken.starts[taken.rows], dtype=mx.int32)
            for array, new in zip(self.stored, coded, strict=True):
                array[rows, :, places] = new[rows, :, 0]
        else:
            for row in taken.rows.tolist():
                self._write_run(slice(row, row + 1), coded, taken, row)

    def clear(self, lengths: Ints) -> None:
        """Zeros in the slots behind so many of each row."""
        import mlx.core as mx

        held = mx.arange(self.slots) < mx.array(lengths, dtype=mx.int32)[:, None]
        for at, array in enumerate(self.stored):
            shape = (held.shape[0], 1, -1, *[1] * (array.ndim - 3))
            self.stored[at] = mx.where(held.reshape(shape), array, mx.zeros_like(array))

    def choose(self, rows: Sequence[int], slots: int) -> None:
        """Only these rows, with so many slots."""
        import mlx.core as mx

        if not slots:
            self.stored, self.fixed = [], ()
            return
        chosen = mx.array(list(rows), dtype=mx.int32)
        self.stored = [fitted(array, slots)[chosen] for array in self.stored]  # cut first: a copy of what is left
        self.fixed = tuple(array[chosen] for array in self.fixed)

    def join(self, parts: Sequence[tuple[RowStore, int]], slots: int) -> None:
        """Become the rows of these, so many each, after each other and with so many slots all; one may be itself."""
        import mlx.core as mx

        filled = next((store for store, _ in parts if store.stored), None)
        if not slots or filled is None:
            self.stored, self.fixed = [], ()
            return
        stored = [
            [fitted(store.stored[at], slots) if store.stored else _zeros(rows, like, slots) for store, rows in parts]
            for at, like in enumerate(filled.stored)
        ]
        fixed = [
            [store.fixed[at] if store.fixed else mx.zeros((rows, *like.shape[1:]), like.dtype) for store, rows in parts]
            for at, like in enumerate(filled.fixed)
        ]
        self.stored = [mx.concatenate(rows) for rows in stored]
        self.fixed = tuple(mx.concatenate(rows) for rows in fixed)

    @classmethod
    def of(cls, codec: Codec, stored: Sequence[Any], fixed: Arrays, tokens: int) -> RowStore:
        """The first tokens of a single cache's arrays as one row. Raises MethodRefused where they are not one row."""
        store = cls(codec)
        if tokens:
            store.stored, store.fixed = [array[:, :, :tokens] for array in stored], tuple(fixed)
            rows = stored[0].shape[0]
            if rows != 1:
                message = f"a cache of {rows} sequences cannot be a row of a batch"
                raise MethodRefused(message, hint="merge caches of single sequences")
        return store

    def row(self, row: int, tokens: int) -> tuple[list[Any], Arrays]:
        """Its arrays, (1, heads, tokens, ...) and what does not grow, as copies: the batch is not held by them."""
        import mlx.core as mx

        only = mx.array([row])
        return [array[:, :, :tokens][only] for array in self.stored], tuple(array[only] for array in self.fixed)

    def _write_run(self, rows: slice, coded: Arrays, taken: Taken, row: int) -> None:
        """Of these rows, what one of them has of the call."""
        first, count, start = (int(numbers[row]) for numbers in taken)
        for array, new in zip(self.stored, coded, strict=True):
            array[rows, :, start : start + count] = new[rows, :, first : first + count]


def fitted(array: Any, slots: int) -> Any:
    """Cut along axis 2 to so many slots, or with zeros up to them."""
    import mlx.core as mx

    missing = slots - array.shape[2]
    if missing <= 0:
        return array[:, :, :slots] if missing else array
    return mx.pad(array, [(0, 0), (0, 0), (0, missing), *[(0, 0)] * (array.ndim - 3)])


def _zeros(rows: int, like: Any, slots: int) -> Any:
    import mlx.core as mx

    return mx.zeros((rows, like.shape[1], slots, *like.shape[3:]), dtype=like.dtype)


def beside(chosen: Any, array: Any) -> Any:
    """One number a row, (rows,), shaped to go with (rows, ...)."""
    return chosen.reshape(-1, *[1] * (array.ndim - 1))
