"""Work beside the event loop: threads, traces, looks at the machine, and the counts of it all."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from veloxquant import local
from veloxquant.daemon import status
from veloxquant.daemon import traces as traces_module
from veloxquant.daemon.counters import Clients, Counters
from veloxquant.daemon.threads import in_daemon_thread, note_end
from veloxquant.daemon.traces import AT_ONCE, CELLS, REMEMBERED, WAITING, Traces
from veloxquant.errors import ModelNotSupported, Overloaded
from veloxquant.models.resolve import ModelSource
from veloxquant.planner.snapshot import Snapshot
from veloxquant.profiles import CacheLayer, CachePart, HardwareProfile, ModelProfile

WORLD: Any = SimpleNamespace(
    loaded=SimpleNamespace(fingerprint="f"), config=None, snapshot=Snapshot(hardware=HardwareProfile(), offers=())
)


def source(name: str) -> ModelSource:
    """A model of that name."""
    return ModelSource(model_id=name, config={}, config_hash=name)


@pytest.fixture(autouse=True)
def nothing_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trace was made before."""
    monkeypatch.setattr(local, "cached_profile", lambda _source, _world: None)


class Tracer:
    """Traces that take as long as the test likes."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.names: list[str] = []
        self.at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def __call__(self, model: ModelSource, _world: Any) -> ModelProfile:
        """Wait for the word."""
        with self._lock:
            self.names.append(model.model_id)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        assert self.go.wait(30)
        with self._lock:
            self.at_once -= 1
        if model.model_id == "bad":
            raise ModelNotSupported("no such model", hint="another")
        return ModelProfile(model_id=model.model_id)


def test_work_in_a_thread_comes_back() -> None:
    """Its result, or its error."""

    async def run() -> None:
        assert await in_daemon_thread(lambda a, b: a + b, 1, 2) == 3
        with pytest.raises(ZeroDivisionError):
            await in_daemon_thread(lambda: 1 / 0)

    asyncio.run(run())


def test_a_thread_that_outlives_the_loop_is_harmless() -> None:
    """Nobody waits for its result; nothing is printed about it."""
    go, done = threading.Event(), threading.Event()

    def slow() -> None:
        go.wait(30)
        done.set()

    async def run() -> None:
        task = asyncio.ensure_future(in_daemon_thread(slow))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    go.set()
    assert done.wait(30)


def test_one_model_is_traced_once_for_all_who_ask() -> None:
    """And known afterwards."""

    async def run() -> None:
        tracer = Tracer()
        traces = Traces(tracer)
        asking = [asyncio.ensure_future(traces.profile(source("m"), WORLD)) for _ in range(5)]
        await asyncio.sleep(0)
        assert traces.state().running == 1
        asking.pop().cancel()
        tracer.go.set()
        assert {profile.model_id for profile in await asyncio.gather(*asking)} == {"m"}
        assert tracer.names == ["m"]
        known = traces.known(source("m"), WORLD)
        assert known is not None
        assert traces.known(source("n"), WORLD) is None
        assert traces.state().done == 1

    asyncio.run(run())


def test_few_at_once_some_waiting_and_no_more() -> None:
    """Whoever comes after that hears Overloaded at once."""

    async def run() -> None:
        tracer = Tracer()
        traces = Traces(tracer)
        asking = [asyncio.ensure_future(traces.profile(source(f"m{n}"), WORLD)) for n in range(AT_ONCE + WAITING)]
        await asyncio.sleep(0.05)
        assert (traces.state().running, traces.state().waiting) == (AT_ONCE, WAITING)
        with pytest.raises(Overloaded):
            await traces.profile(source("one too many"), WORLD)
        tracer.go.set()
        await asyncio.gather(*asking)
        assert tracer.most_at_once == AT_ONCE
        assert traces.state().waiting == 0
        assert (await traces.profile(source("one too many"), WORLD)).model_id == "one too many"

    asyncio.run(run())


def test_a_trace_that_all_have_left_is_not_begun() -> None:
    """Else clients that ask and vanish would have everybody wait, or refused, behind traces that nobody wants."""

    async def run() -> None:
        tracer = Tracer()
        traces = Traces(tracer)
        asking = [asyncio.ensure_future(traces.profile(source(f"m{n}"), WORLD)) for n in range(AT_ONCE + WAITING)]
        twice = asyncio.ensure_future(traces.profile(source(f"m{AT_ONCE}"), WORLD))
        await asyncio.sleep(0.05)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert (traces.state().running, traces.state().waiting) == (AT_ONCE, 1)
        again = asyncio.ensure_future(traces.profile(source(f"m{AT_ONCE + 1}"), WORLD))
        await asyncio.sleep(0)
        tracer.go.set()
        assert [(await task).model_id for task in (twice, again)] == [f"m{AT_ONCE}", f"m{AT_ONCE + 1}"]
        await asyncio.gather(*(trace.task for trace in traces._running.values()))  # those begun first may end last
        assert sorted(tracer.names) == [f"m{n}" for n in range(AT_ONCE + 2)]
        assert traces.state().done == AT_ONCE + 2

    asyncio.run(run())


def test_a_failed_trace_is_every_askers_error_and_is_tried_again() -> None:
    """A failure may pass (a full disk, a slow machine)."""

    async def run() -> None:
        tracer = Tracer()
        tracer.go.set()
        traces = Traces(tracer)
        for _ in range(2):
            with pytest.raises(ModelNotSupported):
                await traces.profile(source("bad"), WORLD)
        assert tracer.names == ["bad", "bad"]
        assert (traces.state().failed, traces.state().running) == (2, 0)

    asyncio.run(run())


def test_a_failed_trace_that_nobody_waits_for_is_told_once() -> None:
    """Its event is in the log; asyncio need not print it as an exception that was never retrieved."""
    told: list[Any] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
        tracer = Tracer()
        traces = Traces(tracer)
        asking = asyncio.ensure_future(traces.profile(source("bad"), WORLD))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.wait([asking])
        tracer.go.set()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        assert (traces.failed, traces.state().running) == (1, 0)

    asyncio.run(run())
    gc.collect()
    assert told == []


def test_what_fails_where_nobody_waits_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A mistake of ours; what was refused, or given up, is none."""

    async def run() -> None:
        async def fail(error: BaseException) -> None:
            raise error

        tasks = [
            asyncio.ensure_future(fail(error))
            for error in (ModelNotSupported("m", hint="h"), asyncio.CancelledError(), KeyError("ours"))
        ]
        for task in tasks:
            task.add_done_callback(note_end)
        await asyncio.wait(tasks)

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == ["task.failed"]


