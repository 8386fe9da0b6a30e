"""The benchmark directory as the daemon sees it: watched, read again when it may have changed, and shown.

The watcher only ever says "look again", from whatever thread. Looking is cheap (files that did not change are not
read), happens in a thread, never twice at once, and not more often than a share of the time it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from veloxquant import local, views
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.benchmarks.calibrations import Calibrations
from veloxquant.benchmarks.eviction import Limits, recorded_at
from veloxquant.benchmarks.records import UNDATED
from veloxquant.benchmarks.watch import Watcher
from veloxquant.daemon import log
from veloxquant.daemon.threads import in_daemon_thread
from veloxquant.errors import StoreError
from veloxquant.planner.snapshot import NoRecords
from veloxquant.units import format_count
from veloxquant.wire.answers import RecordsState

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from veloxquant.benchmarks.benchmark_db import BenchmarkRecord
    from veloxquant.config import Config
    from veloxquant.daemon.state import State
    from veloxquant.planner.snapshot import Records
    from veloxquant.profiles import Calibration
    from veloxquant.wire.answers import RecordPage
    from veloxquant.wire.messages import RecordsParams

MIN_GAP_S = 0.05
"""Between two looks: a burst of publishes is one change."""
REST = 3.0
"""Rest this many times the CPU time of the last look, so that a directory under fire takes a quarter of a core."""
REST_FROM_DISK = 0.5
"""Rest this many times as long as it took, for what it waited for; a busy machine makes each look take longer."""

_TOLD = 8
"""Calibrations that are not used and named one by one."""


class RecordFeed:
    """One directory. `read` and `close` may be called from any thread; the rest belongs to the event loop's."""

    def __init__(self, config: Config) -> None:
        self.directory = local.records_directory(config)
        self.records: Records = NoRecords()
        """As last read; planning goes on with them when the directory cannot be read any more."""
        self.calibrations: Mapping[tuple[str, str], Calibration] = {}
        """Likewise, by (model id, config hash)."""
        self.trouble: str | None = None
        self._stored: Calibrations | None = None
        self._settings = _settings(config)
        self._database: BenchmarkDatabase | None = None
        self._by_id: dict[str, BenchmarkRecord] = {}
        self._newest: tuple[dict[str, BenchmarkRecord], BenchmarkRecord | None] = ({}, None)
        """The newest of these records."""
        self._skipped: dict[str, str] = {}
        self._read_at = time.monotonic()
        self._reading = threading.Lock()
        self._rest_s = MIN_GAP_S
        self._watcher: Watcher | None = None
        self._looking: asyncio.Task[None] | None = None
        self._dirty = False

    def serves(self, config: Config) -> bool:
        """Whether this feed is what that configuration asks for."""
        return self._settings == _settings(config)

    def read(self) -> bool:
        """Look at the directory; whether the records are others than before. Never raises: see `trouble`."""
        with self._reading:
            began, cpu = time.monotonic(), time.thread_time()
            try:
                self._read_calibrations()
                return self._read()
            except StoreError as error:
                self.trouble = f"the benchmark records cannot be read: {error.message}"
                return False
            finally:
                spent_s, used_s = time.monotonic() - began, time.thread_time() - cpu
                self._rest_s = max(MIN_GAP_S, REST * used_s, REST_FROM_DISK * spent_s)

    def start(self, state: State) -> None:
        """Watch the directory and keep the state's records up to date."""
        loop = asyncio.get_running_loop()

        def on_dirty() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody plans any more
                loop.call_soon_threadsafe(self.look_again, state)

        if self._settings.watch:
            self._watcher = Watcher(self.directory, on_dirty)
            self._watcher.start()

    def rest(self) -> None:
        """Start no more looks."""
        self._dirty = False
        if self._looking is not None:
            self._looking.cancel()

    def close(self) -> None:
        """Let go of the directory. Blocks until the watcher's threads are gone."""
        if self._watcher is not None:
            self._watcher.stop()
        if self._database is not None:
            self._database.close()

    def look_again(self, state: State) -> None:
        """The directory may have changed."""
        self._dirty = True
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look(state))

    def counts(self) -> dict[str, int]:
        """For notices."""
        return {"used": len(self._by_id), "skipped": len(self._skipped)}

    def state(self) -> RecordsState:
        """For `status`."""
        return RecordsState(
            directory=str(self.directory),
            used=len(self._by_id),
            skipped=len(self._skipped),
            scan_age_s=round(time.monotonic() - self._read_at, 3),
            watcher="off" if self._watcher is None else self._watcher.state(),
            newest_age_s=self._newest_age_s(),
        )

    def warnings(self) -> tuple[str, ...]:
        """What a person should look at, in sentences."""
        found: list[str] = []
        if count := len(self._skipped):
            what = f"{format_count(count, 'benchmark record')} {'is' if count == 1 else 'are'} not used"
            found.append(f"{what}: veloxquantctl records --skipped says why")
        if self._stored is not None:
            folder = self._stored.folder
            found += [f"{folder / name} is not used: {why}" for name, why in list(self._stored.skipped.items())[:_TOLD]]
            found += [] if self._stored.trouble is None else [self._stored.trouble]
        if self._watcher is not None and (problem := self._watcher.problem()) is not None:
            found.append(f"changes of benchmark records are found by a look each 10 s only: {problem}")
        if self._database is not None and (behind := self._database.index_problem) is not None:
            found.append(f"index.json is behind the benchmark records, which are all used: {behind}")
        return tuple(found)

    def page(self, params: RecordsParams, generation: int) -> RecordPage:
        """The records that match the filters, as they were last read."""
        return views.records(
            params, self._by_id.values(), self._skipped, directory=self.directory, generation=generation
        )

    def _newest_age_s(self) -> float | None:
        """By the records' own dates, looked for once in each set of records."""
        if self._newest[0] is not self._by_id:
            dated = (record for record in self._by_id.values() if record.created_at != UNDATED)
            self._newest = self._by_id, max(dated, key=lambda record: record.created_at, default=None)
        newest = self._newest[1]
        at = 0.0 if newest is None else recorded_at(newest)
        return round(time.time() - at, 3) if at else None

    def _read(self) -> bool:
        if self._database is None:
            self._database = BenchmarkDatabase(self.directory, limits=self._settings.limits)
        else:
            self._database.load()
        self._keep_bounds(self._database)
        self.trouble = None
        self._read_at = time.monotonic()
        self._skipped = self._database.skipped
        before, self._by_id = self._by_id, self._database.as_held()
        if _same(before, self._by_id):
            return False
        self.records = self._database.record_set(self._settings.threshold)
        return True

    def _read_calibrations(self) -> None:
        """Raises StoreUnavailable for a directory that is nowhere; what cannot be read in it is told as a warning."""
        if self._stored is None:
            self._stored = Calibrations(self.directory)
        if self._stored.look():
            self.calibrations = self._stored.known
            log.event("calibrations.changed", used=len(self.calibrations), skipped=len(self._stored.skipped))

    def _keep_bounds(self, database: BenchmarkDatabase) -> None:
        """Other programs publish by a rename and evict nothing, so the daemon does."""
        with contextlib.suppress(StoreError):  # a directory that is only read grows by others' doing and stays as it is
            gone = database.prune()
            if gone:
                log.event("records.evicted", count=len(gone), bytes=sum(victim.size_bytes for victim in gone))

    async def _look(self, state: State) -> None:
        while self._dirty:
            self._dirty = False
            if await in_daemon_thread(self.read):
                log.event("records.changed", **self.counts())
            state.use_records(self.records)
            state.use_calibrations(self.calibrations)
            state.warn("records", self.trouble)
            await asyncio.sleep(self._rest_s)


class _Settings(NamedTuple):
    directory: Path
    threshold: float
    watch: bool
    limits: Limits


def _settings(config: Config) -> _Settings:
    limits = Limits(config.records.max_records, config.records.max_bytes)
    return _Settings(local.records_directory(config), config.planner.match_threshold, config.records.watch, limits)


def _same(before: dict[str, BenchmarkRecord], after: dict[str, BenchmarkRecord]) -> bool:
    """The same objects under the same ids: the database makes a new object for every file it reads again."""
    return before.keys() == after.keys() and all(after[key] is record for key, record in before.items())
