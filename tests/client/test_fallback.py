"""R36 and the fallback: whatever became of the daemon, a plan within the limit that says where it came from.

No time is asserted. A daemon that hangs does so until the test is over, so that a call that ends at all has kept its
limit; what this process is given to plan with must be more than nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import scripted

from veloxquant import _transport
from veloxquant._transport import SocketTransport
from veloxquant.client import Client
from veloxquant.errors import NotAnswering, NotRunning, ProtocolUnsupported, UnknownMethod, VeloxError
from veloxquant.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from veloxquant.planner.result import Plan

DAEMONS = scripted.NO_FIT
OURS = msgspec.structs.replace(DAEMONS, source="local")
PLAIN: dict[str, Any] = msgspec.to_builtins(DAEMONS)
LIMIT_S = 0.6


@pytest.fixture
def path(short_folder: Path) -> Path:
    """Where the daemon listens, if there is one."""
    return short_folder / "d.sock"


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that planning in this process was given, each time it was asked."""
    given: list[float] = []

    def answer(_self: Any, _method: str, _params: Any, left_s: float) -> Plan:
        given.append(left_s)
        return OURS

    monkeypatch.setattr("veloxquant._fallback.LocalPlanner.answer", answer)
    return given


def planned_here(path: Path, left: list[float], *reasons: type[VeloxError], says: str = "") -> None:
    """A plan within the limit that was made in this process, and why."""
    with Client(path, timeout_s=LIMIT_S) as client:
        assert client.plan("a/b").source == "local"
        assert client.fallback_reason is not None
        assert type(client.fallback_reason) in reasons
        assert says in client.fallback_reason.message
    assert len(left) == 1
    assert 0 < left[0] <= LIMIT_S


def test_r36_no_daemon(path: Path, left: list[float]) -> None:
    """No socket: planned here, marked, with the reason."""
    planned_here(path, left, NotRunning, says="no socket is there")


def test_r36_a_killed_daemon_left_its_socket(path: Path, left: list[float]) -> None:
    """Nobody listens on the file any more."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    planned_here(path, left, NotRunning, says="nobody listens")


@pytest.mark.parametrize("wait_s", [0.0, 0.2])
def test_r36_waiting_for_a_daemon_is_bounded(
    path: Path, left: list[float], wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `wait_s` one look at an absent daemon; with it, looks until it is over, then a plan of this process."""
    looks: list[float] = []
    clock = [time.monotonic()]

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(_transport.time, "sleep", sleep)
    monkeypatch.setattr(_transport.time, "monotonic", lambda: clock[0])
    with Client(path, timeout_s=30.0, wait_s=wait_s) as client:
        assert client.plan("a/b").source == "local"
    # From one look to the next at most 0.16 s, give or take half.
    assert wait_s <= sum(looks) <= (wait_s and wait_s + 0.24)
    assert left == [pytest.approx(30.0 - sum(looks))]


_SERVER = """
import os, signal, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(8)
print(flush=True)
while True:
    connection, _ = listener.accept()
    sys.stdin.readline() if sys.argv[2] == "accepted" else connection.recv(65536)
    if sys.argv[2] == "half":
        connection.sendall(b'{"jsonrpc":"2.0","id":1,')
    os.kill(os.getpid(), {"killed": signal.SIGKILL}.get(sys.argv[2], signal.SIGSTOP))
"""


