"""Rows of a batch: padding is never counted, and the columns are those that mlx-lm's own batch cache has."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import BatchKVCache, KVCache

from veloxquant.caches.rows import Rows
from veloxquant.errors import MethodRefused


def written(rows: Rows, calls: list[int]) -> list[list[int]]:
    """Indices over all calls of the tokens that each row took for its own."""
    own: list[list[int]] = [[] for _ in rows.lengths]
    done = 0
    for tokens in calls:
        taken = rows.advance(tokens)
        for row, (first, count) in enumerate(zip(taken.firsts, taken.counts, strict=True)):
            own[row] += range(done + first, done + first + count)
        done += tokens
    return own


def cut(total: int, step: int) -> list[int]:
    """Lengths of the calls that mlx-lm makes of a prompt."""
    return [min(step, total - start) for start in range(0, total, step)]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 100])
def test_of_a_prompt_padded_on_the_right_only_own_tokens_count(step: int) -> None:
    """Lengths 5, 1 and 3 on histories of 2, 7 and 0, in calls of any size."""
    rows = Rows([2, 7, 0])
    rows.prepare(lengths=[5, 1, 3], right_padding=[0, 4, 2])
    assert written(rows, cut(5, step)) == [[0, 1, 2, 3, 4], [0], [0, 1, 2]]
    rows.finalize()
    assert rows.lengths == [7, 8, 3]
    assert rows.longest == 8
    assert rows.offset.tolist() == [7, 8, 3]
    assert rows.advance(1).counts.tolist() == [1, 1, 1]


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_of_a_prompt_padded_on_the_left_a_rows_tokens_are_the_last(step: int) -> None:
    """Positions of its first token are 0, so that offsets are negative until the padding is over."""
    rows = Rows([0, 0])
    rows.prepare(left_padding=[0, 3])
    assert rows.offset.tolist() == [0, -3]
    assert written(rows, cut(5, step)) == [[0, 1, 2, 3, 4], [3, 4]]
    assert rows.offset.tolist() == rows.lengths == [5, 2]


def test_padding_on_both_sides() -> None:
    """A row may begin late and end early."""
    rows = Rows([0, 4])
    rows.prepare(left_padding=[1, 0], lengths=[2, 6], right_padding=[3, 0])
    assert written(rows, [4, 2]) == [[1, 2], [0, 1, 2, 3, 4, 5]]
    rows.finalize()
    assert rows.lengths == [2, 10]


def test_a_call_says_where_a_rows_tokens_go() -> None:
    """From `starts` on; and token 0 of the call is at `offsets`."""
    rows = Rows([3, 0])
    rows.prepare(left_padding=[0, 2])
    taken = rows.take(4)
    assert [numbers.tolist() for numbers in taken] == [[0, 2], [4, 2], [3, 0]]
    assert taken.offsets.tolist() == [3, -2]
    assert taken.rows.tolist() == [0, 1]
    assert not taken.equal
    assert rows.lengths == [3, 0]
    assert rows.take(1).rows.tolist() == [0]
    assert Rows([6, 6]).take(9).equal


def test_the_end_of_a_prompt_that_nobody_said_is_the_end_all_the_same() -> None:
    """After all its tokens, the next token is every row's own, with and without `finalize`."""
    rows = Rows([0, 0])
    rows.prepare(lengths=[3, 1], right_padding=[0, 2])
    rows.advance(3)
    assert rows.advance(1).counts.tolist() == [1, 1]
    rows.finalize()
    assert rows.lengths == [4, 2]
    assert rows.padding == [0, 2]


