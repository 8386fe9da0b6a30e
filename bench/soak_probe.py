"""How long answers take while the soak runs, seen by one client in a process of its own.

`soak_probe.py SOCKET SECONDS`, where the seconds are those of a window. It asks three things in turn: a plan, a ping,
and, as a control, a plan's number of bytes of a child process that only echoes. When the control gets slower too, it is
the machine that is busier, not the daemon that got slower. Each window is one line of JSON on standard output: every
time in it, in microseconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import soak_load

from veloxquant.wire.messages import encode_request

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE_S = 0.02
LIMIT_S = 60.0
SERIES = ("plan", "ping", "control")


def ask(path: Path, method: str, params: dict[str, Any]) -> Callable[[], None]:
    """One question over a plain connection of its own: the client would doubt a daemon that is silent for 2 s."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(LIMIT_S)
    connection.connect(str(path))
    frame = encode_request(1, method, params)

    def once() -> None:
        connection.sendall(frame)
        line = b""
        while not line.endswith(b"\n"):
            chunk = connection.recv(65536)
            if not chunk:
                raise SystemExit(f"the daemon closed the connection instead of answering {method}")
            line += chunk
        if b'"result"' not in line[:64]:
            raise SystemExit(f"{method} was answered with {line[:200]!r}")

    return once


def echo(answer_bytes: int) -> Callable[[], None]:
    """As many bytes for one line, from a child that does nothing else; it ends when this process does."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        reply = b"x" * answer_bytes
        while theirs.recv(65536):
            theirs.sendall(reply)
        os._exit(0)
    theirs.close()

    def once() -> None:
        ours.sendall(b"x" * 1024)
        left = answer_bytes
        while left:
            left -= len(ours.recv(65536))

    return once


def window(asks: dict[str, Callable[[], None]], ends: float) -> dict[str, list[int]]:
    """Times of each series until then, in microseconds."""
    times: dict[str, list[int]] = {name: [] for name in asks}
    while time.monotonic() < ends:
        for name, once in asks.items():
            time.sleep(PAUSE_S)
            began = time.perf_counter_ns()
            once()
            times[name].append((time.perf_counter_ns() - began) // 1000)
    return times


def main(path: Path, window_s: float) -> None:
    """Windows one after the other, until the reader has gone or the daemon has."""
    params = {"model": soak_load.MODEL, "hardware": soak_load.HARDWARE, "workload": {"context_length": 4096}}
    # Before any connection, so that the child holds none of them.
    control = echo(24 * 1024)
    asks = {"plan": ask(path, "plan", params), "ping": ask(path, "ping", {}), "control": control}
    ends = time.monotonic()
    while True:
        ends += window_s
        print(json.dumps(window(asks, ends)), flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), float(sys.argv[2]))
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)
