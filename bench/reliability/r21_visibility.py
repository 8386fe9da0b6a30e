"""R21: how soon a published record is in a plan: by its event, and by the clock alone when every event is lost.

    python bench/reliability/r21_visibility.py [--full]

One record after the other is published by a rename into a directory of 10,000 that a daemon watches, at random
moments, and a plan is asked for until it names the record as evidence: 60 times, with `--full` 1,000. The next record
takes the place of the one before, so that each plan can name one. Then the same with a watch that gets no events, in
this process; and the time that a look takes at 10,000 files that did not change.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, many_records, questions, wire
from watchdog.observers import Observer

from veloxquant.benchmarks import watch
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.record_text import encode
from veloxquant.wire.messages import encode_request

RECORDS = 10_000
LABEL = "affine4-g64"
QUESTION = encode_request(1, "plan", questions.params(4096) | {"methods": [LABEL]})
PATIENCE_S = 30.0
SCANS = 20
SETTLE_S = 10.0
"""A record's file younger than two seconds is read again at each look; those of a user's directory are older."""


def publish(records: Path, number: int, label: str) -> float:
    """Put the record of this number in place of the one before; when that was."""
    record = BenchmarkRecord(
        f"visible-{number}",
        label,
        str(questions.MODEL["model_id"]),
        context_length=4096,
        memory_bytes=10**6 + number,
        chip=str(questions.HARDWARE["chip"]),
    )
    aside = records / ".publisher.tmp"
    aside.write_bytes(encode(record))
    aside.rename(records / f"{record.id}.json")
    began = time.perf_counter()
    (records / f"visible-{number - 1}.json").unlink(missing_ok=True)
    return began


def evidence(answer: Any) -> set[str]:
    """The records that a plan names."""
    result = answer["result"]
    found = [*([result["chosen"]] if result["chosen"] else []), *result["alternatives"]]
    return {key for one in found for key in one["memory"]["evidence"]["record_ids"]}


def spent_ms(asker: wire.Wire, records: Path, number: int) -> float:
    """Milliseconds from the rename to the first plan that names the record."""
    began = publish(records, number, LABEL)
    while f"visible-{number}" not in evidence(asker.ask(QUESTION)):
        if time.perf_counter() - began > PATIENCE_S:
            raise SystemExit(f"record {number} is in no plan after {PATIENCE_S:g} s")
        time.sleep(0.002)
    return (time.perf_counter() - began) * 1000


def by_event(times: int) -> None:
    """Each record at a random moment."""
    dice = random.Random(21)  # noqa: S311 -- moments, not secrets
    spent: list[float] = []
    with session.private_home() as home:
        directory = home.folder / "cache" / "veloxquant" / "benchmarks"
        many_records.fill(directory, RECORDS)
        with session.running(home) as daemon:
            time.sleep(SETTLE_S)
            asker = wire.Wire(str(home.socket))
            asker.ask(QUESTION)  # the first plan of a model reads it
            for number in range(times):
                time.sleep(dice.uniform(0.1, 1.0))
                spent.append(spent_ms(asker, directory / "records", number))
            asker.close()
            daemon.stop()
    what = f"from a rename to a plan that names the record, {times} times amid {RECORDS:,}"
    figures.say("R21", f"{what}, median", statistics.median(spent), "ms", "none", met=True)
    figures.at_most("R21", f"{what}, p99", figures.percentile(spent, 99), "ms", 500.0)
    print(f"the five longest: {[round(one) for one in sorted(spent)[-5:]]} ms", file=sys.stderr)


class Mute(Observer):  # type: ignore[valid-type,misc]
    """Gives no event, as a network volume does not."""

    def dispatch_events(self, event_queue: Any) -> None:
        """Drops each."""
        event_queue.get(block=True)


def holds(db: BenchmarkDatabase, record_id: str) -> bool:
    """Whether it was found."""
    return db.find(record_id) is not None


def by_clock(times: int) -> None:
    """Seconds from the rename to a look that finds the record, without any event."""
    vars(watch)["Observer"] = Mute
    dice = random.Random(22)  # noqa: S311 -- moments, not secrets
    longest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "benchmarks"
        db = BenchmarkDatabase(directory)
        looked = threading.Condition()

        def look() -> None:
            with looked:
                db.load()
                looked.notify_all()

        watcher = watch.Watcher(directory, look)
        watcher.start()
        time.sleep(3)  # past the looks that follow a start
        for number in range(times):
            time.sleep(dice.uniform(0, 3))
            began = publish(directory / "records", number, "fp16")
            with looked:
                seen = looked.wait_for(partial(holds, db, f"visible-{number}"), PATIENCE_S)
            if not seen:
                raise SystemExit(f"record {number} was not found in {PATIENCE_S:g} s")
            longest = max(longest, time.perf_counter() - began)
        watcher.stop()
    figures.at_most("R21", f"the longest of {times} with every event lost", longest, "s", 15.0)


def scan() -> None:
    """Milliseconds of a look at files that did not change."""
    with tempfile.TemporaryDirectory() as folder:
        many_records.fill(Path(folder), RECORDS)
        db = BenchmarkDatabase(folder)
        time.sleep(2.5)  # younger files are read again, as their clock may be coarse
        db.load()
        spent, used = [], []
        for _ in range(SCANS):
            began, cpu = time.perf_counter(), time.process_time()
            db.load()
            spent.append((time.perf_counter() - began) * 1000)
            used.append((time.process_time() - cpu) * 1000)
        db.close()
    what = f"a look at {RECORDS:,} records that did not change, median of {SCANS}"
    figures.at_most("R21", f"{what}, CPU time", statistics.median(used), "ms", 60.0)
    figures.at_most("R21", f"{what}, wall time", statistics.median(spent), "ms", 60.0)


def main() -> int:
    """The three figures."""
    full = figures.options(__doc__ or "").full
    scan()
    by_event(1000 if full else 60)
    by_clock(20 if full else 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
