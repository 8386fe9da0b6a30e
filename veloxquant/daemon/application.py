"""What answers behind the socket, joined: the world and what feeds it, the questions, the clients, the counts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from veloxquant import __version__, local, views
from veloxquant.config import load
from veloxquant.daemon import log, metrics
from veloxquant.daemon import status as process_state
from veloxquant.daemon.counters import Clients, Counters
from veloxquant.daemon.hardware_watch import HardwareWatch
from veloxquant.daemon.plugin_watch import PluginWatch
from veloxquant.daemon.questions import Questions
from veloxquant.daemon.record_feed import RecordFeed
from veloxquant.daemon.state import State
from veloxquant.daemon.subscribers import Subscribers
from veloxquant.daemon.threads import in_daemon_thread
from veloxquant.daemon.traces import Traces
from veloxquant.errors import VeloxError
from veloxquant.methods import registry
from veloxquant.wire.answers import MethodsState, Metrics, Reloaded, Status
from veloxquant.wire.messages import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    import msgspec

    from veloxquant.config import Config
    from veloxquant.local import World
    from veloxquant.models.resolve import ModelSource
    from veloxquant.profiles import HardwareProfile, ModelProfile
    from veloxquant.wire.messages import ExplainParams, FitParams, HardwareParams, PlanParams

SERVER = "veloxquant"


class Application:
    """One daemon's parts. Made and used on the event loop's thread."""

    def __init__(
        self,
        world: World,
        feed: RecordFeed,
        *,
        socket: Path,
        config_path: Path | None = None,
        read_config: Callable[[], Config] = load,
    ) -> None:
        self.state = State(world)
        self.feed = feed
        self.counters = Counters()
        self.traces = Traces(self._trace)
        self.clients = Clients()
        self.stop_reason: str | None = None
        self.stopping = asyncio.Event()
        self.subscribers = Subscribers(self.describe)
        self.state.on_change(self.subscribers.changed)
        self._socket = socket
        self._config_path = config_path
        self._read_config = read_config
        self._questions = Questions(self.state, self.traces)
        self._hardware = HardwareWatch(self.state)
        self.plugins = PluginWatch(self.state, self._load_plugins)
        self._loop = asyncio.get_running_loop()
        self._reloading = asyncio.Lock()
        self._first_config = world.config
        self._started = time.monotonic()

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.state.world.config

    def remembered(self, method: str, raw: bytes) -> bytes | None:
        """The encoded answer given before, while it holds."""
        if self._hardware.stale:
            self._questions.answers.misses += 1
            return None
        self._hardware.touch()
        return self._questions.remembered(method, raw)

    async def question(self, method: str, params: PlanParams | FitParams, raw: bytes) -> msgspec.Raw:
        """Answer `plan` or `fit`."""
        if self._hardware.stale:
            await self._hardware.fresh()
        return await self._questions.answer(method, params, raw)

    async def explain(self, params: ExplainParams) -> Any:
        """Answer `explain`."""
        return await self._questions.explain(params)

    def rest(self, unasked_s: float) -> None:
        """Let go of what only questions asked within so many seconds are faster for."""
        self._questions.answers.rest(unasked_s)

    async def hardware(self, params: HardwareParams) -> HardwareProfile:
        """Answer `hardware`, with memory as it is now."""
        await self._hardware.fresh()
        return views.hardware(params, self.state.world)

    async def reload(self) -> Reloaded:
        """Read configuration, plugins, machine and records again. Raises what was wrong, with all kept as it was."""
        async with self._reloading:
            try:
                world, feed = await in_daemon_thread(self._build)
            except VeloxError as error:
                self.state.warn("reload", f"the last reload failed, the earlier settings hold: {error.message}")
                log.event("reload.failed", logging.ERROR, error=error.name, text=error.message, hint=error.hint)
                raise
            changed = await self._move_in(world, feed)
        return Reloaded(
            generation=self.state.generation,
            changed=changed,
            warnings=tuple(self.state.warnings.values()),
        )

    def describe(self, topics: Iterable[str]) -> tuple[int, Mapping[str, Any]]:
        """The generation and the state of each topic, as a notice has them."""
        parts: dict[str, Callable[[], Any]] = {
            "generation": lambda: self.state.generation,
            "records": self.feed.counts,
            "methods": self._methods,
            "hardware": lambda: self.state.world.snapshot.hardware,
            "warnings": self._warnings,
        }
        return self.state.generation, {topic: parts[topic]() for topic in topics}

    async def status(self) -> Status:
        """Answer `status`, with memory as it was half a minute ago at most."""
        if self._hardware.stale:
            await self._hardware.fresh()
        return Status(
            server=SERVER,
            version=__version__,
            protocol=PROTOCOL,
            pid=os.getpid(),
            uptime_s=round(time.monotonic() - self._started, 3),
            generation=self.state.generation,
            socket=str(self._socket),
            log_file=None if (kept := log.place()) is None else str(kept),
            config_path=self._config_file(),
            hardware=self.state.world.snapshot.hardware,
            methods=self._methods(),
            records=self.feed.state(),
            clients=self.clients.state(len(self.subscribers)),
            requests=self.counters.state(),
            cache=self._questions.answers.state(),
            traces=self.traces.state(),
            process=(process := process_state.now()),
            warnings=(*self._warnings(), *process_state.warnings(process)),
        )

    async def metrics(self) -> Metrics:
        """Answer `metrics`."""
        return metrics.render(await self.status(), self.counters.durations)

    def _config_file(self) -> str | None:
        """The configuration file that a reload reads, None while there is none."""
        return str(self._config_path) if self._config_path is not None and self._config_path.exists() else None

    def start(self) -> None:
        """Begin to watch. What changed since the world was built is noticed by a first look."""
        self.state.warn("records", self.feed.trouble)
        self.feed.start(self.state)
        self.feed.look_again(self.state)
        self._hardware.start()

    async def close(self) -> None:
        """Stop everything that runs beside the requests."""
        self.traces.abandon()
        self._hardware.close()
        self._questions.close()
        self.feed.rest()
        await in_daemon_thread(self.feed.close)

    def ask_to_stop(self, reason: str) -> None:
        """Have the server wind up; the first reason counts."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self.stopping.set()

    def _trace(self, source: ModelSource, world: World) -> ModelProfile:
        """In a thread: trace a model, and warn when the disk cannot keep what was found."""
        profile = local.trace_profile(source, world)
        if profile.source != "traced":
            return profile
        if profile.unkept is not None:
            log.event("trace.not_kept", logging.WARNING, model=source.model_id, text=profile.unkept)
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody reads warnings any more
            self._loop.call_soon_threadsafe(self.state.warn, "traces", profile.unkept)
        return profile

    def _build(self) -> tuple[World, RecordFeed]:
        """In a thread: everything anew, records apart, which the feed brings along."""
        config = self._read_config()
        feed = self.feed if self.feed.serves(config) else RecordFeed(config)
        feed.read()
        world = local.open_world(
            config,
            source="daemon",
            records=feed.records,
            calibrations=feed.calibrations,
            loaded=registry.load_again(self.state.world.loaded),
        )
        return world, feed

    async def _load_plugins(self) -> None:
        """Answer with the plugins that are on disk now; everything else stays."""
        async with self._reloading:
            loaded = await in_daemon_thread(registry.load_again, self.state.world.loaded)
            world = self.state.world
            known = world.snapshot
            self.state.use_world(
                local.open_world(
                    world.config,
                    source="daemon",
                    hardware=known.hardware,
                    records=known.records,
                    calibrations=known.calibrations,
                    loaded=loaded,
                )
            )

    async def _move_in(self, world: World, feed: RecordFeed) -> bool:
        """Answer from there on; whether anything is other than before."""
        old = self.feed
        self.feed = feed
        snapshot = dataclasses.replace(world.snapshot, records=feed.records, calibrations=feed.calibrations)
        changed = self.state.use_world(dataclasses.replace(world, snapshot=snapshot))
        log.level(world.config.daemon.log_level)
        self.state.warn("reload", None)
        self.state.warn("restart", _needs_restart(self._first_config, world.config))
        self.state.warn("records", feed.trouble)
        if feed is not old:
            old.rest()
            self.start()  # first: the new directory is watched whatever becomes of the old one
            await in_daemon_thread(old.close)
        return changed

    def _methods(self) -> MethodsState:
        world = self.state.world
        fenced = {world.snapshot.label_of(one): one.reason for one in world.snapshot.quarantined}
        return MethodsState(ready=len(world.ready), quarantined=fenced)

    def _warnings(self) -> tuple[str, ...]:
        """What a person should look at, in sentences."""
        snapshot = self.state.world.snapshot
        fenced = [
            f"method {snapshot.label_of(one)} is quarantined: {one.reason}"
            for one in snapshot.quarantined
            if one.reason != local.DISABLED
        ]
        tripped = [f"method {one.name} failed in use: {one.reason}" for one in self.state.world.loaded.tripped()]
        plugins = self.state.world.loaded.warnings
        lost = [] if (text := log.trouble()) is None else [text]
        return (*self.state.warnings.values(), *lost, *fenced, *tripped, *plugins, *self.feed.warnings())


def _needs_restart(running: Config, wanted: Config) -> str | None:
    """Settings that are only read at the start, when they changed."""
    changed = [
        name
        for name, old, new in (
            ("socket.path", running.socket.path, wanted.socket.path),
            ("daemon.log_file", running.daemon.log_file, wanted.daemon.log_file),
            ("daemon.max_connections", running.daemon.max_connections, wanted.daemon.max_connections),
            ("daemon.idle_timeout_s", running.daemon.idle_timeout_s, wanted.daemon.idle_timeout_s),
        )
        if old != new
    ]
    return f"{', '.join(changed)} changed and takes effect at the next start" if changed else None
