"""Plugins that are installed, upgraded or removed while the daemon runs: noticed, and used without a restart.

Every LOOK_S the folders and files that plugins were loaded from are looked at (some file system calls). What two looks
in a row find changed alike is settled, no installation half way, and the plugins are loaded again: a change is in use
within two looks. What changes again and again (a plugin that writes into its own package) is loaded at most once in
AGAIN_S, with a warning in between. A plugin that this process cannot replace goes on as it is, with a warning that
names the version a restart would bring (veloxquant.methods.upgrades).
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from veloxquant import local
from veloxquant.daemon import log
from veloxquant.daemon.threads import in_daemon_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from veloxquant.daemon.state import State

LOOK_S = 30.0
"""Each look wakes several threads: at 15 s a daemon at rest woke more than once a second (R37)."""
AGAIN_S = 600.0


class PluginWatch:
    """Lives on the event loop's thread; looks at the disk in others."""

    def __init__(self, state: State, load_again: Callable[[], Awaitable[None]]) -> None:
        self._state = state
        self._load_again = load_again
        self._seen = ""
        self._changed: tuple[str, ...] = ()
        self._loaded_at: dict[tuple[str, ...], float] = {}
        self._told: frozenset[tuple[str, str]] = frozenset()
        state.on_change(self._tell)

    async def run(self) -> None:
        """Look until cancelled."""
        self._tell(frozenset({"methods"}))
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:  # noqa: BLE001 -- fence: import finders are other people's code, and are asked here
                log.failure("plugins.look_failed")

    async def look(self) -> None:
        """Look once; load again what has changed and is at rest."""
        loaded = self._state.world.loaded
        seen = await in_daemon_thread(loaded.look_again)
        if seen == self._seen and not self._changed:
            return
        at_rest, self._seen = seen == self._seen, seen
        self._changed = await in_daemon_thread(loaded.changed)
        if not self._changed:
            self._state.warn("plugins", None)
        elif at_rest:
            await self._use(self._changed)

    async def _use(self, changed: tuple[str, ...]) -> None:
        """Load again, unless the same has just been done."""
        now = time.monotonic()
        if now - self._loaded_at.get(changed, -AGAIN_S) < AGAIN_S:
            self._state.warn("plugins", f"{', '.join(changed)} on disk, again: veloxquantctl reload uses it at once")
            return
        self._loaded_at = {changed: now}
        self._changed = ()
        log.event("plugins.changed", plugins=list(changed))
        self._state.warn("plugins", None)
        await self._load_again()

    def _tell(self, topics: frozenset[str]) -> None:
        """One line for each plugin that is fenced off, once."""
        if "methods" not in topics:
            return
        snapshot = self._state.world.snapshot
        fenced = {(snapshot.label_of(one), one.reason) for one in snapshot.quarantined if one.reason != local.DISABLED}
        for name, reason in sorted(fenced - self._told):
            log.event("plugin.quarantined", logging.WARNING, plugin=name, reason=reason)
        self._told = frozenset(fenced)
