"""R37: what a daemon at rest costs, from /proc: CPU time, and how often it wakes up. Linux only.

    python bench/reliability/r37_idle_cost.py [--full]

A minute each; `--full` fifteen.

A thread that waits and is woken gives its processor up once each time: its voluntary context switches count the
wake-ups. Counted over all threads that live, first with no client, then with one that is connected and silent and one
that subscribed. Then once more with the threads that came and went, which the kernel adds up when a process ends: a
daemon that rested for the whole time, less one that only started and stopped.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, many_records

RECORDS = 1000
SETTLE_S = 10.0
"""After a start, a look at what changed meanwhile and the burst's quiet end."""


class Cost(NamedTuple):
    """Since the start of the process, all threads together."""

    wake_ups: int
    cpu_ns: int


def cost(pid: int) -> Cost:
    """As the kernel counts it."""
    switches = cpu_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        switches += next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
        cpu_ns += int((task / "schedstat").read_text().split()[0])
    return Cost(switches, cpu_ns)


def measure(daemon: session.Daemon, seconds: float, what: str) -> None:
    """Two figures over this time."""
    before = cost(daemon.process.pid)
    time.sleep(seconds)
    after = cost(daemon.process.pid)
    wake_ups = (after.wake_ups - before.wake_ups) / seconds
    share = (after.cpu_ns - before.cpu_ns) / 1e9 / seconds * 100
    figures.at_most("R37", f"wake-ups, {what}, over {seconds:.0f} s", wake_ups, "1/s", 1.0)
    figures.at_most("R37", f"CPU time, {what}, over {seconds:.0f} s", share, "%", 0.1)


def whole_life(home: session.Home, seconds: float) -> int:
    """Wake-ups of a daemon that starts, rests for so long, and stops."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_nvcsw
    with session.running(home):
        time.sleep(seconds)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_nvcsw - before


def main() -> int:
    """Idle alone, then idle with clients, then with what came and went."""
    seconds = 900.0 if figures.options(__doc__ or "").full else 60.0
    with session.private_home() as home:
        many_records.fill(home.folder / "cache" / "veloxquant" / "benchmarks", RECORDS)
        with session.running(home) as daemon:
            time.sleep(SETTLE_S)
            measure(daemon, seconds, f"{RECORDS:,} records, no client")
            with daemon.client() as silent, daemon.client() as listener:
                silent.ping()
                heard = listener.subscribe()
                next(heard)
                time.sleep(SETTLE_S)
                measure(daemon, seconds, "a silent client and a subscriber")
                heard.close()  # type: ignore[attr-defined]
        wake_ups = (whole_life(home, SETTLE_S + seconds) - whole_life(home, SETTLE_S)) / seconds
        figures.at_most("R37", f"wake-ups, ended threads too, over {seconds:.0f} s", wake_ups, "1/s", 1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
