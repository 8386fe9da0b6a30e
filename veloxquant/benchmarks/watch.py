"""Tells when to look at the benchmark directory again. Events are hints; a look at the clock is the truth.

Every native event that may concern a record or a calibration means "dirty", never more: events get lost, merged and
reordered on every system. Beside them a stat of the folders every 10 s (each rename, creation and deletion moves a
folder's mtime) and an unconditional look every 5 minutes (for files edited in place) find whatever the events missed,
so an answer is late by at most that. In a burst of changes events are given up until it is over, and the stat comes
ten times a second: tens of thousands of events would take half a core to tell what it tells for nothing. Where native
events cannot be had, or a change came without one (a network volume, a stream that fell silent, a queue that
overflowed), the state is "scan only" and everything still works, later.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer

from veloxquant.benchmarks.calibrations import CALIBRATIONS
from veloxquant.benchmarks.index import RECORDS
from veloxquant.benchmarks.storage import make_folder, placed
from veloxquant.benchmarks.watch_schedule import QUIET_S, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from watchdog.observers.api import BaseObserver

State = Literal["native", "scan only"]

STAT_INTERVAL_S = 10.0
FORCED_INTERVAL_S = 300.0
STOP_TIMEOUT_S = 2.0
HEARING_S = 1.0
"""An event comes within this of its change; watchdog holds a rename back for half a second."""
UNHEARD = "something changed and made no event, as on a network volume or after events were lost"

# Not "opened" and "closed without a write", which our own reading makes; nor "modified" where "closed" follows it.
_EVENTS: list[type[FileSystemEvent]] = [
    FileCreatedEvent,
    FileMovedEvent,
    FileDeletedEvent,
    FileClosedEvent,
    DirCreatedEvent,
    DirMovedEvent,
    DirDeletedEvent,
]
_EVENTS_ABOVE = [one for one in _EVENTS if one is not FileClosedEvent]
if sys.platform != "linux":
    _EVENTS.append(FileModifiedEvent)
_log = logging.getLogger(__name__)
# An observer that is stopped while it has events to tell says so, at a level that would reach stderr.
logging.getLogger("watchdog").addHandler(logging.NullHandler())

_Place = tuple[int, int, int] | None


@dataclass(frozen=True)
class _Seen:
    """The folders as a stat shows them: device, inode and mtime, None where there is no folder."""

    root: tuple[int, ...] | None
    """Without the mtime, which the index and the lock move."""
    records: _Place
    calibrations: _Place = None

    def same_folders(self, other: _Seen) -> bool:
        """Whether these are the very folders, whatever happened in them."""
        inside = (self.records, other.records), (self.calibrations, other.calibrations)
        return self.root == other.root and all(_identity(mine) == _identity(theirs) for mine, theirs in inside)


def _identity(place: _Place) -> tuple[int, ...] | None:
    return place[:2] if place is not None else None


def _place(folder: Path) -> _Place:
    try:
        status = folder.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_mtime_ns) if stat.S_ISDIR(status.st_mode) else None


def _check_room() -> None:
    """Raise what an observer would where it does not find its files and threads: failing, it leaves some open."""
    with ExitStack() as opened:
        for _ in range(2):
            for end in os.pipe():
                opened.callback(os.close, end)
        tried = threading.Thread(target=int, name="veloxquant-watch-room", daemon=True)
        tried.start()
        tried.join()


class _Handler(FileSystemEventHandler):
    """Calls `hear` for events in the folders of records and calibrations, about these, their parent and links to them.

    Temporary files count: watchdog may hold a rename back for half a second to pair its halves, but not the closing of
    the temporary file just before it.
    """

    def __init__(self, inside: tuple[str, ...], places: tuple[str, ...], hear: Callable[[], None]) -> None:
        self._inside = inside
        self._places = (*inside, *places)
        self._hear = hear

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Called by watchdog's thread."""
        if any(self._concerns(os.fsdecode(path)) for path in (event.src_path, event.dest_path) if path):
            self._hear()

    def _concerns(self, path: str) -> bool:
        return path in self._places or os.path.dirname(path) in self._inside  # noqa: PTH120 -- text, as watchdog's paths are


