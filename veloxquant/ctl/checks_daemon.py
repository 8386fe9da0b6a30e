"""Doctor's checks on the daemon: its folder, its socket, its lock."""

from __future__ import annotations

import fcntl
import os
import stat
from typing import TYPE_CHECKING

from veloxquant import paths
from veloxquant.client import Client
from veloxquant.config import socket_of
from veloxquant.ctl.finding import Finding, existing, failed, note, ok
from veloxquant.errors import NotRunning, VeloxError

if TYPE_CHECKING:
    from pathlib import Path

    from veloxquant.config import Config

_PATIENCE_S = 2.0


def socket_folder(config: Config) -> Finding:
    """Only we may look into the socket's folder: whoever can write there could answer in the daemon's place.

    The daemon makes socket and lock in it, and the folder itself where it is missing.
    """
    folder = socket_of(config).parent
    try:
        facts = folder.stat()
    except FileNotFoundError:
        place = existing(folder)
        return ok(f"{folder} does not exist yet; the daemon makes it") if _open_to_us(place) else _shut(place)
    if facts.st_uid != os.geteuid():
        return failed(f"{folder} belongs to user id {facts.st_uid}", "set VELOXQUANT_SOCKET to a folder of your own")
    if facts.st_mode & 0o077:
        return failed(f"{folder} has mode {stat.S_IMODE(facts.st_mode):04o}, open to others", f"chmod 700 '{folder}'")
    return ok(f"{folder} is private") if _open_to_us(folder) else _shut(folder)


def socket_answers(config: Config) -> Finding:
    """A daemon answers; without one, clients plan by themselves, more slowly."""
    try:
        pong = Client(config=config, timeout_s=_PATIENCE_S, fallback=False).ping()
    except NotRunning as error:
        return note(error.message, "veloxquantctl daemon")
    return ok(f"the daemon answers as pid {pong.pid}")


def lock(config: Config) -> Finding:
    """The lock is held exactly when a daemon listens."""
    path = paths.lock_path(socket_of(config))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return ok("no lock yet: no daemon has run here")
    except OSError as error:
        return failed(f"the lock {path} cannot be opened: {error.strerror}", "move it away")
    try:
        holder = os.pread(descriptor, 32, 0).strip().decode("ascii", "replace") or "unknown"
        # Shared and for an instant: a daemon that starts just now tries for longer than that.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _held(config, holder)
    finally:
        os.close(descriptor)
    return _free(config)


def _open_to_us(folder: Path) -> bool:
    """Whether names can be made there; a file system that is only read says no to root, too."""
    return os.access(folder, os.W_OK | os.X_OK)


def _shut(folder: Path) -> Finding:
    return failed(
        f"the daemon cannot make its socket: {folder} cannot be written",
        f"chmod u+rwx '{folder}', or set VELOXQUANT_SOCKET to a path in a folder that you can write",
    )


def _held(config: Config, holder: str) -> Finding:
    try:
        Client(config=config, timeout_s=_PATIENCE_S, fallback=False).ping()
    except VeloxError as error:
        return failed(
            f"pid {holder} holds the lock and does not answer: {error.message}", f"look at its log, or kill {holder}"
        )
    return ok(f"the lock is held by pid {holder}")


def _free(config: Config) -> Finding:
    try:
        Client(config=config, timeout_s=_PATIENCE_S, fallback=False).ping()
    except VeloxError:
        return ok("the lock is free, and no daemon runs")
    return failed("somebody listens on the socket without holding its lock", "stop that program, then start the daemon")
