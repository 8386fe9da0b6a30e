"""R12, the other half: thousands of clients that hang up at any moment leave no task, descriptor or memory behind.

Nothing sent, half a line, a question without waiting, half an answer read, a subscription, a plan that takes time, a
reset instead of an end. As many go before, so that only what would grow without end is seen.
"""

from __future__ import annotations

import random
import socket
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, load, questions, wire

PLAN = questions.plans(1)[0]
SENT = (
    b"",
    b"{",
    PLAN[: len(PLAN) // 2],
    questions.PING,
    questions.PING * 100,
    PLAN,
    PLAN * 20,
    b'{"jsonrpc":"2.0","id":1,"method":"subscribe"}\n',
    b"x" * 300_000,
    b"GET / HTTP/1.1\r\n\r\n",
)
"""What a client has sent when it goes."""
REMEMBERED = 200
"""More plans than the daemon keeps."""


def hang_up(path: str, count: int, seed: int, *, plans: bool = True) -> None:
    """So many clients, each gone in its own way; some ask for a new plan, and `plans` says whether any ask for one."""
    dice = random.Random(seed)  # noqa: S311 -- a repeatable walk
    fresh = iter(questions.plans(4096 * seed)[REMEMBERED:])
    for number in range(count):
        connection = load.connect(path)
        data = SENT[number % len(SENT)] if number % 37 or not plans else next(fresh)
        if not plans and data.startswith(PLAN):
            data = data.replace(b'"method":"plan"', b'"method":"nope"')
        try:
            connection.sendall(data)
            if dice.random() < 0.5 and data.endswith(b"\n"):
                connection.recv(dice.choice((1, 100, 100_000)))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the daemon was faster: a line too long
        if dice.random() < 0.3:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def main() -> int:
    """2,000 clients, or 20,000."""
    count = 20_000 if figures.options(__doc__ or "").full else 2_000
    with session.private_home() as home, session.running(home) as daemon:
        path = str(home.socket)
        load.run(path, questions.plans(1), 1)
        load.run(path, questions.plans(REMEMBERED), 1)  # what is remembered for its own sake is full before
        hang_up(path, count, seed=1)  # what is kept of plans, clients and errors has its size then
        time.sleep(0.5)
        before = wire.vitals(daemon)
        hang_up(path, count, seed=2)
        time.sleep(0.5)
        after = wire.vitals(daemon)
        with daemon.client() as client:
            left = client.status().clients.now - 1
        told = home.log.read_text(encoding="utf-8", errors="replace")
    label = f"{count:,} clients that hang up at any moment"
    figures.at_most("R12", f"{label}: connections left", left, "clients", 0)
    figures.at_most("R12", f"{label}: tasks more than before", after.tasks - before.tasks, "tasks", 0)
    figures.at_most("R12", f"{label}: descriptors more than before", after.files - before.files, "files", 0)
    growth = (after.resident_kib - before.resident_kib) / 1024
    figures.at_most("R12", f"{label}: growth of resident memory", growth, "MiB", 2)
    noise = [line for line in told.splitlines() if not line.startswith("{")] + ["Traceback"] * told.count("Traceback")
    figures.at_most("R12", f"{label}: lines in the log that are no event", len(noise), "lines", 0)
    print("\n".join(noise[:5]), file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
