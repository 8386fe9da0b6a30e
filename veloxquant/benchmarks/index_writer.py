"""When `index.json` is written: at once while that is cheap, else at a bounded interval by a thread, and at close.

So an add costs the same whatever the number of records, and the index is at most a few seconds behind. A write that
failed is tried again, less and less often, and by the next look at the directory.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

INTERVAL_S = 1.0
COST_MULTIPLE = 20.0
"""Time between two writes is this many times what the last one took, so that it takes 5 %, unless that is too long."""
LONGEST_PAUSE_S, LEAST_MULTIPLE = 10.0, 4.0
"""It is no longer than this, or this many times what the last one took where that is more yet."""
CHEAP_S = 0.005
"""Where a write or a look at the directory takes longer, nobody who adds a record is made to wait for one."""
LONGEST_RETRY_S = 60.0
_MOST_DOUBLINGS = 6
_SOON_S = 0.1
_LAST_TRIES = 5
"""Tries after which an index is left to the next who opens the directory, when its database is gone."""

_log = logging.getLogger(__name__)
_behind: weakref.WeakSet[IndexWriter] = weakref.WeakSet()
"""Those to be closed at exit."""


class IndexWriter:
    """Calls `write` not too often and not too late, in one thread at a time.

    `write` takes its own locks, may raise StoreUnavailable, and returns why it left the index alone, if it did. Within
    `at_once` it raises that where it would have to wait for another process.
    """

    def __init__(
        self,
        write: Callable[[], str | None],
        at_once: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._write = write
        self._at_once = at_once
        self._due = False
        self._is_ours = False
        """Whether what is missing in the index is our own doing, so that it is worth waiting for others at close."""
        self._timer: threading.Timer | None = None
        self._timer_at = 0.0
        self._next_at = 0.0
        self._ended_at = 0.0
        self._look_s = 0.0
        self._write_s = 0.0
        self._failures = 0
        self._is_let_go = False
        self._writing_thread: int | None = None
        self._closes_with_child = False
        self._renew()
        self.problem: str | None = None
        """Why the index is not up to date; records are safe, and it is made again when it can be."""

    @property
    def is_due(self) -> bool:
        """Whether the index is known to be behind."""
        return self._due

    def mark(self, *, waits: bool = True) -> None:
        """The index is behind: it is written now or soon. Never raises for a disk that cannot be written.

        Without `waits`, of who only looks at the directory, it waits for no other thread or process.
        """
        self._after_fork()
        _behind.add(self)
        with self._guard:
            self._due = True
            self._is_ours = self._is_ours or waits
            if self._writing_thread is not None:
                return  # whoever writes sees to it afterwards
            wait_s = self._next_at - time.monotonic()
            if wait_s > 0 or max(self._look_s, self._write_s) > CHEAP_S:
                self._schedule(wait_s)
                return
        self._write_if_due(waits=waits)

    def retry(self) -> None:
        """Where a write failed, try again as soon as after a first one: the reason may be gone. Waits for nobody."""
        self._after_fork()
        with self._guard:
            if not (self._due and self._failures):
                return
            self._failures = 0
            self._next_at = self._ended_at + max(INTERVAL_S, _pause_s(self._write_s))
        self.mark(waits=False)

    def flush(self) -> None:
        """Write now. Raises StoreUnavailable."""
        self._after_fork()
        if self._writing_thread == threading.get_ident():
            return  # called by the garbage collector in the middle of a write
        with self._one_at_a_time:
            self._write_now()

    def rest(self, spent_s: float) -> None:
        """A look at the directory took this long, and a write would too: where that is much, it waits."""
        self._look_s = spent_s
        pause_s = _pause_s(spent_s)
        if pause_s > INTERVAL_S:
            self._next_at = max(self._next_at, time.monotonic() + pause_s)

    def close(self) -> None:
        """Write what is due, and wait for a write under way. Safe at interpreter exit and twice; fails in silence."""
        if self._pid != os.getpid() or self._writing_thread == threading.get_ident():
            return
        with self._one_at_a_time:
            self._write_if_due(waits=self._is_ours)
            with self._guard:
                if self._failures and self._timer is not None:
                    self._timer.cancel()
                    self._timer = None

    def let_go(self) -> None:
        """The database is gone. Called by the garbage collector, wherever that strikes, so it waits for nobody."""
        self._is_let_go = True
        if self._due and self._pid == os.getpid() and self._writing_thread != threading.get_ident():
            self._write_if_due(waits=False)

    def _write_if_due(self, *, waits: bool) -> None:
        if not self._one_at_a_time.acquire(blocking=waits):
            with self._guard:
                if self._writing_thread is None:  # else it sees afterwards that more is due
                    self._schedule(_SOON_S)
            return
        try:
            if not self._due:
                return
            with nullcontext() if waits else self._at_once(), suppress(StoreUnavailable):
                self._write_now()
                return
        finally:
            self._one_at_a_time.release()
        _log.info("index.json is behind the records: %s", self.problem)

    def _write_now(self) -> None:
        with self._guard:
            self._due = False
            self._writing_thread = threading.get_ident()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        started = time.monotonic()
        is_done = False
        try:
            self.problem = self._write()
            is_done = True
        except StoreUnavailable as error:
            self.problem = error.message
            raise
        finally:
            self._ended(started, is_done=is_done)

    def _ended(self, started: float, *, is_done: bool) -> None:
        self._ended_at = ended = time.monotonic()
        self._write_s = ended - started
        with self._guard:
            self._writing_thread = None
            self._failures = 0 if is_done else self._failures + 1
            doublings = min(max(self._failures - 1, 0), _MOST_DOUBLINGS)
            wait_s = max(min(INTERVAL_S * 2**doublings, LONGEST_RETRY_S), _pause_s(self._write_s))
            self._next_at = ended + wait_s
            self._is_ours = self._is_ours and (self._due or not is_done)
            self._due = self._due or not is_done
            if self._due and not (self._is_let_go and self._failures > _LAST_TRIES):
                self._schedule(wait_s)

    def _schedule(self, wait_s: float) -> None:
        at = time.monotonic() + max(wait_s, 0.0)
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
            self._timer = None
        timer = threading.Timer(max(wait_s, 0.0), self._on_time)
        timer.daemon = True
        with suppress(RuntimeError):  # the interpreter ends and starts no more threads; close() follows
            timer.start()
            self._timer, self._timer_at = timer, at
        self._close_with_child()

    def _on_time(self) -> None:
        with self._guard:
            if self._timer is threading.current_thread():
                self._timer = None
        self._write_if_due(waits=self._is_ours)

    def _close_with_child(self) -> None:
        # A child of multiprocessing leaves without the interpreter's own exit functions, but runs its finalizers.
        process, util = (sys.modules.get(f"multiprocessing.{name}") for name in ("process", "util"))
        if self._closes_with_child or process is None or util is None or process.parent_process() is None:
            return
        self._closes_with_child = True
        alive = weakref.ref(self)
        util.Finalize(None, _close, args=(alive,), exitpriority=1)

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            self._renew()
            self._timer = None

    def _renew(self) -> None:
        # The garbage collector may call let_go() wherever a lock of ours is held, so both can be taken again.
        self._pid = os.getpid()
        self._guard = threading.RLock()
        self._one_at_a_time = threading.RLock()
        self._writing_thread = None
        self._closes_with_child = False


def _pause_s(spent_s: float) -> float:
    return min(COST_MULTIPLE * spent_s, max(LONGEST_PAUSE_S, LEAST_MULTIPLE * spent_s))


def _close(alive: weakref.ref[IndexWriter]) -> None:
    writer = alive()
    if writer is not None:
        writer.close()


@atexit.register
def _close_all() -> None:
    for writer in list(_behind):
        writer.close()
