"""Clients that mean harm, or were never tested: what they get, and that others and the daemon's own do not suffer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from daemon_kit import Daemon, Wire, in_process, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reliability import load, malformed, r12_hang_ups, r12_malformed, r14_long_line, r18_connect_burst

from veloxquant.daemon.connection import Patience
from veloxquant.errors import ModelNotSupported
from veloxquant.wire.frames import REQUEST_LIMIT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from veloxquant.daemon.server import Server
    from veloxquant.local import World
    from veloxquant.models.resolve import ModelSource
    from veloxquant.profiles import ModelProfile

PING = b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n'
METHODS = b'{"jsonrpc":"2.0","id":1,"method":"methods"}\n'
UNFINISHED = b'{"jsonrpc":"2.0","id":1,"method":"pl'
PIECES = (b"", PING, PING * 40, METHODS, METHODS * 60, UNFINISHED, b"\xff\n", b"x" * 300_000, b"GET / HTTP/1.1\r\n\r\n")
SUBSCRIBE = b'{"jsonrpc":"2.0","id":1,"method":"subscribe"}\n'
UNSUBSCRIBE = b'{"jsonrpc":"2.0","id":1,"method":"unsubscribe"}\n'


@pytest.fixture(scope="module")
def at_rest(shared: Daemon) -> tuple[int, int]:
    """Descriptors and tasks of the daemon while nobody but the one who asks is there."""
    shared.call("methods")  # what is made once is made
    return held(shared)


def held(daemon: Daemon) -> tuple[int, int]:
    """Descriptors and tasks now."""
    process = daemon.call("status")["process"]
    return process["fds"], process["tasks"]


def assert_nothing_left(daemon: Daemon, at_rest: tuple[int, int]) -> None:
    """Soon nobody is there but the one who asks, and nothing of the others."""
    wait_for(lambda: daemon.call("status")["clients"]["now"] == 1, "all gone")
    wait_for(
        lambda: all(now <= then for now, then in zip(held(daemon), at_rest, strict=True)),
        f"no more than {at_rest} descriptors and tasks",
    )


def test_r10_many_persistent_clients_all_get_all_their_answers(shared: Daemon, at_rest: tuple[int, int]) -> None:
    """256 at once, each asking again as soon as it has its answer."""
    outcome = load.run(str(shared.socket), [PING, METHODS] * 128, 5)
    assert outcome.errors == []
    assert len(outcome.seconds) == 256 * 5
    assert_nothing_left(shared, at_rest)


@pytest.mark.parametrize("kind", malformed.KINDS)
def test_r12_each_kind_of_malformed_line_gets_one_typed_error(shared: Daemon, kind: str) -> None:
    """With a hint, whatever the line is; a good line behind it is answered."""
    make = malformed.KINDS[kind]
    wire = Wire(shared.socket)
    for line in (make(malformed.dice(seed)) for seed in range(12)):
        answer = wire.ask(line)
        assert answer["error"]["data"]["name"] in ("parse_error", "invalid_request", "invalid_params", "unknown_method")
        assert answer["error"]["data"]["hint"]
    assert wire.call("ping")["pong"]
    wire.close()


def test_r12_malformed_lines_leave_no_descriptor_and_no_task(shared: Daemon, at_rest: tuple[int, int]) -> None:
    """Two thousand of all kinds; the module's daemon logs no traceback (its fixture looks)."""
    assert r12_malformed.send(str(shared.socket), 2000, seed=12) == 0
    assert_nothing_left(shared, at_rest)


def test_r12_clients_that_hang_up_leave_no_descriptor_and_no_task(shared: Daemon, at_rest: tuple[int, int]) -> None:
    """At any moment: before, in and after a line, in the middle of an answer, with an end or a reset."""
    r12_hang_ups.hang_up(str(shared.socket), 300, seed=12, plans=False)
    assert_nothing_left(shared, at_rest)


def test_r14_an_endless_line_is_cut_off_soon(shared: Daemon) -> None:
    """Of a gibibyte hardly more than the limit and the socket's own buffers are taken."""
    sent, said, closed = r14_long_line.send_long_line(str(shared.socket))
    assert sent < 8 * REQUEST_LIMIT_BYTES
    assert [json.loads(line)["error"]["data"]["name"] for line in said] == ["frame_too_large"]
    assert closed


def test_r15_half_open_clients_keep_nobody_waiting(shared: Daemon, at_rest: tuple[int, int]) -> None:
    """500 of them, and a fresh client is answered."""
    half_open = [Wire(shared.socket) for _ in range(500)]
    for one in half_open:
        one.send(UNFINISHED)
    assert shared.call("ping")["pong"]
    assert shared.call("status")["clients"]["now"] == 501
    for one in half_open:
        one.close()
    assert_nothing_left(shared, at_rest)


