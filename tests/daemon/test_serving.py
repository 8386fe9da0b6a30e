"""What any client may send, and what it gets."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
from typing import TYPE_CHECKING, Any

import pytest
from daemon_kit import TINY_LLAMA, Daemon, Wire, wait_for

from veloxquant import __version__, errors
from veloxquant.methods import registry
from veloxquant.wire import messages
from veloxquant.wire.frames import REQUEST_LIMIT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PING = b'{"jsonrpc":"2.0","id":%d,"method":"ping"}'


@pytest.fixture
def wire(shared: Daemon) -> Iterator[Wire]:
    """A connection to the module's daemon."""
    wire = Wire(shared.socket)
    yield wire
    wire.close()


def test_hello_says_who_answers(wire: Wire, shared: Daemon) -> None:
    """And every call is a capability."""
    hello = wire.call("hello", {"client": "a test", "protocol": [1, 2], "want": ["plan"]})
    assert (hello["server"], hello["version"], hello["protocol"]) == ("veloxquant", __version__, 1)
    assert hello["pid"] == shared.process.pid
    assert set(hello["capabilities"]) == set(messages.PARAMS)


@pytest.mark.parametrize("versions", [[0], [2], [2, 3]])
def test_r20_another_protocol_is_refused_with_the_range(wire: Wire, versions: list[int]) -> None:
    """Older or newer; the connection stays usable."""
    with pytest.raises(errors.ProtocolUnsupported, match="speaks 1 to 1"):
        wire.call("hello", {"protocol": versions})
    assert wire.call("ping")["pong"]


def test_hello_is_optional(wire: Wire) -> None:
    """So that nc works."""
    ping, hello = wire.call("ping"), wire.call("hello")
    assert ping.keys() == {"pong", "pid", "generation"}  # the generation moves with a busy machine's memory
    assert (ping["pong"], ping["pid"]) == (True, hello["pid"])


def test_methods_are_listed_with_their_variants(wire: Wire) -> None:
    """The first-party ones."""
    rows = {row["name"]: row for row in wire.call("methods")["methods"]}
    ours = [method.name for method in registry.load().methods]
    assert {name: row["state"] for name, row in rows.items()} == dict.fromkeys(ours, "ready")
    assert "affine4-g64" in [variant["label"] for variant in rows["affine"]["variants"]]
    with pytest.raises(errors.MethodNotFound, match="afine"):
        wire.call("methods", {"name": "afine"})


def test_hardware_can_be_another_machine(wire: Wire) -> None:
    """This one, or as if on a Mac."""
    here = wire.call("hardware")
    assert set(here["sources"]) >= {"chip", "available_bytes"}
    there = wire.call("hardware", {"hardware": {"chip": "Apple M2", "gpu_cores": 10, "total_memory_bytes": 16 * 2**30}})
    assert (there["chip"], there["generation"], there["total_memory_bytes"]) == ("Apple M2", 2, 16 * 2**30)


def test_status_tells_all(wire: Wire, shared: Daemon) -> None:
    """And the daemon has imported no engine."""
    wire.call("ping")
    status = wire.call("status")
    assert status["schema"] == "veloxquant.status/1"
    assert (status["pid"], status["socket"]) == (shared.process.pid, str(shared.socket))
    assert status["methods"] == {"ready": len(registry.load().methods), "quarantined": {}}
    assert status["clients"]["now"] >= 1
    assert status["requests"]["by_method"]["ping"] >= 1
    assert status["process"]["engine_modules"] == []
    assert 0 < status["process"]["rss_bytes"] < 60 * 2**20
    assert status["process"]["fds"] < status["process"]["fd_limit"]


def test_an_error_does_not_end_the_connection(wire: Wire) -> None:
    """The next line is a new chance."""
    for bad in (b"", b"{", b"[]", b'{"jsonrpc":"2.0","id":1,"method":"zork"}', b"\x00\xff"):
        assert "error" in wire.ask(bad)
    assert wire.call("ping")["pong"]


def test_the_error_carries_the_id_and_the_json_rpc_code(wire: Wire) -> None:
    """Name, hint and field are in its data."""
    answer = wire.ask(b'{"jsonrpc":"2.0","id":"x","method":"ping","params":{"loud":true}}')
    assert (answer["id"], answer["error"]["code"]) == ("x", -32602)
    assert answer["error"]["data"]["name"] == "invalid_params"
    assert answer["error"]["data"]["field"] == "loud"
    assert answer["error"]["data"]["hint"]


