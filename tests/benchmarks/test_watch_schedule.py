"""When a watcher calls, on a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks.watch_schedule import (
    BURST_EVENTS,
    BURST_INTERVAL_S,
    BURST_S,
    POLL_S,
    QUIET_S,
    SETTLE_S,
    Schedule,
)


def run(changes: list[float], until: float, *, call_s: float = 0.0, events: int = 1) -> list[float]:
    """The moments of the calls that these changes lead to, by a loop that sleeps until the next moment.

    As the watcher does: each change makes so many events, but in a burst it hears none, and its looks tell of changes.
    """
    schedule, calls, now, unseen = Schedule(0.0, 1e9, 300.0, QUIET_S), [], 0.0, 0
    waiting = sorted(changes)
    while True:
        hears = not schedule.is_burst
        now = max(now, min([schedule.next_at, *waiting[:hears]]))
        if now > until:
            return calls
        while waiting and waiting[0] <= now:
            waiting.pop(0)
            unseen += 1
            for _ in range(events * hears):
                schedule.event(now)
        if schedule.next_at > now:
            continue
        due = schedule.take_call(now)
        schedule.take_stat(now)
        schedule.polled(now, changed=unseen > 0)
        if unseen and not (hears or due):
            schedule.event(now)
        unseen = 0
        if due:
            calls.append(now)
            schedule.called(now, now + call_s)
            now += call_s


def test_one_event_leads_to_a_call_at_once_and_one_when_all_is_quiet() -> None:
    """The second finds what the first was too early for."""
    assert run([5.0], 60) == [pytest.approx(5 + SETTLE_S), pytest.approx(5 + QUIET_S)]


def test_r21_without_events_there_is_a_call_every_five_minutes() -> None:
    """For files edited in place on systems that say nothing."""
    assert run([], 1000) == [300.0, 600.0, 900.0]


def test_r22_many_changes_lead_to_few_calls_and_a_last_one() -> None:
    """200 changes in 10 s, too few for a burst: at most 4 calls a second, the last one after the end."""
    calls = run([n / 20 for n in range(200)], 60)
    assert len(calls) <= 10 / BURST_INTERVAL_S + 2
    assert calls[-1] == pytest.approx(9.95 + QUIET_S)


def test_r22_slow_calls_rest() -> None:
    """A look that takes a second takes at most a fifth of the time of a long burst."""
    calls = run([n / 100 for n in range(6000)], 59, call_s=1.0)
    assert len(calls) <= 60 / 5 + 1


@given(st.lists(st.floats(0, 50), min_size=1, max_size=30))
def test_r21_no_event_is_forgotten(events: list[float]) -> None:
    """After each event comes a call, soon."""
    calls = run(events, 100)
    for event in events:
        assert any(event <= call <= event + SETTLE_S + BURST_INTERVAL_S + 1e-9 for call in calls)


def test_r21_the_folders_are_looked_at_every_ten_seconds() -> None:
    """Once each time, and late looks do not pile up."""
    schedule = Schedule(0.0, 10.0, 300.0, QUIET_S)
    assert [now for now in (5.0, 10.0, 11.0, 19.0, 35.0, 36.0, 44.9, 45.0) if schedule.take_stat(now)] == [10, 35, 45]


@given(st.lists(st.floats(0, 80), min_size=1, max_size=10))
def test_r21_a_change_whose_events_are_all_lost_is_found_within_fifteen_seconds(changes: list[float]) -> None:
    """A look at the folders every 10 s sees that they moved, and the call comes at once."""
    schedule, calls, waiting, now = Schedule(0.0, 10.0, 300.0, QUIET_S), [], sorted(changes), 0.0
    while now <= 100:
        now = schedule.next_at
        if schedule.take_call(now):
            calls.append(now)
            schedule.called(now, now)
        schedule.take_stat(now)
        if waiting and waiting[0] <= now:  # the watcher stats the folders whenever it is awake
            waiting = [change for change in waiting if change > now]
            schedule.event(now)
    for change in changes:
        assert any(change <= call <= change + 15 for call in calls)


def test_r22_a_burst_is_followed_by_looks_and_ends_with_a_call() -> None:
    """10,000 records in 10 s: ten looks and four calls a second, one last call when it has been quiet for long."""
    calls = run([n / 1000 for n in range(10_000)], 60, events=5)
    assert len(calls) <= 10 / BURST_INTERVAL_S + 5
    ends, after = calls[-2:]  # the burst's, and as after every event one that comes when it has been quiet for long
    assert 9.999 + QUIET_S <= ends <= 9.999 + QUIET_S + 2 * BURST_INTERVAL_S + SETTLE_S
    assert after == pytest.approx(ends + QUIET_S - SETTLE_S)


def test_r22_fewer_events_are_no_burst() -> None:
    """One less than a burst has, within one interval; the next interval counts anew."""
    schedule = Schedule(0.0, 1e9, 1e9, QUIET_S)
    for now in (1.0, 2.0, 3.0):
        for _ in range(BURST_EVENTS - 1):
            schedule.event(now)
        assert schedule.take_call(now + BURST_INTERVAL_S)
        schedule.polled(now + BURST_INTERVAL_S, changed=True)
        assert not schedule.is_burst
    for _ in range(BURST_EVENTS):
        schedule.event(4.0)
    assert schedule.take_call(4.1)
    assert schedule.is_burst
    assert schedule.next_at == pytest.approx(4.1 + POLL_S)


def in_a_burst() -> tuple[Schedule, float]:
    """A schedule at the moment when a burst begins, and the moment."""
    schedule, now = Schedule(0.0, 1e9, 1e9, QUIET_S), 1.0 + SETTLE_S
    for _ in range(BURST_EVENTS):
        schedule.event(1.0)
    assert schedule.take_call(now)
    return schedule, now


def test_r22_a_burst_is_over_once_nothing_changed_for_the_quiet_time() -> None:
    """Not at the first look that finds nothing new; then there are no more looks, and a call."""
    schedule, now = in_a_burst()
    schedule.called(now, now)
    for changed in (False, True, False, False):
        now += QUIET_S / 2
        schedule.take_call(now)
        assert schedule.is_burst
        schedule.polled(now, changed=changed)
    assert not schedule.is_burst
    assert schedule.next_at == pytest.approx(now + SETTLE_S)
    assert schedule.take_call(now + SETTLE_S)
    schedule.called(now, now)
    assert schedule.take_call(now + QUIET_S)
    assert schedule.next_at > 1e8


def test_r22_a_slow_stream_after_a_burst_is_heard_again() -> None:
    """One change a second never leaves it quiet for long: after half a minute events are tried all the same."""
    schedule, now = in_a_burst()
    ends = now + BURST_S
    while now < ends - POLL_S / 2:
        assert schedule.is_burst
        now += POLL_S
        schedule.polled(now, changed=round(now / POLL_S) % 10 == 0)
    schedule.polled(ends, changed=True)
    assert not schedule.is_burst
    assert schedule.take_call(ends + 2 * SETTLE_S)


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 400), st.floats(0.0001, 0.02)), min_size=1, max_size=6))
def test_r22_no_change_of_a_burst_is_forgotten(bursts: list[tuple[float, int, float]]) -> None:
    """After each change comes a call: soon, whether it was heard or looked for."""
    changes = [start + number * gap for start, count, gap in bursts for number in range(count)]
    calls = run(changes, 100, events=5)
    for change in changes:
        assert any(change <= call <= change + SETTLE_S + 2 * BURST_INTERVAL_S + 1e-9 for call in calls)
