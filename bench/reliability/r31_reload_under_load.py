"""R31: the configuration changes and is reloaded again and again while clients plan: no plan fails, memory stays.

    python bench/reliability/r31_reload_under_load.py [--full]     1,000 reloads; without --full 100

Every reload brings another reserve, each tenth an invalid file, which has to be refused with the earlier settings kept.
Growth is the resident set after the last reload less that after the first 100 (50), by when its caches are full, each
12 s after the load has stopped.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import session
from reliability import figures, load, questions

from veloxquant.errors import ConfigInvalid

SETTLE_S = 12.0


def reload(daemon: session.Daemon, file: Path, rounds: range) -> int:
    """Reload so often; how many did not do as they should."""
    wrong = 0
    with daemon.client() as client:
        for number in rounds:
            bad = number % 10 == 9
            file.write_text("reserve = 1\n" if bad else f"[planner]\nreserve_bytes = {number}\n")
            try:
                wrong += not client.reload().changed or bad
            except ConfigInvalid:
                wrong += not bad
    return wrong


def under_load(daemon: session.Daemon, home: session.Home, file: Path, rounds: range) -> tuple[int, list[str], int]:
    """Reload while clients ask: wrong reloads, failed plans, plans."""
    done, outcomes = threading.Event(), []

    def ask() -> None:
        lines = questions.plans(4)
        while not done.is_set():
            outcomes.append(load.run(str(home.socket), lines, 8))
            time.sleep(0.02)

    asking = threading.Thread(target=ask)
    asking.start()
    wrong = reload(daemon, file, rounds)
    done.set()
    asking.join()
    return wrong, [one for o in outcomes for one in o.errors], sum(len(o.seconds) for o in outcomes)


def main() -> int:
    """The first reloads, a look, the rest, a look."""
    count, first = (1000, 100) if figures.options(__doc__ or "").full else (100, 50)
    with session.private_home() as home:
        file = home.folder / "veloxquant.toml"
        file.touch(0o600)
        home.environment["VELOXQUANT_CONFIG"] = str(file)
        with session.running(home) as daemon:
            process = psutil.Process(daemon.process.pid)
            load.run(str(home.socket), questions.plans(1), 1)  # the model is traced once
            began = time.monotonic()
            early = under_load(daemon, home, file, range(first))
            time.sleep(SETTLE_S)
            before, files = process.memory_info().rss, process.num_fds()
            late = under_load(daemon, home, file, range(first, count))
            elapsed = time.monotonic() - began - SETTLE_S
            time.sleep(SETTLE_S)
            growth, more_files = (process.memory_info().rss - before) / 2**20, process.num_fds() - files
    plans = early[2] + late[2]
    what = f"{count:,} reloads under {plans:,} plans"
    failed = early[1] + late[1]
    figures.at_most("R31", f"{what}: failed plans", len(failed), "plans", 0)
    figures.at_most("R31", f"{what}: reloads that took a bad file or changed nothing", early[0] + late[0], "reloads", 0)
    figures.at_most("R31", f"{what}: growth of the resident set", growth, "MiB", 5.0)
    figures.at_most("R31", f"{what}: descriptors more than before", more_files, "files", 0)
    figures.say("R31", f"{what}: a reload takes", elapsed / count * 1000, "ms", "none", met=True)
    if failed:
        print(failed[0], file=sys.stderr)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("VELOXQUANT_DAEMON_LOG_FILE", "")
    raise SystemExit(main())
