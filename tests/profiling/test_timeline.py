"""A timeline stays short and loses nothing that its plots show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.profiling import TimelinePoint, timeline
from veloxquant.profiling.timeline import MOST_POINTS, Timeline


def filled(updates: int) -> Timeline:
    """A timeline of that many updates; the 3,000th held the most."""
    line = Timeline()
    for token in range(1, updates + 1):
        line.add(TimelinePoint(token, 10**9 if token == 3000 else token, 0.5, 1))
    return line


def test_up_to_4096_updates_each_has_its_point() -> None:
    """Nothing is thinned that need not be."""
    points = filled(MOST_POINTS).points()
    assert points[:2] == (TimelinePoint(1, 1, 0.5, 1), TimelinePoint(2, 2, 0.5, 1))
    assert len(points) == MOST_POINTS


def test_one_more_halves_the_old_ones() -> None:
    """4,096 points become 2,048 of two updates each, and the new one comes after them."""
    points = filled(MOST_POINTS + 1).points()
    assert len(points) == MOST_POINTS // 2 + 1
    assert points[0] == TimelinePoint(2, 2, 1.0, 2)
    assert points[-1] == TimelinePoint(MOST_POINTS + 1, MOST_POINTS + 1, 0.5, 1)


def test_twenty_thousand_updates_keep_peak_time_and_count() -> None:
    """20,000 updates of 0.5 ms: 10,000 ms, and the one peak is still there."""
    points = filled(20_000).points()
    assert MOST_POINTS // 2 <= len(points) <= MOST_POINTS
    assert sum(point.ms for point in points) == 10_000
    assert sum(point.calls for point in points) == 20_000
    assert max(point.resident_bytes for point in points) == 10**9
    assert points[-1].sequence_tokens == 20_000


@given(calls=st.lists(st.integers(0, 1), max_size=200))
def test_any_order_of_keys_and_values_keeps_the_sums(calls: list[int]) -> None:
    """With at most 8 points: bounded, in order, nothing lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "MOST_POINTS", 8)
        line = Timeline()
        for number, one in enumerate(calls):
            line.add(TimelinePoint(number, number, 1.0, one))
    points = line.points()
    assert len(points) <= 8
    assert sum(point.calls for point in points) == sum(calls)
    assert sum(point.ms for point in points) == len(calls)
    assert [point.sequence_tokens for point in points] == sorted(point.sequence_tokens for point in points)


def test_a_copy_goes_its_own_way() -> None:
    """Also the thinning."""
    line = filled(5)
    other = line.copy()
    other.add(TimelinePoint(6, 6, 0.5, 1))
    assert (len(line.points()), len(other.points())) == (5, 6)