def test_profiles_in_memory_are_bounded() -> None:
    """The others are a file read away."""

    async def run() -> None:
        tracer = Tracer()
        tracer.go.set()
        traces = Traces(tracer)
        for number in range(REMEMBERED + 3):
            await traces.profile(source(f"m{number}"), WORLD)
        known = [traces.known(source(f"m{number}"), WORLD) is not None for number in range(REMEMBERED + 3)]
        assert known == [False] * 3 + [True] * REMEMBERED

    asyncio.run(run())


def test_a_profile_is_for_one_engine_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another mlx-lm is another trace; and what a bad moment gave is asked again after a while."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(traces_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    upgraded: Any = SimpleNamespace(
        loaded=WORLD.loaded, config=None, snapshot=replace(WORLD.snapshot, hardware=HardwareProfile(mlx_lm_version="9"))
    )

    async def run() -> None:
        tracer = Tracer()
        tracer.go.set()
        traces = Traces(tracer)
        await traces.profile(source("m"), WORLD)
        assert traces.known(source("m"), WORLD) is not None
        assert traces.known(source("m"), upgraded) is None
        clock.now += traces_module.KEEP_S + 1
        assert traces.known(source("m"), WORLD) is None

    asyncio.run(run())


def test_quantiles_are_of_the_times_given() -> None:
    """100 requests of 1 to 100 ms: the nearest ranks above half and above 99 in a hundred."""
    counters = Counters()
    for number in range(1, 101):
        counters.answered("plan", number / 1000)
    counters.errors["overloaded"] += 1
    state = counters.state()
    assert (state.total, state.by_method, state.errors) == (100, {"plan": 100}, {"overloaded": 1})
    assert (state.p50_ms, state.p99_ms) == (51.0, 100.0)
    assert Counters().state().p50_ms is None


class Connected:
    """Stands for a connection."""


def test_clients_are_counted() -> None:
    """Now and at the most; and whoever waits for the last to leave hears of it."""

    async def run() -> None:
        clients = Clients()
        one: Any = Connected()
        two: Any = Connected()
        clients.welcome(one)
        clients.welcome(two)
        clients.leave(one)
        assert not clients.nobody.is_set()
        assert (clients.state(0).now, clients.state(0).peak) == (1, 2)
        clients.leave(two)
        async with asyncio.timeout(5):
            await clients.nobody.wait()

    asyncio.run(run())


def test_the_process_tells_about_itself() -> None:
    """More memory than Python alone, some files, within their limit."""
    now = status.now()
    assert now.rss_bytes is not None
    assert now.rss_bytes > 5 * 2**20
    assert now.fds is not None
    assert now.fd_limit is not None
    assert 0 < now.fds < now.fd_limit
    assert now.threads >= 1


@pytest.mark.parametrize(("fds", "limit", "warned"), [(89, 100, False), (90, 100, True), (None, 100, False)])
def test_nearly_all_files_are_warned_of(fds: int | None, limit: int, *, warned: bool) -> None:
    """From nine tenths of the limit on, in a sentence with both figures."""
    process = msgspec.structs.replace(status.now(), fds=fds, fd_limit=limit)
    assert ("90 of 100 files are open" in " ".join(status.warnings(process))) == warned


def test_profiles_of_absurd_models_are_bounded_by_what_they_hold() -> None:
    """64 configs of 1,500 layers would take 800 MB; the newest is kept whatever it holds, since it was asked for."""
    layer = CacheLayer(index=0, engine_class="KVCache", parts=(CachePart(kind="kv", engine_class="KVCache"),))

    async def run() -> None:
        traces = Traces(lambda model, _world: ModelProfile(model_id=model.model_id, layers=(layer,) * (CELLS + 1)))
        for name in "ab":
            await traces.profile(source(name), WORLD)
        assert [traces.known(source(name), WORLD) is not None for name in "ab"] == [False, True]

    asyncio.run(run())
