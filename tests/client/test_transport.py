"""The client's way to the daemon: retry, reconnect, and a deadline that holds whatever the daemon does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
import scripted

from veloxquant import _transport, paths
from veloxquant._transport import SocketTransport
from veloxquant.client import Client
from veloxquant.errors import FrameTooLarge, InvalidParams, NotAnswering, NotRunning, SocketRefused
from veloxquant.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PONG = {"pong": True, "pid": 7, "generation": 3}


def pong(connection: socket.socket) -> None:
    """Answer every request on this connection."""
    while True:
        scripted.reply(connection, PONG)


def client(path: Path, timeout_s: float = 5.0) -> Client:
    """A client that never plans in its own process."""
    return Client(path, timeout_s=timeout_s, fallback=False)


@pytest.fixture
def path(short_folder: Path) -> Path:
    """Where the scripted daemon listens."""
    return short_folder / "d.sock"


def test_one_connection_serves_many_calls(path: Path) -> None:
    """The connection is kept from one call to the next."""
    with scripted.daemon(path, pong) as accepted, client(path) as asking:
        for _ in range(5):
            assert asking.ping().pid == 7
        assert len(accepted) == 1


def test_a_restarted_daemon_is_found_again(path: Path) -> None:
    """A kept connection that broke is replaced without the caller noticing."""
    with client(path) as asking:
        with scripted.daemon(path, pong):
            asking.ping()
        with scripted.daemon(path, pong):
            assert asking.ping().generation == 3


@pytest.fixture
def lock_held(path: Path) -> Iterator[Path]:
    """The lock of a daemon that has started and does not listen yet."""
    lock = paths.lock_path(path)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield lock


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the transport would have slept, each time."""
    slept: list[float] = []
    monkeypatch.setattr(_transport.time, "sleep", slept.append)
    return slept


@pytest.mark.usefixtures("lock_held")
def test_a_daemon_that_is_starting_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is held: it is tried again, and found once it listens."""
    with contextlib.ExitStack() as running:
        started: list[float] = []

        def start(pause: float) -> None:
            started.append(pause)
            if len(started) == 3:
                running.enter_context(scripted.daemon(path, pong))

        monkeypatch.setattr(_transport.time, "sleep", start)
        with client(path) as asking:
            assert asking.ping().pong
        assert len(started) == 3


def test_a_daemon_that_goes_between_two_calls_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was there a moment ago, so it may be restarting: tried again although nobody holds the lock yet."""
    with contextlib.ExitStack() as running:
        asking = running.enter_context(client(path))
        with scripted.daemon(path, pong):
            asking.ping()
        monkeypatch.setattr(_transport.time, "sleep", lambda _pause: running.enter_context(scripted.daemon(path, pong)))
        assert asking.ping().pong


def test_without_a_holder_of_the_lock_nobody_is_waited_for(path: Path, pauses: list[float]) -> None:
    """No lock file, or one that a dead daemon left: the answer that none runs comes at once."""
    with pytest.raises(NotRunning), client(path) as asking:
        asking.ping()
    paths.lock_path(path).write_text("4312\n")
    with pytest.raises(NotRunning), client(path) as asking:
        asking.ping()
    assert pauses == []


def test_looking_at_the_lock_leaves_it_to_the_daemon(path: Path) -> None:
    """A client that looked holds nothing afterwards."""
    lock = paths.lock_path(path)
    lock.touch()
    with pytest.raises(NotRunning), client(path) as asking:
        asking.ping()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_absence_is_said_with_the_way_out(path: Path) -> None:
    """No socket is NotRunning, naming the path and the command that starts one."""
    with pytest.raises(NotRunning, match=r"d\.sock: no socket is there") as caught, client(path) as asking:
        asking.ping()
    assert "veloxquantctl daemon" in caught.value.hint


