"""Stopping: what was asked is answered, nothing is left behind, and nothing of others is taken along."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from daemon_kit import TINY_LLAMA, Daemon, Wire, in_process, wait_for

from veloxquant import errors, paths
from veloxquant.daemon import peer
from veloxquant.daemon.connection import Patience
from veloxquant.daemon.server import LOST_DRAIN_S, Server, Timing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def slow_question(number: int) -> bytes:
    """A plan of a model that no cache knows: a trace of seconds."""
    model = {"config": TINY_LLAMA | {"vocab_size": 300 + os.getpid() % 10_000 + number}}
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": "plan", "params": {"model": model}}).encode() + b"\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_r30_a_signal_stops_it_cleanly(start: Callable[..., Daemon], number: signal.Signals) -> None:
    """Exit status 0; the socket is gone, idle clients are closed, the next one starts."""
    daemon = start().ready()
    idle = daemon.connect()
    assert idle.call("ping")["pong"]
    daemon.signal(number)
    assert idle.closed()
    assert daemon.wait() == 0
    assert not daemon.socket.exists()
    assert daemon.events("daemon.stopping")[0]["reason"] == number.name
    assert start().ready().call("ping")["pong"]


def test_a_client_can_stop_it(start: Callable[..., Daemon]) -> None:
    """It gets its answer, and the log says who it was."""
    daemon = start().ready()
    assert daemon.call("shutdown") == {"stopping": True, "drain_s": 2.0}
    assert daemon.wait() == 0
    assert daemon.events("shutdown.asked")[0]["peer_pid"] == os.getpid()


def test_r30_a_request_under_way_is_answered(start: Callable[..., Daemon]) -> None:
    """Within the drain time, here long enough for a trace."""
    daemon = start(env={"VELOXQUANT_DAEMON_DRAIN_S": "60"}).ready()
    wire = daemon.connect()
    wire.send(slow_question(0))
    wait_for(lambda: daemon.events("trace.started"), "the trace")
    daemon.signal(signal.SIGTERM)
    assert json.loads(wire.line())["result"]["schema"] == "veloxquant.plan/1"
    assert wire.closed()
    assert daemon.wait() == 0


def test_r30_a_request_that_takes_too_long_is_given_up(start: Callable[..., Daemon]) -> None:
    """The client is closed; no worker is left behind."""
    daemon = start(env={"VELOXQUANT_DAEMON_DRAIN_S": "0.1"}).ready()
    wire = daemon.connect()
    wire.send(slow_question(1))
    workers = wait_for(psutil.Process(daemon.process.pid).children, "the worker")
    daemon.signal(signal.SIGTERM)
    assert wire.closed()
    assert daemon.wait() == 0
    assert daemon.events("clients.abandoned")[0]["clients"] == 1
    wait_for(lambda: not any(worker.is_running() for worker in workers), "the worker's end")


def test_r30_a_second_signal_ends_it_at_once(start: Callable[..., Daemon]) -> None:
    """With 128 + the signal's number, as shells report it; the socket is gone all the same."""
    daemon = start(env={"VELOXQUANT_DAEMON_DRAIN_S": "60"}).ready()
    wire = daemon.connect()
    wire.send(slow_question(2))
    wait_for(lambda: daemon.events("trace.started"), "the trace")
    daemon.signal(signal.SIGTERM)
    wait_for(lambda: daemon.events("daemon.stopping"), "the drain")
    daemon.signal(signal.SIGINT)
    assert daemon.wait() == 128 + signal.SIGINT
    assert not daemon.socket.exists()


def test_r30_subscribers_are_told(start: Callable[..., Daemon]) -> None:
    """A last notice, then the end."""
    daemon = start().ready()
    wire = daemon.connect()
    wire.call("subscribe", {"topics": ["generation"]})
    wire.line()
    daemon.signal(signal.SIGTERM)
    assert json.loads(wire.line())["params"]["event"] == "stopping"
    assert wire.closed()


def test_r30_under_load_every_request_is_answered_or_closed(start: Callable[..., Daemon]) -> None:
    """Eight clients ask without pause while it stops; no answer is torn, none is an internal error."""
    daemon = start().ready()
    endings: list[str] = []
    answered = threading.Event()

    def ask() -> None:
        wire = Wire(daemon.socket)
        while True:
            try:
                wire.call("ping")
            except (errors.ShuttingDown, BrokenPipeError, ConnectionResetError) as end:
                endings.append(type(end).__name__)
                break
            except errors.NotAnswering:  # the empty line at the end of the stream
                endings.append("closed")
                break
            answered.set()
        wire.close()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert answered.wait(30)
    daemon.signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert len(endings) == 8
    assert daemon.wait() == 0


def test_r09_a_socket_taken_over_is_left_to_the_other(short_folder: Path) -> None:
    """The daemon goes by itself, with a failure status, and touches nothing."""
    path = short_folder / "s" / "d.sock"
    inodes: list[int] = []

    def take_over(_server: Server) -> None:
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
        inodes.append(path.lstat().st_ino)

    assert in_process(short_folder, take_over, self_check_s=0.02) == 1
    assert path.lstat().st_ino == inodes[0]


def test_r09_a_folder_put_in_the_place_of_ours_is_left_alone(short_folder: Path) -> None:
    """A clean-up of the run-time folder, and somebody who made it anew."""
    path = short_folder / "s" / "d.sock"

    def replace(_server: Server) -> None:
        path.parent.rename(short_folder / "old")
        path.parent.mkdir(mode=0o700)
        path.write_text("theirs")

    assert in_process(short_folder, replace, self_check_s=0.02) == 1
    assert path.read_text() == "theirs"


