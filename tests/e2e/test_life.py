"""A client whose daemon is crowded, stopped in its tracks, or gone: an answer or a typed error within the limit."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from veloxquant.client import Client
from veloxquant.errors import NotAnswering, NotRunning
from veloxquant.paths import config_file

MACHINE = {"working_set_bytes": 2**33, "total_memory_bytes": 2**34}


def test_a_burst_of_new_clients_is_absorbed(running: Any) -> None:
    """300 clients that connect in the same moment all get their answer."""
    failures: list[BaseException] = []
    ready = threading.Barrier(300)

    def knock() -> None:
        try:
            with Client(running.socket, timeout_s=30, fallback=False) as client:
                ready.wait(30)
                client.ping()
        except BaseException as error:  # noqa: BLE001 -- counted below, whatever it is
            failures.append(error)

    threads = [threading.Thread(target=knock, daemon=True) for _ in range(300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_a_stopped_daemon_is_not_waited_for(running: Any, tiny_model: dict[str, Any]) -> None:
    """SIGSTOP leaves a socket that accepts and never answers: the plan is made here, well before the limit."""
    with Client(running.socket, timeout_s=60) as client:
        assert client.plan(tiny_model, hardware=MACHINE).source == "daemon"
        os.kill(running.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(NotAnswering):
                client.ping(timeout_s=0.5)
            # Whoever waited for the daemon until the limit would have no time left to plan here, and raise.
            plan = client.plan(tiny_model, hardware=MACHINE)
            assert plan.source == "local"
            assert isinstance(client.fallback_reason, NotAnswering)
        finally:
            os.kill(running.process.pid, signal.SIGCONT)
        assert client.plan(tiny_model, hardware=MACHINE).source == "daemon"
        assert client.fallback_reason is None


def test_without_a_daemon_the_answer_is_the_same(running: Any, home: Any, tiny_model: dict[str, Any]) -> None:
    """No daemon at the path: the same choice and bytes, marked local; what only a daemon knows is refused."""
    with Client(running.socket, timeout_s=60) as asking, Client(home / "none.sock", timeout_s=60) as alone:
        over_socket = asking.plan(tiny_model, hardware=MACHINE, context_length=8192)
        local = alone.plan(tiny_model, hardware=MACHINE, context_length=8192)
        assert (over_socket.source, local.source) == ("daemon", "local")
        assert over_socket.chosen == local.chosen
        assert [row.name for row in alone.methods().methods] == [row.name for row in asking.methods().methods]
        with pytest.raises(NotRunning):
            alone.status()


def test_notices_tell_of_a_reload(running: Any) -> None:
    """A subscriber gets the full state first, then what changed."""
    file = config_file(running.environment)
    file.parent.mkdir(parents=True, exist_ok=True)
    with Client(running.socket, timeout_s=30, fallback=False) as client:
        notices = client.subscribe(["generation"])
        first = next(notices)
        assert first.full
        file.write_text("[planner]\nmatch_threshold = 0.61\n")
        file.chmod(0o600)
        try:
            done = client.reload()
            changed = next(notices)
            assert changed.generation >= first.generation + 1
            assert (done.changed, done.generation >= changed.generation) == (True, True)
            notices.close()  # type: ignore[attr-defined]
        finally:
            file.unlink()
            client.reload()
