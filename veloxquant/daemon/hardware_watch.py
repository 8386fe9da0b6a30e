"""Keeping the machine's facts fresh for whoever asks, at next to no cost while nobody does.

Memory in use changes by the second. A request starts a look in the background when the last one is older than
REFRESH_S, and waits for one when it is older than STALE_S: an answer is never about the memory of an hour ago. Every
RECHECK_S the whole machine is looked at again (a limit raised). The generation moves only when something material did
(state.moved), so that answers stay remembered on a machine at rest.

Ages are by a clock that goes on while the machine sleeps: after a night the first request waits for a look. Beside the
requests a glance each GLANCE_S sees, for some microseconds, whether the machine slept or other versions of MLX or of
mlx-lm are installed; then the whole of it is looked at, and subscribers hear of what changed though nobody asked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from typing import TYPE_CHECKING

from veloxquant.daemon import log
from veloxquant.daemon.threads import in_daemon_thread
from veloxquant.hardware import detect, versions

if TYPE_CHECKING:
    from collections.abc import Callable

    from veloxquant.daemon.state import State
    from veloxquant.profiles import HardwareProfile

REFRESH_S = 5.0
STALE_S = 30.0
RECHECK_S = 60.0
GLANCE_S = 30.0
SLEPT_S = 5.0
"""The clocks of a waking and of a sleeping machine part by this much before it counts as sleep."""

Versions = tuple[str | None, str | None]


def through_sleep() -> float:
    """Seconds on a clock that no step of the wall clock moves and no sleep of the machine stops.

    Linux: CLOCK_BOOTTIME. macOS: CLOCK_MONOTONIC, which counts sleep there, while Python's time.monotonic does not
    (clock_gettime(3); not run on a Mac).
    """
    return time.clock_gettime(time.CLOCK_MONOTONIC if sys.platform == "darwin" else time.CLOCK_BOOTTIME)


def installed_versions() -> Versions:
    """What is installed now: MLX and mlx-lm, None where one is not. Reads two small files."""
    return versions.installed("mlx"), versions.installed("mlx-lm")


class HardwareWatch:
    """Lives on the event loop's thread; looks at the machine in others. The clocks are for tests to set."""

    def __init__(
        self,
        state: State,
        refresh: Callable[[HardwareProfile], HardwareProfile] = detect.refresh,
        recheck: Callable[[], HardwareProfile] = detect.detect,
        *,
        versions: Callable[[], Versions] = installed_versions,
        clock: Callable[[], float] = through_sleep,
        awake: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._refresh = refresh
        self._recheck = recheck
        self._versions = versions
        self._clock = clock
        self._awake = awake
        self._asleep = clock() - awake()
        self._installed: Versions | None = None
        self._looked_at = self._rechecked_at = clock()
        self._looking: asyncio.Task[None] | None = None
        self._glancing: asyncio.Task[None] | None = None

    @property
    def stale(self) -> bool:
        """Too old to answer from."""
        return self._clock() - self._looked_at > STALE_S

    def start(self) -> None:
        """Glance now and then, until closed."""
        if self._glancing is None:
            self._glancing = asyncio.get_running_loop().create_task(self._glance_for_ever())

    def touch(self) -> None:
        """Somebody asks: look in the background if it is time."""
        if self._clock() - self._looked_at > REFRESH_S:
            self._start()

    async def fresh(self) -> None:
        """Wait for a look, the one under way or a new one."""
        await asyncio.shield(self._start())

    async def glance(self) -> None:
        """Look at the whole machine if it slept, or if other versions are installed than before."""
        asleep = self._clock() - self._awake()
        slept_s, self._asleep = asleep - self._asleep, asleep
        planned = self._state.world.snapshot.hardware
        before = self._installed or (planned.mlx_version, planned.mlx_lm_version)
        self._installed = await in_daemon_thread(self._versions)
        if slept_s < SLEPT_S and self._installed == before:
            return
        mlx, mlx_lm = self._installed
        log.event("machine.changed", slept_s=round(max(0.0, slept_s), 1), mlx=mlx, mlx_lm=mlx_lm)
        self._rechecked_at = -math.inf
        while self._rechecked_at == -math.inf:  # a look that is under way may be one at memory alone
            await self.fresh()

    def close(self) -> None:
        """Look no more."""
        for task in (self._looking, self._glancing):
            if task is not None:
                task.cancel()

    def _start(self) -> asyncio.Task[None]:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
        return self._looking

    async def _look(self) -> None:
        now = self._clock()
        whole = now - self._rechecked_at > RECHECK_S
        before = self._state.world.snapshot.hardware
        seen = await (in_daemon_thread(self._recheck) if whole else in_daemon_thread(self._refresh, before))
        self._looked_at = self._clock()
        if whole:
            self._rechecked_at = self._looked_at
        self._state.use_hardware(seen)

    async def _glance_for_ever(self) -> None:
        while True:
            await asyncio.sleep(GLANCE_S)
            try:
                await self.glance()
            except (OSError, RuntimeError) as error:  # no thread or no file to be had: the next glance tries again
                log.event("machine.unseen", logging.WARNING, error=repr(error))
