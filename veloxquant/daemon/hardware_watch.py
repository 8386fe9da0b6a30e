"""Keeping the machine's facts fresh for whoever asks, at no cost while nobody does.

Memory in use changes by the second. A request starts a look in the background when the last one is older than
REFRESH_S, and waits for one when it is older than STALE_S: an answer is never about the memory of an hour ago. Every
RECHECK_S the whole machine is looked at again (versions upgraded underneath, a limit raised). The generation moves
only when something material did (state.moved), so that answers stay remembered on a machine at rest.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from veloxquant.daemon.threads import in_daemon_thread
from veloxquant.hardware import detect

if TYPE_CHECKING:
    from collections.abc import Callable

    from veloxquant.daemon.state import State
    from veloxquant.profiles import HardwareProfile

REFRESH_S = 5.0
STALE_S = 30.0
RECHECK_S = 60.0


class HardwareWatch:
    """Lives on the event loop's thread; looks at the machine in others."""

    def __init__(
        self,
        state: State,
        refresh: Callable[[HardwareProfile], HardwareProfile] = detect.refresh,
        recheck: Callable[[], HardwareProfile] = detect.detect,
    ) -> None:
        self._state = state
        self._refresh = refresh
        self._recheck = recheck
        self._looked_at = self._rechecked_at = time.monotonic()
        self._looking: asyncio.Task[None] | None = None

    @property
    def stale(self) -> bool:
        """Too old to answer from."""
        return time.monotonic() - self._looked_at > STALE_S

    def touch(self) -> None:
        """Somebody asks: look in the background if it is time."""
        if time.monotonic() - self._looked_at > REFRESH_S:
            self._start()

    async def fresh(self) -> None:
        """Wait for a look, the one under way or a new one."""
        await asyncio.shield(self._start())

    def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()

    def _start(self) -> asyncio.Task[None]:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
        return self._looking

    async def _look(self) -> None:
        now = time.monotonic()
        whole = now - self._rechecked_at > RECHECK_S
        before = self._state.world.snapshot.hardware
        seen = await (in_daemon_thread(self._recheck) if whole else in_daemon_thread(self._refresh, before))
        self._looked_at = time.monotonic()
        if whole:
            self._rechecked_at = self._looked_at
        self._state.use_hardware(seen)