def test_r16_a_client_that_never_reads_keeps_nobody_waiting(shared: Daemon) -> None:
    """While it is stalled others are answered, and it is not served on: its questions stay in its own buffers."""
    stalled = Wire(shared.socket)
    before = shared.call("status")["requests"]["by_method"].get("methods", 0)
    asked = 20_000

    def ask() -> None:
        with contextlib.suppress(OSError):  # it is hung up on
            stalled.send(METHODS * asked)

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(50):
        assert shared.call("ping")["pong"]
    answered = shared.call("status")["requests"]["by_method"]["methods"] - before
    assert 0 < answered < asked / 2
    stalled.socket.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    stalled.close()


def test_r18_a_burst_beyond_the_backlog_is_not_seen_by_callers(shared: Daemon) -> None:
    """700 of our clients connect while the daemon accepts nothing; its backlog is 512."""
    failures, _, _ = r18_connect_burst.burst(shared.socket, shared.process.pid, 700)
    assert failures == []


def no_thread() -> Exception:
    """What the interpreter raises when the system gives it none."""
    usual = threading.stack_size(2**46)  # no machine has so much
    try:
        threading.Thread(target=print).start()
    except RuntimeError as error:
        return error
    finally:
        threading.stack_size(usual)
    raise AssertionError("a thread with a stack of 64 TiB")


@pytest.mark.parametrize("trouble", [OSError(errno.EMFILE, "Too many open files"), MemoryError(), no_thread()])
def test_r19_a_request_that_starves_is_told_so(trouble: Exception) -> None:
    """Want of files, memory or threads passes: it is `overloaded`, not a mistake of ours with a ticket."""
    from types import SimpleNamespace

    from veloxquant.daemon.counters import Counters
    from veloxquant.daemon.dispatch import Dispatch

    def starve() -> None:
        raise trouble

    config = SimpleNamespace(daemon=SimpleNamespace(slow_call_ms=1000))
    app: Any = SimpleNamespace(state=None, counters=Counters(), config=config, status=starve)
    client: Any = SimpleNamespace(peer=SimpleNamespace(uid=1, pid=2))
    answer = Dispatch(app).answer(b'{"jsonrpc":"2.0","id":7,"method":"status"}', client)
    assert isinstance(answer, bytes)
    found = json.loads(answer)
    assert (found["id"], found["error"]["data"]["name"]) == (7, "overloaded")
    assert found["error"]["data"]["hint"]


@pytest.mark.parametrize(
    "frame", [b"GET / HTTP/1.1\r\n", b"POST /rpc HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", b"HEAD / HTTP/1.0\n"]
)
def test_an_http_client_gets_one_answer_and_the_end(shared: Daemon, frame: bytes) -> None:
    """Whatever its verb, and nothing that follows the first line is taken for a request."""
    wire = Wire(shared.socket)
    wire.send(frame + PING)
    lines = list(iter(wire.line, b""))
    assert lines[0].startswith(b"HTTP/1.1 400 ")
    assert not any(b"pong" in line for line in lines)
    wire.close()


