"""A socket that a service manager opened for us: systemd's socket unit, launchd's `Sockets`.

The manager listens from the login on and starts us when a client comes, so nobody is refused while we start or are
being replaced. What it hands over must be what we would have made ourselves: the stream socket of our path, private to
us. Its file stays the manager's: it is never removed here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from veloxquant import ownership
from veloxquant.daemon.lifecycle import Listener
from veloxquant.errors import SocketRefused

if TYPE_CHECKING:
    from collections.abc import MutableMapping

LAUNCHD_NAME = b"daemon"
"""The key under `Sockets` in the plist."""
FIRST_DESCRIPTOR = 3
"""sd_listen_fds(3): SD_LISTEN_FDS_START."""
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
# launch_activate_socket(3): not started by launchd; started by it from a plist without such a socket.
_NOT_ACTIVATED = (errno.ESRCH, errno.ENOENT)


def inherited(
    path: Path,
    env: MutableMapping[str, str] = os.environ,
    platform: str = sys.platform,
    library: Any | None = None,
) -> Listener | None:
    """The listener that a service manager opened for `path`, None where none did. Ask once: it is handed out once.

    The variables that announced it are taken out of `env`, so that no worker takes them for its own. `library` is the C
    library on macOS, None for the real one. Raises SocketRefused for a socket that is not the private one of `path`.
    """
    descriptor = _from_launchd(library) if platform == "darwin" else _from_systemd(env)
    return None if descriptor is None else _adopt(path, descriptor)


def _from_systemd(env: MutableMapping[str, str]) -> int | None:
    """sd_listen_fds(3): the one descriptor that is announced to this very process."""
    pid, count, _names = [env.pop(name, "") for name in _VARIABLES]
    if pid != str(os.getpid()):
        return None  # absent, or left over from a parent: not for us
    if count != "1":
        _refuse(f"LISTEN_FDS is {count!r}: one socket is served", "leave one ListenStream in the socket unit")
    return FIRST_DESCRIPTOR


def _from_launchd(library: Any | None) -> int | None:
    """launch_activate_socket(3): 0 and an array to be freed, or an errno. Not run on a Mac."""
    system = ctypes.CDLL(None) if library is None else library
    activate = getattr(system, "launch_activate_socket", None)
    if activate is None:
        return None
    found, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t(0)
    error = activate(ctypes.c_char_p(LAUNCHD_NAME), ctypes.byref(found), ctypes.byref(count))
    if error in _NOT_ACTIVATED:
        return None
    if error:
        _refuse(
            f"launchd does not hand over the socket {LAUNCHD_NAME.decode()!r}: {os.strerror(error)}",
            "load the agent again: veloxquantctl service install",
        )
    descriptors: list[int] = [found[number] for number in range(count.value)]
    system.free(found)
    if len(descriptors) != 1:
        _refuse(
            f"launchd hands over {len(descriptors)} sockets named {LAUNCHD_NAME.decode()!r}: one is served",
            "leave one entry of that name under Sockets in the plist",
        )
    return descriptors[0]


def _adopt(path: Path, descriptor: int) -> Listener:
    try:
        taken = socket.socket(fileno=descriptor)
    except OSError as error:
        _refuse(f"descriptor {descriptor} is no socket: {error.strerror}", "start it from a socket unit")
    try:
        facts = _checked(taken, path)
    except SocketRefused:
        taken.detach()  # not closed: it may be anything, and we end
        raise
    taken.set_inheritable(False)
    taken.settimeout(0)
    return Listener(socket=taken, path=path, device=facts.st_dev, inode=facts.st_ino, activated=True)


def _checked(taken: socket.socket, path: Path) -> os.stat_result:
    """What is at the path. Raises SocketRefused unless that and the socket are what we would have made."""
    wrong = _not_listening(taken) or _elsewhere(taken, path)
    if wrong is not None:
        _refuse(f"the service manager's socket {wrong}", f"let it listen on {path}, as a stream")
    try:
        facts = os.lstat(path)
    except OSError as error:
        _refuse(f"the service manager's socket {path} is gone: {error.strerror}", "restart its socket unit")
    if not stat.S_ISSOCK(facts.st_mode):
        _refuse(f"{path} is not the service manager's socket any more", "restart its socket unit")
    if (why := ownership.foreign(facts)) is not None:
        _refuse(f"{path} {why}", "use a unit of your own")
    if (why := ownership.not_private(facts)) is not None:
        _refuse(f"{path} {why}", "set SocketMode=0600 in the socket unit, or SockPathMode 384 in the plist")
    return facts


def _not_listening(taken: socket.socket) -> str | None:
    if taken.family != socket.AF_UNIX or taken.type != socket.SOCK_STREAM:
        return "is no Unix stream socket"
    if not taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return "does not listen"
    return None


def _elsewhere(taken: socket.socket, path: Path) -> str | None:
    """The folder may be named differently (a link in its path), the socket in it may not."""
    name = os.fsencode(taken.getsockname())
    if not name.startswith(b"/"):
        return "has no path"
    there = Path(os.fsdecode(name))
    if (there.parent.resolve(), there.name) != (path.parent.resolve(), path.name):
        return f"is {there}, not {path}"
    return None


def _refuse(reason: str, hint: str) -> NoReturn:
    raise SocketRefused(reason, hint=hint, field="socket.path")