def test_a_stale_socket_is_not_running(path: Path) -> None:
    """A socket file that nobody listens on is NotRunning, not a crash."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
        stale.bind(str(path))
    with pytest.raises(NotRunning, match="nobody listens"), client(path) as asking:
        asking.ping()


@pytest.mark.usefixtures("lock_held")
def test_known_absence_is_not_waited_for_again(path: Path, pauses: list[float]) -> None:
    """After one full round of retries, later calls look once, so that a server without a daemon is not slowed."""
    asking = client(path)
    for expected in (5, 5):
        with pytest.raises(NotRunning):
            asking.ping()
        assert len(pauses) == expected


@pytest.mark.usefixtures("lock_held")
def test_retry_pauses_double_from_10_to_160_ms(path: Path, pauses: list[float]) -> None:
    """Each pause is its nominal value give or take half, so that clients do not knock in step."""
    with pytest.raises(NotRunning), client(path) as asking:
        asking.ping()
    for nominal, pause in zip((0.010, 0.020, 0.040, 0.080, 0.160), pauses, strict=True):
        assert nominal / 2 <= pause < nominal * 1.5


def silence(connection: socket.socket) -> None:
    """Read, never answer."""
    while True:
        scripted.line(connection)


def drip(connection: socket.socket) -> None:
    """An answer that never ends, a byte at a time."""
    scripted.line(connection)
    while True:
        connection.sendall(b" ")
        time.sleep(0.01)


def endless(connection: socket.socket) -> None:
    """A line that does not stop."""
    scripted.line(connection)
    while True:
        connection.sendall(b"x" * 65536)


def garbage(connection: socket.socket) -> None:
    """Bytes that are no JSON."""
    while scripted.line(connection):
        connection.sendall(b"\xff\x00 not the protocol\n")


def hang_up(connection: socket.socket) -> None:
    """Close without an answer."""
    scripted.line(connection)


def slam(connection: socket.socket) -> None:
    """Close with the request unread, which resets the connection."""
    connection.recv(1, socket.MSG_PEEK)


def other_id(connection: socket.socket) -> None:
    """An answer to another request."""
    while scripted.line(connection):
        connection.sendall(b'{"jsonrpc":"2.0","id":999999,"result":{}}\n')


def no_result(connection: socket.socket) -> None:
    """An answer with nothing in it."""
    while scripted.line(connection):
        connection.sendall(b'{"jsonrpc":"2.0","id":1}\n')


@pytest.mark.parametrize("behaviour", [silence, drip, endless, garbage, hang_up, slam, other_id, no_result])
def test_whatever_the_daemon_does_the_call_ends_typed(path: Path, behaviour: Callable[[socket.socket], None]) -> None:
    """A daemon that hangs, drips, floods, babbles or hangs up without end: the call ends all the same, typed."""
    with (
        scripted.daemon(path, behaviour),
        client(path, timeout_s=0.6) as asking,
        pytest.raises(NotAnswering) as caught,
    ):
        asking.ping()
    assert caught.value.hint


def test_a_daemon_that_does_not_even_read_is_given_up(path: Path) -> None:
    """Sending is under the same limit as waiting: a full socket buffer does not hold the caller."""
    read_on = threading.Event()
    with scripted.daemon(path, lambda _connection: read_on.wait(10) and None), client(path, timeout_s=0.4) as asking:
        with pytest.raises(NotAnswering, match="in time"):
            asking._door().exchange(b"x" * 4_000_000 + b"\n", time.monotonic() + 0.4)
        read_on.set()


def test_a_slow_answer_of_a_living_daemon_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long work on one connection is not taken for a hang while the daemon answers pings on another."""
    monkeypatch.setattr(_transport, "FIRST_SILENCE_S", 0.05)
    pings = threading.Semaphore(0)

    def slow(connection: socket.socket) -> None:
        if b'"id":0' in scripted.line(connection):
            pings.release()
            connection.sendall(b'{"jsonrpc":"2.0","id":0,"result":{"pong":true,"pid":7,"generation":3}}\n')
            return
        assert pings.acquire(timeout=30)
        assert pings.acquire(timeout=30)
        connection.sendall(b'{"jsonrpc":"2.0","id":1,"result":{"pong":true,"pid":7,"generation":3}}\n')

    with scripted.daemon(path, slow), client(path, timeout_s=30) as asking:
        assert asking.ping().pid == 7


@pytest.mark.usefixtures("lock_held")
def test_r18_a_full_backlog_is_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst above the backlog is absorbed: refused with EAGAIN on Linux, like an absent daemon on macOS."""
    knocked = threading.Event()
    pause = time.sleep

    def sleep(seconds: float) -> None:
        knocked.set()
        pause(seconds)

    monkeypatch.setattr(_transport.time, "sleep", sleep)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(0)
    fillers = []
    for _ in range(4):
        filler = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        filler.settimeout(0)
        fillers.append(filler)
        if filler.connect_ex(str(path)) != 0:
            break

    def accept_late() -> None:
        knocked.wait(30)
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                pong(connection)
            except (OSError, EOFError):
                return

    acceptor = threading.Thread(target=accept_late, daemon=True)
    acceptor.start()
    try:
        with client(path) as asking:
            assert asking.ping().pong
        assert knocked.is_set()
    finally:
        for filler in fillers:
            filler.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(5)


def test_threads_share_one_client(path: Path) -> None:
    """Answers reach the thread that asked, with at most one connection for each."""

    def echo(connection: socket.socket) -> None:
        while True:
            request = messages.decode_envelope(scripted.line(connection).rstrip())
            result = {"pong": True, "pid": request.id, "generation": 0}
            connection.sendall(messages.encode_result(request.id, result))

    mixed: list[tuple[int, int]] = []
    with scripted.daemon(path, echo) as accepted, client(path) as asking:

        def ask(number: int) -> None:
            params = messages.encode_request(number, "ping", {})
            for _ in range(50):
                answer = messages.decode_answer(asking._door().exchange(params, time.monotonic() + 5))
                if answer.id != number:
                    mixed.append((number, int(answer.id or 0)))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not mixed
        assert 1 <= len(accepted) <= 8


def test_a_forked_child_opens_its_own_connection(path: Path) -> None:
    """Parent and child never share a connection, so that neither reads the other's answers."""
    with scripted.daemon(path, pong) as accepted, client(path) as asking:
        asking.ping()
        door = asking._door()
        assert isinstance(door, SocketTransport)
        door._owner = os.getpid() + 1  # what a child sees: the connections are another process's
        asking.ping()
        assert len(accepted) == 2