class Watcher:
    """Calls `on_dirty` from a thread of its own when records may have changed, and once at the start.

    After a single change it is called at once; during a burst at most four times a second and a fifth of the time; once
    more when all is quiet. What it raises is logged and never ends the watch. `start` creates the folders where it can,
    so that the first record ever published makes an event. Raises StoreUnavailable for a ~ that leads nowhere.
    """

    def __init__(
        self,
        directory: Path | str,
        on_dirty: Callable[[], None],
        *,
        stat_interval_s: float = STAT_INTERVAL_S,
        forced_interval_s: float = FORCED_INTERVAL_S,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._root = placed(directory)
        self._on_dirty = on_dirty
        self._schedule = Schedule(time.monotonic(), stat_interval_s, forced_interval_s, quiet_s)
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._observer: BaseObserver | None = None
        self._seen = _Seen(None, None)
        self._problem: str | None = "it is not started"
        self._heard_at = self._armed_at = time.monotonic()
        self._unheard: tuple[float, float] | None = None
        """Between which two looks something changed of which no event has told yet."""
        self._told_of_silence = False
        self._looked_at = time.monotonic()

    def start(self) -> None:
        """Begin to watch. Whatever changes after this returns, and what changed before, leads to a call."""
        if self._thread is not None:
            return
        with suppress(OSError):
            make_folder(self._root / RECORDS)
        self._look_and_arm()
        self._schedule.event(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="veloxquant-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch and its threads. Safe twice, before `start`, and from within `on_dirty`."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT_S)
        self._disarm()

    def state(self) -> State:
        """Whether events arrive ("native") or just the clock finds changes ("scan only")."""
        return "native" if self._problem is None else "scan only"

    def problem(self) -> str | None:
        """Why the state is "scan only", None when it is not."""
        return self._problem

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._stopping and self._schedule.next_at > time.monotonic():
                    self._wake.wait(self._schedule.next_at - time.monotonic())
                if self._stopping:
                    return
                call = self._schedule.take_call(time.monotonic())
                self._schedule.take_stat(time.monotonic())
            if self._look_and_arm() and not call:
                self._hint()
            if call:
                self._call()

    def _hear(self) -> None:
        """An event has come."""
        self._heard_at = time.monotonic()
        self._hint()

    def _hint(self) -> None:
        """Something may have changed."""
        with self._wake:
            before = self._schedule.next_at
            self._schedule.event(time.monotonic())
            if self._schedule.next_at < before:  # a burst of thousands wakes the thread once
                self._wake.notify_all()

    def _call(self) -> None:
        began = time.monotonic()
        try:
            self._on_dirty()
        except Exception:  # noqa: BLE001 -- a fence: a watch that died of its user's error would look alive
            _log.exception("looking at %s again failed", self._root)
        with self._wake:
            self._schedule.called(began, time.monotonic())

    def _look_and_arm(self) -> bool:
        """Stat the folders, follow them where they went, and revive dead events. True when something has moved."""
        since, self._looked_at = self._looked_at, time.monotonic()
        seen = self._look()
        changed, moved = seen != self._seen, not seen.same_folders(self._seen)
        self._seen = seen
        with self._wake:
            self._schedule.polled(self._looked_at, changed=changed)
        if self._schedule.is_burst and not moved:
            self._disarm()
            self._unheard = None
            return changed
        silent = self._is_silent(since, changed=changed and not moved)
        if moved or silent or not self._events_arrive():
            self._revive(silent=silent)
        elif self._problem == UNHEARD and self._heard_at > self._armed_at:
            self._note(None)
        return changed

    def _revive(self, *, silent: bool) -> None:
        """Ask for events of the folders as they are now."""
        self._disarm()
        self._armed_at, self._unheard = time.monotonic(), None
        problem = self._arm()
        self._note(UNHEARD if silent and problem is None else problem)
        seen = self._look()
        if seen != self._seen:
            self._hint()  # it changed before its events could arrive
            if seen.same_folders(self._seen):
                self._seen = seen
        if self._stopping:
            self._disarm()

    def _is_silent(self, since: float, *, changed: bool) -> bool:
        """Whether something changed after `since`, or before, and no event has told of it in time."""
        if changed and self._unheard is None and self._problem in (None, UNHEARD):
            self._unheard = since, self._looked_at
        if self._unheard is None:
            return False
        after, seen_at = self._unheard
        is_heard = self._heard_at >= after
        if is_heard or self._looked_at - seen_at >= HEARING_S:
            self._unheard = None
            return not is_heard
        return False

    def _look(self) -> _Seen:
        inside = (_place(self._root / name) for name in (RECORDS, CALIBRATIONS))
        return _Seen(_identity(_place(self._root)), *inside)

    def _events_arrive(self) -> bool:
        observer = self._observer
        return observer is not None and observer.is_alive() and all(each.is_alive() for each in list(observer.emitters))

    def _arm(self) -> str | None:
        """Ask the system for events; the reason where it gives none."""
        # Events carry real paths on macOS, and watchdog itself follows no link.
        root, above = os.path.realpath(self._root), os.path.realpath(self._root.parent)
        inside = [os.path.join(root, name) for name in (RECORDS, CALIBRATIONS)]  # noqa: PTH118 -- text, as watchdog's paths are
        real = tuple(os.path.realpath(path) for path in inside)
        link = os.path.join(above, self._root.name)  # noqa: PTH118
        handler = _Handler(real, (root, link, *inside), self._hear)
        folders = self._folders(root, real)
        # From above come the root's removal, its return, and a link that is pointed elsewhere. It may be unreadable.
        problem = self._observe(handler, folders, above) and self._observe(handler, folders, None)
        if problem is not None or self._seen.records is not None:
            return problem
        return f"there is no folder {self._root if self._seen.root is None else self._root / RECORDS}"

    def _observe(self, handler: _Handler, folders: tuple[str, ...], above: str | None) -> str | None:
        """Start an observer of these; the reason where it does not start."""
        observer: BaseObserver | None = None
        try:
            _check_room()
            observer = Observer()
            if above is not None:
                observer.schedule(handler, above, recursive=False, event_filter=_EVENTS_ABOVE)
            for folder in folders:
                observer.schedule(handler, folder, recursive=False, event_filter=_EVENTS)
            observer.start()
        except Exception as error:  # noqa: BLE001 -- a fence: each system's layer raises errors of its own
            if observer is not None:
                with suppress(Exception):
                    observer.stop()
            return f"the system gives no events: {error}"
        self._observer = observer
        return None

    def _folders(self, root: str, inside: tuple[str, ...]) -> tuple[str, ...]:
        """The folders that are there."""
        if self._seen.root is None:
            return ()
        seen = zip(inside, (self._seen.records, self._seen.calibrations), strict=True)
        return (root, *(path for path, place in seen if place is not None))

    def _disarm(self) -> None:
        observer, self._observer = self._observer, None
        if observer is None:
            return
        with suppress(Exception):  # a fence, as in `_observe`: the clock goes on without whatever this one was
            observer.stop()
        observer.join(STOP_TIMEOUT_S)

    def _note(self, problem: str | None) -> None:
        """Remember the state, and say it once when it changes; on a volume that is silent off and on, once for all."""
        if problem == self._problem:
            return
        self._problem = problem
        if problem is None:
            _log.info("watching %s", self._root)
        elif problem != UNHEARD or not self._told_of_silence:
            self._told_of_silence = self._told_of_silence or problem == UNHEARD
            _log.warning("changes in %s are found by the clock only: %s", self._root, problem)
