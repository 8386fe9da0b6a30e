"""A daemon that does what a test tells it: one function per connection, in threads of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from veloxquant.planner.result import Budget, Plan

if TYPE_CHECKING:
    from pathlib import Path

Behaviour = Callable[[socket.socket], None]

NO_FIT = Plan(
    plan_id="0a",
    source="daemon",
    decision="no_fit",
    chosen=None,
    hardware={},
    model={},
    workload={},
    engine={},
    budget=Budget(working_set_bytes=1, weights_bytes=1, active_bytes=0, reserve_bytes=0, kv_budget_bytes=0),
)
"""The least that a daemon may answer `plan` with."""


def reply(connection: socket.socket, result: Any) -> None:
    """Answer one request line with this result."""
    request = json.loads(line(connection))
    connection.sendall(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode() + b"\n")


def line(connection: socket.socket) -> bytes:
    """The next request line; raises EOFError when the client is gone."""
    data = b""
    while not data.endswith(b"\n"):
        chunk = connection.recv(65536)
        if not chunk:
            raise EOFError
        data += chunk
    return data


@contextlib.contextmanager
def daemon(path: Path, behaviour: Behaviour, *, backlog: int = 64) -> Iterator[list[int]]:
    """Listen at `path`; every accepted connection is given to `behaviour`. Yields a list that counts connections."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(backlog)
    accepted: list[int] = []
    opened: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve_one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            behaviour(connection)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            accepted.append(connection.fileno())
            opened.append(connection)
            threads.append(threading.Thread(target=serve_one, args=(connection,), daemon=True))
            threads[-1].start()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    try:
        yield accepted
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in opened:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in [server, *threads]:
            thread.join(5)
        path.unlink(missing_ok=True)
