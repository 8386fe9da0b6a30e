"""R1: from starting the program to its first answer, with 1,000 and with 10,000 records.

    python bench/reliability/r01_cold_start.py [--full]     7 starts of each; without --full 2

Wall time is what a user waits and what a busy machine stretches, so the processor time that the daemon has taken by
then is beside it. The first start with new records, which makes the index, is left out.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import session
from reliability import figures, many_records


def once(home: session.Home) -> tuple[float, float]:
    """Milliseconds to the first answer: wall, and user and system time of the daemon."""
    with session.running(home) as daemon:
        spent = psutil.Process(daemon.process.pid).cpu_times()
        return daemon.ready_s * 1000, (spent.user + spent.system) * 1000


def main() -> int:
    """Both sizes."""
    starts = 7 if figures.options(__doc__ or "").full else 2
    for records, target_ms in ((1_000, 400.0), (10_000, 1000.0)):
        with session.private_home() as home:
            many_records.fill(home.folder / "cache" / "veloxquant" / "benchmarks", records)
            once(home)
            time.sleep(2.0)  # what was just written is read again until it is older than a clock tick
            walls, cpus = zip(*(once(home) for _ in range(starts)), strict=True)
        what = f"{records:,} records, {starts} starts: first answer"
        figures.at_most("R1", f"{what}, median", figures.percentile(list(walls), 50), "ms", target_ms)
        figures.at_most("R1", f"{what}, fastest", min(walls), "ms", target_ms)
        figures.at_most("R1", f"{what}, median processor time", figures.percentile(list(cpus), 50), "ms", target_ms)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
