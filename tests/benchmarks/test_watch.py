"""The watch on real folders."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from watch_kit import EVENTS_ONLY, PATIENCE_S, Seen, Start, publish
from watchdog.observers import Observer

from veloxquant.benchmarks import storage, watch
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.benchmarks.calibrations import Calibrations
from veloxquant.benchmarks.watch import Watcher
from veloxquant.profiles.calibration import Calibration

# The other way round: `deaf` makes the system refuse to give events.
CLOCK_ONLY = {"stat_interval_s": 0.05, "forced_interval_s": 1e6}


class NoObserver:
    """What a system has that gives no events."""

    def schedule(self, *arguments: Any, **keywords: Any) -> None:
        """Refuses."""
        raise OSError(24, "inotify instance limit reached")


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that gives no events, such as one out of inotify instances."""
    monkeypatch.setattr(watch, "Observer", NoObserver)


def test_a_calibration_is_seen_by_event(directory: Path, started: Start) -> None:
    """In a folder that was not there when the watch began, and again when its file is replaced or goes."""
    seen = started(directory, **EVENTS_ONLY)
    assert seen.until(lambda: seen.calls == 1)
    store = Calibrations(directory)
    found = Calibration(
        model_id="org/model", architecture="llama", config_hash="0", tokens=1, text="a test", bits=(4,), layers=()
    )
    seen.database.load = store.look  # type: ignore[method-assign,assignment]
    path = store.put(found)
    assert seen.until(lambda: list(store.known) == [("org/model", "0")])
    store.put(msgspec.structs.replace(found, tokens=2))
    assert seen.until(lambda: [one.tokens for one in store.known.values()] == [2])
    path.unlink()
    assert seen.until(lambda: not store.known)
    assert seen.watcher.state() == "native"


def test_r21_the_first_record_ever_is_seen_by_event(directory: Path, started: Start) -> None:
    """In a directory that did not exist when the watch began."""
    seen = started(directory, **EVENTS_ONLY)
    assert seen.watcher.state() == "native"
    assert seen.watcher.problem() is None
    publish(directory, "a")
    assert seen.shows("a")


def test_r21_changes_edits_and_deletions_are_seen_by_event(directory: Path, started: Start) -> None:
    """Whatever moves the records."""
    seen = started(directory, **EVENTS_ONLY)
    publish(directory, "a")
    publish(directory, "b")
    assert seen.shows("a", "b")
    (directory / "records" / "a.json").unlink()
    assert seen.shows("b")
    (directory / "records" / "b.json").write_text('{"id": "c", "method": "fp16", "model_id": "m/x"}')
    assert seen.shows("c")


def test_r21_what_happened_before_the_start_is_seen(directory: Path, started: Start) -> None:
    """The first call comes without any event, so nothing falls between a reading and the start."""
    seen = Seen(directory)
    BenchmarkDatabase(directory).add("fp16", "m/x", context_length=1)
    seen.watcher.start()
    try:
        assert seen.until(lambda: len(seen.database.records) == 1)
    finally:
        seen.watcher.stop()


def test_reading_and_indexing_are_no_changes(directory: Path, started: Start) -> None:
    """A look does not lead to another look: not by reading records, not by writing the index."""
    seen = started(directory, quiet_s=0.1, **EVENTS_ONLY)
    publish(directory, "a")
    assert seen.shows("a")
    time.sleep(0.6)
    calls = seen.calls
    for _ in range(3):
        again = BenchmarkDatabase(directory)
        again.index_path.unlink(missing_ok=True)
        again.load()
        again.close()
    time.sleep(0.4)
    assert seen.calls == calls


def test_r21_without_events_the_clock_finds_changes(directory: Path, started: Start, deaf: None) -> None:
    """The state says so, with the reason."""
    seen = started(directory, **CLOCK_ONLY)
    assert seen.watcher.state() == "scan only"
    assert "inotify instance limit" in (seen.watcher.problem() or "")
    publish(directory, "a")
    assert seen.shows("a")
    publish(directory, "b")
    assert seen.shows("a", "b")


