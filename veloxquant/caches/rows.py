"""The rows of a batch: how long each is, which tokens of a call are its own, and where mlx-lm would have put them.

Our batch twins lay a row out from its first token on: token p is at place p, whatever the other rows hold. mlx-lm's own
twin (`BatchKVCache`) lays rows out to end together: token p is in column p + padding. One model may hold both kinds,
and then one layer's mask serves the other's too; so masks are always in mlx-lm's columns (`caches.batch_masks`), which
are counted here as mlx-lm counts them.

Prompts of unequal lengths come in calls with padding on the right (`prepare`, calls, `finalize`: mlx-lm's
PromptProcessingBatch) or, from older callers, on the left. Padding is never written and never counted.

Numbers of rows are numpy arrays, so that a step costs Python as much for one row as for many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from veloxquant.caches import batch_masks
from veloxquant.caches.limits import whole
from veloxquant.caches.saved import MOST_TOKENS, reading, refusal
from veloxquant.errors import MethodRefused, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    """A whole number for each row."""

_HINT = "give one whole number for each row, as mlx-lm's BatchGenerator does"


class Taken(NamedTuple):
    """What of a call of n tokens is whose: for each row its own tokens, always one run of them."""

    firsts: Ints
    """Index in the call of the row's first own token; what is before it is padding."""
    counts: Ints
    """How many tokens are the row's own; what comes after them is padding."""
    starts: Ints
    """Position, and place, of the first of them: what the row held before."""

    @property
    def offsets(self) -> Ints:
        """Position of the call's token 0 in each row, negative in padding on the left: token j is at offset + j."""
        return self.starts - self.firsts

    @property
    def ends(self) -> Ints:
        """Tokens that each row holds after the call."""
        return self.starts + self.counts

    @property
    def equal(self) -> bool:
        """Whether every row has the same tokens of the call at the same places: then one slice writes all rows."""
        return alike(self.firsts) and alike(self.counts) and alike(self.starts)

    @property
    def rows(self) -> Ints:
        """The rows that have a token of their own in the call."""
        return self.counts.nonzero()[0]


def ints(numbers: Sequence[int] | Ints) -> Ints:
    """One whole number for each row."""
    return np.asarray(numbers, dtype=np.int64)


def alike(numbers: Ints) -> bool:
    """Whether all rows have the same number."""
    least, most = spread(numbers)
    return least == most


def spread(numbers: Ints) -> tuple[int, int]:
    """Least and greatest of all rows' numbers; 0 and 0 without rows."""
    plain = numbers.tolist()  # for as few as the rows of a batch, several times faster than numpy's own
    return min(plain, default=0), max(plain, default=0)


