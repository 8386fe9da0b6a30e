"""Who waits for whom: readers and the garbage collector for nobody; and an index that failed is tried again."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from filelock import FileLock

from veloxquant.benchmarks import index_writer
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.index_writer import IndexWriter
from veloxquant.benchmarks.lock import StoreLock
from veloxquant.errors import StoreUnavailable

Fill = Callable[..., list[str]]
InIndex = Callable[[Path], set[str]]
STRAY = ".vq-b.json-1-aabbccdd.tmp"


def comes(holds: Callable[[], bool]) -> bool:
    """Whether this holds before long."""
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each attempt of this thread at the lock between processes would wait."""
    seen: list[bool] = []
    really, here = FileLock.acquire, threading.get_ident()

    def acquire(lock: FileLock, *words: Any, **named: Any) -> Any:
        if threading.get_ident() == here:
            seen.append(named.get("blocking", True))
        return really(lock, *words, **named)

    monkeypatch.setattr(FileLock, "acquire", acquire)
    return seen


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried at once."""
    monkeypatch.setattr(index_writer, "INTERVAL_S", 0.02)
    monkeypatch.setattr(index_writer, "COST_MULTIPLE", 0.0)


@pytest.mark.usefixtures("quick")
def test_opening_waits_for_no_writer(directory: Path, fill: Fill, in_index: InIndex, waits: list[bool]) -> None:
    """A live one holds the lock and has a temporary file; the index is stale. Both are put right once it is done."""
    ids = set(fill(BenchmarkDatabase(directory), 2))
    (directory / "index.json").write_text("{")
    stray = directory / "records" / STRAY
    stray.write_text("x")
    with StoreLock(directory / ".lock").held():
        waits.clear()
        db = BenchmarkDatabase(directory)
        assert set(db.records) == ids
        db.load()
        db.close()
        assert True not in waits
        assert stray.exists()
        assert "another writer" in (db.index_problem or "")
        db.load()
    assert comes(lambda: not stray.exists() and db.index_problem is None)
    assert in_index(directory) == ids


def test_a_stopped_writer_does_not_keep_a_reader_from_ending(directory: Path, fill: Fill) -> None:
    """A program that only reads is not asked to bring the index up to date at any price."""
    fill(BenchmarkDatabase(directory), 2)
    (directory / "index.json").write_text("{")
    script = (
        "import sys; from veloxquant.benchmarks import lock; lock.TIMEOUT_S = 1e6\n"
        "lock.StoreLock.__init__.__kwdefaults__['timeout_s'] = 1e6\n"
        "from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase\n"
        "db = BenchmarkDatabase(sys.argv[1]); print(len(db.records))"
    )
    command = [sys.executable, "-c", script, str(directory)]
    with StoreLock(directory / ".lock").held():
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2\n"


def test_litter_goes_at_the_next_open_when_nobody_writes(db: BenchmarkDatabase, fill: Fill) -> None:
    """However young it is, and whatever its time says."""
    fill(db, 1)
    for name in (STRAY, ".vq-c.json-1-aabbccdd.tmp"):
        (db.records_dir / name).write_text("x")
    BenchmarkDatabase(db.storage_dir)
    assert [path for path in db.records_dir.iterdir() if path.suffix == ".tmp"] == []


def test_reading_goes_on_while_a_thread_waits_to_write(
    db: BenchmarkDatabase, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds the lock: our writer waits, and find, records and load of the same database answer."""
    ids = set(fill(db, 2))
    trying, really = threading.Event(), FileLock.acquire

    def acquire(lock: FileLock, *words: Any, **named: Any) -> Any:
        trying.set()
        return really(lock, *words, **named)

    writing = threading.Thread(target=lambda: db.upsert(BenchmarkRecord("new", "fp16", "m/x")))
    with StoreLock(db.storage_dir / ".lock").held():
        monkeypatch.setattr(FileLock, "acquire", acquire)
        writing.start()
        assert trying.wait(20)
        db.load()
        assert set(db.records) == ids
        assert db.find("new") is None
        assert writing.is_alive()
    writing.join(20)
    assert db.find("new") is not None


@pytest.mark.usefixtures("quick")
def test_the_garbage_collector_waits_for_nobody(directory: Path, in_index: InIndex, waits: list[bool]) -> None:
    """A database in a circle goes while another of the same directory holds the lock in this very thread."""
    holder, going = BenchmarkDatabase(directory), BenchmarkDatabase(directory)
    going.upsert(BenchmarkRecord("a", "fp16", "m/x"))
    going._store.index._due = going._store.index._is_ours = True
    (directory / "index.json").unlink()
    circle: list[Any] = [going]
    circle.append(circle)
    with holder._store.lock.held():
        waits.clear()
        del circle, going
        gc.collect()
        assert waits
        assert True not in waits
    assert comes((directory / "index.json").exists)
    assert in_index(directory) == {"a"}


