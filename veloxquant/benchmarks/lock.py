"""One writer at a time, over threads and processes. The system drops a dead process's lock, so it blocks nobody."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from veloxquant.benchmarks.storage import make_folder, reaching
from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMEOUT_S = 30.0
_POLL_S = 0.002
"""A write takes about a millisecond, so a waiting writer looks again after two."""


class StoreLock:
    """Reentrant lock on a benchmark directory; advisory, among users of this class. Readers need none."""

    def __init__(self, path: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._renew()

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Keep this object's other threads out; for memory only, and for moments: `held` is never asked within it."""
        self._after_fork()
        with self._threads:
            yield

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this, `held` waits for no other writer in this thread, but raises StoreUnavailable."""
        before = self._is_patient()
        self._local.is_patient = False
        try:
            yield
        finally:
            self._local.is_patient = before

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other writer out, creating the directory first. Who only reads goes on while this waits.

        Raises StoreUnavailable when the directory cannot be written or a live process keeps the lock too long.
        """
        self._after_fork()
        if not self._writers.acquire(blocking=self._is_patient()):
            raise self._busy()
        try:
            with reaching(self._path.parent, "write to"):
                if self._depth == 0:
                    make_folder(self._path.parent)
                    self._acquire()
                self._depth += 1
            try:
                with self._threads:
                    yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._processes.release()
        finally:
            self._writers.release()

    def _acquire(self) -> None:
        try:
            if self._is_patient():
                self._processes.acquire(timeout=self._timeout_s, poll_interval=_POLL_S)
            else:
                self._processes.acquire(timeout=0, blocking=False)
        except NotImplementedError as error:
            raise StoreUnavailable(
                f"the file system of {self._path.parent} has no file locks",
                hint="choose a records.directory on a local disk",
            ) from error
        except Timeout as error:
            if not self._is_patient():
                raise self._busy() from error
            raise StoreUnavailable(
                f"another process has kept {self._path} locked for {self._timeout_s:g} s",
                hint="find it with `lsof` on that file; it is stopped or hangs, as a dead one would hold nothing",
            ) from error

    def _is_patient(self) -> bool:
        return getattr(self._local, "is_patient", True)

    def _busy(self) -> StoreUnavailable:
        hint = "it is tried again by itself; no record is lost"
        return StoreUnavailable(f"another writer is at work in {self._path.parent}", hint=hint)

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._writers = threading.RLock()
        self._threads = threading.RLock()
        self._processes = FileLock(self._path, thread_local=False)
        self._depth = 0

    def _after_fork(self) -> None:
        # A lock that another thread held at the fork would never be released in the child.
        if self._pid != os.getpid():
            self._renew()
