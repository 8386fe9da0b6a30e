"""Where the tokens of one call go in the tiers of a batch whose rows have lengths of their own: indices, no numbers.

Rows are handled together: what differs between them is in index arrays, of which keys and values share one set, so
that a call makes as many MLX calls for eight rows as for one. Which groups are complete is known from whole numbers
alone; the device is never waited for.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from veloxquant.caches.rows import spread

if TYPE_CHECKING:
    from veloxquant.caches.rows import Ints, Taken
    from veloxquant.caches.tiered_layout import Layout


class Moves:
    """One call of `tokens` tokens: what goes to the sinks, to the ring, and from there into packed groups.

    Recent columns, as attention and packing take them, are the ring as it is after a call of one token. For a longer
    call they are the ring as it was, in order, and then the call's tokens, padding and all: column c of a row is at
    position `begins` + c.
    """

    def __init__(self, layout: Layout, taken: Taken, tokens: int) -> None:
        self.layout, self.tokens = layout, tokens
        self.firsts, self.starts, self.offsets = taken.firsts, taken.starts, taken.offsets
        self.ends = taken.ends
        self.rows, self.longest = len(self.ends), spread(self.ends)[1]
        self.first = (self.starts == 0) & (self.ends > 0)
        """Whether a row has its first token here."""
        self.begin = bool(self.first.any())
        """Whether some row does."""
        self.sink = bool((self.starts < np.minimum(self.ends, layout.sinks)).any())
        """Whether some row has a token for the sinks."""
        self.ring = (self.ends > np.maximum(self.starts, layout.sinks)).nonzero()[0]
        """Rows that have a token for the ring."""
        self._before = layout.groups(self.starts)
        """Groups of each row that were complete before the call."""
        self._new = layout.groups(self.ends) - self._before
        """Those that the call completes."""
        self.groups = int(self._new.sum())
        """The latter, of all rows."""

    @property
    def begins(self) -> Ints | None:
        """Position of the first recent column of each row; None where the columns are the ring's slots."""
        return None if self.tokens == 1 else self.offsets - self.layout.ring

    @cached_property
    def first_tokens(self) -> tuple[Any, Any]:
        """The token of the call that is a row's first own one, (rows, 1), and whether it is at position 0, (rows,)."""
        return column(np.minimum(self.firsts, self.tokens - 1)), mx.array(self.first)

    @cached_property
    def sink_tokens(self) -> tuple[Any, Any]:
        """(rows, sinks) each: the token of the call for each sink, and whether there is one."""
        return self._tokens(mx.arange(self.layout.sinks))

    @cached_property
    def ring_tokens(self) -> tuple[Any, Any]:
        """(rows, ring) each: the token of the call that stays in each slot, and whether there is one."""
        ring, sinks = self.layout.ring, self.layout.sinks
        last = column(self.ends) - (1 + sinks)
        places = last - mx.remainder(last - mx.arange(ring), ring)  # the newest of each slot, counted from S on
        return self._tokens(mx.where(places < 0, -1 - sinks, places) + sinks)

    @cached_property
    def ring_slots(self) -> tuple[Any, Any]:
        """For a call of one token: rows and slots that are written, (writing rows,) each."""
        slots = (self.starts[self.ring] - self.layout.sinks) % self.layout.ring
        return mx.array(self.ring, dtype=mx.int32), mx.array(slots, dtype=mx.int32)

    @cached_property
    def ring_order(self) -> Any:
        """(rows, ring): the slot of each recent column of a call of several tokens."""
        return mx.remainder(column(self.offsets) - self.layout.sinks + mx.arange(self.layout.ring), self.layout.ring)

    def places(self, first: int, last: int) -> tuple[Any, Any, Any]:
        """Of some of `groups`: rows (k, 1), group indices (k, 1), and recent columns of the tokens (k, group)."""
        rows, indices = (numbers[first:last] for numbers in self._complete)
        at = column(indices)
        columns = at * self.layout.group + mx.arange(self.layout.group)
        if self.begins is None:
            columns = columns % self.layout.ring
        else:
            columns = columns + self.layout.sinks - column(self.begins[rows])
        return column(rows), at, columns

    @cached_property
    def _complete(self) -> tuple[Ints, Ints]:
        """Row and index of each group that the call completes, row by row."""
        rows = np.repeat(np.arange(self.rows), self._new)
        done = np.cumsum(self._new) - self._new  # by the rows before
        return rows, np.arange(self.groups) + np.repeat(self._before - done, self._new)

    def _tokens(self, places: Any) -> tuple[Any, Any]:
        """The call's token at each position, (rows or 1, k), and whether it is the row's own."""
        index = mx.clip(places - column(self.offsets), 0, self.tokens - 1)
        return index, (places >= column(self.starts)) & (places < column(self.ends))


def column(numbers: Ints) -> Any:
    """int32 (count, 1)."""
    return mx.array(numbers, dtype=mx.int32)[:, None]
