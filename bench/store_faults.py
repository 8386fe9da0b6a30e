"""The benchmark store under fire: many writers, kills, a full disk, a read-only mount; exit code 0 when all holds.

    python bench/store_faults.py [--kills 1000] [--only writers,threads,erasing,kills,merges,disk,burst]

Every figure of the promises in full: 8 processes adding 500 records each while 4 reload, 8 threads on one database,
removing and clearing amid adds, 1,000 kills with signal 9 at random moments, as many of a merge, and (on Linux, where
user namespaces are allowed) a file system of 1 MB that is filled and then mounted read-only; and a burst of 20,000
publishes under watch. The tests run these in short forms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import merge_kills

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.benchmarks.verify import verify
from veloxquant.benchmarks.watch import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable

WRITERS, EACH, READERS, THREADS = 8, 500, 4, 8
KILLS = 1000
MOST_WAIT_S = 0.12
BURST, BURST_LATE_S = 20_000, 5.0

HEAD = (
    "import itertools, os, random, sys\n"
    "from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord\n"
)
ADD = (
    HEAD
    + """
db = BenchmarkDatabase(sys.argv[1])
for n in range(int(sys.argv[3])):
    print(db.add("fp16", sys.argv[2], context_length=1 + n).id, flush=True)
"""
)
READ = (
    HEAD
    + """
db, seen, looks = BenchmarkDatabase(sys.argv[1]), 0, 0
while len(db.records) < int(sys.argv[2]):
    db.load()
    assert not db.skipped, db.skipped
    assert len(db.records) >= seen, "a record vanished"
    seen, looks = len(db.records), looks + 1
print(looks)
"""
)
# Each acknowledgement is printed after the call returned, what is about to be erased before it: "+ id speed",
# "- id" and "- *"; "? id" and "? *" say that an erasure has begun.
MIXED = (
    HEAD
    + """
db, dice = BenchmarkDatabase(sys.argv[1]), random.Random(int(sys.argv[2]))
while True:
    context, speed, fate = 1 + dice.randrange(6), float(dice.randrange(1, 10**6)), dice.random()
    if fate < 0.45:
        record = db.add("fp16", "m/x", context_length=context, throughput_tok_s=speed)
        print("+", record.id, speed, flush=True)
    elif fate < 0.75:
        name = f"own-{context}"
        db.upsert(BenchmarkRecord(name, "fp16", "m/y", throughput_tok_s=speed))
        print("+", name, speed, flush=True)
    elif fate < 0.97:
        gone = dice.choice(sorted(db.records) or ["none"])
        print("?", gone, flush=True)
        db.remove(gone)
        print("-", gone, flush=True)
    else:
        print("?", "*", flush=True)
        db.clear()
        print("-", "*", flush=True)
"""
)
# Keeps only what it adds after the others' erasures: whatever it saw removed must never come back.
ERASE = (
    HEAD
    + """
db, dice, gone = BenchmarkDatabase(sys.argv[1]), random.Random(3), set()
print("ready", flush=True)
for round_number in itertools.count():
    if os.path.exists(sys.argv[2]):
        break
    db.load()
    back = gone & set(db.records)
    assert not back, f"came back: {back}"
    for key in sorted(db.records)[:20]:
        if db.remove(key):
            gone.add(key)
    if round_number % 10 == 9:
        known = set(db.records)
        db.clear()
        gone |= known
print(len(gone))
"""
)
PUBLISH = (
    HEAD
    + """
for n in range(int(sys.argv[2])):
    with open(sys.argv[1] + "/.publisher.tmp", "w") as file:
        file.write('{"id": "r%d", "method": "fp16", "model_id": "m/x"}' % n)
    os.rename(sys.argv[1] + "/.publisher.tmp", f"{sys.argv[1]}/r{n}.json")
"""
)
# Runs as root of a user namespace of its own, so that it may mount.
DISK = (
    HEAD
    + """
import subprocess
from pathlib import Path
from veloxquant.errors import StoreUnavailable
folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
db, added = BenchmarkDatabase(folder / "b"), {}
def contents():
    return {path: path.read_bytes() for path in (folder / "b" / "records").iterdir()}
