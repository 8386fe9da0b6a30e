"""R4: kill -9 at a random moment, again and again: the next daemon answers at once, and nobody cleans up by hand.

    python bench/reliability/r04_killed.py [--full]     500 kills; without --full 24

A quarter each while it starts, while it reads records that came, while it evicts and writes the index, while it winds
up. After each kill the index must be whole or absent; in the end it must say what the record files say.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, forked, load, many_records, questions

from veloxquant.benchmarks.verify import verify

MOMENTS = ("start", "scan", "write", "drain")
LIMIT = 300
"""Records that are kept: what comes beyond them is evicted."""


class Victims:
    """Daemons of one home that are killed, and what was seen of them."""

    def __init__(self, home: session.Home, chance: random.Random) -> None:
        self.answered_s: list[float] = []
        self.broken_indexes = 0
        self.unanswered: list[str] = []
        self._home = home
        self._records = home.folder / "cache" / "veloxquant" / "benchmarks"
        self._chance = chance
        self._published = 0
        many_records.fill(self._records, LIMIT - 50)

    def kill(self, moment: str) -> None:
        """One daemon, ended at this moment."""
        daemon = forked.start(self._home.folder / "log")
        if moment != "start":
            self._wait(daemon, moment)
        if moment in ("scan", "write"):
            self._publish(4 if moment == "scan" else 60)
        elif moment == "drain":
            load.run(str(self._home.socket), [*questions.plans(3), questions.PING], 2)
            daemon.signal(signal.SIGTERM)
        time.sleep(self._chance.uniform(0, {"start": 0.5, "drain": 0.02}.get(moment, 0.3)))
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        self._look_at_index()

    def last(self) -> tuple[int, bool]:
        """One that ends as asked: its status, and whether index and records then say the same."""
        daemon = forked.start(self._home.folder / "log")
        self._wait(daemon, "last")
        time.sleep(3.0)  # an index that a killed daemon left behind is made again soon after the first look
        daemon.signal(signal.SIGTERM)
        code = daemon.wait()
        found = verify(self._records)
        return code, found.sound and not found.temporary

    def _wait(self, daemon: forked.Forked, moment: str) -> None:
        try:
            forked.ping(str(self._home.socket))
        except TimeoutError as error:
            self.unanswered.append(f"{moment}: {error}")
            return
        self.answered_s.append(time.monotonic() - daemon.began)

    def _publish(self, count: int) -> None:
        """Records as another program puts them: written aside, renamed, no index."""
        folder = self._records / "records"
        for _ in range(count):
            self._published += 1
            name, data = many_records.encoded(100_000 + self._published)
            (folder / f".{name}.tmp").write_bytes(data)
            (folder / f".{name}.tmp").replace(folder / name)

    def _look_at_index(self) -> None:
        index = self._records / "index.json"
        try:
            json.loads(index.read_bytes() if index.exists() else b"{}")
        except ValueError:
            self.broken_indexes += 1


def main() -> int:
    """Kill, start, kill."""
    kills = 500 if figures.options(__doc__ or "").full else 24
    with session.private_home() as home:
        home.adopt()
        os.environ |= {"VELOXQUANT_DAEMON_LOG_FILE": "", "VELOXQUANT_RECORDS_MAX_RECORDS": str(LIMIT)}
        victims = Victims(home, random.Random(4))  # noqa: S311 -- moments, no secrets
        with session.running(home):
            load.run(str(home.socket), questions.plans(1), 1)  # the model is traced once
        for number in range(kills):
            victims.kill(MOMENTS[number % len(MOMENTS)])
        code, sound = victims.last()
        tracebacks = (home.folder / "log").read_text().count("Traceback")
    what = f"{kills} kills"
    figures.at_most("R4", f"{what}: starts after one that did not answer", len(victims.unanswered), "starts", 0)
    figures.at_most("R4", f"{what}: slowest first answer after one", max(victims.answered_s), "s", 1.0)
    p50 = figures.percentile(victims.answered_s, 50)
    figures.say("R4", f"{what}: median first answer after one", p50, "s", "none", met=True)
    figures.at_most("R4", f"{what}: indexes that were not whole", victims.broken_indexes, "indexes", 0)
    figures.say("R4", f"{what}: index and records agree in the end", sound, "", "1", met=sound)
    figures.at_most("R4", f"{what}: tracebacks, or a last exit other than 0", tracebacks + abs(code), "", 0)
    for one in victims.unanswered[:3]:
        print(one, file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
