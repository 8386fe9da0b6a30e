"""Merges killed with signal 9 at random file operations: the directory is what it was before, or what it is after.

Each round copies a directory, forks, and lets the child merge; just before its n-th opening, renaming or deleting of a
file the child kills itself, as a crash would. Every second round the next who opens it is killed in the same way, while
it undoes what was left. Then the directory is opened once more, and compared with both byte for byte.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import sys
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from veloxquant.benchmarks import merge_journal, merge_run
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord, benchmark_fingerprint
from veloxquant.benchmarks.eviction import Limits
from veloxquant.benchmarks.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RECORDS = 40
_BATCH = 7
"""Small, so that the lock is given up in the middle, as with 200 of thousands."""
_OPERATIONS = frozenset({"open", "os.rename", "os.remove"})
_VERSIONS = ("0.30.0", "0.31.0", "0.32.0+a", "0.32.0-a")

Files = dict[str, bytes]


def kills(directory: Path, times: int) -> str:
    """The rounds; what they came to."""
    dice = random.Random(20261130)  # noqa: S311 -- moments, not secrets
    logging.getLogger(merge_run.__name__).setLevel(logging.ERROR)  # each undoing is a warning
    first, incoming = directory / "first", records(dice)
    BenchmarkDatabase(first, limits=limits()).merge(records(dice))
    (first / "records" / "damaged.json").write_bytes(b"{")
    before = files(first)
    untouched = directory / "all"
    shutil.copytree(first, untouched)
    total = run(lambda: merge(untouched, incoming))
    assert total is not None
    after = files(untouched)
    assert before != after, "the merge changes nothing"
    outcomes = {"undone": 0, "done": 0, "killed twice": 0}
    place = directory / "killed"
    for number in range(times):
        shutil.copytree(first, place)
        while run(lambda: merge(place, incoming), dice.randrange(total)) is not None:
            shutil.rmtree(place)  # it had ended before: the index is not written at the same moments each time
            shutil.copytree(first, place)
        cut_off = files(place) not in (before, after) or (place / merge_journal.NAME).exists()
        if number % 2:
            outcomes["killed twice"] += cut_off and run(lambda: opened(place), dice.randrange(total)) is None
        opened(place)
        found = files(place)
        assert found in (before, after), f"round {number}: neither before nor after"
        verdict = verify(place)
        assert not verdict.index_differs, verdict.index_differs
        assert list(verdict.set_aside) == ["records/damaged.json"], verdict.set_aside
        assert not verdict.temporary, verdict.temporary
        assert not (place / merge_journal.NAME).exists(), "the journal is left"
        outcomes["done" if found == after else "undone"] += 1
        shutil.rmtree(place)
    said = ", ".join(f"{count} {what}" for what, count in outcomes.items())
    return f"{times} kills within {total} file operations of a merge: {said}"


def limits() -> Limits:
    """Such that the merge evicts some."""
    return Limits(max_records=RECORDS)


def records(dice: random.Random) -> list[BenchmarkRecord]:
    """Of few measurements, so that they replace and supersede each other; some pinned, some under ids of their own."""
    made = {}
    for number in range(RECORDS):
        one = BenchmarkRecord(
            "x",
            dice.choice(("fp16", "affine4-g64")),
            "org/model",
            context_length=1024 * dice.randrange(1, 12),
            mlx_version=dice.choice(_VERSIONS),
            throughput_tok_s=float(dice.randrange(1, 1000)),
            created_at=f"2026-01-{dice.randrange(1, 29):02}T00:00:00+00:00",
            tags=["pinned"] * (dice.random() < 0.1),
        )
        own = benchmark_fingerprint(one.method, one.model_id, one.context_length, one.batch_size, one.chip)
        chosen = f"own-{number % 5}" if dice.random() < 0.2 else own
        made[chosen] = replace(one, id=chosen)
    return list(made.values())


def merge(directory: Path, incoming: list[BenchmarkRecord]) -> None:
    """What is interrupted."""
    db = BenchmarkDatabase(directory, limits=limits())
    db.merge(incoming)
    db.close()


def opened(directory: Path) -> None:
    """What the next user of a directory does."""
    BenchmarkDatabase(directory, limits=limits()).close()


def files(directory: Path) -> Files:
    """The record files."""
    return {path.name: path.read_bytes() for path in (directory / "records").iterdir() if path.name[0] != "."}


def run(work: Callable[[], None], most: int = sys.maxsize) -> int | None:
    """Do it in a child, which kills itself before its file operation of this number; how many it made, or None."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _child(work, most, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None
    assert status == 0, "the child failed"
    return int(said)


def _child(work: Callable[[], None], most: int, writer: int) -> NoReturn:
    count = 0

    def step(event: str, _arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event not in _OPERATIONS:
            return
        count += 1
        if count > most:
            os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        merge_run._BATCH = _BATCH  # noqa: SLF001 -- so that few records make several batches
        sys.addaudithook(step)
        work()
        os.write(writer, str(count).encode())
        code = 0
    except BaseException:  # noqa: BLE001 -- a fence: nothing may run on in the child
        traceback.print_exc()
    finally:
        os._exit(code)