def refused(work):
    before = contents()
    try:
        work()
    except StoreUnavailable as error:
        assert error.hint
    else:
        raise AssertionError("it was not refused")
    assert contents() == before, "the store is not as it was"
    assert set(db.records) == set(added), "the memory is not as it was"
try:
    while True:
        made = db.add("fp16", "m/x", context_length=1 + len(added), tags=["x" * 3000])
        added[made.id] = made.to_dict()
except StoreUnavailable as error:
    print("full after", len(added), "records:", error.message)
full = lambda: db.add("fp16", "m/x", context_length=10**6, tags=["x" * 60000])
refused(full)
db.load()
found = {key: one.to_dict() for key, one in BenchmarkDatabase(folder / "b").records.items()}
assert found == added and not db.skipped
assert db.remove(next(iter(added)))
del added[next(iter(added))]
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
for work in (
    lambda: db.add("fp16", "m/z", context_length=1),
    lambda: db.upsert(BenchmarkRecord("own", "fp16", "m/z")),
    lambda: db.remove(next(iter(added))),
    db.clear,
    lambda: db.merge([BenchmarkRecord("own", "fp16", "m/z")]),
):
    refused(work)
assert set(BenchmarkDatabase(folder / "b").records) == set(added)
print("read-only: 5 kinds of write refused,", len(added), "records read")
"""
)


def start(script: str, *words: object) -> subprocess.Popen[str]:
    """A program of its own, with nothing shared but the directory."""
    command = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What each printed; an error of one ends us."""
    results = [(process, *process.communicate()) for process in processes]
    wrong = [err for process, _, err in results if process.returncode != 0]
    assert not wrong, wrong[0]
    return [out for _, out, _ in results]


def whole(directory: Path, expected: set[str]) -> None:
    """Directory, index and memory hold exactly these, and nothing is set aside or lying about."""
    verdict = verify(directory)
    assert verdict.sound, verdict
    assert not verdict.temporary, verdict.temporary
    assert {path.stem for path in (directory / "records").iterdir()} == expected
    assert set(json.loads((directory / "index.json").read_text())["records"]) == expected
    assert set(BenchmarkDatabase(directory).records) == expected


def writers(directory: Path, _kills: int) -> str:
    """Processes that add at once lose nothing, while others reload."""
    readers = [start(READ, directory, WRITERS * EACH) for _ in range(READERS)]
    added = ended([start(ADD, directory, f"m/{n}", EACH) for n in range(WRITERS)])
    looks = sum(map(int, ended(readers)))
    whole(directory, {key for out in added for key in out.split()})
    return f"{WRITERS} x {EACH} records by processes, {READERS} readers with {looks} looks"


def threads(directory: Path, _kills: int) -> str:
    """Threads on one database likewise."""
    db = BenchmarkDatabase(directory)
    added: list[str] = []
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for n in range(EACH):
                added.append(db.add("fp16", f"m/{number}", context_length=1 + n).id)
                if n % 50 == 0:
                    db.load()
        except BaseException as error:  # noqa: BLE001 -- shown below
            wrong.append(error)

    each = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    db.close()
    assert not wrong, wrong[0]
    whole(directory, set(added))
    return f"{THREADS} x {EACH} records by threads of one database"


def erasing(directory: Path, _kills: int) -> str:
    """What is removed or cleared while others add stays away, and no add of theirs after it is lost."""
    stop = directory.with_name("stop")
    eraser = start(ERASE, directory, stop)
    assert eraser.stdout is not None
    assert eraser.stdout.readline() == "ready\n"
    adders = [start(ADD, directory, f"m/{n}", EACH) for n in range(4)]
    added = {key for out in ended(adders) for key in out.split()}
    stop.touch()
    erased = int(ended([eraser])[0])
    db = BenchmarkDatabase(directory)
    db.close()
    left = set(db.records)
    assert left <= added, "a record came from nowhere"
    assert len(added) - len(left) >= erased > 0, (len(added), len(left), erased)
    whole(directory, left)
    return f"{len(added)} added, {erased} seen to be erased meanwhile, none came back"


