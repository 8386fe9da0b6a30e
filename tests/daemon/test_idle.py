"""What a daemon at rest does: next to nothing, seldom, and without a word in the log."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from veloxquant.benchmarks import watch
from veloxquant.benchmarks.watch_schedule import QUIET_S, Schedule
from veloxquant.config import load
from veloxquant.daemon import log
from veloxquant.daemon.connection import Patience
from veloxquant.daemon.server import serve
from veloxquant.daemon.state import State
from veloxquant.local import World
from veloxquant.planner.snapshot import Snapshot
from veloxquant.profiles import HardwareProfile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from veloxquant.config import Config
    from veloxquant.daemon.server import Server


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What goes to the log, from the lowest level on that is logged by default."""
    stream = io.StringIO()
    log.start("info", stream=stream)
    yield stream
    log.stop()


@pytest.fixture
def config(short_folder: Path) -> Config:
    """A daemon in a folder of the test's own; its watcher, a thread with a clock of its own, is looked at apart."""
    folder = short_folder / "s"
    folder.mkdir(mode=0o700)
    flags = {"socket.path": str(folder / "d.sock"), "records.directory": str(short_folder / "records")}
    return load(flags=flags | {"records.watch": "false"})


def at_rest(config: Config, stream: io.StringIO) -> tuple[list[float], str]:
    """Seconds until each timer of the loop once it has settled, and what was logged after `daemon.ready`."""
    seen: list[tuple[list[float], str]] = []

    async def look(server: Server) -> None:
        loop: Any = asyncio.get_running_loop()
        assert server.app.feed._looking is not None
        await server.app.feed._looking
        _, _, after = stream.getvalue().partition('"daemon.ready"')
        now = loop.time()
        timers = [one.when() - now for one in loop._scheduled if not one.cancelled()]
        seen.append((timers, after.partition("\n")[2]))
        server.app.ask_to_stop("shutdown")

    async def run() -> int:
        tasks: list[asyncio.Task[None]] = []
        return await serve(
            config, on_ready=lambda server: tasks.append(asyncio.create_task(look(server))), signals=False
        )

    assert asyncio.run(run()) == 0
    return seen[0]


def test_r37_a_daemon_at_rest_is_woken_less_than_once_a_second(config: Config, written: io.StringIO) -> None:
    """By its timers, of which none comes each second, and by the watcher's two; and it says nothing meanwhile (R38).

    What is left of a period is less than the period, so that the rate is not underestimated.
    """
    timers, said = at_rest(config, written)
    assert timers
    assert min(timers) > 1.0
    watcher = (watch.STAT_INTERVAL_S, watch.FORCED_INTERVAL_S)
    assert sum(1 / seconds for seconds in (*timers, *watcher)) < 0.6
    assert said == ""


def test_r37_a_silent_client_has_a_clock_of_minutes() -> None:
    """Its idle time is looked at when it could be over, not by and by."""
    assert Patience().idle_s >= 60


def test_r37_the_watcher_wakes_for_its_stat_alone() -> None:
    """After a burst has become quiet: once each ten seconds, and never in between."""
    schedule = Schedule(0.0, watch.STAT_INTERVAL_S, watch.FORCED_INTERVAL_S, QUIET_S)
    schedule.event(0.0)
    now, woken = 0.0, []
    while now < 3600:
        now = schedule.next_at
        woken.append(now)
        if schedule.take_call(now):
            schedule.called(now, now)
        schedule.take_stat(now)
    assert len(woken) <= 2 + 3600 / 10 + 3600 / 300


def machine(active_bytes: int) -> HardwareProfile:
    """16 GiB, so much of it in use."""
    return HardwareProfile(total_memory_bytes=2**34, active_bytes=active_bytes)


def test_r38_memory_that_moves_is_no_news(written: io.StringIO) -> None:
    """Monitors that ask make the daemon notice it all day long; it is told of at the level "debug" alone."""
    snapshot = Snapshot(hardware=machine(0), offers=())
    state = State(World(config=load(), loaded=cast("Any", SimpleNamespace()), snapshot=snapshot))
    for number in range(1, 100):
        assert state.use_hardware(machine(number % 7 * 2**31))
    assert written.getvalue() == ""
    log.level("debug")
    assert state.use_hardware(machine(2**33))
    assert '"world.changed"' in written.getvalue()