@contextlib.contextmanager
def process(path: Path, when: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon process that stops (or dies) by itself at some moment of a request."""
    command = [sys.executable, "-S", "-E", "-c", _SERVER, str(path), when]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            yield server
        finally:
            server.kill()


def test_r36_a_stopped_daemon_before_connect(path: Path, left: list[float]) -> None:
    """SIGSTOP: the kernel still takes connections, and nobody reads them."""
    with process(path, "asked") as server:
        server.send_signal(signal.SIGSTOP)
        planned_here(path, left, NotAnswering)


@pytest.mark.parametrize("when", ["asked", "half"])
def test_r36_a_daemon_that_is_stopped_under_a_request(path: Path, left: list[float], when: str) -> None:
    """SIGSTOP after it read the request, or in the middle of its answer."""
    with process(path, when):
        planned_here(path, left, NotAnswering)


def test_r36_a_daemon_killed_under_a_request(path: Path, left: list[float]) -> None:
    """SIGKILL after it read the request: its socket file stays, nobody comes back."""
    with process(path, "killed") as server:
        # Asked again, it may still be dying (the connection breaks) or dead (nobody listens).
        planned_here(path, left, NotRunning, NotAnswering)
        assert server.wait() == -signal.SIGKILL


def dribble(connection: socket.socket) -> None:
    """An answer that never ends, a byte at a time; pings are answered at once."""
    if b'"id":0' in scripted.line(connection):
        connection.sendall(b'{"jsonrpc":"2.0","id":0,"result":{"pong":true,"pid":7,"generation":3}}\n')
        return
    while True:
        connection.sendall(b" ")
        time.sleep(0.005)


def test_r36_an_answer_that_dribbles_is_given_up(
    path: Path, left: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then is no sign of life: an answer that has begun must end soon, however long the limit."""
    monkeypatch.setattr(_transport, "REST_S", 0.1)
    monkeypatch.setattr(_transport, "FIRST_SILENCE_S", 0.03)
    with scripted.daemon(path, dribble), Client(path, timeout_s=100.0) as client:
        assert client.plan("a/b").source == "local"
        assert isinstance(client.fallback_reason, NotAnswering)
    assert left[0] > 90


def test_fallback_an_answer_in_single_bytes_is_an_answer(path: Path, left: list[float]) -> None:
    """Slow and whole is the daemon's answer."""

    def spell(connection: socket.socket) -> None:
        request = messages.decode_envelope(scripted.line(connection).rstrip())
        for byte in messages.encode_result(request.id, PLAIN):
            connection.sendall(bytes([byte]))

    with scripted.daemon(path, spell), Client(path) as client:
        assert client.plan("a/b").source == "daemon"
        assert client.fallback_reason is None
    assert left == []


def silence(connection: socket.socket) -> None:
    """Pings are answered, nothing else: a daemon whose work hangs."""
    while b'"id":0' in scripted.line(connection):
        connection.sendall(b'{"jsonrpc":"2.0","id":0,"result":{"pong":true,"pid":7,"generation":3}}\n')
    scripted.line(connection)


def test_r36_a_daemon_that_only_pretends_leaves_time_for_this_process(path: Path, left: list[float]) -> None:
    """It answers pings for ever and the question never: a part of the limit is kept from it."""
    with scripted.daemon(path, silence):
        planned_here(path, left, NotAnswering, says="in time")


def raw(line: bytes) -> Callable[[socket.socket], None]:
    """A daemon that answers every line with this one."""

    def behave(connection: socket.socket) -> None:
        while scripted.line(connection):
            connection.sendall(line + b"\n")

    return behave


def answered(value: Any) -> Callable[[socket.socket], None]:
    """A daemon with this result for everything, or this error."""

    def behave(connection: socket.socket) -> None:
        while True:
            request = messages.decode_envelope(scripted.line(connection).rstrip())
            is_error = isinstance(value, VeloxError)
            encode = messages.encode_error if is_error else messages.encode_result
            connection.sendall(encode(request.id, value))

    return behave


GARBAGE = [b"", b"\xff\xfe\x00", b"HTTP/1.1 400 Bad Request\r", b"[]", b"{", b'{"jsonrpc":"2.0","id":7,"result":{}}']


@pytest.mark.parametrize("line", [*GARBAGE, b"[" * 100_000, b"x" * (2**20 + 2)], ids=lambda line: repr(line[:20]))
def test_r36_garbage_is_no_answer(path: Path, left: list[float], line: bytes) -> None:
    """Whatever stands on that line, it is not a plan."""
    with scripted.daemon(path, raw(line)):
        planned_here(path, left, NotAnswering)


OLD: dict[str, tuple[Any, type[VeloxError], str]] = {
    "does not know the call": (UnknownMethod("there is no call plan"), UnknownMethod, "no call plan"),
    "refuses our protocol": (ProtocolUnsupported("this daemon speaks 0 to 0"), ProtocolUnsupported, "0 to 0"),
    "answers in another schema": ({**PLAIN, "schema": "veloxquant.plan/0"}, ProtocolUnsupported, "plan/0"),
    "lacks a field": ({k: v for k, v in PLAIN.items() if k != "decision"}, NotAnswering, "decision"),
    "has another type": ({**PLAIN, "budget": "plenty"}, NotAnswering, "budget"),
}


@pytest.mark.parametrize("kind", OLD)
def test_r36_an_old_daemon(path: Path, left: list[float], kind: str) -> None:
    """One of another protocol is as good as none, and the reason names what it lacks."""
    answer, reason, says = OLD[kind]
    with scripted.daemon(path, answered(answer)):
        planned_here(path, left, reason, says=says)


def test_fallback_what_only_a_daemon_knows_is_not_made_up(path: Path) -> None:
    """ping, status and the like have no local answer: an old daemon's refusal is raised."""
    with scripted.daemon(path, answered(UnknownMethod("there is no such call"))), pytest.raises(UnknownMethod):
        Client(path).status()


def test_r36_a_full_backlog(path: Path, left: list[float]) -> None:
    """A listener that accepts nobody is knocked at for the daemon's part of the limit."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        for _ in range(4):
            filler = opened.enter_context(socket.socket(socket.AF_UNIX))
            filler.settimeout(0)
            if filler.connect_ex(str(path)) != 0:
                break
        planned_here(path, left, NotAnswering if sys.platform == "linux" else NotRunning)


def test_fallback_a_daemon_that_restarts_under_a_request_answers(path: Path, left: list[float]) -> None:
    """The connection breaks after the question was read; the next daemon is asked, and answers."""
    behaviours = iter([lambda connection: scripted.line(connection) and None, answered(PLAIN)])

    def behave(connection: socket.socket) -> None:
        next(behaviours)(connection)

    with scripted.daemon(path, behave) as accepted, Client(path) as client:
        assert client.plan("a/b").source == "daemon"
        assert client.fallback_reason is None
        assert len(accepted) == 2
    assert left == []


def test_r36_the_limit_holds_for_planning_here(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning that hangs is left behind: the call ends typed while the work still goes on."""
    over = threading.Event()
    ended: list[bool] = []

    def answer(*_args: Any) -> Plan:
        ended.append(over.wait(30))
        return OURS

    monkeypatch.setattr("veloxquant._fallback.LocalPlanner.answer", answer)
    try:
        with Client(path, timeout_s=0.05) as client, pytest.raises(NotAnswering) as caught:
            client.plan("a/b")
        assert ended == []
    finally:
        over.set()
    assert "no socket is there" in caught.value.message
    assert "no answer within the remaining 0.0 s" in caught.value.message
    assert "longer timeout" in caught.value.hint


def test_fallback_errors_of_planning_here_are_its_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the question is raised as it is, also an interrupt of the work."""
    for kind in (VeloxError, KeyboardInterrupt, SystemExit):

        def answer(*_args: Any, kind: type[BaseException] = kind) -> Plan:
            raise kind("as it is")

        monkeypatch.setattr("veloxquant._fallback.LocalPlanner.answer", answer)
        with pytest.raises(kind, match="as it is"):
            Client(path).plan("a/b")


def test_fallback_each_thread_hears_its_own_reason(path: Path, left: list[float]) -> None:
    """Threads share one client while the daemon goes: every answer is right, and so is each thread's reason."""
    wrong: list[str] = []
    gone, asked = threading.Event(), threading.Barrier(9)

    with Client(path, timeout_s=60.0) as client:

        def ask() -> None:
            for _ in range(20):
                plan = client.plan("a/b")
                if (client.fallback_reason is None) != (plan.source == "daemon"):
                    wrong.append(f"{plan.source}, {client.fallback_reason}")
            asked.wait(60)
            gone.wait(60)
            plan = client.plan("a/b")
            if plan.source != "local" or not isinstance(client.fallback_reason, NotRunning):
                wrong.append(f"after the end: {plan.source}, {client.fallback_reason}")

        threads = [threading.Thread(target=ask) for _ in range(8)]
        with scripted.daemon(path, answered(PLAIN)):
            for thread in threads:
                thread.start()
            asked.wait(60)
        gone.set()
        for thread in threads:
            thread.join()
        assert client.fallback_reason is None
    assert wrong == []
    assert len(left) == 8


_FORKING = """
import os, sys
from veloxquant.client import Client
client = Client(sys.argv[1], fallback=False)
first = client.ping().pid
child = os.fork()
for _ in range(20):
    assert client.ping().pid == first
if child == 0:
    client.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
client.ping()
print(os.waitstatus_to_exitcode(status))
"""


def test_fallback_a_fork_after_connecting(path: Path) -> None:
    """Parent and child ask at once, each over its own connection; the child's end leaves the parent's alone."""

    def pong(connection: socket.socket) -> None:
        while True:
            scripted.reply(connection, {"pong": True, "pid": 7, "generation": 3})

    with scripted.daemon(path, pong) as accepted:
        done = subprocess.run(
            [sys.executable, "-c", _FORKING, str(path)], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.strip() == "0"
        assert len(accepted) == 2


def test_fallback_signals_do_not_end_a_wait(path: Path, left: list[float]) -> None:
    """A handler that runs in the middle of waiting and sending changes nothing (EINTR is taken up again)."""
    seen: list[int] = []
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(connection: socket.socket) -> None:
        request = messages.decode_envelope(scripted.line(connection).rstrip())
        for expected in range(1, 21):
            signal.pthread_kill(main, signal.SIGUSR1)
            while len(seen) < expected:
                time.sleep(0.001)
        connection.sendall(messages.encode_result(request.id, PLAIN))

    before = signal.signal(signal.SIGUSR1, lambda number, _frame: seen.append(number))
    try:
        with scripted.daemon(path, interrupt), Client(path) as client:
            assert client.plan("a/b").source == "daemon"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(seen) == 20
    assert left == []


def test_fallback_a_handler_that_raises_ends_the_wait(path: Path) -> None:
    """Ctrl-C in the middle of a call: the interrupt is raised, and the late answer meets no later question."""
    main = threading.main_thread().ident
    assert main is not None
    asked: list[Any] = []

    def answer_late(connection: socket.socket) -> None:
        while True:
            asked.append(messages.decode_envelope(scripted.line(connection).rstrip()).id)
            if len(asked) == 1:
                signal.pthread_kill(main, signal.SIGINT)
                time.sleep(0.02)
            connection.sendall(messages.encode_result(asked[-1], {"pong": True, "pid": asked[-1], "generation": 0}))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with scripted.daemon(path, answer_late) as accepted, Client(path, fallback=False) as client:
            with pytest.raises(KeyboardInterrupt):
                client.ping()
            assert client.ping().pid == 2
            assert len(accepted) == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_fallback_closing_while_another_thread_waits(path: Path) -> None:
    """The waiting thread gets its answer; the client stays usable; in the end nothing is open."""
    reading, closed = threading.Event(), threading.Event()

    def hold(connection: socket.socket) -> None:
        while True:
            request = messages.decode_envelope(scripted.line(connection).rstrip())
            reading.set()
            closed.wait(30)
            connection.sendall(messages.encode_result(request.id, {"pong": True, "pid": 7, "generation": 0}))

    with scripted.daemon(path, hold):
        client = Client(path, fallback=False)
        pids: list[int] = []
        waiting = threading.Thread(target=lambda: pids.append(client.ping().pid))
        waiting.start()
        assert reading.wait(30)
        client.close()
        closed.set()
        waiting.join()
        assert pids == [7]
        assert client.ping().pid == 7
        client.close()
        door = client._door()
        assert isinstance(door, SocketTransport)
        assert door._idle == []


def test_fallback_two_threads_close_at_once(path: Path) -> None:
    """The last idle connection may be taken by another thread between looking and taking: no error."""

    class Taken(list[Any]):
        """Looks full, and is empty when it is taken from."""

        def __bool__(self) -> bool:
            return True

        def __len__(self) -> int:
            return 1

    door = SocketTransport(path)
    door._idle = Taken()
    door.close()
    assert door._take() is None
    door._idle = []


def test_fallback_of_a_forked_child_closes_its_copies_only(path: Path) -> None:
    """What a child gives back is not put among the parent's connections."""
    door = SocketTransport(path)
    ours, theirs = socket.socketpair()
    with theirs:
        connection = _transport._Connection.__new__(_transport._Connection)
        connection._socket = ours
        connection._buffer = bytearray()
        door._owner = os.getpid() + 1
        door._give_back(connection)
        assert door._idle == []
        assert theirs.recv(1) == b""
