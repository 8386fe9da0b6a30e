"""Frames to the daemon and back over its socket, whatever the daemon does, within a deadline.

Blocking sockets only. A pool of idle connections makes one transport usable from many threads without a lock: a thread
takes a connection or opens one, and gives it back after a clean exchange. All deadlines are `time.monotonic()` values.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import socket
import stat
import time
from typing import TYPE_CHECKING, Protocol

from veloxquant.errors import NotAnswering, NotRunning, SocketRefused
from veloxquant.wire.frames import ANSWER_LIMIT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIRST_PAUSE_S = 0.010
LAST_PAUSE_S = 0.160
ATTEMPTS = 5
"""Pauses of 10, 20, 40, 80 and 160 ms bridge a daemon's start and a restart between two calls."""
MAX_IDLE = 8
FIRST_SILENCE_S = 0.5
LAST_SILENCE_S = 4.0
"""Silence after which the daemon is asked, on a second connection, whether it is alive; doubled each time it is."""
PING_S = 1.5
"""What a living daemon may take to answer that; its event loop is never busy for longer than some milliseconds."""
REST_S = 2.0
"""From the first byte of an answer to its newline: a daemon writes an answer whole."""
_PING = b'{"jsonrpc":"2.0","id":0,"method":"ping"}\n'
_ROOT = 0
_ABSENT = (errno.ENOENT, errno.ECONNREFUSED)


class Transport(Protocol):
    """What a Client needs: one frame for one frame, or one frame for a stream of them."""

    def exchange(self, frame: bytes, deadline: float) -> bytes:
        """Send one request line, return its answer line. Raises NotRunning, NotAnswering, SocketRefused."""
        ...

    def stream(self, frame: bytes, deadline: float) -> Iterator[bytes]:
        """Send one request line, then yield every line that arrives; the deadline is for the first one."""
        ...

    def close(self) -> None:
        """Let go of every connection."""
        ...


