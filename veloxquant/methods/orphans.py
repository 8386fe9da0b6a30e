"""Processes that a plugin starts and leaves: found and ended, also those that left its group and its session.

A process whose parent ends is given to the nearest ancestor that asked for such (PR_SET_CHILD_SUBREAPER, Linux); else
to the first process of the system, where nobody knows whose it was. Elsewhere than on Linux only the plugin's own
group is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_PR_SET_CHILD_SUBREAPER = 36
"""<linux/prctl.h>."""


def adopt() -> None:
    """Become the parent of whatever is left behind below this process; nothing where the system knows no such thing."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(ImportError, OSError, AttributeError):  # an interpreter without ctypes
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def left() -> int:
    """How many children of this process still run; those that have ended are collected."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return max(1, len(_children()))
    return 0


def end(known: Collection[int] = ()) -> None:
    """Kill and collect every child of this process but the known ones, and what is given to it by that.

    One that we may not kill (it runs as another user) is left, and waited for by nobody.
    """
    spared = set(known)
    while strays := [pid for pid in _children() if pid not in spared]:
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:
                spared.add(pid)
                continue
            except ProcessLookupError:
                pass
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    """Of every thread of this process, as Linux lists them (proc_pid_task(5)); none elsewhere."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for listed in Path("/proc/self/task").glob("*/children"):
            found += map(int, listed.read_text(encoding="ascii").split())
    return found
