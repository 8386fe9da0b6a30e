"""R12: a million lines that are no request: one typed error each, no traceback, no memory and no descriptor kept.

Ten kinds in turn, 200 lines a write with a good one behind them, a new connection now and then.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, malformed, questions, wire

BATCH = 200
BATCHES_A_CONNECTION = 25


def send(path: str, count: int, seed: int) -> int:
    """How many of so many lines did not get exactly one typed error, in place."""
    wrong, made = 0, malformed.lines(count, seed)
    connection = wire.Wire(path)
    for batch in range(-(-count // BATCH)):
        if batch % BATCHES_A_CONNECTION == 0:
            connection.close()
            connection = wire.Wire(path)
        lines = [line for _, line in zip(range(BATCH), made, strict=False)]
        connection.send(b"".join(lines) + questions.PING)
        answers = connection.lines(len(lines) + 1)
        wrong += sum(1 for answer in answers[:-1] if b'"error":{"code":-32' not in answer[:340])
        wrong += len(lines) + 1 - len(answers)
        wrong += 0 if answers and b'"pong":true' in answers[-1] else 1
    connection.close()
    return wrong


def main() -> int:
    """20,000 lines, or a million."""
    count = 1_000_000 if figures.options(__doc__ or "").full else 20_000
    with session.private_home() as home, session.running(home) as daemon:
        path = str(home.socket)
        send(path, min(count, 20_000), seed=1)  # allocators settle, every kind of error is made once
        before = wire.vitals(daemon)
        began = time.perf_counter()
        wrong = send(path, count, seed=2)
        elapsed = time.perf_counter() - began
        after = wire.vitals(daemon)
        told = home.log.read_text(encoding="utf-8", errors="replace")
    label = f"{count:,} malformed lines of {len(malformed.KINDS)} kinds"
    figures.at_most("R12", f"{label}: without exactly one typed error", wrong, "lines", 0)
    figures.at_most("R12", f"{label}: tracebacks", told.count("Traceback"), "tracebacks", 0)
    growth = (after.resident_kib - before.resident_kib) / 1024
    figures.at_most("R12", f"{label}: growth of resident memory", growth, "MiB", 2)
    figures.at_most("R12", f"{label}: descriptors more than before", after.files - before.files, "files", 0)
    figures.at_most("R12", f"{label}: tasks more than before", after.tasks - before.tasks, "tasks", 0)
    figures.say("R12", f"{label}: rate", count / elapsed, "/s", "none", met=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