def test_r09_it_looks_often_and_goes_soon(short_folder: Path) -> None:
    """Every 5 s, a fifth of a wake-up a second; clients have 2 s then, however long the drain may be."""
    path = short_folder / "s" / "d.sock"
    drains: list[float] = []

    def lose(server: Server) -> None:
        drains.append(server._drain_s())
        server.app.stop_reason = None
        path.unlink()
        wait_for(server.app.stopping.is_set, "the loss to be seen")
        drains.append(server._drain_s())

    assert in_process(short_folder, lose, flags={"daemon.drain_s": 60.0}, self_check_s=0.02) == 1
    assert drains == [60.0, LOST_DRAIN_S]
    assert LOST_DRAIN_S + 3 <= 5
    assert 1.0 <= Timing().self_check_s <= 60.0 - 5.0


def test_r09_a_socket_removed_ends_the_daemon(short_folder: Path) -> None:
    """Nobody could reach it any more; whoever supervises it starts another."""
    path = short_folder / "s" / "d.sock"
    assert in_process(short_folder, lambda _server: path.unlink(), self_check_s=0.02) == 1
    assert paths.lock_path(path).exists()


def test_a_socket_that_cannot_be_touched_is_no_reason_to_go(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is renewed for those who clean temporary folders; a disk that is read-only by now says no."""
    asked: list[object] = []

    def refuse(path: object) -> None:
        asked.append(path)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def look_twice(_server: Server) -> None:
        wait_for(lambda: len(asked) > 1, "two attempts")
        wire = Wire(short_folder / "s" / "d.sock")
        wire.call("shutdown")
        wire.close()

    monkeypatch.setattr("veloxquant.daemon.server.TOUCH_S", -1.0)
    monkeypatch.setattr(os, "utime", refuse)
    assert in_process(short_folder, look_twice, self_check_s=0.02) == 0
    assert set(asked) == {short_folder / "s" / "d.sock"}


def test_r08_another_user_gets_not_one_byte(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed and counted (the kernel's word is made up here: tests run as one user)."""

    def knock(server: Server) -> None:
        wire = Wire(short_folder / "s" / "d.sock")
        assert wire.closed()
        wire.close()
        assert server.app.clients.refused == 1
        monkeypatch.undo()
        second = Wire(short_folder / "s" / "d.sock")
        assert second.call("status")["clients"]["refused"] == 1
        second.call("shutdown")
        second.close()

    monkeypatch.setattr(peer, "identify", lambda _connection: peer.Peer(uid=os.geteuid() + 1, pid=1))
    assert in_process(short_folder, knock) == 0


def test_r08_a_peer_the_kernel_does_not_name_is_refused(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not knowing is not trusting."""

    def nameless(_connection: socket.socket) -> peer.Peer:
        raise OSError(22, "no credentials")

    def knock(_server: Server) -> None:
        wire = Wire(short_folder / "s" / "d.sock")
        assert wire.closed()
        wire.close()
        monkeypatch.undo()
        second = Wire(short_folder / "s" / "d.sock")
        second.call("shutdown")
        second.close()

    monkeypatch.setattr(peer, "identify", nameless)
    assert in_process(short_folder, knock) == 0


def test_silent_clients_are_closed_with_their_own_clocks(short_folder: Path) -> None:
    """Half a frame, nothing at all, and a subscriber, which may be silent for ever."""

    def be_silent(_server: Server) -> None:
        wires = [Wire(short_folder / "s" / "d.sock") for _ in range(3)]
        wires[0].send(b'{"half')
        wires[2].call("subscribe", {"topics": ["generation"]})
        wires[2].line()
        assert wires[0].closed()
        assert wires[1].closed()
        wires[2].call("shutdown")
        for wire in wires:
            wire.close()

    assert in_process(short_folder, be_silent, patience=Patience(half_frame_s=0.05, idle_s=0.1)) == 0


def test_a_failure_inside_is_an_answer_with_a_ticket(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The traceback is in the log under that ticket, and the connection goes on."""
    broken: list[str] = []

    def break_it(server: Server) -> None:
        def boom(*_: Any) -> None:
            raise ZeroDivisionError("boom")

        monkeypatch.setattr(server.app, "status", boom)
        wire = Wire(short_folder / "s" / "d.sock")
        try:
            wire.call("status")
        except errors.VeloxError as error:
            broken.append(error.message)
        assert wire.call("ping")["pong"]
        wire.call("shutdown")
        wire.close()

    with caplog.at_level("ERROR", logger="veloxquant"):
        assert in_process(short_folder, break_it) == 0
    (message,) = broken
    ticket = message.partition("ticket ")[2].rstrip(")")
    (record,) = [one for one in caplog.records if one.message == "request.failed"]
    assert record.fields["ticket"] == ticket  # type: ignore[attr-defined]
    assert record.exc_info is not None
    assert "boom" not in message


def test_r30_a_stop_needs_no_further_thread(short_folder: Path) -> None:
    """Where the system gives none any more, the daemon still ends as asked."""
    usual = threading.stack_size()

    def scenario(server: Server) -> None:
        threading.stack_size(2**46)  # no machine has so much: from here on no thread starts
        with contextlib.closing(Wire(server.app._socket)) as last:
            last.call("shutdown")

    try:
        assert in_process(short_folder, scenario) == 0
    finally:
        threading.stack_size(usual)
