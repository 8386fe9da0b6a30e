"""What tells one state of a file from another, in little memory."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks.folder import is_settled
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
    now = time.time_ns()
    assert not is_settled(Signature(1, 2, mtime_ns, now), now + 10**12)


SECOND = 1_764_000_000 * 10**9


@pytest.mark.parametrize(
    ("mtime_ns", "ctime_ns", "tick_ns"),
    [
        (SECOND, SECOND, 2 * 10**9),  # a clock of seconds, or of two
        (SECOND, SECOND + 123_456_789, 2 * 10**9),  # a time that somebody set says nothing of the clock
        (SECOND + 123_456_789, SECOND, 2 * 10**9),
        (SECOND + 120_000_000, SECOND + 120_000_000, 2 * 10**8),  # hundredths of a second, as exFAT has
        (SECOND + 123_456_789, SECOND + 123_456_790, 2 * 10**8),
    ],
)
def test_r26_a_file_is_settled_when_its_clock_has_ticked_on(mtime_ns: int, ctime_ns: int, tick_ns: int) -> None:
    """Two seconds where the clock may be as coarse as FAT's, a fifth of one where parts of a second are kept."""
    seen, newest = Signature(1, 2, mtime_ns, ctime_ns), max(mtime_ns, ctime_ns)
    assert not is_settled(seen, newest + tick_ns)
    assert is_settled(seen, newest + tick_ns + 1)