class Crowd:
    """A few clients, each open or not."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self.open: dict[int, Wire] = {}

    def act(self, who: int, what: str, data: bytes) -> None:
        """One step of one client; what the daemon does to it in return is its own affair."""
        client = self.open.get(who)
        if client is None:
            client = self.open[who] = Wire(self.path)
        with contextlib.suppress(OSError):
            self._steps[what](self, who, client, data)

    def _send(self, _who: int, client: Wire, data: bytes) -> None:
        client.socket.settimeout(0.05)  # who does not read cannot send for ever
        client.send(data)

    def _read(self, _who: int, client: Wire, data: bytes) -> None:
        client.socket.settimeout(0.02)
        client.socket.recv(1 + len(data) * 100)

    def _end(self, _who: int, client: Wire, _data: bytes) -> None:
        client.socket.shutdown(socket.SHUT_WR)

    def _close(self, who: int, client: Wire, _data: bytes) -> None:
        del self.open[who]
        client.close()

    def _reset(self, who: int, client: Wire, _data: bytes) -> None:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close(who, client, b"")

    _steps: ClassVar[dict[str, Callable[..., None]]] = {
        "send": _send,
        "read": _read,
        "end": _end,
        "close": _close,
        "reset": _reset,
    }


STEP = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["send", "send", "send", "read", "end", "close", "reset"]),
    st.sampled_from([*PIECES, SUBSCRIBE, UNSUBSCRIBE]) | st.binary(max_size=30),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, min_size=1, max_size=14))
def test_no_sequence_of_behaviours_leaves_anything_behind(
    shared: Daemon, at_rest: tuple[int, int], steps: list[tuple[int, str, bytes]]
) -> None:
    """Four clients send, read, subscribe, end, close and reset in any order; one who behaves is answered throughout."""
    good, crowd = Wire(shared.socket), Crowd(shared.socket)
    for who, what, data in steps:
        crowd.act(who, what, data)
        assert good.call("ping")["pong"]
    for wire in (good, *crowd.open.values()):
        wire.close()
    assert_nothing_left(shared, at_rest)


def test_clients_that_vanish_while_their_models_wait_leave_no_trace_to_be_made(short_folder: Path) -> None:
    """Closed at once, or first for writing alone: their traces are not begun, and their connections go."""
    began: list[str] = []
    go = threading.Event()

    def scenario(server: Server) -> None:
        def trace(model: ModelSource, _world: World) -> ModelProfile:
            began.append(model.model_id)
            assert go.wait(30)
            raise ModelNotSupported("no such model", hint="another")

        server.app.traces._trace = trace
        half, closed, reader = ([Wire(server.app._socket) for _ in range(3)] for _ in range(3))
        for number, wire in enumerate((*half, *closed, *reader)):
            model = {"config": {"model_type": "llama", "hidden_size": number}, "model_id": f"m{number}"}
            params = {"model": model, "workload": {"context_length": 1024}}
            wire.send(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "plan", "params": params}).encode() + b"\n")
            wait_for(lambda number=number: traced(server) == number + 1, "its trace to run or wait")
        for wire in half:
            wire.socket.shutdown(socket.SHUT_WR)
        for wire in closed:
            wire.close()
        wait_for(lambda: traced(server) == len(half) + len(reader), "those that went to be forgotten")
        assert server.app.traces.state().waiting == 4  # whoever only writes no more is answered
        for wire in half:
            wire.close()
        wait_for(lambda: traced(server) == 2 + len(reader), "the others that went to be forgotten")
        assert len(server.app.clients) == len(reader)
        go.set()
        for wire in reader:
            assert b"no such model" in wire.line()
            wire.close()
        with contextlib.closing(Wire(server.app._socket)) as last:
            last.call("shutdown")

    assert in_process(short_folder, scenario, patience=Patience(look_s=0.01)) == 0
    assert sorted(began) == ["m0", "m1", "m6", "m7", "m8"]


def traced(server: Server) -> int:
    """Traces that run, and that wait for their turn."""
    state = server.app.traces.state()
    return state.running + state.waiting


def test_a_client_that_goes_away_amid_a_reload_does_not_end_it(short_folder: Path) -> None:
    """Half a reload would be a daemon that no longer looks at the records."""
    go = threading.Event()

    def scenario(server: Server) -> None:
        build = server.app._build
        server.app._build = lambda: go.wait(30) and build()  # type: ignore[method-assign]
        gone = Wire(server.app._socket)
        gone.send(b'{"jsonrpc":"2.0","id":1,"method":"reload"}\n')
        wait_for(server.app._reloading.locked, "the reload")
        server.app.state.warnings["reload"] = "an earlier one failed"
        gone.close()
        wait_for(lambda: not server.app.clients, "the client to be gone")
        go.set()
        wait_for(lambda: "reload" not in server.app.state.warnings, "the reload to be done")
        with contextlib.closing(Wire(server.app._socket)) as last:
            last.call("shutdown")

    assert in_process(short_folder, scenario) == 0


def test_clients_that_left_while_they_waited_take_nobodys_place(short_folder: Path) -> None:
    """Who asks about a model that is being traced and goes would else count until the trace has ended."""

    def scenario(server: Server) -> None:
        async def never(*_: object) -> bytes:
            return await asyncio.Event().wait() and b""

        server.app.question = never  # type: ignore[assignment, method-assign]
        waiting, gone = (Wire(server.app._socket) for _ in range(2))
        for wire in (waiting, gone):
            wire.send(b'{"jsonrpc":"2.0","id":1,"method":"plan","params":{"model":{"config":{}}}}\n')
        wait_for(lambda: all(client._working for client in server.app.clients) and len(server.app.clients) == 2, "both")
        gone.close()
        late = Wire(server.app._socket)
        assert late.call("ping")["pong"]
        late.call("shutdown")
        waiting.close()
        late.close()

    assert in_process(short_folder, scenario, flags={"daemon.max_connections": 2, "daemon.drain_s": 0.01}) == 0