class Rows:
    """Lengths of the rows of one layer's batch twin. Whole numbers only: nothing here waits for the device."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.held = ints(lengths)
        """Tokens that each row holds."""
        self.columns = self.longest
        """Columns that mlx-lm's own twin would fill."""
        self.shift = self.columns - self.held
        """Token p of a row is in mlx-lm's column p + padding."""
        self._skip = np.zeros_like(self.held)
        """Padding on the left that is yet to come."""
        self._due: Ints | None = None
        """Own tokens that are yet to come, where padding follows them; None: all that comes is the row's own."""
        self._right = np.zeros_like(self.held)
        """Padding on the right of the prompt at hand."""
        self._coming = 0
        """Tokens of that prompt yet to come, padding and all."""

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.held)

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row holds."""
        return [*map(int, self.held)]

    @property
    def padding(self) -> list[int]:
        """What `shift` has."""
        return [*map(int, self.shift)]

    @property
    def longest(self) -> int:
        """Tokens of the longest row; 0 without rows."""
        return spread(self.held)[1]

    @property
    def offset(self) -> Any:
        """int32 (rows,): the position of the next call's token 0, from which rotary embeddings count."""
        import mlx.core as mx

        return mx.array(self.held - self._skip, dtype=mx.int32)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say what the coming calls bring: padding on the left, then `lengths` own tokens, then padding on the right.

        Raises MethodRefused for another count of rows, for numbers that no position can be, for padding on the right
        without lengths (which tokens are padding could not be known before the end), and for rows that do not end
        together.
        """
        self._end_prompt()
        left = self._numbers(left_padding, "left_padding")
        right = self._numbers(right_padding, "right_padding")
        if lengths is None:
            if right.any():
                raise MethodRefused("padding on the right without the rows' lengths", hint=_HINT, field="lengths")
        else:
            due = self._numbers(lengths, "lengths")
            ends = left + due + right
            last = int(ends.max(initial=0))
            if right_padding is None:
                right = last - ends
            elif not alike(ends):
                raise MethodRefused(f"rows of a prompt end at {quoted(ends.tolist())}, not together", hint=_HINT)
            self._due, self._right, self._coming = due, right, last
        self.shift = self.shift + left
        self._skip = self._skip + left

    def make_mask(self, tokens: int, return_array: bool = True, window_size: int | None = None) -> Any:
        """The mask for the next call of so many tokens, an array as mlx-lm's own twin would make it."""
        self._end_prompt()
        return batch_masks.causal(self.held - self._skip, self.columns, tokens, window_size)

    def finalize(self) -> None:
        """The prompt with padding on the right is over. Nothing to do without one, or a second time."""
        if self._due is not None:
            self.shift = self.shift + self._right
        self._due, self._right, self._coming = None, np.zeros_like(self.held), 0

    def take(self, tokens: int) -> Taken:
        """What of the next call of so many tokens is whose. Changes nothing."""
        self._end_prompt()
        firsts = np.minimum(self._skip, tokens)
        counts = tokens - firsts
        if self._due is not None:
            counts = np.minimum(counts, self._due)
        return Taken(firsts, counts, self.held)

    def advance(self, tokens: int) -> Taken:
        """Count the next call of so many tokens; what of it is whose."""
        taken = self.take(tokens)
        self.held = taken.ends
        self._skip = self._skip - taken.firsts
        if self._due is not None:
            self._due = self._due - taken.counts
            self._coming -= tokens
        self.columns += tokens
        return taken

    def trim(self, tokens: int) -> int:
        """Forget the last tokens of every row, or all of a row that has fewer; how many of the longest."""
        self._end_prompt()
        tokens = max(0, min(self.longest, tokens))
        self.held = np.maximum(0, self.held - tokens)
        self.columns -= tokens
        self.shift = np.minimum(self.shift, self.columns)
        return tokens

    def filter(self, keep: Any) -> list[int]:
        """Only these rows, a list of whole numbers or an array, in this order; the same as a list."""
        chosen = [int(row) for row in (keep.tolist() if hasattr(keep, "tolist") else keep)]
        for name in ("held", "shift", "_skip", "_right"):
            setattr(self, name, getattr(self, name)[chosen])
        if self._due is not None:
            self._due = self._due[chosen]
        least = int(self.shift.min()) if chosen else self.columns
        self.shift = self.shift - least
        self.columns -= least
        return chosen

    def extend(self, other: Rows) -> None:
        """Other rows after these. Raises MethodRefused while a prompt with padding on the right is under way."""
        self._end_prompt()
        other._end_prompt()
        if self._due is not None or other._due is not None:
            raise MethodRefused("rows cannot join in the middle of a padded prompt", hint="call finalize() first")
        columns = max(self.columns, other.columns)
        self.shift = np.concatenate([side.shift + columns - side.columns for side in (self, other)])
        self.held = np.concatenate([self.held, other.held])
        self._skip = np.concatenate([self._skip, other._skip])
        self._right = np.zeros_like(self.held)
        self.columns = columns

    def describe(self) -> dict[str, Any]:
        """All of it as JSON takes it, for a saved state."""
        held = {"lengths": self.lengths, "columns": self.columns, "padding": self.padding, "skip": self._skip.tolist()}
        due = None if self._due is None else self._due.tolist()
        return {**held, "due": due, "right": self._right.tolist(), "coming": self._coming}

    @classmethod
    def described(cls, description: Mapping[str, Any]) -> Rows:
        """What `describe()` described. Raises MethodRefused or InvalidParams for anything else."""
        with reading():
            lists = {name: _wholes(description[name]) for name in ("lengths", "padding", "skip", "right")}
            due = None if description["due"] is None else _wholes(description["due"])
            columns = whole(description["columns"], "columns", 0, MOST_TOKENS)
            coming = whole(description["coming"], "coming", -MOST_TOKENS, MOST_TOKENS)
        counted = [*lists.values(), *([] if due is None else [due])]
        if len({len(numbers) for numbers in counted}) > 1:
            raise refusal(f"numbers for {[len(numbers) for numbers in counted]} rows")
        rows = cls(lists["lengths"])
        rows.columns, rows.shift, rows._coming = columns, ints(lists["padding"]), coming
        rows._skip, rows._right = ints(lists["skip"]), ints(lists["right"])
        rows._due = None if due is None else ints(due)
        return rows

    def _end_prompt(self) -> None:
        """A padded prompt that has come wholly is over, whether or not the caller says so."""
        if self._due is not None and self._coming <= 0:
            self.finalize()

    def _numbers(self, given: Any, field: str) -> Ints:
        """Zeros where nothing is given."""
        if given is None:
            return np.zeros_like(self.held)
        numbers = [int(number) for number in (given.tolist() if hasattr(given, "tolist") else given)]
        if len(numbers) != self.count or any(not 0 <= number <= MOST_TOKENS for number in numbers):
            raise MethodRefused(f"{field} = {quoted(numbers)} for {self.count} rows", hint=_HINT, field=field)
        return ints(numbers)


def _wholes(given: Any) -> list[int]:
    """One number for each row, of a saved state."""
    return [whole(number, "a row's number", 0, MOST_TOKENS) for number in given]