@pytest.mark.usefixtures("quick")
def test_an_index_that_could_not_be_written_is_written_when_it_can_be(db: BenchmarkDatabase, in_index: InIndex) -> None:
    """Something stood in its place and is taken away; nobody adds, loads or closes."""
    db.save()
    db.index_path.unlink()
    db.index_path.mkdir()
    db.upsert(BenchmarkRecord("a", "fp16", "m/x"))
    assert comes(lambda: db.index_problem is not None)
    db.index_path.rmdir()
    assert comes(lambda: db.index_path.exists() and db.index_problem is None)
    assert in_index(db.storage_dir) == {"a"}
    db.close()


def failing(times: float) -> tuple[Callable[[], None], list[bool]]:
    """A write that fails so often, and what became of each."""
    done: list[bool] = []

    def write() -> None:
        done.append(len(done) >= times)
        if not done[-1]:
            raise StoreUnavailable("no", hint="wait")

    return write, done


def test_the_next_look_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the pauses have become by then."""
    write, done = failing(3)
    writer = IndexWriter(write)
    monkeypatch.setattr(index_writer, "INTERVAL_S", 3600.0)
    writer.mark()
    for _ in range(2):
        writer._on_time()
    assert done == [False] * 3
    monkeypatch.setattr(index_writer, "INTERVAL_S", 0.0)
    writer.retry()
    assert comes(lambda: done[-1] and not writer.is_due)
    writer.retry()
    writer.close()
    assert done.count(True) == 1


class Timer:
    """In the place of threading.Timer: remembers the waits, and fires when it is told."""

    waits: ClassVar[list[float]] = []

    def __init__(self, wait_s: float, work: Callable[[], None]) -> None:
        self.waits.append(wait_s)
        self.work = work

    def start(self) -> None:
        """Never by itself."""

    def cancel(self) -> None:
        """It would not fire anyway."""


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits that were asked for, in seconds."""
    monkeypatch.setattr(Timer, "waits", [])
    monkeypatch.setattr(index_writer.threading, "Timer", Timer)
    return Timer.waits


def test_pauses_between_tries_double_up_to_a_minute(timers: list[float]) -> None:
    """Each failure is followed by another try, less and less often."""
    write, done = failing(float("inf"))
    writer = IndexWriter(write)
    writer.mark()
    for _ in range(8):
        writer._timer.work()  # type: ignore[union-attr]
    assert timers == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert len(done) == 9


def test_tries_for_a_database_that_is_gone_come_to_an_end(timers: list[float]) -> None:
    """The next who opens the directory finds the index stale."""
    write, done = failing(float("inf"))
    writer = IndexWriter(write)
    writer.mark()
    writer.let_go()
    while writer._timer is not None:
        timer, writer._timer = writer._timer, None
        timer.work()  # type: ignore[attr-defined]
    assert 2 <= len(done) <= 8


def test_a_failure_at_close_leaves_no_timer(timers: list[float]) -> None:
    """Closed is closed, until somebody adds again."""
    write, _ = failing(float("inf"))
    writer = IndexWriter(write)
    writer.mark()
    writer.close()
    assert writer._timer is None
    assert writer.is_due


@pytest.mark.parametrize(("look_s", "least_s", "most_s"), [(0.1, 1.9, 2.0), (2.2, 9.9, 10.0), (10.0, 39.9, 40.0)])
def test_the_index_follows_a_long_look_within_bounds(
    timers: list[float], look_s: float, least_s: float, most_s: float
) -> None:
    """20 times as long as the look took, but no more than 10 s, unless four times the look is more."""
    writer = IndexWriter(lambda: None)
    writer.rest(look_s)
    writer.mark()
    assert len(timers) == 1
    assert least_s <= timers[0] <= most_s


def test_a_sooner_moment_takes_the_place_of_a_later_one(timers: list[float]) -> None:
    """A retry does not wait for the end of a long pause that was begun before."""
    write, _ = failing(1)
    writer = IndexWriter(write)
    writer._failures = 5
    writer.mark()
    writer.retry()
    assert timers[0] == 32.0
    assert timers[1] <= 1.0
    assert len(timers) == 2
