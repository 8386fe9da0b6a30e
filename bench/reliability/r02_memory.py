"""R2: what the daemon holds in memory with 10,000 records: idle, after 4,000 questions, after 256 clients; no engine.

    python bench/reliability/r02_memory.py [--full]

The figure is the resident set, shared libraries included. "After" is 15 s after the last answer, when the daemon has
had time to tidy up. The short form has 2,000 records and a quarter of the questions.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import session
from reliability import figures, load, many_records, questions

TARGET_MIB = 60.0
SETTLE_S = 15.0


def resident_mib(daemon: session.Daemon) -> float:
    """The resident set now."""
    return float(psutil.Process(daemon.process.pid).memory_info().rss) / 2**20


def main() -> int:
    """Three figures and the list of engines in the process."""
    full = figures.options(__doc__ or "").full
    records, asked, clients = (10_000, 4_000, 256) if full else (2_000, 1_000, 64)
    with session.private_home() as home:
        many_records.fill(home.folder / "cache" / "veloxquant" / "benchmarks", records)
        with session.running(home) as daemon, daemon.client() as client:
            where = f"{records:,} records"
            time.sleep(1.0)
            figures.at_most("R2", f"resident, idle, {where}", resident_mib(daemon), "MiB", TARGET_MIB)
            lines = questions.plans(asked)
            path = str(home.socket)
            for line in lines:
                load.run(path, [line], 1)
            peak = resident_mib(daemon)
            time.sleep(SETTLE_S)
            after = f"resident after {asked:,} new questions, {where}"
            figures.at_most("R2", after, resident_mib(daemon), "MiB", TARGET_MIB)
            print(f"  (at the last answer {peak:.1f} MiB)", file=sys.stderr)
            load.run(path, lines[:clients], 16)
            peak = resident_mib(daemon)
            time.sleep(SETTLE_S)
            after = f"resident after {clients} clients at once, {where}"
            figures.at_most("R2", after, resident_mib(daemon), "MiB", TARGET_MIB)
            print(f"  (at the last answer {peak:.1f} MiB)", file=sys.stderr)
            engines = client.status().process.engine_modules
            figures.at_most("R2", "engine packages imported by the daemon", len(engines), "modules", 0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
