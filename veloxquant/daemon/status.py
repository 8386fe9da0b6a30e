"""What `status` says about the process: memory, open files, threads, and that no engine was imported."""

from __future__ import annotations

import asyncio
import resource
import sys
import threading
from pathlib import Path

from veloxquant.wire.answers import ProcessState

ENGINE_MODULES = ("mlx_lm", "transformers", "torch")
"""Packages that belong in workers: importing mlx_lm costs seconds and tens of MiB."""

_MANY_FILES = 0.9


def now() -> ProcessState:
    """This process now. What cannot be told is None: by the system, or of tasks outside the event loop."""
    return ProcessState(
        rss_bytes=_rss_bytes(),
        fds=_open_files(),
        fd_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        threads=threading.active_count(),
        engine_modules=tuple(name for name in ENGINE_MODULES if name in sys.modules),
        tasks=_tasks(),
    )


def warnings(process: ProcessState) -> tuple[str, ...]:
    """What a person should look at, in sentences."""
    fds, limit = process.fds, process.fd_limit
    if fds is None or limit is None or fds < _MANY_FILES * limit:
        return ()
    return (f"{fds:,} of {limit:,} files are open: more clients will be refused",)


def _tasks() -> int | None:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return None


def _rss_bytes() -> int | None:
    import psutil

    try:
        return int(psutil.Process().memory_info().rss)
    except (psutil.Error, OSError):
        return None


def _open_files() -> int | None:
    """Counted in the folder both systems keep for it; the one that lists it holds one itself."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return sum(1 for _ in Path(folder).iterdir()) - 1
        except OSError:
            continue
    return None
