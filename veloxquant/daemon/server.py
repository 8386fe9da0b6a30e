"""The running daemon, from the lock to the last answer.

`serve` is the order of a start and of an end (lifecycle says why); `Server` accepts clients in between. Accepting is
our own loop, not asyncio's server: asyncio replaces live sockets and removes files it did not make, and pauses a whole
second when files run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from veloxquant import local, paths
from veloxquant.config import load, socket_of
from veloxquant.daemon import activation, lean, lifecycle, log, peer
from veloxquant.daemon.application import Application
from veloxquant.daemon.connection import Connection, Patience
from veloxquant.daemon.dispatch import Dispatch
from veloxquant.daemon.record_feed import RecordFeed
from veloxquant.daemon.scarcity import FULL
from veloxquant.daemon.threads import in_daemon_thread
from veloxquant.errors import Overloaded, VeloxError
from veloxquant.wire.messages import encode_error

if TYPE_CHECKING:
    import socket as sockets
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from veloxquant.config import Config
    from veloxquant.daemon.lifecycle import Listener
    from veloxquant.local import World

ACCEPT_PAUSE_S = 0.1
ACCEPT_TOLD_S = 1.0
"""Pauses follow each other while files are short; the log hears of them so often."""
SUCCESSION_S = 12.0
"""From a socket taken over to the end of the daemon that had it: noticing (SELF_CHECK_S), then at most 5 s."""
SELF_CHECK_S = 5.0
"""One stat each; a fifth of a wake-up a second is what it costs."""
_BUSY_LOOKS = 60
"""Looks amid work, five minutes, after which free memory is given back though it never became quiet."""
LOST_DRAIN_S = 2.0
"""Whose socket is gone lets clients finish for so long at most, whatever daemon.drain_s says."""
SPARE_FILES = 48
"""Files kept for everything but clients: records, models, workers' pipes, the log."""
TOUCH_S = 12 * 3600.0
LOST = "socket lost"
_CLOSE_S = 0.5
_FAILED = 1


@dataclass(frozen=True)
class Timing:
    """The daemon's own clocks, in seconds; tests make them shorter."""

    patience: Patience = field(default_factory=Patience)
    self_check_s: float = SELF_CHECK_S


async def serve(
    config: Config,
    *,
    config_path: Path | None = None,
    read_config: Callable[[], Config] = load,
    on_ready: Callable[[Server], None] | None = None,
    signals: bool = True,
    timing: Timing | None = None,
) -> int:
    """Run a daemon until it is told to stop; its exit status. Raises SocketRefused, AlreadyRunning.

    `read_config` is what a reload calls. `on_ready` is called once clients are answered. `signals` False leaves the
    process's signals alone (a daemon inside a test).
    """
    began = time.monotonic()
    files = lifecycle.raise_file_limit()
    path = socket_of(config)
    lifecycle.private_folder(path.parent)
    with contextlib.ExitStack() as cleanup:
        given = activation.inherited(path)
        if given is not None:
            cleanup.callback(given.close)
        # A manager's socket has taken the place of a daemon started by hand, which notices and goes: clients can wait.
        wait_s = lifecycle.LOCK_WAIT_S if given is None else SUCCESSION_S
        cleanup.callback(lifecycle.Lock(paths.lock_path(path), wait_s).release)
        world, feed = await in_daemon_thread(_first_world, config)
        listener = given or cleanup.enter_context(contextlib.closing(_own_listener(path)))
        app = Application(world, feed, socket=path, config_path=config_path, read_config=read_config)
        idle_s = config.daemon.idle_timeout_s
        timing = timing or Timing(patience=Patience(idle_s=idle_s))
        server = Server(app, listener, timing, min(config.daemon.max_connections, max(1, files - SPARE_FILES)))
        return await server.run(began, on_ready, signals=signals)


