"""R16: clients that ask and never read: what is held for one is bounded, it is closed after 5 s, others wait no longer.

Each sends in one go 2,000 questions with answers of some 60 kB, or 400,000 lines of two bytes. What it costs the others
is the p99 of eight clients that ping, with and without it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, load, questions, wire

PLANS = 2000
OTHERS = 8
KINDS = {"plans": questions.plans(1)[0] * PLANS, "lines of two bytes": b"xx\n" * 400_000}
"""What they send. Short lines are many objects for few bytes."""
PINGS = 1000


def stall(path: str, asked: bytes) -> tuple[wire.Wire, threading.Thread]:
    """A client that sends all it has, however slowly it is taken, and reads nothing."""
    client = wire.Wire(path)

    def send() -> None:
        with contextlib.suppress(OSError):  # it is closed, as it should be
            client.send(asked)

    thread = threading.Thread(target=send)
    thread.start()
    return client, thread


def others_p99_ms(path: str) -> float:
    """Of eight clients that ping: the best of three times, as whatever else the machine does can only add to it."""
    found = []
    for _ in range(3):
        outcome = load.run(path, [questions.PING] * OTHERS, PINGS)
        if outcome.errors:
            raise ValueError(outcome.errors[0])
        found.append(figures.percentile(outcome.seconds, 99) * 1000)
    return min(found)


def beside(daemon: session.Daemon, count: int, kind: str, alone_ms: float) -> None:
    """So many that never read, and what they cost."""
    path = str(daemon.home.socket)
    with wire.highest_resident(daemon) as resident:
        began = time.monotonic()
        stalled = [stall(path, KINDS[kind]) for _ in range(count)]
        p99_ms = others_p99_ms(path)
        for _, thread in stalled:
            thread.join(20)
        took = time.monotonic() - began
    alive = sum(1 for _, thread in stalled if thread.is_alive())
    label = f"{count} that never read, {kind}"
    held = (resident[1] - resident[0]) / count
    figures.at_most("R16", f"{label}: most resident memory above the start, for each", held, "KiB", 1024)
    figures.at_most("R16", f"{label}: not closed", alive, "clients", 0)
    in_time = 4 <= took <= 6.5
    figures.say("R16", f"{label}: the last was closed after", took, "s", "5 s, give or take 1.5", met=in_time)
    figures.at_most("R16", f"{label}: p99 of {OTHERS} pinging clients beside", p99_ms, "ms", 2 * alone_ms)
    for client, _ in stalled:
        client.close()


def main() -> int:
    """One that never reads, then twenty at once."""
    figures.options(__doc__ or "")
    with session.private_home() as home, session.running(home) as daemon:
        path = str(home.socket)
        load.run(path, questions.plans(1), 50)
        with wire.highest_resident(daemon):  # whose looking costs this process some time, then as now
            alone_ms = others_p99_ms(path)
        figures.say("R16", f"p99 of {OTHERS} pinging clients alone", alone_ms, "ms", "none", met=True)
        for kind in KINDS:
            for count in (1, 20):
                beside(daemon, count, kind, alone_ms)
        left = daemon.client().status().clients.now - 1
        figures.at_most("R16", "connections left", left, "clients", 0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
