"""Telling a want of files, memory or threads, which passes, from everything else that can fail."""

from __future__ import annotations

import errno

FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""The system has no more files or memory for us, for now."""
_NO_THREAD = "can't start new thread"
"""All that Python says where the system grants none (RLIMIT_NPROC, pids.max); the error is a plain RuntimeError."""


def is_starved(failure: BaseException) -> bool:
    """Whether it failed for want of files, memory or threads."""
    if isinstance(failure, OSError):
        return failure.errno in FULL
    return isinstance(failure, MemoryError) or (isinstance(failure, RuntimeError) and str(failure) == _NO_THREAD)
