"""Model traces: seconds each, in worker processes, a few at a time, and never twice for the same model.

Whoever asks for a model that is being traced waits for that trace. Whoever would have to wait behind too many gets
Overloaded at once, rather than a timeout later.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from veloxquant import local
from veloxquant.daemon import log
from veloxquant.daemon.threads import in_daemon_thread, note_end
from veloxquant.errors import Overloaded, VeloxError
from veloxquant.profiles.calibration import digest
from veloxquant.wire.answers import TracesState

if TYPE_CHECKING:
    from collections.abc import Callable

    from veloxquant.local import World
    from veloxquant.models.resolve import ModelSource
    from veloxquant.profiles import ModelProfile

AT_ONCE = 2
WAITING = 16
REMEMBERED = 64
"""Profiles kept in memory; each is some tens of KiB. The others are a file read away."""
CELLS = 2**16
"""Layers times probes of all of them: 300 bytes each. A config may name 1,500 layers, and its profile takes 13 MB."""

KEEP_S = 600.0
"""A worker that died on a busy machine left the static reader's answer: worth trying again, not for every plan."""


waited_s: ContextVar[float] = ContextVar("waited_s", default=0.0)
"""Seconds that the request of this task has waited for traces: they are not the daemon's slowness."""


@dataclass(eq=False)
class _Trace:
    """One that runs or waits for its turn."""

    task: asyncio.Task[ModelProfile] = field(init=False)
    askers: int = 0
    """Requests that wait for it."""
    begun: bool = False


class _Kept(NamedTuple):
    profile: ModelProfile
    until: float


class Traces:
    """Traces under way and profiles lately used. Lives on the event loop's thread."""

    def __init__(self, trace: Callable[[ModelSource, World], ModelProfile] = local.trace_profile) -> None:
        self.done = 0
        self.failed = 0
        self._trace = trace
        self._running: dict[bytes, _Trace] = {}
        self._profiles: OrderedDict[bytes, _Kept] = OrderedDict()
        self._remembering = threading.Lock()
        self._turn = asyncio.Semaphore(AT_ONCE)

    def state(self) -> TracesState:
        """For `status`."""
        running = min(len(self._running), AT_ONCE)
        waiting = len(self._running) - running
        return TracesState(running=running, waiting=waiting, done=self.done, failed=self.failed)

    def known(self, source: ModelSource, world: World) -> ModelProfile | None:
        """A profile from memory, or from the disk's cache (a file read). Safe to call from any thread."""
        key = _key(source, world)
        kept = self._profiles.get(key)
        if kept is not None and time.monotonic() < kept.until:
            return kept.profile
        profile = local.cached_profile(source, world)
        if profile is not None:
            self._remember(key, profile)
        return profile

    async def profile(self, source: ModelSource, world: World) -> ModelProfile:
        """Trace, or join the trace of the same model. Raises what `local.trace_profile` raises, and Overloaded."""
        key = _key(source, world)
        trace = self._running.get(key) or self._enqueue(key, source, world)
        began = time.monotonic()
        trace.askers += 1
        try:
            # Shielded: a client that goes away must not take the trace from the others.
            return await asyncio.shield(trace.task)
        finally:
            trace.askers -= 1
            if not trace.askers and not trace.begun:
                # All have left: thousands may ask and vanish, and others would wait behind what nobody wants.
                trace.task.cancel()
                self._forget(key, trace)
            waited_s.set(waited_s.get() + time.monotonic() - began)

    def abandon(self) -> None:
        """Wait for none of them any more; their workers end with their own time limit."""
        for trace in self._running.values():
            trace.task.cancel()

    def _enqueue(self, key: bytes, source: ModelSource, world: World) -> _Trace:
        if len(self._running) >= AT_ONCE + WAITING:
            raise Overloaded(
                f"{len(self._running)} models are being traced or wait for it", hint="ask again in some seconds"
            )
        trace = self._running[key] = _Trace()
        trace.task = asyncio.get_running_loop().create_task(self._run(trace, key, source, world))
        trace.task.add_done_callback(lambda _task: self._forget(key, trace))
        trace.task.add_done_callback(note_end)
        return trace

    def _forget(self, key: bytes, trace: _Trace) -> None:
        if self._running.get(key) is trace:
            del self._running[key]

    async def _run(self, trace: _Trace, key: bytes, source: ModelSource, world: World) -> ModelProfile:
        async with self._turn:
            trace.begun = True
            log.event("trace.started", model=source.model_id)
            began = time.monotonic()
            try:
                profile = await in_daemon_thread(self._trace, source, world)
            except VeloxError as error:
                self.failed += 1
                log.event("trace.failed", model=source.model_id, error=error.name, text=error.message)
                raise
        self.done += 1
        took_ms = round((time.monotonic() - began) * 1000)
        log.event("trace.done", model=source.model_id, source=profile.source, took_ms=took_ms)
        self._remember(key, profile)
        return profile

    def _remember(self, key: bytes, profile: ModelProfile) -> None:
        with self._remembering:
            self._profiles[key] = _Kept(profile, time.monotonic() + KEEP_S)
            self._profiles.move_to_end(key)
            while len(self._profiles) > 1 and (len(self._profiles) > REMEMBERED or self._cells() > CELLS):
                self._profiles.popitem(last=False)

    def _cells(self) -> int:
        profiles = [kept.profile for kept in self._profiles.values()]
        return sum(len(profile.layers) * (1 + len(profile.probes)) for profile in profiles)


def _key(source: ModelSource, world: World) -> bytes:
    """Everything a profile depends on: the model's config, its weights, its calibration, the method set, the engine."""
    machine = world.snapshot.hardware
    engine = (machine.mlx_version, machine.mlx_lm_version)
    calibration = world.snapshot.calibration(source.model_id, source.config_hash)
    known = None if calibration is None else digest(calibration)
    model = (source.model_id, source.config_hash, source.weights, known)
    # Its digest, since an index may name files by the thousand and the key is kept with each profile.
    return sha256(msgspec.json.encode((model, world.loaded.fingerprint, engine))).digest()
