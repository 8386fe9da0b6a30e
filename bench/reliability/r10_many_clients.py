"""R10: 256 persistent clients ask 1,000 plans each, then 1,000 clients: no errors, and how long the slowest wait.

First all ask about one workload, as the workers of one server do; then each of the 256 has a question of its own, whose
answer the daemon keeps packed. The load comes from one process, so that on two cores the daemon has the other; on a
busy machine its processor time for a plan says more than any percentile.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import session
from reliability import figures, load, questions

FEW, MANY = 256, 1000
FEW_MS, MANY_MS = 25.0, 250.0


def measure(daemon: session.Daemon, asked: list[bytes], plans: int, label: str, target_ms: float) -> None:
    """One client for each question; its figures."""
    path, process = str(daemon.home.socket), psutil.Process(daemon.process.pid)
    load.run(path, list(dict.fromkeys(asked)), 1)
    before = sum(process.cpu_times()[:2])
    outcome = load.run(path, asked, plans)
    spent = sum(process.cpu_times()[:2]) - before
    if outcome.errors:
        print(outcome.errors[0], file=sys.stderr)
    answered = len(outcome.seconds)
    figures.at_most("R10", f"{label}: errors", len(outcome.errors), "errors", 0)
    figures.at_most("R10", f"{label}: unanswered", len(asked) * plans - answered, "plans", 0)
    figures.say("R10", f"{label}: p50", figures.percentile(outcome.seconds, 50) * 1000, "ms", "none", met=True)
    figures.at_most("R10", f"{label}: p99", figures.percentile(outcome.seconds, 99) * 1000, "ms", target_ms)
    figures.say("R10", f"{label}: rate", answered / outcome.elapsed_s, "/s", "none", met=True)
    figures.say("R10", f"{label}: the daemon's processor time a plan", spent / answered * 1e6, "us", "none", met=True)


def main() -> int:
    """100 plans a client, or 1,000 (250 of the 1,000 clients)."""
    full = figures.options(__doc__ or "").full
    few, many = (1000, 250) if full else (100, 25)
    with session.private_home() as home, session.running(home) as daemon:
        load.run(str(home.socket), questions.plans(1), 1)  # the model is traced once
        own, shared = questions.plans(FEW), questions.plans(1)
        measure(daemon, shared * FEW, few, f"{FEW} clients x {few:,} plans", FEW_MS)
        measure(daemon, own, few, f"{FEW} clients x {few:,} plans, each its own", FEW_MS)
        measure(daemon, shared * MANY, many, f"{MANY:,} clients x {many:,} plans", MANY_MS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
