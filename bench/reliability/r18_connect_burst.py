"""R18: 1,000 clients connect while the daemon accepts nothing: none of them sees it.

The daemon is stopped (SIGSTOP) until every call has begun, so that its backlog of 512 overflows whatever the machine's
speed: harder than 1,000 within 100 ms of a daemon that accepts. Each is our own Client in a thread of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures

from veloxquant.client import Client
from veloxquant.errors import VeloxError

CLIENTS = 1000
AFTER_LAST_S = 0.05


def burst(path: Path, pid: int, clients: int) -> tuple[list[str], float, float]:
    """What went wrong, seconds from the first to the last start of a call, and until the last answer."""
    failures: list[str] = []
    starts: list[float] = []
    go = threading.Event()

    def call() -> None:
        with Client(path, fallback=False, timeout_s=30.0) as client:
            go.wait()
            starts.append(time.perf_counter())
            try:
                client.ping()
            except VeloxError as error:
                failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=call) for _ in range(clients)]
    for thread in threads:
        thread.start()
    os.kill(pid, signal.SIGSTOP)
    began = time.perf_counter()
    go.set()
    while len(starts) < clients:
        time.sleep(0.001)
    time.sleep(AFTER_LAST_S)
    os.kill(pid, signal.SIGCONT)
    for thread in threads:
        thread.join()
    return failures, max(starts) - min(starts), time.perf_counter() - began


def main() -> int:
    """Once, or five times."""
    rounds = 5 if figures.options(__doc__ or "").full else 1
    with session.private_home() as home, session.running(home) as daemon:
        for _ in range(rounds):
            failures, spread, took = burst(home.socket, daemon.process.pid, CLIENTS)
            figures.at_most(
                "R18", f"{CLIENTS:,} connects at once: failures that a caller sees", len(failures), "calls", 0
            )
            figures.say("R18", "from the first call's start to the last one's", spread * 1000, "ms", "none", met=True)
            figures.say("R18", "until all were answered", took, "s", "none", met=True)
            if failures:
                print(failures[0], file=sys.stderr)
        peak = daemon.client().status().clients.peak
        figures.say("R18", "connections open at once, at most", peak, "clients", "none", met=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
