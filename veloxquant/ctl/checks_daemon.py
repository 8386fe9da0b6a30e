"""Doctor's checks on the daemon: its folder, its socket, its lock, and what it says of itself."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant import __version__, ownership, paths, plain_file, socket_probe
from veloxquant.client import Client
from veloxquant.config import socket_of
from veloxquant.ctl.finding import Finding, away, existing, failed, note, ok, way_to_write
from veloxquant.errors import NotAnswering, NotRunning, ProtocolUnsupported, VeloxError
from veloxquant.wire.messages import PARAMS

if TYPE_CHECKING:
    from veloxquant.config import Config
    from veloxquant.wire.answers import Hello

_PATIENCE_S = 2.0
_SILENT = (NotRunning, NotAnswering)
"""For the check of the socket to tell; the others have nobody to ask."""
_NOBODY = "no daemon answers"
_ELSEWHERE = "set VELOXQUANT_SOCKET to a folder of your own"
_RESTART = "veloxquantctl service restart, or stop the daemon and start it anew"


def socket_folder(config: Config) -> Finding:
    """Only we may look into the socket's folder: whoever can write there could answer in the daemon's place.

    The daemon makes socket and lock in it, and the folder itself where it is missing.
    """
    folder = socket_of(config).parent
    try:
        facts = folder.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        place = existing(folder)
        return ok(f"{folder} does not exist yet; the daemon makes it") if _open_to_us(place) else _shut(place)
    if not stat.S_ISDIR(facts.st_mode):
        return failed(f"{folder} is no folder: no daemon can start", away(folder))
    if (why := ownership.foreign(facts)) is not None:
        return failed(f"{folder} {why}", _ELSEWHERE)
    if (why := ownership.not_private(facts)) is not None:
        return failed(f"{folder} {why}", ownership.way_to_close(folder, facts) or _ELSEWHERE)
    return ok(f"{folder} is private") if _open_to_us(folder) else _shut(folder)


def socket_path(config: Config) -> Finding:
    """The path fits into what the system has room for (sun_path). Raises SocketRefused."""
    place = socket_of(config)
    return ok(f"{place}, {len(os.fsencode(place))} of {paths.socket_limit_bytes()} bytes")


def leftovers(config: Config) -> Finding:
    """What lies at the path is a living socket of ours, or nothing, or a dead one that the next start removes."""
    place = socket_of(config)
    try:
        facts = place.lstat()
    except FileNotFoundError:
        return ok("nothing lies at the socket's path while no daemon runs")
    except OSError as error:
        return _hidden(place, error)
    if not stat.S_ISSOCK(facts.st_mode):
        return failed(f"{place} is no socket: no daemon can start", away(place))
    if (why := ownership.foreign(facts)) is not None:
        return failed(f"{place} {why}", _ELSEWHERE)
    found = _knocked(place)
    if found.state == "ok" and (why := ownership.not_private(facts)) is not None:
        return failed(f"{place} {why}", f"chmod 600 '{place}'")
    return found


def _knocked(place: Path) -> Finding:
    error = socket_probe.failure(place, _PATIENCE_S)
    if error is None:
        return ok("the socket's file is a living one")
    if isinstance(error, ConnectionRefusedError):
        return note(f"{place} was left by a daemon that died", "veloxquantctl daemon: a start removes it")
    return failed(f"{place} does not take a connection: {error}", "look at the daemon's log: veloxquantctl logs")


def version(config: Config) -> Finding:
    """The daemon that runs is this program's version, not the one from before an upgrade."""
    found = _hello(config)
    if found is None:
        return ok(_NOBODY)
    if found.version != __version__:
        return note(f"the daemon is version {found.version}, this program {__version__}", _RESTART)
    return ok(f"the daemon is version {found.version}, as this program")


