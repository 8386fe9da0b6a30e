"""Whose code was running when a process ended, so that it ends no second one.

A plugin that was tried out may still end a process over a model that no trial has seen: os._exit, a crash in native
code, a loop there that only a kill ends. Nothing in the process can catch that. But a byte of a file says of each
plugin how many of its calls are under way, and the file outlives its process. Whoever loads plugins next finds it,
and the plugin is out for as long as a bad verdict lasts. A process that ends by itself takes its file along; one killed
from outside amid a call accuses an innocent plugin, for those ten minutes.

A loop in native code that keeps the interpreter's lock stops every thread, so that only a clock outside the interpreter
can end it (`Calls.stuck_s`, faulthandler): the daemon does, and whoever manages it starts the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import json
import os
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from veloxquant import ownership, plain_file
from veloxquant.methods.plugin import Plugin

if TYPE_CHECKING:
    from collections.abc import Iterator

_COUNTS = 1024
"""Bytes at the beginning of the file: one for each plugin, calls of it that are under way. Lines of JSON follow."""
_FILE_BYTES = 512 * 1024
_MOST_CALLS = 255
_ENDING = ".calls"


class Accused(NamedTuple):
    """A plugin whose code was running when a process ended, and the stamp of its files then."""

    plugin: Plugin
    stamp: str


class Calls:
    """This process's file in one folder, made with the first plugin; without a disk nothing is noted."""

    stuck_s: ClassVar[float | None] = None
    """Seconds in calls without any beginning or ending after which the process ends with status 1; None for never."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._file: int | None = None
        self._opened = False
        self._running = 0
        self._end = _COUNTS
        self._places: dict[Accused, int] = {}
        self._counts: dict[int, int] = {}

    @contextlib.contextmanager
    def under_way(self, plugin: Plugin, stamp: str) -> Iterator[None]:
        """Note that code of the plugin is running."""
        place = self._place(Accused(plugin, stamp))
        self._count(place, 1)
        try:
            yield
        finally:
            self._count(place, -1)

    def _count(self, place: int | None, more: int) -> None:
        with self._lock:
            self._running += more
            self._set_clock()
            if place is not None and self._file is not None:
                self._counts[place] = self._counts.get(place, 0) + more
                _write(self._file, bytes([min(self._counts[place], _MOST_CALLS)]), place)

    def _set_clock(self) -> None:
        """Anew with each call that begins or ends: while they do, the interpreter runs."""
        if self.stuck_s is None:
            return
        with contextlib.suppress(ValueError, RuntimeError, AttributeError):  # no standard error to write to
            if self._running:
                faulthandler.dump_traceback_later(self.stuck_s, exit=True)
            else:
                faulthandler.cancel_dump_traceback_later()

    def _place(self, what: Accused) -> int | None:
        """Where the plugin's calls are counted, None where there is no room or no disk."""
        with self._lock:
            if not self._opened:
                self._opened, self._file = True, self._open()
            if what in self._places:
                return self._places[what]
            place, line = len(self._places), json.dumps([asdict(what.plugin), what.stamp]).encode() + b"\n"
            if self._file is None or place >= _COUNTS or self._end + len(line) > _FILE_BYTES:
                return None
            _write(self._file, line, self._end)
            self._end += len(line)
            self._places[what] = place
            return place

    def _open(self) -> int | None:
        """A file that is locked while this process lives; it has its name only then, so that nobody takes it away."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self._folder)
        except OSError:
            return None
        temporary = Path(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, _FILE_BYTES)
            temporary.rename(temporary.with_suffix(_ENDING))
        except OSError:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            return None
        atexit.register(_remove, temporary.with_suffix(_ENDING), os.getpid())
        return descriptor


def _write(file: int, data: bytes, at: int) -> None:
    """Not through a mapping: on a full disk its next page would end the process."""
    with contextlib.suppress(OSError):
        os.pwrite(file, data, at)


def accused(folder: Path) -> list[Accused]:
    """Of processes that have ended since the last look; their files are removed. Never raises."""
    found: list[Accused] = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob(f"*{_ENDING}")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found += _read(path)
    return found


def _read(path: Path) -> list[Accused]:
    with plain_file.open_plain(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # BlockingIOError: its process lives
        path.unlink()
        facts = os.fstat(file.fileno())
        if facts.st_uid != os.geteuid() or ownership.others(facts) is not None:
            return []  # somebody else's word on what may run here
        counts, lines = file.read(_COUNTS), file.read(_FILE_BYTES).rstrip(b"\0").splitlines()
    known = [json.loads(line) for count, line in zip(counts, lines, strict=False) if count]
    return [Accused(Plugin(**plugin), str(stamp)) for plugin, stamp in known]


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a copy of this process has no file of its own
        with contextlib.suppress(OSError):
            path.unlink()