BAD_PLANS: list[tuple[dict[str, Any], type[errors.VeloxError], str | None]] = [
    ({"model": {"path": "/no/such/folder"}}, errors.ModelNotFound, "model.path"),
    ({"model": {"path": "relative/folder"}}, errors.InvalidParams, "model.path"),
    ({"model": {"id": "nobody/nothing"}}, errors.ModelNotFound, "model.id"),
    ({"model": {"id": "../../etc"}}, errors.InvalidParams, "model.id"),
    ({"model": {"config": {"model_type": "zork"}}}, errors.ModelNotSupported, None),
    (
        {"model": {"config": TINY_LLAMA}, "workload": {"context_length": -1}},
        errors.InvalidParams,
        "workload.context_length",
    ),
    (
        {"model": {"config": TINY_LLAMA}, "workload": {"context_length": 10**9}},
        errors.InvalidParams,
        "workload.context_length",
    ),
    ({"model": {"config": TINY_LLAMA}, "workload": {"batch_size": 0}}, errors.InvalidParams, "workload.batch_size"),
    ({"model": {"config": TINY_LLAMA}, "hardware": {"gpu_cores": -3}}, errors.InvalidParams, "hardware.gpu_cores"),
    ({"model": {"config": TINY_LLAMA}, "methods": ["zork"]}, errors.MethodNotFound, "methods"),
    ({"model": {"config": TINY_LLAMA}, "engine": {"version": "0.0.1"}}, errors.EngineUnavailable, "engine.version"),
]


@pytest.mark.parametrize(("params", "kind", "field"), BAD_PLANS)
def test_bad_input_is_a_typed_error_with_a_way_out(
    wire: Wire, params: dict[str, Any], kind: type[errors.VeloxError], field: str | None
) -> None:
    """Over the socket as in the library."""
    with pytest.raises(kind) as caught:
        wire.call("plan", params)
    assert type(caught.value) is kind
    assert caught.value.hint
    if field is not None:
        assert caught.value.field == field


