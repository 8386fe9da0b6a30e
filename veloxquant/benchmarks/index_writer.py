"""When `index.json` is written: at once while that is cheap, else at a bounded interval, and at close.

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

_log = logging.getLogger(__name__)


class IndexWriter:
    """Calls `write` not too often and not too late. `write` takes its own locks and may raise StoreUnavailable."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._guard = threading.Lock()
        self._due = False
        self._timer: threading.Timer | None = None
        self._next_at = 0.0
        self._pid = os.getpid()
        self._writing_thread: int | None = None
        self._closes_with_child = False
        self.problem: str | None = None
        """Why the last write failed; records are safe, and the index is made again when it can be."""

    def mark(self) -> None:
        """The index is behind: write it now or soon. Never raises for a disk that cannot be written."""
        self._after_fork()
        with self._guard:
            self._due = True
            wait_s = self._next_at - time.monotonic()
            if wait_s > 0:
                self._schedule(wait_s)
                return
        self._try()

    def flush(self) -> None:
        """Write now. Raises StoreUnavailable."""
        self._after_fork()
        if self._writing_thread == threading.get_ident():
            return  # called by the garbage collector in the middle of a write
        with self._guard:
            self._due = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        started = time.monotonic()
        try:
            self._writing_thread = threading.get_ident()
            self._write()
            self.problem = None
        except StoreUnavailable as error:
            self.problem = error.message
            self._due = True
            raise
        finally:
            self._writing_thread = None
            spent_s = time.monotonic() - started
            self._next_at = time.monotonic() + max(INTERVAL_S, COST_MULTIPLE * spent_s)

    def rest(self, spent_s: float) -> None:
        """A look at the directory took this long, and a write would too: where that is much, it waits."""
        pause_s = COST_MULTIPLE * spent_s
        if pause_s > INTERVAL_S:
            self._next_at = max(self._next_at, time.monotonic() + pause_s)

    def close(self) -> None:
        """Write what is due. Safe at interpreter exit and twice."""
        if self._due and self._pid == os.getpid():
            self._try()

    def _try(self) -> None:
        with suppress(StoreUnavailable):
            self.flush()
            return
        _log.info("index.json is behind the records: %s", self.problem)

    def _schedule(self, wait_s: float) -> None:
        if self._timer is not None:
            return
        self._timer = threading.Timer(wait_s, self._try)
        self._timer.daemon = True
        self._timer.start()
        self._close_with_child()

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
            self._pid = os.getpid()
            self._guard = threading.Lock()
            self._timer = None
            self._writing_thread = None
            self._closes_with_child = False


def _close(alive: weakref.ref[IndexWriter]) -> None:
    writer = alive()
    if writer is not None:
        writer.close()