class SocketTransport:
    """The daemon's Unix socket. `wait_s` is how long a missing daemon is waited for, beyond the usual retries."""

    def __init__(self, path: Path, *, wait_s: float = 0.0) -> None:
        self._path = path
        self._wait_s = wait_s
        self._idle: list[_Connection] = []
        self._owner = os.getpid()
        self._was_there = False
        self._was_absent = False

    def exchange(self, frame: bytes, deadline: float) -> bytes:
        """One answer line, over a kept connection where there is one; a broken connection is replaced once."""
        try:
            return self._once(frame, deadline)
        except _Broken:
            # A kept connection dies with a restarted daemon; every request may safely be asked twice.
            self.close()
        try:
            return self._once(frame, deadline)
        except _Broken as broken:
            raise NotAnswering(
                f"the daemon at {self._path} closed the connection without an answer ({broken})",
                hint="look at the daemon's log, or restart it",
            ) from None

    def stream(self, frame: bytes, deadline: float) -> Iterator[bytes]:
        """Lines of a connection of its own, closed when the iterator is."""
        connection = self._connect(deadline)
        try:
            connection.send(frame, deadline)
            yield connection.line(deadline)
            while True:
                yield connection.line(None)
        except (_Broken, TimeoutError) as error:
            raise NotAnswering(
                f"the daemon at {self._path} ended the subscription ({error})", hint="subscribe again"
            ) from None
        finally:
            connection.close()

    def close(self) -> None:
        """Close every idle connection; the transport stays usable."""
        # Not "while there are some": another thread may take the last one in between.
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def __del__(self) -> None:
        """A client that was never closed, as in `Client().plan(...)`, leaves no open connections behind."""
        self.close()

    def _once(self, frame: bytes, deadline: float) -> bytes:
        connection = self._take() or self._connect(deadline)
        try:
            connection.send(frame, deadline)
            answer = self._await(connection, deadline)
        except TimeoutError:
            connection.close()
            raise NotAnswering(
                f"the daemon at {self._path} did not answer in time",
                hint="veloxquantctl doctor tells what is the matter; a longer timeout helps a slow first trace",
            ) from None
        except BaseException:
            # Whatever interrupted us, an answer may still arrive on this connection and must not meet the next request.
            connection.close()
            raise
        self._give_back(connection)
        return answer

    def _await(self, connection: _Connection, deadline: float) -> bytes:
        """The answer line. A long silence may be a slow trace or a hung daemon: a ping tells them apart."""
        share = (deadline - time.monotonic()) / 4
        silence, ping = min(FIRST_SILENCE_S, share), min(PING_S, share)
        while True:
            silence_ends = time.monotonic() + silence
            try:
                return connection.line(min(deadline, silence_ends))
            except TimeoutError:
                if time.monotonic() >= min(deadline, connection.rest_ends):
                    raise
                self._ping(min(deadline, time.monotonic() + ping))
            silence = min(silence * 2, LAST_SILENCE_S)

    def _ping(self, deadline: float) -> None:
        """Raises TimeoutError when the daemon does not answer at all. A fresh connection, not one of the pool."""
        try:
            connection = self._connect(deadline)
        except NotRunning:
            raise TimeoutError from None
        try:
            connection.send(_PING, deadline)
            connection.line(deadline)
        except _Broken:
            raise TimeoutError from None
        finally:
            connection.close()

    def _take(self) -> _Connection | None:
        """An idle connection. list.pop and append are atomic, so no lock is needed that a fork could leave held."""
        if self._owner != os.getpid():
            # A forked child must not talk over its parent's connections; closing drops only the child's copies.
            self.close()
            self._owner = os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _give_back(self, connection: _Connection) -> None:
        if connection.clean and len(self._idle) < MAX_IDLE and self._owner == os.getpid():
            self._idle.append(connection)
        else:
            connection.close()

    def _connect(self, deadline: float) -> _Connection:
        """Connect, trying again while the daemon starts (its lock is held), restarts, or has a full backlog."""
        waiting_ends = time.monotonic() + self._wait_s
        pause, tried = FIRST_PAUSE_S, 0
        while True:
            try:
                connection = _Connection(self._path)
            except BlockingIOError:
                # A full backlog means that somebody listens: worth the whole time limit.
                error: OSError | None = None
            except OSError as failure:
                error = _only_absent(failure, self._path)
                if not self._worth_trying(tried) and time.monotonic() >= waiting_ends:
                    self._was_absent = True
                    raise _not_running(self._path, error) from None
            else:
                self._was_there, self._was_absent = True, False
                return connection
            if time.monotonic() + pause >= deadline:
                raise _no_connection(self._path, error) from None
            time.sleep(_jittered(pause))
            pause, tried = min(pause * 2, LAST_PAUSE_S), tried + 1

    def _worth_trying(self, tried: int) -> bool:
        """Whether an absent daemon may be there in a moment: one that we talked to, or one that holds the lock."""
        return tried < ATTEMPTS and not self._was_absent and (tried > 0 or self._was_there or _lock_held(self._path))


class _Broken(Exception):
    """The peer closed or reset the connection."""


