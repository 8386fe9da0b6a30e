"""From a frame to the line that answers it: one table of calls, one fence around them.

Nothing a client sends raises out of here: what is wrong becomes a typed error, and what we got wrong an
internal_error with an id under which the log has the traceback.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant import __version__, views
from veloxquant.daemon import log
from veloxquant.daemon.application import SERVER
from veloxquant.daemon.scarcity import is_starved
from veloxquant.daemon.threads import note_end
from veloxquant.daemon.traces import waited_s
from veloxquant.errors import Overloaded, ProtocolUnsupported, ShuttingDown, VeloxError
from veloxquant.wire import messages
from veloxquant.wire.answers import Hello, Pong, Reloaded, Stopping, Subscribed
from veloxquant.wire.messages import PROTOCOL, encode_error, encode_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from veloxquant.daemon.application import Application
    from veloxquant.daemon.connection import Connection
    from veloxquant.wire.messages import Envelope

CAPABILITIES = tuple(sorted(messages.PARAMS))
"""One for each call; later features get names of their own."""
_REMEMBERED = ("plan", "fit")
_UNREADABLE = "unreadable"


class Dispatch:
    """Answers frames for one application. Implements connection.Desk."""

    def __init__(self, app: Application) -> None:
        self.draining = False
        self._app = app
        self._table: dict[str, Callable[[Any, Connection, bytes], Any]] = {
            "hello": self._hello,
            "ping": lambda _params, _client, _raw: Pong(pid=os.getpid(), generation=app.state.generation),
            "plan": lambda params, _client, raw: app.question("plan", params, raw),
            "fit": lambda params, _client, raw: app.question("fit", params, raw),
            "explain": lambda params, _client, _raw: app.explain(params),
            "methods": lambda params, _client, _raw: views.methods(params, app.state.world),
            "records": lambda params, _client, _raw: app.feed.page(params, app.state.generation),
            "hardware": lambda params, _client, _raw: app.hardware(params),
            "status": lambda _params, _client, _raw: app.status(),
            "metrics": lambda _params, _client, _raw: app.metrics(),
            "reload": self._reload,
            "subscribe": self._subscribe,
            "unsubscribe": self._unsubscribe,
            "shutdown": self._shutdown,
        }

    def answer(self, frame: bytes, client: Connection) -> bytes | Awaitable[bytes]:
        """The answer line, or a promise of it."""
        began = time.perf_counter()
        request_id: int | str | None = None
        method = _UNREADABLE
        try:
            envelope = messages.decode_envelope(frame)
            request_id, method = envelope.id, envelope.method
            result = self._result(method, bytes(envelope.params), client)
        except VeloxError as error:
            self._count(method, began, client)
            return self._refuse(messages.salvage_id(frame) if request_id is None else request_id, error)
        except Exception as failure:  # noqa: BLE001 -- the fence: one bad answer must not end the connection
            self._count(method, began, client)
            return self._refuse(request_id, _failed(method, failure))
        if isinstance(result, Awaitable):
            return self._later(envelope, result, client, began)
        return self._finish(envelope, result, client, began)

    def caught_up(self, client: Connection) -> None:
        """A client reads again."""
        self._app.subscribers.caught_up(client)

    def gone(self, client: Connection) -> None:
        """A client left."""
        self._app.subscribers.remove(client)
        self._app.clients.leave(client)

    def _result(self, method: str, raw: bytes, client: Connection) -> Any:
        if self.draining:
            raise ShuttingDown("the daemon is stopping", hint="ask again once it has been started anew")
        if method in _REMEMBERED:
            encoded = self._app.remembered(method, raw)
            if encoded is not None:
                return msgspec.Raw(encoded)
        params = messages.decode_params(method, raw)
        return self._table[method](params, client, raw)

    async def _later(self, asked: Envelope, promise: Awaitable[Any], client: Connection, began: float) -> bytes:
        try:
            result = await promise
        except VeloxError as error:
            self._count(asked.method, began, client)
            return self._refuse(asked.id, error)
        except Exception as failure:  # noqa: BLE001 -- the fence
            self._count(asked.method, began, client)
            return self._refuse(asked.id, _failed(asked.method, failure))
        return self._finish(asked, result, client, began)

    def _finish(self, asked: Envelope, result: Any, client: Connection, began: float) -> bytes:
        try:
            line = encode_result(asked.id, result)
        except Exception:  # noqa: BLE001 -- the fence: a result that cannot be written
            line = self._refuse(asked.id, _internal(asked.method))
        self._count(asked.method, began, client)
        return line

    def _refuse(self, request_id: int | str | None, error: VeloxError) -> bytes:
        self._app.counters.errors[error.name] += 1
        return encode_error(request_id, error)

    def _count(self, method: str, began: float, client: Connection) -> None:
        """Note that a request ended, and say so in the log when it took long."""
        seconds = time.perf_counter() - began
        # An unknown call is counted under one name, so that no client can make the counts grow.
        known = method if method in self._table else _UNREADABLE
        self._app.counters.answered(known, seconds)
        limit_s = self._app.config.daemon.slow_call_ms / 1000
        if seconds > limit_s and (own_s := seconds - waited_s.get()) > limit_s:
            self._app.counters.slow += 1
            log.event("request.slow", logging.WARNING, method=known, ms=round(own_s * 1000), peer_pid=client.peer.pid)

    def _hello(self, params: messages.HelloParams, _client: Connection, _raw: bytes) -> Hello:
        if PROTOCOL not in params.protocol:
            asked = ", ".join(str(version) for version in params.protocol)
            raise ProtocolUnsupported(
                f"protocol {asked} was asked for, this daemon speaks {PROTOCOL} to {PROTOCOL}",
                hint=messages.SAME_VERSION,
                field="protocol",
            )
        return Hello(
            server=SERVER,
            version=__version__,
            protocol=PROTOCOL,
            capabilities=CAPABILITIES,
            pid=os.getpid(),
            generation=self._app.state.generation,
        )

    async def _reload(self, _params: messages.NoParams, client: Connection, _raw: bytes) -> Reloaded:
        log.event("reload.asked", peer_uid=client.peer.uid, peer_pid=client.peer.pid)
        # Shielded: a client that goes away must not leave the daemon between two worlds.
        reload = asyncio.get_running_loop().create_task(self._app.reload())
        reload.add_done_callback(note_end)
        return await asyncio.shield(reload)

    def _subscribe(self, params: messages.SubscribeParams, client: Connection, _raw: bytes) -> Subscribed:
        return Subscribed(topics=self._app.subscribers.add(client, params.topics))

    def _unsubscribe(self, params: messages.UnsubscribeParams, client: Connection, _raw: bytes) -> Subscribed:
        return Subscribed(topics=self._app.subscribers.remove(client, params.topics))

    def _shutdown(self, _params: messages.NoParams, client: Connection, _raw: bytes) -> Stopping:
        log.event("shutdown.asked", peer_uid=client.peer.uid, peer_pid=client.peer.pid)
        self._app.ask_to_stop("shutdown")
        return Stopping(drain_s=self._app.config.daemon.drain_s)


def _failed(method: str, failure: Exception) -> VeloxError:
    """The error for what should not have happened: want of files, memory or threads passes, all else is our mistake."""
    if is_starved(failure):
        log.event("request.starved", logging.WARNING, method=method, reason=str(failure) or "out of memory")
        return Overloaded(
            "the daemon is out of files, memory or threads for now", hint="ask again, or close some clients"
        )
    return _internal(method)


def _internal(method: str) -> VeloxError:
    """Log the exception being handled, and give the error that names the log line."""
    ticket = secrets.token_hex(4)
    log.failure("request.failed", method=method, ticket=ticket)
    return VeloxError(
        f"the daemon failed at this request (ticket {ticket})",
        hint=f"look for {ticket} in veloxquantctl logs --event request.failed, and report it",
    )
