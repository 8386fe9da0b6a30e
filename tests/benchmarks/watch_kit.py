"""A database that follows its watcher, and how records come into its directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.benchmarks.watch import Watcher

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 30.0
"""No test waits this long unless it fails."""
EVENTS_ONLY = {"stat_interval_s": 1e6, "forced_interval_s": 1e6}
"""Long enough never to come within a test: what is seen is seen by events."""

Start = Callable[..., "Seen"]


class Seen:
    """A database that looks again whenever its watcher says so."""

    def __init__(self, directory: Path, **options: float) -> None:
        self.database = BenchmarkDatabase(directory)
        self.calls = 0
        self.changed = threading.Condition()
        self.watcher = Watcher(directory, self.look, **options)

    def look(self) -> None:
        """Called by the watcher."""
        self.database.load()
        with self.changed:
            self.calls += 1
            self.changed.notify_all()

    def until(self, holds: Callable[[], bool]) -> bool:
        """Whether this holds after some call, however long it takes within reason."""
        with self.changed:
            return self.changed.wait_for(holds, PATIENCE_S)

    def shows(self, *ids: str) -> bool:
        """Whether the database comes to hold exactly these records."""
        return self.until(lambda: set(self.database.records) == set(ids))

    def becomes(self, state: str) -> bool:
        """Whether the watcher comes to this state."""
        deadline = time.monotonic() + PATIENCE_S
        while self.watcher.state() != state and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.watcher.state() == state


def publish(directory: Path, name: str) -> None:
    """Put a record in place as any program does: a temporary file, then a rename."""
    temporary = directory / "records" / ".publisher.tmp"
    temporary.write_text(f'{{"id": "{name}", "method": "fp16", "model_id": "m/x"}}')
    temporary.rename(directory / "records" / f"{name}.json")


def publish_until(directory: Path, over: Callable[[], bool]) -> int:
    """Publish one record after the other; how many it took."""
    deadline = time.monotonic() + PATIENCE_S
    count = 0
    while not over():
        assert time.monotonic() < deadline
        publish(directory, f"r{count}")
        count += 1
    return count