@pytest.mark.parametrize("content", ["{", "[]", "", '{"model_type": NaN}', "\xff"])
def test_a_config_that_is_no_config_is_named(wire: Wire, short_folder: Path, content: str) -> None:
    """The file is there and is not JSON, or not an object."""
    (short_folder / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(errors.ModelConfigInvalid) as caught:
        wire.call("plan", {"model": {"path": str(short_folder)}})
    assert caught.value.hint


def test_a_plan_nobody_remembers_is_not_explained(wire: Wire) -> None:
    """The hint says what to do."""
    with pytest.raises(errors.PlanNotFound) as caught:
        wire.call("explain", {"plan_id": "p"})
    assert caught.value.hint


def test_r14_a_line_that_is_too_long_is_answered_and_closed(wire: Wire) -> None:
    """What was asked before is answered first."""
    wire.send(PING % 7 + b"\n")
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        wire.send(b"x" * (64 * REQUEST_LIMIT_BYTES))
    lines = [json.loads(line) for line in iter(wire.line, b"")]
    assert lines[0]["id"] == 7
    assert lines[1]["error"]["data"]["name"] == "frame_too_large"


def test_r17_pipelined_requests_are_answered_in_order(wire: Wire) -> None:
    """A thousand in one write."""
    wire.send(b"".join(PING % number + b"\n" for number in range(1000)))
    assert [json.loads(wire.line())["id"] for _ in range(1000)] == list(range(1000))


def test_r17_byte_by_byte_is_as_good(wire: Wire) -> None:
    """The answer is the same."""
    whole = wire.ask(PING % 1)
    for byte in PING % 1 + b"\n":
        wire.send(bytes([byte]))
    assert json.loads(wire.line()) == whole


def test_a_client_that_closes_its_side_still_gets_the_answer(shared: Daemon) -> None:
    """As in printf ... | nc -U."""
    wire = Wire(shared.socket)
    wire.send(PING % 1 + b"\n")
    wire.socket.shutdown(socket.SHUT_WR)
    assert json.loads(wire.line())["result"]["pong"]
    assert wire.closed()
    wire.close()


def test_curl_is_told_what_this_is(wire: Wire) -> None:
    """An HTTP answer of one line, then the end."""
    wire.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    lines = list(iter(wire.line, b""))
    assert lines[0].startswith(b"HTTP/1.1 400")
    assert b"JSON-RPC" in lines[-1]


def test_r12_clients_that_vanish_leave_nothing_behind(shared: Daemon) -> None:
    """Half a frame, a question without waiting for the answer, or nothing at all."""
    before = shared.call("status")["process"]["fds"]
    for number in range(60):
        wire = Wire(shared.socket)
        wire.send((b"", b'{"half', PING % 1 + b"\n")[number % 3])
        wire.close()
    wait_for(lambda: shared.call("status")["clients"]["now"] == 1, "all gone")
    assert shared.call("status")["process"]["fds"] <= before


def test_r12_thousands_of_malformed_lines_get_one_answer_each(shared: Daemon) -> None:
    """Never a traceback, no memory kept, and good lines in between are answered."""
    dice = random.Random(11)  # noqa: S311 -- a repeatable walk
    pieces = [
        b'{"jsonrpc":"2.0"',
        b',"id":',
        b"1",
        b'"\\ud800"',
        b"NaN",
        b"[" * 300,
        b"9" * 400,
        b"}",
        b"\x00",
        b"\xff",
    ]
    pieces += [
        b',"method":"plan"',
        b',"params":{"model":{"path":"/x"}}',
        b"\r",
        b'"',
        b"\\",
        b",",
        b"{}",
        b"null",
        b" ",
    ]
    before = shared.call("status")["process"]["rss_bytes"]
    wire = Wire(shared.socket)
    for round_number in range(40):
        lines = [b"".join(dice.choices(pieces, k=dice.randint(0, 9))).replace(b"\n", b"") for _ in range(100)]
        wire.send(b"\n".join(lines) + b"\n" + PING % round_number + b"\n")
        answers = [json.loads(wire.line()) for _ in range(101)]
        assert all("error" in answer for answer in answers[:100])
        assert answers[100]["id"] == round_number
    wire.close()
    assert shared.call("status")["process"]["rss_bytes"] - before < 4 * 2**20


def test_r12_deep_nesting_and_huge_numbers_are_answers(wire: Wire) -> None:
    """Where a parser might give up."""
    for value in (b'{"a":' * 20_000, b"[" * 20_000 + b"]" * 20_000, b"9" * 20_000, b"1e999"):
        answer = wire.ask(
            b'{"jsonrpc":"2.0","id":1,"method":"plan","params":{"model":{"config":{"a":' + value + b"}}}}"
        )
        assert answer["error"]["data"]["name"] in ("parse_error", "invalid_params", "model_config_invalid")


def test_too_many_clients_are_turned_away_politely(start: Callable[..., Daemon]) -> None:
    """With a typed error, and served again when there is room."""
    daemon = start(env={"VELOXQUANT_DAEMON_MAX_CONNECTIONS": "2"}).ready()
    one, two = daemon.connect(), daemon.connect()
    assert one.call("ping")["pong"]
    assert two.call("ping")["pong"]
    third = daemon.connect()
    assert json.loads(third.line())["error"]["data"]["name"] == "overloaded"
    assert third.closed()
    two.close()
    wait_for(lambda: one.call("status")["clients"]["now"] == 1, "room")
    assert daemon.connect().call("ping")["pong"]
    assert one.call("status")["clients"]["refused"] == 1


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="another process's limits can be set on Linux only")
def test_r19_out_of_files_is_a_pause_not_an_end(start: Callable[..., Daemon]) -> None:
    """Accepting waits a moment, says so without flooding the log, and goes on by itself."""
    daemon = start().ready()
    files = daemon.call("status")["process"]["fds"] + 4
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (files, files))
    wires = [daemon.connect() for _ in range(30)]
    assert wires[0].call("ping")["pong"]
    wait_for(lambda: daemon.events("accept.paused"), "a pause")
    for wire in wires:
        wire.close()
    assert daemon.connect().call("ping")["pong"]
    assert daemon.process.poll() is None
    assert "Traceback" not in daemon.log()