class Server:
    """A listening socket, the clients on it, and the application that answers them."""

    def __init__(self, app: Application, listener: Listener, timing: Timing, max_clients: int) -> None:
        self.app = app
        self.dispatch = Dispatch(app)
        self._listener = listener
        self._timing = timing
        self._max_clients = max_clients
        self._loop = asyncio.get_running_loop()
        self._background: set[asyncio.Task[None]] = set()
        self._quiet_until = 0.0
        self._next_look = 0.0
        self._touched_at = time.monotonic()

    async def run(self, began: float, on_ready: Callable[[Server], None] | None, *, signals: bool) -> int:
        """Serve until asked to stop, then wind up; the exit status."""
        self._loop.set_exception_handler(_log_failure)
        if signals:
            self._catch_signals()
        self.app.start()
        self._spawn(self._accept())
        self._spawn(self._check_socket())
        self._spawn(self.app.plugins.run())
        log.event(
            "daemon.ready",
            socket=str(self._listener.path),
            pid=os.getpid(),
            activated=self._listener.activated,
            generation=self.app.state.generation,
            took_ms=round((time.monotonic() - began) * 1000),
        )
        lifecycle.notify_manager("READY=1")
        if signals:  # a process of our own
            lean.settle()
        if on_ready is not None:
            on_ready(self)
        try:
            await self.app.stopping.wait()
        finally:
            await self._wind_up()
        return 0 if self.app.stop_reason in ("shutdown", "SIGTERM", "SIGINT") else _FAILED

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nothing in the background may die unnoticed: without accepting, a daemon is a trap."""
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.event("daemon.failed", logging.CRITICAL, error=repr(error))
            self.app.ask_to_stop("failure")

    def _catch_signals(self) -> None:
        self._loop.add_signal_handler(signal.SIGHUP, lambda: self._spawn(self._reload()))
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_stop_signal, number)

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self.app.stop_reason is not None:
            # Asked twice: go at once, without the clients' leave.
            self._listener.close()
            os._exit(128 + number)
        self.app.ask_to_stop(number.name)

    async def _reload(self) -> None:
        log.event("reload.asked", signal="SIGHUP")
        with contextlib.suppress(VeloxError):  # the application has logged it and shows it in its warnings
            await self.app.reload()

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener.socket)
            except OSError as error:
                if error.errno in FULL:
                    self._tell_pause(error.strerror)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                elif error.errno != errno.ECONNABORTED:
                    raise
            else:
                await self._welcome(connection)

    def _tell_pause(self, reason: str | None) -> None:
        """Log that no client can be accepted now, once a second."""
        if self._loop.time() >= self._quiet_until:
            self._quiet_until = self._loop.time() + ACCEPT_TOLD_S
            log.event("accept.paused", logging.WARNING, reason=reason, clients=len(self.app.clients))

    async def _welcome(self, connection: sockets.socket) -> None:
        try:
            other = peer.identify(connection)
        except OSError:
            other = None
        if other is None or not peer.allowed(other):
            log.event("client.refused", logging.WARNING, peer_uid=None if other is None else other.uid)
            self.app.clients.refused += 1
            connection.close()
            return
        if len(self.app.clients) >= self._max_clients:
            await self._make_room()
        if len(self.app.clients) >= self._max_clients:
            self._turn_away(connection)
            return
        client = Connection(self.dispatch, other, self._timing.patience)
        self.app.clients.welcome(client)
        try:
            await self._loop.connect_accepted_socket(lambda: client, connection)
        except OSError:  # gone again before we could listen
            self.app.clients.leave(client)
            connection.close()

    async def _make_room(self) -> None:
        """Close clients that left while they waited for an answer and were not looked at since."""
        if self._loop.time() < self._next_look:
            return
        self._next_look = self._loop.time() + ACCEPT_PAUSE_S
        clients = {client.fileno(): client for client in self.app.clients}
        for descriptor in peer.hung_up(clients):
            clients[descriptor].abort()
        await asyncio.sleep(0)  # a turn of the loop, in which they go

    def _turn_away(self, connection: sockets.socket) -> None:
        log.event("client.turned_away", logging.WARNING, clients=len(self.app.clients))
        self.app.clients.refused += 1
        error = Overloaded(f"{self._max_clients} clients are connected", hint="close some, or raise max_connections")
        with connection, contextlib.suppress(OSError):
            connection.settimeout(0)
            connection.send(encode_error(None, error))

    async def _check_socket(self) -> None:
        """A daemon whose socket is gone or somebody else's serves nobody: go, and touch nothing."""
        busy = 0
        while True:
            answered = self.app.counters.calls.total()
            await asyncio.sleep(self._timing.self_check_s)
            self.app.rest(self._timing.self_check_s)
            busy = self._tidy(busy, self.app.counters.calls.total() - answered)
            if not self._listener.still_ours():
                log.event("socket.lost", logging.ERROR, socket=str(self._listener.path))
                self.app.ask_to_stop(LOST)
                return
            if time.monotonic() - self._touched_at > TOUCH_S:
                # macOS removes what was not touched for days from its temporary folders.
                self._touched_at = time.monotonic()
                with contextlib.suppress(OSError):  # a disk that has become read-only removes nothing either
                    os.utime(self._listener.path)

    @staticmethod
    def _tidy(busy: int, answered: int) -> int:
        """Give back what work left, once it is quiet or after many looks amid work; looks amid work since then."""
        if answered and busy < _BUSY_LOOKS:
            return busy + 1
        if busy:
            lean.trim()
        return int(answered > 0)

    async def _wind_up(self) -> None:
        """No new clients; answer what was asked; say goodbye; close."""
        log.event("daemon.stopping", reason=self.app.stop_reason, clients=len(self.app.clients))
        lifecycle.notify_manager("STOPPING=1")
        for task in list(self._background):
            task.cancel()
        self._listener.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # two turns of the loop: what has already arrived is read
        self.dispatch.draining = True
        self.app.subscribers.say_goodbye()
        for client in list(self.app.clients):
            client.finish()
        try:
            async with asyncio.timeout(self._drain_s()):
                await self.app.clients.nobody.wait()
        except TimeoutError:
            log.event("clients.abandoned", logging.WARNING, clients=len(self.app.clients))
        for client in list(self.app.clients):
            client.abort()
        with contextlib.suppress(TimeoutError, RuntimeError):  # the system gives no thread to wait in: so do not wait
            async with asyncio.timeout(_CLOSE_S):
                await self.app.close()
        log.event("daemon.stopped")

    def _drain_s(self) -> float:
        wanted = self.app.config.daemon.drain_s
        return min(wanted, LOST_DRAIN_S) if self.app.stop_reason == LOST else wanted


def _log_failure(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio would print: into the log, with the error it is about."""
    log.event("loop.failed", logging.ERROR, text=context.get("message"), error=repr(context.get("exception")))


def _own_listener(path: Path) -> Listener:
    lifecycle.remove_stale(path)
    return lifecycle.listen(path)


def _first_world(config: Config) -> tuple[World, RecordFeed]:
    """In a thread: plugins, machine and records. Never raises for bad plugins or records."""
    feed = RecordFeed(config)
    feed.read()
    world = local.open_world(config, source="daemon", records=feed.records, calibrations=feed.calibrations)
    return world, feed
