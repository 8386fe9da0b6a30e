"""Keeping a process small and prompt that stays for weeks and does nothing most of the time.

With 10,000 records on Linux, of 60 MiB OpenSSL takes 5, and what a burst of 256 clients leaves in the allocator's free
lists 1 to 4.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import sys
from typing import Any

_OPENSSL = ("ssl", "_hashlib")
_USERS = ("asyncio", "hashlib", "hmac")
"""Who would load it; hmac comes with `secrets`."""
# <malloc.h> of glibc.
_M_ARENA_MAX = -8
TURN_S = 0.0005
"""How long a thread that computes keeps the interpreter while another waits: a tenth of Python's own. The event loop
waits that long each time it comes back from the kernel; while records are read anew, a plan's p99 was 40 to 65 ms in
the place of 110 to 230 (bench/reliability/r22_burst.py, one machine, in turn)."""

FULL_RARER = 10
"""Full collections, against Python's own."""


def import_without_openssl() -> None:
    """Import what loads it without it: nothing here speaks TLS, and Python has digests of its own.

    Call before any is imported; later it does nothing. A plugin that needs ssl afterwards imports it as ever.
    """
    if any(name in sys.modules for name in (*_OPENSSL, *_USERS)):
        return
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(_OPENSSL))  # None makes an import fail, which its users are prepared for
    try:
        for name in _USERS:
            importlib.import_module(name)
    finally:
        for name in _OPENSSL:
            del modules[name]


def one_arena() -> None:
    """Have the threads share one heap: each heap of its own keeps what a burst left in it. Call before they start."""
    _call("mallopt", _M_ARENA_MAX, 1)


def short_turns() -> None:
    """Let no thread keep the event loop waiting for long."""
    sys.setswitchinterval(TURN_S)


def settle() -> None:
    """After the start: what is there stays, and the collector need not walk it, 40 ms a time with 10,000 records.

    What comes later it walks whole a tenth as often as Python would: each time stops every thread, for 20 ms with
    20,000 new records, and finds some seventy objects; the garbage of plans is young, and found young.
    """
    gc.freeze()
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_RARER * old)


def trim() -> None:
    """Give free memory back to the system, where glibc keeps it. Some ms."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    function = getattr(_library(), name, None)
    if function is not None:
        function(*arguments)


@functools.cache
def _library() -> Any:
    """The C library on Linux; musl has neither call, and macOS gives memory back by itself."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None
