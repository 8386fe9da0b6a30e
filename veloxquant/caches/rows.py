"""The rows of a batch: how long each is, which tokens of a call are its own, and where mlx-lm would have put them.

Our batch twins lay a row out from its first token on: token p is at place p, whatever the other rows hold. mlx-lm's own
twin (`BatchKVCache`) lays rows out to end together: token p is in column p + padding. One model may hold both kinds,
and then one layer's mask serves the other's too; so masks are always in mlx-lm's columns (`caches.batch_masks`), which
are counted here as mlx-lm counts them.

Prompts of unequal lengths come in calls with padding on the right (`prepare`, calls, `finalize`: mlx-lm's
PromptProcessingBatch) or, from older callers, on the left. Padding is never written and never counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.caches import batch_masks
from veloxquant.caches.limits import whole
from veloxquant.caches.saved import MOST_TOKENS, reading, refusal
from veloxquant.errors import MethodRefused, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HINT = "give one whole number for each row, as mlx-lm's BatchGenerator does"


class Taken(NamedTuple):
    """What of a call of n tokens is whose: for each row its own tokens, always one run of them."""

    firsts: tuple[int, ...]
    """Index in the call of the row's first own token; what is before it is padding."""
    counts: tuple[int, ...]
    """How many tokens are the row's own; what comes after them is padding."""
    starts: tuple[int, ...]
    """Position, and place, of the first of them: what the row held before."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Position of the call's token 0 in each row, negative in padding on the left: token j is at offset + j."""
        return tuple(start - first for first, start in zip(self.firsts, self.starts, strict=True))

    @property
    def equal(self) -> bool:
        """Whether every row has the same tokens of the call at the same places: then one slice writes all rows."""
        return len({*zip(self.firsts, self.counts, self.starts, strict=True)}) <= 1

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows that have a token of their own in the call."""
        return tuple(row for row, count in enumerate(self.counts) if count)


class Rows:
    """Lengths of the rows of one layer's batch twin. Whole numbers only: nothing here waits for the device."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        """Tokens that each row holds."""
        self.columns = self.longest
        """Columns that mlx-lm's own twin would fill."""
        self.padding = [self.columns - length for length in self.lengths]
        """Token p of a row is in mlx-lm's column p + padding."""
        self._skip = [0] * len(self.lengths)
        """Padding on the left that is yet to come."""
        self._due: list[int] | None = None
        """Own tokens that are yet to come, where padding follows them; None: all that comes is the row's own."""
        self._right = [0] * len(self.lengths)
        """Padding on the right of the prompt at hand."""
        self._coming = 0
        """Tokens of that prompt yet to come, padding and all."""

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest row; 0 without rows."""
        return max(self.lengths, default=0)

    @property
    def offset(self) -> Any:
        """int32 (rows,): the position of the next call's token 0, from which rotary embeddings count."""
        import mlx.core as mx

        return mx.array([length - skip for length, skip in zip(self.lengths, self._skip, strict=True)], dtype=mx.int32)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say what the coming calls bring: padding on the left, then `lengths` own tokens, then padding on the right.

        Raises MethodRefused for another count of rows, for numbers below 0, for padding on the right without lengths
        (which tokens are padding could not be known before the end), and for rows that do not end together.
        """
        self._end_prompt()
        left = self._numbers(left_padding, "left_padding")
        right = self._numbers(right_padding, "right_padding")
        if lengths is None:
            if any(right):
                raise MethodRefused("padding on the right without the rows' lengths", hint=_HINT, field="lengths")
        else:
            due = self._numbers(lengths, "lengths")
            ends = [sum(row) for row in zip(left, due, right, strict=True)]
            if right_padding is None:
                right = [max(ends, default=0) - end for end in ends]
                ends = [max(ends, default=0)] * self.count
            if len(set(ends)) > 1:
                raise MethodRefused(f"rows of a prompt end at {quoted(ends)}, not together", hint=_HINT)
            self._due, self._right, self._coming = due, right, max(ends, default=0)
        self.padding = [padding + more for padding, more in zip(self.padding, left, strict=True)]
        self._skip = [skip + more for skip, more in zip(self._skip, left, strict=True)]

    def make_mask(self, tokens: int, return_array: bool = True, window_size: int | None = None) -> Any:
        """The mask for the next call of so many tokens, an array as mlx-lm's own twin would make it."""
        self._end_prompt()
        offsets = [length - skip for length, skip in zip(self.lengths, self._skip, strict=True)]
        return batch_masks.causal(offsets, self.columns, tokens, window_size)

    def finalize(self) -> None:
        """The prompt with padding on the right is over. Nothing to do without one, or a second time."""
        if self._due is not None:
            self.padding = [padding + right for padding, right in zip(self.padding, self._right, strict=True)]
        self._due, self._right, self._coming = None, [0] * self.count, 0

    def take(self, tokens: int) -> Taken:
        """What of the next call of so many tokens is whose. Changes nothing."""
        self._end_prompt()
        firsts = tuple(min(skip, tokens) for skip in self._skip)
        counts = tuple(tokens - first for first in firsts)
        if self._due is not None:
            counts = tuple(min(count, due) for count, due in zip(counts, self._due, strict=True))
        return Taken(firsts, counts, tuple(self.lengths))

    def advance(self, tokens: int) -> Taken:
        """Count the next call of so many tokens; what of it is whose."""
        taken = self.take(tokens)
        self.lengths = [length + count for length, count in zip(self.lengths, taken.counts, strict=True)]
        self._skip = [skip - first for skip, first in zip(self._skip, taken.firsts, strict=True)]
        if self._due is not None:
            self._due = [due - count for due, count in zip(self._due, taken.counts, strict=True)]
            self._coming -= tokens
        self.columns += tokens
        return taken

    def trim(self, tokens: int) -> int:
        """Forget the last tokens of every row, or all of a row that has fewer; how many of the longest."""
        self._end_prompt()
        tokens = max(0, min(self.longest, tokens))
        self.lengths = [max(0, length - tokens) for length in self.lengths]
        self.columns -= tokens
        self.padding = [min(padding, self.columns) for padding in self.padding]
        return tokens

    def filter(self, keep: Any) -> list[int]:
        """Only these rows, a list of whole numbers or an array, in this order; the same as a list."""
        chosen = [int(row) for row in (keep.tolist() if hasattr(keep, "tolist") else keep)]
        for name in ("lengths", "padding", "_skip", "_right"):
            setattr(self, name, [getattr(self, name)[row] for row in chosen])
        if self._due is not None:
            self._due = [self._due[row] for row in chosen]
        least = min(self.padding, default=self.columns)
        self.padding = [padding - least for padding in self.padding]
        self.columns -= least
        return chosen

    def extend(self, other: Rows) -> None:
        """Other rows after these. Raises MethodRefused while a prompt with padding on the right is under way."""
        self._end_prompt()
        other._end_prompt()
        if self._due is not None or other._due is not None:
            raise MethodRefused("rows cannot join in the middle of a padded prompt", hint="call finalize() first")
        columns = max(self.columns, other.columns)
        sides = (self, other)
        self.padding = [padding + columns - side.columns for side in sides for padding in side.padding]
        self.lengths = [*self.lengths, *other.lengths]
        self._skip = [*self._skip, *other._skip]
        self._right = [0] * self.count
        self.columns = columns

    def describe(self) -> dict[str, Any]:
        """All of it as JSON takes it, for a saved state."""
        held = {"lengths": self.lengths, "columns": self.columns, "padding": self.padding, "skip": self._skip}
        return {**held, "due": self._due, "right": self._right, "coming": self._coming}

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
        rows.columns, rows.padding = columns, lists["padding"]
        rows._skip, rows._right, rows._due, rows._coming = lists["skip"], lists["right"], due, coming
        return rows

    def _end_prompt(self) -> None:
        """A padded prompt that has come wholly is over, whether or not the caller says so."""
        if self._due is not None and self._coming <= 0:
            self.finalize()

    def _numbers(self, given: Any, field: str) -> list[int]:
        """Zeros where nothing is given."""
        if given is None:
            return [0] * self.count
        numbers = [int(number) for number in (given.tolist() if hasattr(given, "tolist") else given)]
        if len(numbers) != self.count or any(number < 0 for number in numbers):
            raise MethodRefused(f"{field} = {quoted(numbers)} for {self.count} rows", hint=_HINT, field=field)
        return numbers


def _wholes(given: Any) -> list[int]:
    """One number for each row, of a saved state."""
    return [whole(number, "a row's number", 0, MOST_TOKENS) for number in given]