def kills(directory: Path, times: int) -> str:
    """Signal 9 at random moments of add, upsert, remove and clear."""
    dice = random.Random(20261130)  # noqa: S311 -- moments, not secrets
    expected: dict[str, float] = {}
    calls = 0
    for number in range(times):
        process = start(MIXED, directory, number)
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout, process.stderr:
            first = process.stdout.readline()
            time.sleep(dice.uniform(0, MOST_WAIT_S))
            os.kill(process.pid, signal.SIGKILL)
            output, wrong = first + process.stdout.read(), process.stderr.read()
        process.wait()
        assert wrong == ""
        calls += output.count("\n")
        expected = judge(directory, expected, output)
    return f"{times} kills amid {calls} calls"


def judge(directory: Path, expected: dict[str, float], output: str) -> dict[str, float]:
    """What is there after a kill; fails when something acknowledged is not, or something is torn or left over."""
    doubtful: set[str] = set()
    for line in output[: output.rfind("\n") + 1].splitlines():
        sign, key, *speed = line.split()
        doubtful = {key} if sign == "?" else set()
        if sign == "+":
            expected[key] = float(speed[0])
        elif sign == "-":
            expected = {} if key == "*" else {one: value for one, value in expected.items() if one != key}
    db = BenchmarkDatabase(directory)
    found = {key: record.throughput_tok_s for key, record in db.records.items()}
    assert db.skipped == {}
    assert [path for path in directory.rglob(".*") if path.name.endswith(".tmp")] == []
    # One call was under way: an add or upsert may have written one record and told nobody yet.
    differing = {key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)}
    assert "*" in doubtful or len(differing - doubtful) <= 1, differing
    lost = {key for key in expected if key not in found and not doubtful & {key, "*"}}
    assert lost == set()
    return found


def disk(directory: Path, _kills: int) -> str:
    """A full disk and a read-only one, in a mount namespace of our own."""
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", DISK, str(directory)]
    if os.geteuid() == 0:
        command = ["unshare", "--mount", *command[4:]]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return "NOT RUN: there is no unshare on this system"
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        return f"NOT RUN: {done.stderr.strip().splitlines()[-1]}"
    assert done.returncode == 0, done.stderr
    return "; ".join(done.stdout.strip().splitlines())


def burst(directory: Path, _kills: int) -> str:
    """20,000 records published as fast as it goes, while a daemon's watch looks on: exact within 5 s of the last."""
    db = BenchmarkDatabase(directory)
    exact = threading.Event()
    looks = 0

    def look() -> None:
        nonlocal looks
        db.load()
        looks += 1
        if len(db.records) == BURST:
            exact.set()

    watcher = Watcher(directory, look)
    watcher.start()
    try:
        ended([start(PUBLISH, directory / "records", BURST)])
        began = time.monotonic()
        assert exact.wait(60), f"{len(db.records)} of {BURST} after a minute"
        late = time.monotonic() - began
    finally:
        watcher.stop()
    assert late <= BURST_LATE_S, f"exact only after {late:.1f} s"
    return f"{BURST} records by rename, exact {late:.2f} s after the last, {looks} looks"


PARTS: dict[str, Callable[[Path, int], str]] = {
    "writers": writers,
    "threads": threads,
    "erasing": erasing,
    "kills": kills,
    "merges": merge_kills.kills,
    "disk": disk,
    "burst": burst,
}


def main() -> int:
    """Run the parts; 1 when one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kills", type=int, default=KILLS, help=f"rounds of kill -9, default {KILLS}")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    options = parser.parse_args()
    failed = 0
    for name in options.only.split(","):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / "benchmarks"
            directory.mkdir()
            try:
                text = f"{PARTS[name](directory, options.kills)}"
                verdict = "skip" if text.startswith("NOT RUN") else "ok"
            except AssertionError as error:
                verdict, text, failed = "FAIL", str(error)[:2000], 1
        print(f"{verdict:<4}  {name:<8} {time.monotonic() - began:7.1f} s  {text}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