def test_a_file_at_the_path_is_refused(path: Path) -> None:
    """What is not a socket is not talked to, and the way out is named."""
    path.write_text("here")
    with pytest.raises(SocketRefused, match="not a socket") as caught, client(path) as asking:
        asking.ping()
    assert "VELOXQUANT_SOCKET" in caught.value.hint


def test_a_socket_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that neither we nor root own is not talked to."""
    with scripted.daemon(path, pong) as accepted:
        owner = path.stat().st_uid
        monkeypatch.setattr(_transport.os, "getuid", lambda: owner + 1)
        monkeypatch.setattr(_transport, "_ROOT", -1)
        with pytest.raises(SocketRefused, match="belongs to user id"), client(path) as asking:
            asking.ping()
        assert not accepted


def test_a_path_that_leads_through_a_file_is_refused(path: Path) -> None:
    """No wait would make it a folder: the trouble is named as the system words it."""
    path.write_text("here")
    with pytest.raises(SocketRefused, match="cannot be connected to: Not a directory") as caught:
        client(path / "d.sock").ping()
    assert caught.value.field == "socket.path"


def test_a_lock_that_cannot_be_looked_at_counts_as_held(path: Path, pauses: list[float]) -> None:
    """A link in its place is not followed; a daemon that may be starting is waited for."""
    paths.lock_path(path).symlink_to(path)
    with pytest.raises(NotRunning):
        client(path).ping()
    assert len(pauses) == 5


def test_a_connection_that_the_system_keeps_waiting_is_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """A socket with a time limit may report that in place of a full backlog; the second knock is answered."""
    waited: list[object] = []

    class Slow(socket.socket):
        def connect(self, address: object) -> None:  # type: ignore[override]
            if not waited:
                waited.append(address)
                raise TimeoutError
            super().connect(address)  # type: ignore[arg-type]

    monkeypatch.setattr(_transport.socket, "socket", Slow)
    with scripted.daemon(path, pong), client(path) as asking:
        assert asking.ping().pid == 7
    assert (waited, len(pauses)) == ([str(path)], 1)


def test_a_subscription_that_is_refused_is_the_daemons_error(path: Path) -> None:
    """As of any other call."""

    def refuse(connection: socket.socket) -> None:
        scripted.line(connection)
        connection.sendall(messages.encode_error(1, InvalidParams("no such topic", hint="ask for another")))

    with scripted.daemon(path, refuse), client(path) as asking, pytest.raises(InvalidParams, match="no such topic"):
        next(asking.subscribe(["weather"]))


def test_a_path_that_is_too_long_is_refused_before_connecting(short_folder: Path) -> None:
    """The system's limit is named, not met as a cryptic failure."""
    with pytest.raises(SocketRefused, match="bytes long"):
        client(short_folder / ("x" * 120)).ping()


def test_a_request_beyond_the_limit_is_not_sent(path: Path) -> None:
    """A config of more than 256 KiB is refused here, since the daemon would close the connection."""
    with scripted.daemon(path, pong) as accepted, pytest.raises(FrameTooLarge):
        client(path).plan({"model_type": "llama", "padding": "x" * 300_000})
    assert not accepted


def test_times_that_are_no_times_are_refused(path: Path) -> None:
    """A time limit is finite and not negative."""
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidParams, match="timeout_s"):
            client(path, timeout_s=wrong)
        with pytest.raises(InvalidParams, match="timeout_s"):
            client(path).ping(timeout_s=wrong)


def test_subscriptions_yield_notices_until_the_daemon_goes(path: Path) -> None:
    """The first line answers the request, every later one is a notice; the end is a typed error."""

    def notify(connection: socket.socket) -> None:
        scripted.reply(connection, {"topics": ["generation"]})
        for generation in (4, 5):
            connection.sendall(messages.encode_notice("notice", {"event": "changed", "generation": generation}))

    with scripted.daemon(path, notify), client(path) as asking:
        notices = asking.subscribe(["generation"])
        assert [next(notices).generation, next(notices).generation] == [4, 5]
        with pytest.raises(NotAnswering, match="ended the subscription"):
            next(notices)


def test_r36_a_mute_daemon_is_given_up_after_two_seconds() -> None:
    """The first silence, and the ping that nobody answers: a plan of our own within some seconds, not at the limit."""
    assert _transport.FIRST_SILENCE_S + _transport.PING_S == 2.0