def test_r21_a_forced_look_finds_what_the_stat_cannot(directory: Path, started: Start, deaf: None) -> None:
    """An edit in place moves no folder's mtime."""
    (directory / "records").mkdir(parents=True)
    publish(directory, "a")
    seen = started(directory, stat_interval_s=1e6, forced_interval_s=0.1, quiet_s=0.01)
    assert seen.shows("a")
    (directory / "records" / "a.json").write_text('{"id": "c", "method": "fp16", "model_id": "m/x"}')
    assert seen.shows("c")


def test_r23_without_files_for_events_the_clock_finds_changes(
    directory: Path, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None for the look whether there are any, or none for the observer itself: events come once there are."""
    begun: list[int] = []

    class Full(Observer):  # type: ignore[valid-type,misc]
        def __init__(self) -> None:
            begun.append(1)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def pipe() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as full:
        full.setattr(watch, "Observer", Full)
        full.setattr(watch.os, "pipe", pipe)
        seen = started(directory, **CLOCK_ONLY)
        publish(directory, "a")
        assert seen.shows("a")
        assert begun == []
        assert seen.watcher.problem() == f"the system gives no events: [Errno 24] {os.strerror(errno.EMFILE)}"
        full.undo()
        full.setattr(watch, "Observer", Full)
        publish(directory, "b")
        assert seen.shows("a", "b")
        assert seen.watcher.state() == "scan only"
        assert begun != []
    assert seen.becomes("native")


def test_r23_without_threads_for_events_nothing_is_left_open(
    directory: Path, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look tries again, and each observer would leave its files open."""
    begun: list[int] = []

    class Counted(Observer):  # type: ignore[valid-type,misc]
        def __init__(self) -> None:
            begun.append(1)
            super().__init__()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "veloxquant-watch-room":
            raise RuntimeError("can't start new thread")
        really(thread)

    really = threading.Thread.start
    monkeypatch.setattr(watch, "Observer", Counted)
    with monkeypatch.context() as starved:
        starved.setattr(threading.Thread, "start", refuse)
        seen = started(directory, **CLOCK_ONLY)
        publish(directory, "a")
        assert seen.shows("a")
        assert begun == []
        assert seen.watcher.problem() == "the system gives no events: can't start new thread"
    assert seen.becomes("native")


def test_r23_it_warns_once(directory: Path, deaf: None, started: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Not at each look."""
    with caplog.at_level(logging.WARNING, logger="veloxquant"):
        seen = started(directory, stat_interval_s=0.01, forced_interval_s=0.02)
        assert seen.until(lambda: seen.calls > 3)
    assert len(caplog.records) == 1


def test_r23_a_directory_that_comes_back_is_seen_by_event(directory: Path, started: Start) -> None:
    """From the folder above, without waiting for the clock: gone, made again, and pointed elsewhere by a link."""
    seen = started(directory, **EVENTS_ONLY)
    publish(directory, "a")
    assert seen.shows("a")
    shutil.rmtree(directory)
    assert seen.shows()
    assert seen.becomes("scan only")
    other = directory.with_name("other")
    for folder, name in ((directory, "b"), (other, "c")):
        (folder / "records").mkdir(parents=True)
        publish(folder, name)
        assert seen.shows("b")
    directory.rename(directory.with_name("old"))
    directory.symlink_to(other)
    assert seen.shows("c")


def test_a_parent_that_may_not_be_read_costs_no_events(
    directory: Path, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses to watch it; the directory itself is watched all the same."""

    class Picky(Observer):  # type: ignore[valid-type,misc]
        def schedule(self, handler: Any, path: str, **options: Any) -> Any:
            if Path(path) == directory.parent:
                raise PermissionError(13, "Permission denied")
            return super().schedule(handler, path, **options)

    monkeypatch.setattr(watch, "Observer", Picky)
    seen = started(directory, **EVENTS_ONLY)
    assert seen.watcher.state() == "native"
    publish(directory, "a")
    assert seen.shows("a")


@pytest.mark.parametrize("below", [".", "records"])
def test_r23_a_directory_deleted_and_made_again(directory: Path, started: Start, below: str) -> None:
    """The records go, the state says that only the clock is left; it heals alone."""
    seen = started(directory, stat_interval_s=0.05)
    publish(directory, "a")
    assert seen.shows("a")
    shutil.rmtree(directory / below)
    assert seen.shows()
    assert seen.becomes("scan only")
    (directory / "records").mkdir(parents=True)
    assert seen.becomes("native")
    publish(directory, "b")
    assert seen.shows("b")


def test_r23_a_directory_replaced_by_another(directory: Path, started: Start) -> None:
    """A new folder under the old name is watched as the old one was."""
    seen = started(directory, stat_interval_s=0.05)
    publish(directory, "a")
    assert seen.shows("a")
    other = directory.with_name("other")
    (other / "records").mkdir(parents=True)
    publish(other, "b")
    directory.rename(directory.with_name("old"))
    other.rename(directory)
    assert seen.shows("b")
    publish(directory, "c")
    assert seen.shows("b", "c")
    publish(directory.with_name("old"), "d")
    publish(directory, "e")
    assert seen.shows("b", "c", "e")


def test_r23_a_symbolic_link_to_the_directory(directory: Path, tmp_path: Path, started: Start) -> None:
    """Is followed, and followed again when it is turned elsewhere."""
    for name in ("one", "two"):
        (tmp_path / name / "records").mkdir(parents=True)
    directory.symlink_to(tmp_path / "one")
    seen = started(directory, stat_interval_s=0.05)
    assert seen.watcher.state() == "native"
    publish(tmp_path / "one", "a")
    assert seen.shows("a")
    publish(tmp_path / "two", "b")
    directory.unlink()
    directory.symlink_to(tmp_path / "two")
    assert seen.shows("b")


def test_r23_a_symbolic_link_to_the_folder_of_records(directory: Path, tmp_path: Path, started: Start) -> None:
    """As where the records alone lie on a shared disk: what happens there makes events, and turning the link too."""
    for name in ("one", "two"):
        (tmp_path / name / "records").mkdir(parents=True)
    directory.mkdir()
    (directory / "records").symlink_to(tmp_path / "one" / "records")
    seen = started(directory, quiet_s=0.01, **EVENTS_ONLY)
    assert seen.watcher.state() == "native"
    time.sleep(0.5)  # past the calls that every start makes
    publish(tmp_path / "one", "a")
    assert seen.shows("a")
    publish(tmp_path / "two", "b")
    (directory / "records").unlink()
    (directory / "records").symlink_to(tmp_path / "two" / "records")
    assert seen.shows("b")
    publish(tmp_path / "two", "c")
    assert seen.shows("b", "c")


def test_editors_do_not_disturb(directory: Path, started: Start) -> None:
    """A backup, a swap file, a lock that is a dangling link, writes in place and by rename: one record, none amiss."""
    seen = started(directory, **EVENTS_ONLY)
    publish(directory, "a")
    assert seen.shows("a")
    folder, text = directory / "records", '{"id": "a", "method": "fp16", "model_id": "m/%s"}'
    (folder / ".#a.json").symlink_to("someone@somewhere.4711:1")  # Emacs' lock
    (folder / "#a.json#").write_text(text[:20])  # its copy while typing
    (folder / ".a.json.swp").write_bytes(b"b0VIM")
    (folder / "4913").touch()  # Vim tries whether it may create files
    (folder / "4913").unlink()
    (folder / "a.json").rename(folder / "a.json~")
    (folder / "a.json").write_text(text % "vim")
    assert seen.until(lambda: [one.model_id for one in seen.database.records.values()] == ["m/vim"])
    (folder / "a.json.tmp.1").write_text(text % "code")
    (folder / "a.json.tmp.1").replace(folder / "a.json")
    assert seen.until(lambda: [one.model_id for one in seen.database.records.values()] == ["m/code"])
    assert seen.database.skipped == {}


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on the network: watching it succeeds, and what other machines do there makes no event."""

    class Silent(Observer):  # type: ignore[valid-type,misc]
        def dispatch_events(self, event_queue: Any) -> None:
            event_queue.get(block=True)

    monkeypatch.setattr(watch, "Observer", Silent)


def test_r23_a_folder_that_makes_no_events_is_found_by_the_clock(
    directory: Path, started: Start, mute: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Though all looks well, until a change came and no event: then the state says so, and one warning."""
    seen = started(directory, **CLOCK_ONLY)
    assert seen.watcher.state() == "native"
    for number in range(3):
        publish(directory, f"r{number}")
        assert seen.shows(*(f"r{n}" for n in range(number + 1)))
    assert seen.becomes("scan only")
    assert seen.watcher.problem() == watch.UNHEARD
    publish(directory, "last")
    assert seen.shows("r0", "r1", "r2", "last")
    assert [one.levelname for one in caplog.records] == ["WARNING"]


def test_r23_events_that_a_full_queue_lost(
    directory: Path, started: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first of a burst: the rest is found by the clock, the state is "scan only" until events come again."""
    is_full = threading.Event()

    class Lossy(Observer):  # type: ignore[valid-type,misc]
        def dispatch_events(self, event_queue: Any) -> None:
            if is_full.is_set():
                event_queue.get(block=True)
            else:
                super().dispatch_events(event_queue)

    monkeypatch.setattr(watch, "Observer", Lossy)
    seen = started(directory, **CLOCK_ONLY)
    publish(directory, "heard")
    assert seen.shows("heard")
    is_full.set()
    publish(directory, "r0")
    time.sleep(0.3)  # for the event that was waited for already
    for number in range(1, 20):
        publish(directory, f"r{number}")
    assert seen.shows("heard", *(f"r{n}" for n in range(20)))
    assert seen.becomes("scan only")
    is_full.clear()
    publish(directory, "after")
    assert seen.becomes("native")
    assert seen.shows("heard", "after", *(f"r{n}" for n in range(20)))
    assert [one.levelname for one in caplog.records] == ["WARNING"]


def test_r23_a_volume_that_goes_and_comes_back(
    directory: Path, started: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call of the system for it fails for a while, and its events have ended: one warning, and it heals alone."""
    seen = started(directory, stat_interval_s=0.05)
    publish(directory, "a")
    assert seen.shows("a")
    observer = seen.watcher._observer
    with monkeypatch.context() as unmounted:
        really = Path.stat

        def stat(path: Path, **options: Any) -> os.stat_result:
            if path.is_relative_to(directory):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return really(path, **options)

        unmounted.setattr(Path, "stat", stat)
        unmounted.setattr(storage, "list_folder", stat)
        assert seen.becomes("scan only")
    assert set(seen.database.records) == {"a"}
    assert seen.becomes("native")
    assert seen.watcher._observer is not observer
    publish(directory, "b")
    assert seen.shows("a", "b")
    assert [one.levelname for one in caplog.records if one.name == "veloxquant.benchmarks.watch"] == ["WARNING"]


def test_r23_a_dead_thread_of_events_and_a_system_that_gives_no_other(
    directory: Path, started: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of several ends without a word, and none can be had: the clock goes on, one warning, and it heals alone."""
    seen = started(directory, **CLOCK_ONLY)
    observer = seen.watcher._observer
    assert observer is not None
    with monkeypatch.context() as refusing:
        refusing.setattr(watch, "Observer", NoObserver)
        emitter = next(iter(observer.emitters))
        emitter.stop()
        emitter.join()
        assert seen.becomes("scan only")
        publish(directory, "a")
        assert seen.shows("a")
    assert seen.becomes("native")
    publish(directory, "b")
    assert seen.shows("a", "b")
    assert [one.levelname for one in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("jump_s", [-86400, 86400])
def test_r26_a_clock_that_jumps_hides_nothing(directory: Path, started: Start, deaf: None, jump_s: int) -> None:
    """A day back or ahead between two publications: a folder that is older than before has changed as well."""
    seen = started(directory, **CLOCK_ONLY)
    publish(directory, "a")
    assert seen.shows("a")
    publish(directory, "b")
    jumped = time.time() + jump_s
    for path in (directory / "records" / "b.json", directory / "records"):
        os.utime(path, (jumped, jumped))
    assert seen.shows("a", "b")


def test_r26_two_publications_within_a_tick_of_a_coarse_clock(directory: Path, started: Start, deaf: None) -> None:
    """The second leaves the folder's time as it is; the look once all is quiet finds it."""
    seen = started(directory, **CLOCK_ONLY)
    tick = (directory / "records").stat().st_mtime + 2
    for name in ("a", "b"):
        publish(directory, name)
        os.utime(directory / "records", (tick, tick))
        assert seen.shows(*"ab"[: "ab".index(name) + 1])


def test_r23_an_observer_that_starts_by_half_leaves_nothing(
    directory: Path, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of watches is met at the last folder: the state says so, no thread stays, and the clock goes on."""
    failures = []

    class Limited(Observer):  # type: ignore[valid-type,misc]
        def start(self) -> None:
            *_, last = self.emitters
            last.start = fail
            super().start()

    def fail() -> None:
        failures.append(1)
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr(watch, "Observer", Limited)
    seen = started(directory, **CLOCK_ONLY)
    assert seen.watcher.state() == "scan only"
    publish(directory, "a")
    assert seen.shows("a")
    assert "inotify watch limit" in (seen.watcher.problem() or "")
    assert len(failures) >= 2
    assert [thread for thread in threading.enumerate() if "motify" in type(thread).__name__] == []
    monkeypatch.setattr(watch, "Observer", Observer)
    assert seen.becomes("native")


def test_r23_an_observer_that_fails_to_stop_does_not_end_the_watch(
    directory: Path, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a volume that is gone: the folder that took its place is followed all the same."""

    class Brittle(Observer):  # type: ignore[valid-type,misc]
        def stop(self) -> None:
            super().stop()
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(watch, "Observer", Brittle)
    seen = started(directory, stat_interval_s=0.05)
    publish(directory, "a")
    assert seen.shows("a")
    directory.rename(directory.with_name("old"))
    (directory / "records").mkdir(parents=True)
    assert seen.shows()
    publish(directory, "b")
    assert seen.shows("b")


def test_r23_a_dead_source_of_events_is_revived(directory: Path, started: Start) -> None:
    """Its thread may end without a word."""
    seen = started(directory, stat_interval_s=0.05)
    observer = seen.watcher._observer
    assert observer is not None
    observer.stop()
    observer.join()
    deadline = time.monotonic() + PATIENCE_S
    while seen.watcher._observer is observer and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen.becomes("native")
    publish(directory, "a")
    assert seen.shows("a")


def test_r23_what_comes_while_events_are_asked_for_anew_is_seen(
    directory: Path, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the look, and before the new source hears anything."""
    begun: list[int] = []

    class Late(Observer):  # type: ignore[valid-type,misc]
        def start(self) -> None:
            if begun:
                publish(directory, "between")
            begun.append(1)
            super().start()

    monkeypatch.setattr(watch, "Observer", Late)
    seen = started(directory, stat_interval_s=0.05, forced_interval_s=1e6, quiet_s=0.01)
    publish(directory, "a")
    assert seen.shows("a")
    time.sleep(0.5)  # past the calls that this one led to
    observer = seen.watcher._observer
    assert observer is not None
    observer.stop()
    assert seen.shows("a", "between")


def test_a_failing_user_does_not_end_the_watch(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it raises is logged, and it is called again."""
    calls: list[int] = []
    again = threading.Event()

    def fail() -> None:
        calls.append(1)
        if len(calls) > 1:
            again.set()
        raise ValueError("my own fault")

    watcher = Watcher(directory, fail, forced_interval_s=0.1)
    watcher.start()
    assert again.wait(PATIENCE_S)
    watcher.stop()
    assert "my own fault" in caplog.text


def test_stop_from_within_and_twice_and_before_start(directory: Path) -> None:
    """Each is safe, and no call comes after a stop."""
    Watcher(directory, lambda: None).stop()
    stopped = threading.Event()

    def stop() -> None:
        watcher.stop()
        stopped.set()

    watcher = Watcher(directory, stop)
    watcher.start()
    watcher.start()
    assert stopped.wait(PATIENCE_S)
    watcher.stop()
    watcher.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "veloxquant-watch"]
