"""R22: 20,000 records published as fast as it goes, under a daemon that plans meanwhile.

    python bench/reliability/r22_burst.py [--full]

Another process publishes by renames; a client asks the daemon for plans, before and during, one after the other. When
the last record is there, the directory is compared with what the daemon lists, again and again until they are equal.
2,000 records, with `--full` 20,000. CPU time is the daemon's own, from the first publish until it lists them all.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import session
import store_faults
from reliability import figures, questions, wire

from veloxquant.wire.messages import encode_request

PATIENCE_S = 120.0
PLANS_BEFORE = 1000


def plans(path: str, spent: list[float], over: threading.Event, most: int | None = None) -> None:
    """Ask one question after the other, each another, until it is over; milliseconds of each."""
    asker = wire.Wire(path)
    while not over.is_set() and (most is None or len(spent) < most):
        line = encode_request(1, "plan", questions.params(4096 + len(spent)))
        began = time.perf_counter()
        asker.ask(line)
        spent.append((time.perf_counter() - began) * 1000)
    asker.close()


def used(path: str) -> int:
    """How many records the daemon plans with."""
    asker = wire.Wire(path)
    answer = asker.ask(encode_request(1, "status"))
    asker.close()
    count: int = answer["result"]["records"]["used"]
    return count


def main() -> int:
    """The burst and its figures."""
    count = 20_000 if figures.options(__doc__ or "").full else 2_000
    with session.private_home() as home, session.running(home) as daemon:
        path, records = str(home.socket), home.folder / "cache" / "veloxquant" / "benchmarks" / "records"
        wire.Wire(path).ask(questions.plans(1)[0])  # the first plan of a model reads it
        before: list[float] = []
        plans(path, before, threading.Event(), PLANS_BEFORE)
        during: list[float] = []
        over = threading.Event()
        asking = threading.Thread(target=plans, args=(path, during, over))
        process = psutil.Process(daemon.process.pid)
        cpu, began = sum(process.cpu_times()[:2]), time.perf_counter()
        asking.start()
        subprocess.run([sys.executable, "-c", store_faults.PUBLISH, str(records), str(count)], check=True)
        ended = time.perf_counter()
        while used(path) != count:
            if time.perf_counter() - ended > PATIENCE_S:
                raise SystemExit(f"{used(path)} of {count} after {PATIENCE_S:g} s")
            time.sleep(0.05)
        exact = time.perf_counter()
        cpu = sum(process.cpu_times()[:2]) - cpu
        over.set()
        asking.join()
        daemon.stop()
    tail, base = figures.percentile(during, 99), figures.percentile(before, 99)
    figures.at_most("R22", f"from the last of {count:,} publishes to an exact list", exact - ended, "s", 5.0)
    figures.at_most(
        "R22", f"the daemon's CPU time a second of the {exact - began:.1f} s", cpu / (exact - began), "cores", 1
    )
    what = f"p99 of {len(during):,} plans during it ({tail:.1f} ms) over that of {len(before):,} before ({base:.1f} ms)"
    figures.at_most("R22", what, tail / base, "times", 3.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
