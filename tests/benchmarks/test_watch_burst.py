"""The watch in a burst of changes, on real folders."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import pytest
from watch_kit import EVENTS_ONLY, PATIENCE_S, Start, publish, publish_until
from watchdog.observers import Observer

from veloxquant.benchmarks import watch

if TYPE_CHECKING:
    from pathlib import Path


def test_r22_a_burst_is_exact_in_the_end(directory: Path, started: Start) -> None:
    """1,000 records published as fast as it goes: all are there, with far fewer looks."""
    seen = started(directory, **EVENTS_ONLY)
    for number in range(1000):
        publish(directory, f"r{number}")
    assert seen.until(lambda: len(seen.database.records) == 1000)
    assert seen.calls < 200


@pytest.fixture
def observers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every source of events that was started."""
    begun: list[Any] = []

    class Counted(Observer):  # type: ignore[valid-type,misc]
        def start(self) -> None:
            begun.append(self)
            super().start()

    monkeypatch.setattr(watch, "Observer", Counted)
    return begun


def test_r22_a_burst_is_followed_by_the_clock_and_events_come_again_after_it(
    directory: Path, started: Start, observers: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """While it lasts there is nobody to hear its events; the state is what it was, without a word."""
    seen = started(directory, quiet_s=0.5, **EVENTS_ONLY)
    count = publish_until(directory, lambda: not observers[0].is_alive())
    assert seen.watcher.state() == "native"
    assert seen.until(lambda: len(seen.database.records) == count)
    deadline = time.monotonic() + PATIENCE_S
    while len(observers) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert seen.watcher.state() == "native"
    (directory / "records" / "r0.json").write_text('{"id": "edited", "method": "fp16", "model_id": "m/x"}')
    assert seen.until(lambda: "edited" in seen.database.records)  # which moves no folder: by event
    assert len(observers) == 2
    own = [one for one in caplog.records if one.name.startswith("veloxquant")]
    assert [one for one in own if one.levelno >= logging.WARNING] == []


def test_r22_what_is_edited_in_place_during_a_burst_is_seen_at_its_end(
    directory: Path, started: Start, observers: list[Any]
) -> None:
    """No event tells of it, and no look at the folder's time."""
    seen = started(directory, quiet_s=0.5, **EVENTS_ONLY)
    count = publish_until(directory, lambda: not observers[0].is_alive())
    assert seen.until(lambda: len(seen.database.records) == count)
    assert len(observers) == 1
    (directory / "records" / "r0.json").write_text('{"id": "edited", "method": "fp16", "model_id": "m/x"}')
    assert seen.until(lambda: "edited" in seen.database.records)


def test_r23_a_directory_that_goes_in_a_burst_is_followed(
    directory: Path, started: Start, observers: list[Any]
) -> None:
    """Its return is seen at once, not at the end of the burst."""
    seen = started(directory, quiet_s=1e5, **EVENTS_ONLY)
    publish_until(directory, lambda: not observers[0].is_alive())
    directory.rename(directory.with_name("old"))
    assert seen.shows()
    assert seen.becomes("scan only")
    (directory / "records").mkdir(parents=True)
    publish(directory, "a")
    assert seen.shows("a")
    assert seen.becomes("native")