def test_lengths_alone_are_enough() -> None:
    """The padding follows from them, as the longest row has none."""
    rows = Rows([0, 0])
    rows.prepare(lengths=[2, 4])
    assert written(rows, [4]) == [[0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": [1]},
        {"lengths": [1, -1], "right_padding": [0, 2]},
        {"right_padding": [0, 2]},
        {"left_padding": [1, 2, 3]},
        {"left_padding": [2**70, 0]},
        {"lengths": [3, 1], "right_padding": [0, 1]},
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(wrong: dict[str, Any]) -> None:
    """Another count of rows, numbers out of range, padding without lengths, rows that do not end together."""
    rows = Rows([2, 5])
    before = json.dumps(rows.describe())
    with pytest.raises(MethodRefused):
        rows.prepare(**wrong)
    assert json.dumps(rows.describe()) == before


def test_rows_do_not_join_in_the_middle_of_a_padded_prompt() -> None:
    """What is still to come would be counted for rows it was not meant for."""
    rows = Rows([0, 0])
    rows.prepare(lengths=[3, 1], right_padding=[0, 2])
    with pytest.raises(MethodRefused, match="middle"):
        rows.extend(Rows([1]))


def test_trimming_forgets_a_short_row_wholly() -> None:
    """And says what the longest row lost."""
    rows = Rows([9, 4])
    assert rows.trim(5) == 5
    assert rows.lengths == [4, 0]
    assert rows.trim(-3) == 0
    assert rows.trim(100) == 4
    assert rows.lengths == [0, 0]


def test_no_rows_are_rows_too() -> None:
    """All of them filtered out, and others taken in."""
    rows = Rows([4, 2])
    assert rows.filter([]) == []
    assert (rows.count, rows.longest, rows.columns) == (0, 0, 0)
    rows.extend(Rows([3]))
    assert rows.lengths == [3]


ROWS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["prompt", "step", "filter", "extend", "save"]), st.integers(0, 2**31), st.integers(1, 5)
    ),
    max_size=9,
)


class Engine:
    """mlx-lm's own batch cache, and which of our positions stands in each of its columns."""

    def __init__(self, lengths: list[int]) -> None:
        self.cache = engine(lengths)

    def call(self, tokens: int) -> None:
        """Keys that nobody looks at."""
        rows = self.cache.offset.shape[0]
        self.cache.update_and_fetch(*[mx.zeros((rows, 1, tokens, 1))] * 2)


def engine(lengths: list[int]) -> BatchKVCache:
    """As `merge` makes it of single caches so long."""
    singles = []
    for length in lengths:
        single = KVCache()
        if length:
            single.update_and_fetch(*[mx.zeros((1, 1, length, 1))] * 2)
        singles.append(single)
    return KVCache.merge(singles)


def numbers(seed: int, count: int, least: int, most: int) -> list[int]:
    """So many whole numbers in a range, by arithmetic."""
    return [least + (seed // (7**at) + 3 * at) % (most - least + 1) for at in range(count)]


@given(ROWS, STEPS)
@settings(max_examples=80, deadline=None)
def test_columns_and_padding_are_those_of_the_engines_own_batch(lengths: list[int], steps: list[Any]) -> None:
    """Through prompts with padding, single tokens, rows that leave and rows that join: counted as BatchKVCache does."""
    rows, theirs = Rows(lengths), Engine(lengths)
    for what, seed, size in steps:
        count = rows.count
        if what == "prompt":
            due = numbers(seed, count, 1, 6)
            pads = [max(due) - one for one in due]
            for each in (rows, theirs.cache) if any(pads) else ():
                each.prepare(lengths=due, right_padding=pads)
            for call in cut(max(due), size):
                rows.advance(call)
                theirs.call(call)
            for each in (rows, theirs.cache):
                each.finalize()
        elif what == "step":
            rows.advance(1)
            theirs.call(1)
        elif what == "filter":
            keep = sorted(set(numbers(seed, size, 0, count - 1)))
            rows.filter(keep)
            theirs.cache.filter(keep)
        elif what == "extend":
            more = numbers(seed, size, 0, 7)
            rows.extend(Rows(more))
            theirs.cache.extend(engine(more))
        else:
            rows = Rows.described(json.loads(json.dumps(rows.describe())))
        assert rows.offset.tolist() == theirs.cache.offset.tolist() == rows.lengths
        assert rows.padding == theirs.cache.left_padding.tolist()
        assert rows.columns == theirs.cache._idx
