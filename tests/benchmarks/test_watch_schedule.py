"""When a watcher calls, on a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks.watch_schedule import BURST_INTERVAL_S, QUIET_S, SETTLE_S, Schedule


def run(events: list[float], until: float, *, call_s: float = 0.0) -> list[float]:
    """The moments of the calls that these events lead to, by a loop that sleeps until the next moment."""
    schedule, calls, now = Schedule(0.0, 10.0, 300.0, QUIET_S), [], 0.0
    waiting = sorted(events)
    while True:
        now = max(now, min([schedule.next_at, *waiting[:1]]))
        if now > until:
            return calls
        while waiting and waiting[0] <= now:
            schedule.event(waiting.pop(0))
        schedule.take_stat(now)
        if schedule.take_call(now):
            calls.append(now)
            schedule.called(now, now + call_s)
            now += call_s


def test_one_event_leads_to_a_call_at_once_and_one_when_all_is_quiet() -> None:
    """The second finds what the first was too early for."""
    assert run([5.0], 60) == [pytest.approx(5 + SETTLE_S), pytest.approx(5 + QUIET_S)]


def test_r21_without_events_there_is_a_call_every_five_minutes() -> None:
    """For files edited in place on systems that say nothing."""
    assert run([], 1000) == [300.0, 600.0, 900.0]


def test_r22_a_burst_leads_to_few_calls_and_a_last_one() -> None:
    """10,000 events in 10 s: at most 4 calls a second, the last one after the end."""
    calls = run([n / 1000 for n in range(10_000)], 60)
    assert len(calls) <= 10 / BURST_INTERVAL_S + 2
    assert calls[-1] == pytest.approx(9.999 + QUIET_S)


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
