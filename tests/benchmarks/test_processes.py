"""Several threads and processes on one directory, some of them killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from veloxquant.benchmarks import folder
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.profiles import ModelProfile, WorkloadProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from pathlib import Path

    import pytest

    from veloxquant.benchmarks.storage import Signature

    InIndex = Callable[[Path], set[str]]

ADD = """
import sys
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
db = BenchmarkDatabase(sys.argv[1])
for n in range(int(sys.argv[3])):
    print(db.add("fp16", sys.argv[2], context_length=1 + n).id, flush=True)
"""
READ = """
import sys
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
db, seen = BenchmarkDatabase(sys.argv[1]), 0
while len(db.records) < int(sys.argv[2]):
    db.load()
    assert not db.skipped, db.skipped
    assert len(db.records) >= seen
    seen = len(db.records)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A program of its own, with nothing shared but the directory."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    """Waits for it: from then on the program is at work."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line
    return line


def rest(process: subprocess.Popen[str]) -> tuple[str, str]:
    """All it says until it ends. Not by `communicate`, which would lose what `readline` has buffered."""
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        said = process.stdout.read(), process.stderr.read()
    process.wait()
    return said


def test_processes_that_add_at_once_lose_nothing(directory: Path, in_index: InIndex) -> None:
    """4 processes with 100 records each, two readers reloading: 400 in directory and index, none torn."""
    readers = [start(READ, directory, 400) for _ in range(2)]
    writers = [start(ADD, directory, f"m/{n}", 100) for n in range(4)]
    results = [(process, *process.communicate(timeout=100)) for process in writers + readers]
    assert [(process.returncode, err) for process, _, err in results] == [(0, "")] * 6
    added = {line for _, out, _ in results for line in out.split()}
    assert len(added) == 400
    assert {path.stem for path in (directory / "records").iterdir()} == added == in_index(directory)
    assert set(BenchmarkDatabase(directory).records) == added


def test_threads_that_share_a_database_lose_nothing(db: BenchmarkDatabase, in_index: InIndex) -> None:
    """Adding, removing, matching and reloading from eight threads."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for n in range(30):
                record = db.add("fp16", f"m/{number}", context_length=1 + n)
                if n % 3 == 0:
                    assert db.remove(record.id)
                if n % 7 == 0:
                    db.load()
        except BaseException as error:  # noqa: BLE001 -- shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    db.close()
    assert failures == []
    assert len(db.records) == len(BenchmarkDatabase(db.storage_dir).records) == len(in_index(db.storage_dir)) == 160


def test_what_another_thread_adds_during_a_look_stays(
    db: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch, in_index: InIndex
) -> None:
    """The folder is listed, and then, before the listing is used, a record comes, one is replaced and one goes."""
    kept, gone = (db.add("fp16", "m/x", context_length=1 + n).id for n in range(2))
    listing = folder.list_folder
    added: list[str] = []

    def meddle(path: Path, known: Container[str], *further: Any) -> tuple[dict[str, Any], list[str]]:
        found = listing(path, known, *further)
        if path == db.records_dir and not added:
            added.append(db.add("fp16", "m/y", context_length=1).id)
            db.add("fp16", "m/x", context_length=1, throughput_tok_s=7.0)
            db.remove(gone)
        return found

    monkeypatch.setattr(folder, "list_folder", meddle)
    db.load()
    model, near = ModelProfile(model_id="m/y"), WorkloadProfile(context_length=1)
    assert {key: one.throughput_tok_s for key, one in db.records.items()} == {kept: 7.0, added[0]: 0.0}
    assert db.find_best_match(model, near)["fp16"].id == added[0]
    db.close()
    assert in_index(db.storage_dir) == {kept, *added}


def test_a_look_keeps_others_out_for_moments_only(db: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another thread reads 50 files, of which each takes long, this one adds: it waits for one, not for all."""
    made = [db.add("fp16", "m/x", context_length=1 + n) for n in range(50)]
    reading = folder.read_small
    read: list[str] = []
    begun = threading.Event()

    def slowly(path: str | Path, descriptor: int | None = None) -> tuple[bytes, Signature]:
        if threading.current_thread() is looking:
            read.append(str(path))
            begun.set()
            time.sleep(0.02)
        return reading(path, descriptor)

    looking = threading.Thread(target=db.load)
    monkeypatch.setattr(folder, "read_small", slowly)
    for one in made:
        (db.records_dir / f"{one.id}.json").touch()
    looking.start()
    assert begun.wait(20)
    added = db.add("fp16", "m/y", context_length=1)
    had_read = len(read)
    looking.join(20)
    assert had_read < len(read) == 50
    assert set(db.records) == {added.id, *(one.id for one in made)}


def test_removing_during_adds_resurrects_nothing(db: BenchmarkDatabase) -> None:
    """A process that still has a removed record in memory does not bring it back."""
    gone = db.add("fp16", "m/gone", context_length=1).id
    other = start(ADD, db.storage_dir, "m/kept", 40)
    first = first_line(other)
    db.remove(gone)
    out, err = rest(other)
    assert (other.returncode, err) == (0, "")
    assert set(BenchmarkDatabase(db.storage_dir).records) == {first.strip(), *out.split()}


def test_a_killed_holder_of_the_lock_blocks_nobody(db: BenchmarkDatabase) -> None:
    """The system gives the lock back with the process."""
    script = (
        "import sys, time; from pathlib import Path; from veloxquant.benchmarks.lock import StoreLock\n"
        "with StoreLock(Path(sys.argv[1]) / '.lock').held(): print('held', flush=True); time.sleep(100)"
    )
    holder = start(script, db.storage_dir)
    assert first_line(holder) == "held\n"
    adding = threading.Thread(target=lambda: db.add("fp16", "m/x", context_length=1))
    adding.start()
    holder.kill()
    rest(holder)
    adding.join(20)
    assert len(db.records) == 1


def test_a_record_published_by_any_program_is_read(directory: Path) -> None:
    """Write a temporary file, rename it: that is all a publisher needs to do."""
    db = BenchmarkDatabase(directory)
    (directory / "records").mkdir(parents=True)
    temporary = directory / "records" / ".publisher.tmp"
    temporary.write_text(json.dumps({"id": "x", "method": "fp16", "model_id": "m/x"}))
    temporary.rename(directory / "records" / "x.json")
    db.load()
    assert set(db.records) == {"x"}
