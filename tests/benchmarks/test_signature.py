"""What tells one state of a file from another, in little memory."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks.folder import CLOCK_TICK_NS
from veloxquant.benchmarks.storage import Signature

WHOLE = st.integers(0, 2**64 - 1)
FOUR = st.tuples(WHOLE, WHOLE, WHOLE, WHOLE)


@given(FOUR, FOUR)
def test_it_keeps_its_numbers_and_is_equal_when_they_are(
    one: tuple[int, int, int, int], other: tuple[int, int, int, int]
) -> None:
    """Each of them, up to the largest that a system has."""
    kept = Signature(*one)
    assert (kept.inode, kept.size, kept.mtime_ns, kept.ctime_ns) == one
    assert (kept == Signature(*other)) == (one == other)


@pytest.mark.parametrize("mtime_ns", [-1, -(10**18), 2**64 - 1, -(2**63)])
def test_a_time_out_of_this_age_is_never_settled(mtime_ns: int) -> None:
    """Before 1970, or centuries ahead: the file is read again and compared, and nothing fails."""
    seen = Signature(1, 2, mtime_ns, time.time_ns())
    assert max(seen.mtime_ns, seen.ctime_ns) + CLOCK_TICK_NS > time.time_ns()
