"""When `index.json` is written: at once while that is cheap, else at a bounded interval by a thread, and at close.

So an add costs the same whatever the number of records, and the index is at most a few seconds behind.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_S = 1.0
COST_MULTIPLE = 20.0
"""Time between two writes is at least this many times what the last one took, so that it takes at most 5 %."""
CHEAP_S = 0.005
"""Where a write or a look at the directory takes longer, nobody who adds a record is made to wait for one."""

_log = logging.getLogger(__name__)


class IndexWriter:
    """Calls `write` not too often and not too late, in one thread at a time.

    `write` takes its own locks, may raise StoreUnavailable, and returns why it left the index alone, if it did.
    """

    def __init__(self, write: Callable[[], str | None]) -> None:
        self._write = write
        self._due = False
        self._timer: threading.Timer | None = None
        self._next_at = 0.0
        self._look_s = 0.0
        self._write_s = 0.0
        self._writing_thread: int | None = None
        self._closes_with_child = False
        self._renew()
        self.problem: str | None = None
        """Why the index is not up to date; records are safe, and it is made again when it can be."""

    @property
    def is_due(self) -> bool:
        """Whether the index is known to be behind."""
        return self._due

    def mark(self) -> None:
        """The index is behind: it is written now or soon. Never raises for a disk that cannot be written."""
        self._after_fork()
        with self._guard:
            self._due = True
            if self._writing_thread is not None:
                return  # whoever writes sees to it afterwards
            wait_s = self._next_at - time.monotonic()
            if wait_s > 0 or max(self._look_s, self._write_s) > CHEAP_S:
                self._schedule(wait_s)
                return
        self._write_if_due()

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
        pause_s = COST_MULTIPLE * spent_s
        if pause_s > INTERVAL_S:
            self._next_at = max(self._next_at, time.monotonic() + pause_s)

    def close(self) -> None:
        """Write what is due, and wait for a write under way. Safe at interpreter exit and twice."""
        if self._pid == os.getpid() and self._writing_thread != threading.get_ident():
            self._write_if_due()

    def _write_if_due(self) -> None:
        with self._one_at_a_time:
            if not self._due:
                return
            with suppress(StoreUnavailable):
                self._write_now()
                return
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
            ended = time.monotonic()
            self._write_s = ended - started
            self._next_at = ended + max(INTERVAL_S, COST_MULTIPLE * self._write_s)
            with self._guard:
                self._writing_thread = None
                if self._due:
                    self._schedule(self._next_at - ended)
                self._due = self._due or not is_done

    def _schedule(self, wait_s: float) -> None:
        if self._timer is not None:
            return
        timer = threading.Timer(max(wait_s, 0.0), self._on_time)
        timer.daemon = True
        with suppress(RuntimeError):  # the interpreter ends and starts no more threads; close() follows
            timer.start()
            self._timer = timer
        self._close_with_child()

    def _on_time(self) -> None:
        with self._guard:
            if self._timer is threading.current_thread():
                self._timer = None
        self._write_if_due()

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
        # The garbage collector may call close() wherever a lock of ours is held, so both can be taken again.
        self._pid = os.getpid()
        self._guard = threading.RLock()
        self._one_at_a_time = threading.RLock()
        self._writing_thread = None
        self._closes_with_child = False


def _close(alive: weakref.ref[IndexWriter]) -> None:
    writer = alive()
    if writer is not None:
        writer.close()
