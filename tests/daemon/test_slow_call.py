"""Requests that take long are told of in the log, with what and who; waiting for a trace is no slowness."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.daemon import dispatch, log
from veloxquant.daemon.counters import Counters
from veloxquant.daemon.dispatch import Dispatch
from veloxquant.daemon.traces import waited_s
from veloxquant.errors import ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CLIENT: Any = SimpleNamespace(peer=SimpleNamespace(uid=501, pid=4312))
PING = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'
STATUS = b'{"jsonrpc":"2.0","id":1,"method":"status"}'


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that requests are timed with."""
    made = Clock()
    monkeypatch.setattr(dispatch, "time", made)
    return made


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is logged."""
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(log, "event", lambda name, _level=0, **fields: lines.append({"event": name} | fields))
    return lines


def desk(status: Callable[[], Any]) -> Dispatch:
    """A dispatch whose `status` is this."""
    config = SimpleNamespace(daemon=SimpleNamespace(slow_call_ms=1000))
    app: Any = SimpleNamespace(
        state=SimpleNamespace(generation=1), counters=Counters(), config=config, status=status, metrics=status
    )
    return Dispatch(app)


def test_a_request_above_the_limit_is_told_of(clock: Clock, told: list[dict[str, Any]]) -> None:
    """With its method, its time and the process that asked; one at the limit is not."""
    steps = [1.25, 1.0]

    def status() -> str:
        clock.now += steps.pop()
        return "well"

    asked = desk(status)
    asked.answer(STATUS, CLIENT)
    asked.answer(STATUS, CLIENT)
    asked.answer(PING, CLIENT)
    assert told == [{"event": "request.slow", "method": "status", "ms": 1250, "peer_pid": 4312}]
    assert asked._app.counters.state().slow == 1


def test_waiting_for_a_trace_is_not_slow(clock: Clock, told: list[dict[str, Any]]) -> None:
    """Seconds that a model's trace takes have an event of their own; what comes on top counts, a refusal's too."""
    steps = [2.5, 1.5, 0.5]

    async def status() -> str:
        beyond = steps.pop()
        waited_s.set(waited_s.get() + 5.0)
        clock.now += 5.0 + beyond
        if beyond > 2:
            raise ModelNotFound("no such model")
        return "well"

    async def ask() -> None:
        answer: bytes | Awaitable[bytes] = asked.answer(STATUS, CLIENT)
        assert not isinstance(answer, bytes)
        await asyncio.create_task(answer)  # type: ignore[arg-type]

    asked = desk(status)
    for _ in range(3):
        asyncio.run(ask())
    assert [line["ms"] for line in told] == [1500, 2500]


def test_an_unreadable_request_is_timed_under_one_name(clock: Clock, told: list[dict[str, Any]]) -> None:
    """No client can make the log's or the counters' vocabulary grow."""
    asked = desk(lambda: "well")
    asked.answer(b'{"jsonrpc":"2.0","id":1,"method":"nope"}', CLIENT)
    asked.answer(b"{", CLIENT)
    assert set(asked._app.counters.durations) == {"unreadable"}
    assert told == []
