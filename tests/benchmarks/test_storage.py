"""Writing and reading files when the system refuses, and seeing changes that hide."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.benchmarks import directory as one_directory
from veloxquant.benchmarks import folder, storage
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.lock import StoreLock
from veloxquant.benchmarks.storage import Signature
from veloxquant.benchmarks.watch import Watcher
from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Fill = Callable[..., list[str]]


def picture(directory: Path) -> dict[str, bytes]:
    """Every file below a directory but the lock, with its content."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def refusing(code: int) -> Callable[..., int]:
    """A stand-in for a system call that fails."""

    def refuse(*arguments: Any, **keywords: Any) -> int:
        raise OSError(code, os.strerror(code))

    return refuse


FAULTS = [
    ("fsync", errno.ENOSPC),
    ("fsync", errno.EIO),
    ("replace", errno.EIO),
    ("open", errno.EROFS),
    ("open", errno.EACCES),
    ("open", errno.EDQUOT),
]


def test_a_home_that_nobody_knows_is_a_typed_error() -> None:
    """`~user` of a user who does not exist names no folder, for the database and for the watch."""
    for opens in (BenchmarkDatabase, lambda place: Watcher(place, lambda: None)):
        with pytest.raises(StoreUnavailable, match="no-such-user") as caught:
            opens("~no-such-user/records")
        assert caught.value.hint


