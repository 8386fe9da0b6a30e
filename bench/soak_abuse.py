"""What clients should not do, one round each: broken frames, sudden ends, half frames, and never reading."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

BROKEN = (
    b"\n",
    b"{\n",
    b"\xff\xfe\n",
    b'{"jsonrpc":"2.0","id":1,"method":"nope"}\n',
    b'{"jsonrpc":"2.0","id":1,"method":"plan","params":{"model":{"path":"/x"},"more":1}}\n',
    b'{"jsonrpc":"2.0","id":NaN,"method":"ping"}\n',
    b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]\n',
    b"GET / HTTP/1.1\n",
    b"[" * 9000 + b"\n",
    b"x" * (256 * 1024 + 1),
)
"""Each gets one line that is no result."""
HALF = b'{"jsonrpc":"2.0","id":1,"me'
HALF_OPEN = 10
CLOSED_WITHIN_S = 60.0
"""The daemon's limits are 30 s for a frame and 5 s for an answer; a busy machine may take longer to notice."""
_STATUS = b'{"jsonrpc":"2.0","id":1,"method":"status"}\n'
_VICTIM = """
import socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
while True:
    line.sendall(b'{"jsonrpc":"2.0","id":1,"method":"status"}\\n')
    while not line.recv(65536).endswith(b"\\n"):
        pass
"""
"""A client that asks without end, in a process of its own, until it is killed."""

Round = tuple[str, "Callable[[int], Awaitable[None]]", float]


def jobs(path: Path) -> list[Round]:
    """(name, one round, mean pause in seconds) of each kind of abuse."""
    kinds: list[tuple[str, Callable[[Path, int], Awaitable[None]], float]] = [
        ("broken frames", broken_frame, 0.5),
        ("clients that hang up", hang_up, 1.0),
        ("clients killed", killed, 5.0),
        ("subscribers that never read", never_read, 5.0),
        *[("half-open clients", half_open, 0.5)] * HALF_OPEN,
    ]
    return [(name, functools.partial(work, path), pause_s) for name, work, pause_s in kinds]


async def broken_frame(path: Path, number: int) -> None:
    """One broken line, one answer that is no result; now and then random bytes."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(BROKEN[number % len(BROKEN)] if number % 3 else os.urandom(200).replace(b"\n", b"x") + b"\n")
        async with asyncio.timeout(CLOSED_WITHIN_S):
            line = await reader.readline()
        refused = line.startswith(b"HTTP/1.1 400") or "error" in json.loads(line or b"{}")
        if not refused:
            raise AssertionError(f"a broken frame was answered with {line[:200]!r}")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def hang_up(path: Path, number: int) -> None:
    """Ask and leave at once, with a whole frame or half a one under way."""
    _, writer = await asyncio.open_unix_connection(path)
    writer.write(_STATUS if number % 2 else HALF)
    writer.transport.abort()


async def killed(path: Path, _: int) -> None:
    """A client process that ends by SIGKILL in the middle of what it does."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-S", "-E", "-c", _VICTIM, str(path))
    await asyncio.sleep(random.uniform(0.05, 0.3))  # noqa: S311 -- a load, not a secret
    if process.returncode is not None:
        raise AssertionError(f"a client ended by itself with {process.returncode}")
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def half_open(path: Path, _: int) -> None:
    """Half a frame, then silence: the daemon has to hang up."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(HALF)
        await _until_closed(reader.read(1))
    finally:
        writer.close()


async def never_read(path: Path, _: int) -> None:
    """Subscribe, ask and ask, read nothing: the daemon has to hang up; what it sent until then stays unread."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(0)
        await loop.sock_connect(connection, str(path))
        await loop.sock_sendall(connection, b'{"jsonrpc":"2.0","id":0,"method":"subscribe"}\n')
        await _until_closed(_ask_on(loop, connection))


async def _ask_on(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    """Questions until the connection breaks. The daemon stops reading before that, so that sending waits too."""
    while True:
        try:
            await asyncio.wait_for(loop.sock_sendall(connection, _STATUS * 8), 1.0)
        except (BrokenPipeError, ConnectionResetError):
            return
        except TimeoutError:
            continue
        await asyncio.sleep(0.005)


async def _until_closed(waiting: Awaitable[Any]) -> None:
    """Wait for it. Raises AssertionError when it takes too long."""
    began = time.monotonic()
    try:
        await asyncio.wait_for(waiting, CLOSED_WITHIN_S)
    except ConnectionResetError:
        return
    except TimeoutError:
        raise AssertionError(f"not closed within {time.monotonic() - began:.0f} s") from None
