"""Owning the socket: one daemon a socket, a private folder, nothing of others touched, and a clean end.

Order of a start: raise the file limit, check the folder, take the lock, write our pid, (load everything,) remove a
dead socket, bind under a tight umask, listen, say that we are ready. The lock is a flock: it dies with its process,
so that no pid has to be guessed at. The lock file itself stays, since removing it would let two daemons hold one each.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from veloxquant import ownership, paths, socket_probe
from veloxquant.daemon.scarcity import is_starved
from veloxquant.errors import AlreadyRunning, SocketRefused

if TYPE_CHECKING:
    from pathlib import Path

WANTED_FILES = 8192
BACKLOG = 512
LOCK_WAIT_S = 0.1
_PID_WAIT_S = 0.3


def raise_file_limit(wanted: int = WANTED_FILES) -> int:
    """Raise the soft limit on open files (256 on macOS) towards `wanted`, never beyond the hard one; the limit now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    goal = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft == resource.RLIM_INFINITY or soft >= goal:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
    except (OSError, ValueError):  # macOS refuses more than OPEN_MAX: what we have has to do
        return soft
    return goal


def private_folder(folder: Path) -> None:
    """Make the folder with mode 0700, or check that it is ours alone. Raises SocketRefused naming the fix."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        raise SocketRefused(
            f"the socket's folder {folder} cannot be made: {error.strerror}",
            hint="set VELOXQUANT_SOCKET to a path in a folder that you can write",
            field="socket.path",
        ) from None
    if (why := ownership.foreign(facts)) is not None:
        raise SocketRefused(
            f"the socket's folder {folder} {why}",
            hint="set VELOXQUANT_SOCKET to a path in a folder of your own",
            field="socket.path",
        )
    if (why := ownership.not_private(facts)) is not None:
        ways = (ownership.way_to_close(folder, facts), "set VELOXQUANT_SOCKET to a path in a folder of its own")
        raise SocketRefused(
            f"the socket's folder {folder} {why}",
            hint=", or ".join(filter(None, ways)),
            field="socket.path",
        )


class Lock:
    """The right to serve one socket path, held until `release` or the end of the process."""

    def __init__(self, path: Path, wait_s: float = LOCK_WAIT_S) -> None:
        """Take it and write our pid into it. Raises AlreadyRunning naming the holder, SocketRefused."""
        self.path = path
        self._fd = self._open()
        if not self._take(wait_s):
            holder = self._holder()
            os.close(self._fd)
            raise AlreadyRunning(
                f"another veloxquant daemon ({holder}) holds {path}",
                hint="use it, or stop it first: veloxquantctl status shows it",
            )
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Let the next one in."""
        os.close(self._fd)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            if is_starved(error):
                raise  # there is nothing amiss with the file
            raise SocketRefused(
                f"the lock {self.path} cannot be opened: {error.strerror}",
                hint="move away what is there; it must be a plain file of your own",
                field="socket.path",
            ) from None
        facts = os.fstat(descriptor)
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
            return descriptor
        os.close(descriptor)
        raise SocketRefused(
            f"the lock {self.path} is not a plain file of yours", hint="move it away", field="socket.path"
        )

    def _take(self, wait_s: float) -> bool:
        """Try for a moment: a worker that a dying daemon was just starting holds the lock until it has started."""
        ends = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= ends:
                    return False
                time.sleep(0.01)
            else:
                return True

    def _holder(self) -> str:
        """The holder's pid; one that has just taken the lock needs a moment to write it."""
        ends = time.monotonic() + _PID_WAIT_S
        while True:
            text = os.pread(self._fd, 32, 0).strip()
            if text.isdigit():
                return f"pid {text.decode()}"
            if time.monotonic() >= ends:
                return "pid not known"
            time.sleep(0.01)


def remove_stale(path: Path) -> None:
    """Remove a socket whose daemon died. Call with the lock held.

    Raises SocketRefused for anything but a socket of ours, AlreadyRunning when somebody answers on it.
    """
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(facts.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(facts.st_mode) else "not a socket"
        raise SocketRefused(
            f"{path} is there and is {kind}",
            hint="move it away, or set VELOXQUANT_SOCKET to another path",
            field="socket.path",
        )
    if (why := ownership.foreign(facts)) is not None:
        raise SocketRefused(
            f"{path} {why}",
            hint="set VELOXQUANT_SOCKET to a path in a folder of your own",
            field="socket.path",
        )
    if socket_probe.answers(path):
        raise AlreadyRunning(
            f"somebody listens on {path} without holding its lock",
            hint="stop that program, or set VELOXQUANT_SOCKET to another path",
        )
    path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Listener:
    """A bound, listening socket and the identity of its file."""

    socket: socket.socket
    path: Path
    device: int
    inode: int
    activated: bool = False
    """A service manager made it, and goes on listening when we end."""

    def still_ours(self) -> bool:
        """The file at the path is the one we made."""
        try:
            facts = os.lstat(self.path)
        except OSError:
            return False
        return (facts.st_dev, facts.st_ino) == (self.device, self.inode)

    def close(self) -> None:
        """Remove the file if it is ours still, then stop listening, so that no client meets a dead socket.

        A service manager's file stays: clients wait there for whoever is started next.
        """
        if not self.activated and self.still_ours():
            with contextlib.suppress(OSError):  # somebody was quicker, or the disk is read-only now
                self.path.unlink()
        self.socket.close()


def listen(path: Path) -> Listener:
    """Bind and listen. The file has mode 0600 from its first instant. Raises SocketRefused."""
    limit = paths.socket_limit_bytes()
    if len(os.fsencode(path)) > limit:
        raise SocketRefused(
            f"the socket path is {len(os.fsencode(path))} bytes long, the system allows {limit}: {path}",
            hint="set VELOXQUANT_SOCKET to a shorter path",
            field="socket.path",
        )
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        server.bind(os.fspath(path))
    except OSError as error:
        server.close()
        raise SocketRefused(
            f"cannot listen on {path}: {error.strerror}",
            hint="set VELOXQUANT_SOCKET to a path on a local disk, in a folder that you can write",
            field="socket.path",
        ) from None
    finally:
        os.umask(before)
    path.chmod(0o600)
    server.settimeout(0)
    facts = os.lstat(path)
    server.listen(BACKLOG)
    return Listener(socket=server, path=path, device=facts.st_dev, inode=facts.st_ino)


def notify_manager(state: str) -> None:
    """Tell systemd ("READY=1", "STOPPING=1") when it asked to be told; nothing otherwise."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door, contextlib.suppress(OSError):
        door.connect(address)
        door.send(state.encode())