@pytest.mark.parametrize(("call", "code"), FAULTS)
def test_r34_a_write_the_system_refuses_leaves_the_store_as_it_was(
    db: BenchmarkDatabase, fill: Fill, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Full disk, broken disk, read-only: a typed error with a way out; folder, memory and index unchanged."""
    kept = fill(db, 2)
    db.close()
    before, records = picture(db.storage_dir), db.records
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, call, refusing(code))
        for attempt in (
            lambda: db.add("fp16", "m/new", context_length=1),
            lambda: db.upsert(BenchmarkRecord(kept[0], "fp16", "m/changed")),
        ):
            with pytest.raises(StoreUnavailable) as caught:
                attempt()
            assert os.strerror(code) in caught.value.message
            assert caught.value.hint
    assert picture(db.storage_dir) == before
    assert db.records == records == BenchmarkDatabase(db.storage_dir).records


def test_a_write_that_the_system_cuts_off(
    db: BenchmarkDatabase, fill: Fill, temporaries: Callable[[Path], list[Path]]
) -> None:
    """A real refusal in the middle of a file, by the limit on file sizes: typed, and nothing half is left."""
    kept = fill(db, 1)
    db.close()
    script = (
        "import resource, sys; from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase\n"
        "from veloxquant.errors import StoreUnavailable\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "db = BenchmarkDatabase(sys.argv[1])\n"
        "try: db.add('fp16', 'm/new', context_length=1)\n"
        "except StoreUnavailable as error: print(len(db.records), error.message)"
    )
    command = [sys.executable, "-c", script, str(db.storage_dir)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("1 ")
    assert os.strerror(errno.EFBIG) in done.stdout
    assert temporaries(db.storage_dir) == []
    assert set(BenchmarkDatabase(db.storage_dir).records) == set(kept)


def test_a_failed_delete_keeps_the_record(db: BenchmarkDatabase, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory as on disk."""
    kept = fill(db, 1)
    with monkeypatch.context() as patch:
        patch.setattr(type(db.storage_dir), "unlink", refusing(errno.EACCES))
        with pytest.raises(StoreUnavailable):
            db.remove(kept[0])
    assert set(db.records) == set(kept) == set(BenchmarkDatabase(db.storage_dir).records)


def test_r24_an_unreadable_file_is_skipped(db: BenchmarkDatabase, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the system said; the root user reads all, so the refusal is simulated."""
    good, bad = fill(db, 2)
    really = os.open

    def refuse_one(path: Any, *arguments: Any, **keywords: Any) -> int:
        if str(path).endswith(f"{bad}.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return really(path, *arguments, **keywords)

    monkeypatch.setattr(storage.os, "open", refuse_one)
    again = BenchmarkDatabase(db.storage_dir)
    assert set(again.records) == {good}
    assert again.skipped == {f"records/{bad}.json": "it cannot be read: Permission denied"}


def test_r34_a_read_only_directory_is_read(db: BenchmarkDatabase, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with a stale index and litter that cannot be cleaned up."""
    ids = fill(db, 2)
    db.close()
    db.index_path.write_bytes(b"{")
    (db.records_dir / ".vq-x.json-1-00.tmp").write_bytes(b"half")
    before = picture(db.storage_dir)
    monkeypatch.setattr("veloxquant.benchmarks.lock.FileLock.acquire", refusing(errno.EROFS))
    again = BenchmarkDatabase(db.storage_dir)
    assert set(again.records) == set(ids)
    assert "Read-only" in (again.index_problem or "")
    assert picture(db.storage_dir) == before


def test_r24_a_fifo_among_the_records_blocks_nobody(db: BenchmarkDatabase, fill: Fill) -> None:
    """It is no regular file."""
    fill(db, 1)
    os.mkfifo(db.records_dir / "pipe.json")
    db.load()
    assert db.skipped == {"records/pipe.json": "it is not a regular file"}


def test_litter_of_killed_writers_is_swept_and_nothing_else(
    db: BenchmarkDatabase, fill: Fill, temporaries: Callable[[Path], list[Path]]
) -> None:
    """Only temporary files of our own naming go."""
    fill(db, 1)
    for litter in (db.records_dir / ".vq-a.json-1-ff.tmp", db.storage_dir / ".vq-index.json-2-00.tmp"):
        litter.write_bytes(b"{")
    foreign = db.records_dir / ".other-program.tmp"
    foreign.write_bytes(b"{")
    BenchmarkDatabase(db.storage_dir)
    assert temporaries(db.storage_dir) == [foreign]


def test_a_lock_that_a_live_process_keeps(directory: Path) -> None:
    """Is a typed error after the time limit, naming the file."""
    directory.mkdir()
    first, second = (StoreLock(directory / ".lock", timeout_s=0.05) for _ in range(2))
    with first.held(), pytest.raises(StoreUnavailable, match="locked") as caught, second.held():
        pass
    assert "lsof" in caught.value.hint
    with second.held(), second.held():
        pass


def test_r26_an_edit_that_leaves_no_trace_in_the_stat_is_found(
    db: BenchmarkDatabase, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same inode, size and times, as within one tick of a coarse clock: the content decides."""
    monkeypatch.setattr(
        storage, "signature", lambda status: Signature(status.st_ino, status.st_size, status.st_mtime_ns, 0)
    )
    (record_id,) = fill(db, 1, throughput_tok_s=11.5)
    path = db.records_dir / f"{record_id}.json"
    db.load()
    stamp = path.stat()
    with path.open("r+b") as file:
        content = file.read().replace(b"11.5", b"99.5")
        file.seek(0)
        file.write(content)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert (path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns) == (
        stamp.st_ino,
        stamp.st_size,
        stamp.st_mtime_ns,
    )
    db.load()
    assert db.records[record_id].throughput_tok_s == 99.5


@pytest.mark.parametrize("days", [-1, 1])
def test_r26_clocks_that_jump(db: BenchmarkDatabase, fill: Fill, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """A day forth or back hides no change."""
    (record_id,) = fill(db, 1, throughput_tok_s=11.5)
    really = time.time_ns
    monkeypatch.setattr(folder.time, "time_ns", lambda: really() + days * 86_400 * 10**9)
    db.load()
    path = db.records_dir / f"{record_id}.json"
    replacement = path.with_name(".new")
    replacement.write_bytes(path.read_bytes().replace(b"11.5", b"99.5"))
    replacement.replace(path)
    db.load()
    assert db.records[record_id].throughput_tok_s == 99.5


def test_r21_a_scan_reads_only_what_changed(db: BenchmarkDatabase, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are older than a clock tick and look the same are not opened, and keep their very objects."""
    first, *_ = fill(db, 20)
    later = time.time_ns() + 10 * folder.CLOCK_TICK_NS
    monkeypatch.setattr(folder.time, "time_ns", lambda: later)
    db.load()
    before, reads = db.records, []
    really = folder.read_small
    monkeypatch.setattr(folder, "read_small", lambda path, at: reads.append(path) or really(path, at))
    db.load()
    assert reads == []
    path = db.records_dir / f"{first}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"throughput_tok_s": 5.0}))
    db.load()
    assert reads == [f"{first}.json"]
    assert db.records[first].throughput_tok_s == 5.0
    assert all(db.records[key] is record for key, record in before.items() if key != first)


def test_r22_looks_rest_in_a_burst_and_at_no_other_time(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is served before the first look is done. Later ones read in moments, and list so after many changes."""
    records, later = directory / "records", time.time_ns() + 10 * folder.CLOCK_TICK_NS
    monkeypatch.setattr(folder.time, "time_ns", lambda: later)  # no file is read again for its youth
    records.mkdir(parents=True)
    for number in range(1100):
        (records / f"r{number}.json").write_text(f'{{"id": "r{number}", "method": "fp16", "model_id": "m/x"}}')
    rests: list[float] = []
    db: list[BenchmarkDatabase] = []
    sleep, rest_s = one_directory.time.sleep, 0.00123  # as nobody else sleeps
    monkeypatch.setattr(one_directory, "_REST_S", rest_s)
    monkeypatch.setattr(one_directory.time, "sleep", lambda s: rests.append(s) if s == rest_s else sleep(s))

    def rests_of(look: Callable[[], None]) -> int:
        rests.clear()
        look()
        return len(rests)

    assert rests_of(lambda: db.append(BenchmarkDatabase(directory))) == 0
    assert rests_of(db[0].load) == 0
    db[0]._store.index.flush()  # its writer looks as well, and would read some of what follows
    for changed, listing in ((127, 0), (128, 4)):  # after 256, 512, 768 and 1,024 names
        for number in range(changed):
            text = f'{{"id": "r{number}", "method": "fp16", "model_id": "m/{changed}"}}'
            (records / f"r{number}.json").write_text(text)
        monkeypatch.setattr(one_directory, "_MOMENT_S", 0.0)
        assert rests_of(db[0].load) == changed - 1  # between any two files
        assert sum(one.model_id == f"m/{changed}" for one in db[0].records.values()) == changed
        assert rests_of(db[0].load) == listing
        assert rests_of(db[0].load) == 0
    db[0].close()


def test_r26_a_renamed_file_still_serves(db: BenchmarkDatabase, fill: Fill) -> None:
    """Also when only the case changes: the id is what the record says."""
    (record_id,) = fill(db, 1)
    path = db.records_dir / f"{record_id}.json"
    path.rename(path.with_name(f"{record_id.upper()}.json"))
    db.load()
    assert set(db.records) == {record_id}
    assert db.skipped == {}


def test_r25_a_write_is_flushed_before_it_shows_and_its_folder_after(
    db: BenchmarkDatabase, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary file in the same folder, flush of the file, rename, flush of the folder; then the call returns."""
    fill(db, 1)
    steps: list[str] = []
    opened: dict[int, str] = {}
    open_, fsync, replace = os.open, os.fsync, os.replace

    def noting_open(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        descriptor = open_(path, flags, *arguments, **options)
        opened[descriptor] = os.fspath(path)
        if flags & os.O_CREAT and str(path).endswith(".tmp"):
            steps.append(f"create in {os.path.basename(os.path.dirname(path))}")  # noqa: PTH119, PTH120 -- text
        return descriptor

    def noting_fsync(descriptor: int) -> None:
        steps.append("flush file" if opened[descriptor].endswith(".tmp") else "flush folder")
        fsync(descriptor)

    def noting_replace(source: Any, target: Any) -> None:
        steps.append("rename")
        replace(source, target)

    for name, call in (("open", noting_open), ("fsync", noting_fsync), ("replace", noting_replace)):
        monkeypatch.setattr(os, name, call)
    monkeypatch.setattr(db._store.index, "mark", lambda **_options: None)
    db.upsert(BenchmarkRecord("one", "fp16", "m/x"))
    assert steps == ["create in records", "flush file", "rename", "flush folder"]


def test_r25_the_index_may_go_at_any_time(db: BenchmarkDatabase, fill: Fill) -> None:
    """Before, between and after every kind of write, or be another directory's; it follows the files, never they it."""
    lies = b'{"version": 1, "records": {"ghost": {"method": "m", "model_id": "m", "path": "records/ghost.json"}}}'
    for step, spoil in enumerate([None, lies, b"{", None, lies]):
        ids = fill(db, 2, throughput_tok_s=float(step + 1))
        if spoil is None:
            db.index_path.unlink(missing_ok=True)
        else:
            db.index_path.write_bytes(spoil)
        db.remove(ids[0])
        db.load()
        db.close()
        assert set(db.records) == {ids[1]} == set(json.loads(db.index_path.read_text())["records"])
        db.index_path.unlink()
        assert set(BenchmarkDatabase(db.storage_dir).records) == {ids[1]}
