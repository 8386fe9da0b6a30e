"""A plain connection for scripts that misbehave, and what a daemon's process holds."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from reliability import load, questions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import session


class Vitals(NamedTuple):
    """Resident KiB, open descriptors, and the event loop's tasks."""

    resident_kib: float
    files: int
    tasks: int


def vitals(daemon: session.Daemon) -> Vitals:
    """What the daemon holds now; tasks as it says itself."""
    process = psutil.Process(daemon.process.pid)
    with daemon.client() as client:
        told = client.status().process
    return Vitals(process.memory_info().rss / 1024, (told.fds or 0), told.tasks or 0)


@contextmanager
def highest_resident(daemon: session.Daemon) -> Iterator[list[float]]:
    """Resident KiB while the block runs: the first, then the highest seen, looked at every millisecond."""
    process = psutil.Process(daemon.process.pid)
    seen = [process.memory_info().rss / 1024] * 2
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.001):
            seen[1] = max(seen[1], process.memory_info().rss / 1024)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        seen[1] = max(seen[1], process.memory_info().rss / 1024)


class Wire:
    """One connection; every wait has a limit."""

    def __init__(self, path: str, within_s: float = 30.0) -> None:
        self.socket = load.connect(path, within_s)
        self._buffer = b""

    def send(self, data: bytes) -> None:
        """Exactly these bytes."""
        self.socket.sendall(data)

    def lines(self, count: int) -> list[bytes]:
        """So many lines, fewer where the daemon closes."""
        parts, have = [self._buffer], self._buffer.count(b"\n")
        while have < count:
            try:
                block = self.socket.recv(1 << 20)
            except ConnectionResetError:
                block = b""
            if not block:
                break
            parts.append(block)
            have += block.count(b"\n")
        *found, rest = b"".join(parts).split(b"\n")
        self._buffer = b"".join(line + b"\n" for line in found[count:]) + rest
        return found[:count]

    def ask(self, line: bytes) -> Any:
        """One line for one line, decoded."""
        self.send(line)
        return json.loads(self.lines(1)[0])

    def is_closed(self, within_s: float) -> bool:
        """Whether the daemon hangs up within this time."""
        self.socket.settimeout(within_s)
        try:
            return self.socket.recv(1) == b""
        except TimeoutError:
            return False
        except ConnectionResetError:
            return True

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


def fresh_pings_ms(path: str, count: int) -> list[float]:
    """Milliseconds of so many pings, each over a connection of its own, connecting included."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        wire = Wire(path)
        answer = wire.ask(questions.PING)
        found.append((time.perf_counter() - began) * 1000)
        wire.close()
        if "result" not in answer:
            raise ValueError(f"a ping was answered with {answer}")
    return found