def protocol(config: Config) -> Finding:
    """We understand each other, and the daemon knows every call that this program may make."""
    try:
        found = _hello(config)
    except ProtocolUnsupported as error:
        return failed(error.message, f"install one version on both sides, then: {_RESTART}")
    if found is None:
        return ok(_NOBODY)
    lacking = sorted(set(PARAMS) - set(found.capabilities))
    if lacking:
        return note(f"the daemon lacks {', '.join(lacking)}", _RESTART)
    return ok(f"protocol {found.protocol} with {len(found.capabilities)} capabilities")


def watcher(config: Config) -> Finding:
    """The daemon hears of new records by events, not by its clock alone."""
    try:
        records = _client(config).status().records
    except _SILENT:
        return ok(_NOBODY)
    if records.watcher != "scan only":
        return ok(f"records are watched ({records.watcher}), last read {records.scan_age_s:.0f} s ago")
    from veloxquant.benchmarks.index import RECORDS

    folder = Path(records.directory) / RECORDS
    if not folder.is_dir():
        return note(f"there is no folder {folder} to watch", f"mkdir -p '{folder}'")
    limit = "on Linux raise fs.inotify.max_user_watches, and " if sys.platform == "linux" else ""
    return note(
        "changes of records are found by the clock only", f"{limit}keep records on a local disk; veloxquantctl logs"
    )


def socket_answers(config: Config) -> Finding:
    """A daemon answers; without one, clients plan by themselves, more slowly."""
    try:
        pong = _client(config).ping()
    except NotRunning as error:
        return note(error.message, "veloxquantctl daemon")
    except NotAnswering as error:
        return failed(error.message, f"veloxquantctl logs may tell why; {_RESTART} (kill -9 if it does not end)")
    return ok(f"the daemon answers as pid {pong.pid}")


def lock(config: Config) -> Finding:
    """The lock is held exactly when a daemon listens."""
    path = paths.lock_path(socket_of(config))
    try:
        file = plain_file.open_plain(path, follow_link=False)
    except FileNotFoundError:
        return ok("no lock yet: no daemon has run here")
    except OSError as error:
        if isinstance(error, plain_file.NotPlain) or path.is_symlink():
            return failed(f"{path} is no plain file: no daemon can start", away(path))
        return _hidden(path, error)
    with file:
        holder = file.read(32).strip().decode("ascii", "replace") or "unknown"
        try:  # shared and for an instant: a daemon that starts just now tries for longer than that
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _held(config, holder, path)
    return _free(config)


def _client(config: Config) -> Client:
    return Client(config=config, timeout_s=_PATIENCE_S, fallback=False)


def _hello(config: Config) -> Hello | None:
    try:
        return _client(config).hello()
    except _SILENT:
        return None


def _open_to_us(folder: Path) -> bool:
    """Whether names can be made there; a file system that is only read says no to root, too."""
    return os.access(folder, os.W_OK | os.X_OK)


def _shut(folder: Path) -> Finding:
    return failed(
        f"the daemon cannot make its socket: {folder} cannot be written",
        way_to_write(folder, "VELOXQUANT_SOCKET"),
    )


def _hidden(place: Path, error: OSError) -> Finding:
    return failed(f"{place} cannot be looked at: {error.strerror}", "what the check of the socket folder says, first")


def _held(config: Config, holder: str, path: Path) -> Finding:
    try:
        _client(config).ping()
    except VeloxError as error:
        if not _lives(holder):  # a name that an earlier daemon left there: by now it may be anybody's
            return failed(f"a program other than pid {holder} holds the lock {path}", f"lsof '{path}' names it: end it")
        return failed(
            f"pid {holder} holds the lock and does not answer: {error.message}",
            f"veloxquantctl logs may tell why; unless it has just started: kill -9 {holder}",
        )
    return ok(f"the lock is held by pid {holder}")


def _lives(holder: str) -> bool:
    """Whether there is such a process of ours."""
    try:
        os.kill(int(holder), 0)
    except (ValueError, OverflowError, OSError):
        return False
    return True


def _free(config: Config) -> Finding:
    try:
        _client(config).ping()
    except VeloxError:
        return ok("the lock is free, and no daemon runs")
    return failed("somebody listens on the socket without holding its lock", "stop that program, then start the daemon")
