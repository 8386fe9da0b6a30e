"""R3: eight daemons start at once, again and again: one survives each time, the others leave with 75 and name it.

    python bench/reliability/r03_one_survivor.py [--full]     200 rounds; without --full 10

All eight wait for one moment before they begin.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, forked

STARTERS = 8
ALREADY = 75


def race(home: session.Home, number: int) -> tuple[int, list[float], int]:
    """One round: survivors, the losers' seconds, and losers that did not name the survivor."""
    started = [forked.start(home.folder / f"log{number}.{one}") for one in range(STARTERS)]
    holder = forked.ping(str(home.socket))["pid"]
    while sum(one.poll() is None for one in started) > 1:
        time.sleep(0.001)
    losers = [one for one in started if one.pid != holder]
    seconds = [_seconds(one) for one in losers]
    unnamed = sum(one.poll() != ALREADY or f"pid {holder}" not in one.log.read_text() for one in losers)
    alive = [one for one in started if one.poll() is None]
    for one in alive:
        one.signal(signal.SIGTERM)
        one.wait()
    for one in started:
        one.log.unlink()
    return len(alive), seconds, unnamed


def _seconds(loser: forked.Forked) -> float:
    """From its start to its last word."""
    return loser.log.stat().st_mtime - (time.time() - time.monotonic() + loser.began)


def main() -> int:
    """Rounds of eight."""
    rounds = 200 if figures.options(__doc__ or "").full else 10
    with session.private_home() as home:
        home.adopt()
        os.environ["VELOXQUANT_DAEMON_LOG_FILE"] = ""
        outcomes = [race(home, number) for number in range(rounds)]
    what = f"{rounds} rounds of {STARTERS} starters"
    figures.at_most("R3", f"{what}: rounds without exactly one survivor", sum(o[0] != 1 for o in outcomes), "rounds", 0)
    figures.at_most(
        "R3", f"{what}: losers that did not exit with 75 naming it", sum(o[2] for o in outcomes), "losers", 0
    )
    seconds = [one for outcome in outcomes for one in outcome[1]]
    for name, rank in (("median", 50), ("p99", 99), ("slowest", 100)):
        figures.at_most("R3", f"{what}: {name} loser", figures.percentile(seconds, rank), "s", 1.0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
