"""Who is on the other end of a connection, and whether still. Only our own user and root are served."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

# <sys/un.h> on macOS: level SOL_LOCAL, option LOCAL_PEERPID. Python names neither.
_SOL_LOCAL = 0
_LOCAL_PEERPID = 2


class Peer(NamedTuple):
    """User and, where the system tells, process at the other end."""

    uid: int
    pid: int | None


def identify(connection: socket.socket) -> Peer:
    """The peer as the kernel saw it when it connected. Raises OSError when the kernel does not say."""
    return _linux(connection) if sys.platform == "linux" else _bsd(connection)


def hung_up(descriptors: Iterable[int]) -> list[int]:
    """Those connections whose other end is closed altogether, and not for writing alone.

    Looks for POLLOUT though nothing is to be written: macOS tells of an end only where something is looked for, and
    where that is POLLIN an end of writing looks the same (XNU's poll; not run on a Mac).
    """
    ends = select.poll()
    for descriptor in descriptors:
        if descriptor >= 0:
            ends.register(descriptor, select.POLLOUT)
    return [descriptor for descriptor, seen in ends.poll(0) if seen & (select.POLLHUP | select.POLLERR)]


def allowed(peer: Peer) -> bool:
    """Our own user, or root."""
    return peer.uid in (os.geteuid(), 0)


def _linux(connection: socket.socket) -> Peer:
    layout = struct.Struct("3i")  # struct ucred: pid, uid, gid
    pid, uid, _gid = layout.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))
    return Peer(uid=uid, pid=pid)


def _bsd(connection: socket.socket) -> Peer:
    """macOS: getpeereid for the user, LOCAL_PEERPID for the process. Not run on a Mac."""
    uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
    library = ctypes.CDLL(None, use_errno=True)
    if library.getpeereid(connection.fileno(), ctypes.byref(uid), ctypes.byref(gid)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    try:
        (pid,) = struct.unpack("i", connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID, 4))
    except OSError:
        pid = None
    return Peer(uid=uid.value, pid=pid)
