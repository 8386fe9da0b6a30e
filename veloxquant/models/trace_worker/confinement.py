"""What the worker gives up before anything of an engine, a plugin or a model is imported: room, network, copies.

The kernel holds the limits and, where it lets an ordinary user ask for that, the network. Audit hooks hold the rest;
they see what Python does and not what native code does, so they are a fence against model and plugin code that reaches
out, no sandbox against an exploit.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

NetworkFence = Literal["namespace", "sandbox", "audit"]
"""What keeps the worker from the network: an empty network namespace (Linux), the system's sandbox (macOS), or the
audit hook alone."""

FILE_BYTES = 16 * 2**20
"""The largest file that may be written. Verdicts and byte code are some KiB; pipes do not count."""
OPEN_FILES = 4096
"""What mlx-lm asks for when it is imported (mlx_lm/utils.py): with a lower limit the import would fail."""

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
"""<linux/sched.h>."""
_SANDBOX_NAMED = 0x0001
"""<sandbox.h>, macOS; "no-network" is one of its named profiles (kSBXProfileNoNetwork)."""

_FORBIDDEN = frozenset(
    {"socket.__new__", "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"}
    | {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo"}
    | {"pickle.find_class"}
    | {"os.fork", "os.forkpty", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn"}
)
"""Audit events (docs.python.org/3/library/audit_events.html). A copy of the process would hold memory of its own, and
another program would have neither the limits' reasons nor these hooks."""


def confine(cpu_s: int, memory_bytes: int) -> NetworkFence:
    """Take limits and fences on, for the rest of this process; what keeps it from the network.

    Called while the process has one thread: a user namespace cannot be entered with more.
    """
    _limit(cpu_s, memory_bytes)
    fence = _leave_network()
    sys.addaudithook(_forbid)
    return fence


def _limit(cpu_s: int, memory_bytes: int) -> None:
    """What the system enforces. Lower limits set from outside stay.

    RLIMIT_AS is no measure of memory: a trace that holds 176 MiB reserves 534, MLX for CUDA reserves more than there
    is, and macOS does not enforce it. RLIMIT_DATA counts what can be written to (Linux); who starts the worker looks
    at what it holds, everywhere.
    """
    import resource

    limits = [
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
    ]
    if sys.platform == "linux":
        limits.append((resource.RLIMIT_DATA, memory_bytes))
    for which, wanted in limits:
        with contextlib.suppress(ValueError, OSError):  # the system knows the limit and will not have it changed
            hard = resource.getrlimit(which)[1]
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(which, (most, most))


def _forbid(event: str, _: tuple[Any, ...]) -> None:
    """No network, no pickles and no copies of itself, whatever a model module or a plugin tries."""
    if event in _FORBIDDEN:
        raise PermissionError(f"{event} is not allowed while tracing a model")


def _leave_network() -> NetworkFence:
    """The strongest fence this system grants; it never raises, since the audit hook is there in any case."""
    steps: dict[str, tuple[Callable[[], bool], NetworkFence]] = {
        "linux": (_enter_namespace, "namespace"),
        "darwin": (_enter_sandbox, "sandbox"),
    }
    enter, fence = steps.get(sys.platform, (bool, "audit"))
    try:
        return fence if enter() else "audit"
    except (ImportError, OSError, AttributeError):  # no ctypes, no such function, a file that cannot be written
        return "audit"


def _enter_namespace() -> bool:
    """A network namespace without interfaces; whether the kernel grants one, to root or by a user namespace."""
    import ctypes

    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) == 0:
        return True
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    # Without these we would be nobody: files would seem to belong to others (user_namespaces(7)).
    own = Path("/proc/self")
    with contextlib.suppress(OSError):
        (own / "setgroups").write_text("deny", encoding="ascii")
        (own / "uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
        (own / "gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")
    return True


def _enter_sandbox() -> bool:
    """The named profile without network. Apple only: not run on a Mac."""
    import ctypes

    said = ctypes.c_char_p()
    system = ctypes.CDLL("/usr/lib/libSystem.dylib")
    return bool(system.sandbox_init(b"no-network", ctypes.c_uint64(_SANDBOX_NAMED), ctypes.byref(said)) == 0)