class _Connection:
    """One connected socket and the bytes that arrived on it beyond the last line."""

    def __init__(self, path: Path) -> None:
        """Raises OSError. A socket file that is neither ours nor root's is not talked to."""
        _refuse_foreign(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer = bytearray()
        self.rest_ends = math.inf
        """When the line that has begun must have ended."""
        try:
            # With a time limit of its own, connect reports a full backlog at once instead of blocking in the kernel.
            self._socket.settimeout(LAST_PAUSE_S)
            self._socket.connect(os.fspath(path))
        except TimeoutError:
            self._socket.close()
            raise BlockingIOError(errno.EAGAIN, "the connection was not accepted") from None
        except BaseException:
            self._socket.close()
            raise

    @property
    def clean(self) -> bool:
        """Nothing unasked has arrived."""
        return not self._buffer

    def send(self, frame: bytes, deadline: float) -> None:
        """All of the frame. Raises TimeoutError, _Broken."""
        self._limit(deadline)
        try:
            self._socket.sendall(frame)
        except TimeoutError:
            raise
        except OSError as error:
            raise _Broken(error.strerror or str(error)) from None

    def line(self, deadline: float | None) -> bytes:
        """The next line, without its newline; what arrived so far is kept on TimeoutError. Raises _Broken."""
        while True:
            end = self._buffer.find(b"\n")
            if end >= 0:
                found = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                self.rest_ends = math.inf
                return found
            if len(self._buffer) > ANSWER_LIMIT_BYTES:
                raise NotAnswering(
                    f"the answer is longer than the {ANSWER_LIMIT_BYTES:,} bytes that the protocol allows",
                    hint="check that the socket belongs to a veloxquant daemon",
                )
            self._limit(deadline)
            self._receive()

    def close(self) -> None:
        """Close; never raises."""
        self._socket.close()

    def _receive(self) -> None:
        try:
            chunk = self._socket.recv(65536)
        except TimeoutError:
            raise
        except OSError as error:
            raise _Broken(error.strerror or str(error)) from None
        if not chunk:
            raise _Broken("end of stream")
        if not self._buffer:
            self.rest_ends = time.monotonic() + REST_S
        self._buffer += chunk

    def _limit(self, deadline: float | None) -> None:
        if deadline is None:
            self._socket.settimeout(None)
            return
        left = min(deadline, self.rest_ends) - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)


def _refuse_foreign(path: Path) -> None:
    """Raises OSError when nothing is there, SocketRefused when what is there is not a socket of ours."""
    found = os.lstat(path)
    if not stat.S_ISSOCK(found.st_mode):
        raise SocketRefused(
            f"{path} is there and is not a socket",
            hint="move it away, or set VELOXQUANT_SOCKET to another path",
            field="socket.path",
        )
    if found.st_uid not in (os.getuid(), _ROOT):
        raise SocketRefused(
            f"{path} belongs to user id {found.st_uid}, not to you ({os.getuid()})",
            hint="set VELOXQUANT_SOCKET to a path in a folder of your own",
            field="socket.path",
        )


def _lock_held(path: Path) -> bool:
    """Whether a daemon holds the lock beside this socket; a lock that cannot be looked at counts as held."""
    from veloxquant.paths import lock_path

    try:
        descriptor = os.open(lock_path(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        # Shared and for an instant: a daemon that starts just now tries for longer than that.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _only_absent(error: OSError, path: Path) -> OSError:
    """The error, when it means that no daemon listens; SocketRefused for any other trouble with the path."""
    if error.errno in _ABSENT:
        return error
    raise SocketRefused(
        f"{path} cannot be connected to: {error.strerror or error}",
        hint="check the folder's owner and mode, or set VELOXQUANT_SOCKET to another path",
        field="socket.path",
    ) from None


def _not_running(path: Path, error: OSError) -> NotRunning:
    why = "no socket is there" if error.errno == errno.ENOENT else "nobody listens on it"
    return NotRunning(
        f"no veloxquant daemon is running at {path}: {why}",
        hint="start one with `veloxquantctl daemon`",
    )


def _no_connection(path: Path, error: OSError | None) -> NotRunning | NotAnswering:
    """What to say when the deadline ends the wait for a connection."""
    if error is not None:
        return _not_running(path, error)
    return NotAnswering(
        f"the daemon at {path} did not accept the connection in time",
        hint="it may be stopped or overloaded: veloxquantctl status",
    )


def _jittered(pause: float) -> float:
    """Between half and one and a half of the pause, so that many clients do not knock in step."""
    return pause * (0.5 + int.from_bytes(os.urandom(2), "big") / 65536)
