"""A merge happens or it does not: errors, interruptions, kills, other writers, and journals that are none of ours."""

from __future__ import annotations

import base64
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import merge_kills
import pytest

from veloxquant.benchmarks import merge_run
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.eviction import Limits
from veloxquant.benchmarks.folder import digest_of
from veloxquant.benchmarks.merge_journal import NAME
from veloxquant.benchmarks.record_text import encode
from veloxquant.benchmarks.verify import verify
from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    Files = dict[str, bytes]

OLD, NEW = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"
INCOMING = [BenchmarkRecord(f"r{n}", "fp16", "m/x", context_length=1 + n, created_at=NEW) for n in range(20)]
"""Ten are newer than those of `held`, ten are new."""


@pytest.fixture
def held(directory: Path, monkeypatch: pytest.MonkeyPatch) -> BenchmarkDatabase:
    """Ten records, one of them spelled by another program; a merge into it takes several holds of the lock."""
    monkeypatch.setattr(merge_run, "_BATCH", 3)
    db = BenchmarkDatabase(directory)
    for n in range(10):
        db.upsert(BenchmarkRecord(f"r{n}", "fp16", "m/x", context_length=1 + n, created_at=OLD))
    path = db.records_dir / "r9.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    db.load()
    return db


def files(db: BenchmarkDatabase) -> Files:
    """The record files."""
    return merge_kills.files(db.storage_dir)


def when_written(db: BenchmarkDatabase, number: int, work: Callable[[], object]) -> Callable[[int, int], None]:
    """Told of each step, it does this once when so many records are written; the steps before are of deciding."""
    is_done = False

    def on_step(done: int, _total: int) -> None:
        nonlocal is_done
        if (db.storage_dir / NAME).exists() and done == number and not is_done:
            is_done = True
            work()

    return on_step


def raising(error: BaseException) -> Callable[[], None]:
    """Raises it."""

    def work() -> None:
        raise error

    return work


def test_r25_a_merge_that_is_killed_is_undone_or_done(tmp_path: Path) -> None:
    """The short form of `make faults`: byte for byte the one directory or the other, after kills while undoing too."""
    code = "import sys, merge_kills; from pathlib import Path; print(merge_kills.kills(Path(sys.argv[1]), 10))"
    command = [sys.executable, "-c", code, str(tmp_path / "b")]
    here = os.environ | {"PYTHONPATH": str(Path(merge_kills.__file__).parent)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("10 kills within ")


@pytest.mark.parametrize("number", [1, 3, 11, 20])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("mine")])
def test_a_merge_that_is_interrupted_leaves_the_directory_as_it_was(
    held: BenchmarkDatabase, number: int, error: BaseException
) -> None:
    """By its user's own error or Ctrl-C, wherever it was; then the same merge succeeds."""
    before, records = files(held), held.records
    with pytest.raises(type(error)):
        held.merge(INCOMING, on_step=when_written(held, number, raising(error)))
    assert files(held) == before
    assert {key: one.to_dict() for key, one in held.records.items()} == {k: one.to_dict() for k, one in records.items()}
    assert not (held.storage_dir / NAME).exists()
    assert held.merge(INCOMING).counts == {"replaced": 10, "added": 10}
    assert len(held.records) == len(BenchmarkDatabase(held.storage_dir).records) == 20
    assert not (held.storage_dir / NAME).exists()


def test_a_disk_that_fails_in_the_middle_of_a_merge(held: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be undone at once either; the next who opens the directory does, and until then nothing is lost."""
    before, really, calls = files(held), os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            held.merge(INCOMING)
    assert (held.storage_dir / NAME).exists()
    assert set(files(held)) >= set(before)
    again = BenchmarkDatabase(held.storage_dir)
    assert files(again) == before
    assert not (held.storage_dir / NAME).exists()
    held.load()
    assert {one.created_at for one in held.records.values()} == {OLD}


def test_a_writer_undoes_what_was_left_before_it_writes(held: BenchmarkDatabase) -> None:
    """One that had opened the directory before the merge began, too."""
    before = files(held)
    left_over(held, {"r10": INCOMING[10]}, deleted=["r0"])
    made = held.add("fp16", "m/y", context_length=1)
    found = files(held)
    assert found.pop(f"{made.id}.json")
    assert found == before


def test_what_others_put_after_an_interrupted_merge_stays(held: BenchmarkDatabase) -> None:
    """In the place of what it had deleted, of what it had replaced, and of what it had added."""
    before = files(held)
    left_over(held, {"r10": INCOMING[10], "r1": INCOMING[1], "r2": INCOMING[2]}, deleted=["r0", "r3"])
    theirs = {f"r{n}.json": encode(BenchmarkRecord(f"r{n}", "fp16", "m/theirs")) for n in (0, 1, 10)}
    for name, content in theirs.items():
        (held.records_dir / name).write_bytes(content)
    BenchmarkDatabase(held.storage_dir)
    assert files(held) == before | theirs
    assert not (held.storage_dir / NAME).exists()


def left_over(db: BenchmarkDatabase, wrote: dict[str, BenchmarkRecord], *, deleted: list[str] = []) -> None:  # noqa: B006 -- not changed
    """What a killed merge leaves that wrote these and deleted those."""
    journal: dict[str, Any] = {"version": 1, "wrote": {}, "replaced": {}, "deleted": {}}
    for key, record in wrote.items():
        path = db.records_dir / f"{key}.json"
        if path.exists():
            journal["replaced"][path.name] = base64.b64encode(path.read_bytes()).decode()
        path.write_bytes(encode(record))
        journal["wrote"][key] = [digest_of(encode(record)).hex()]
    for key in deleted:
        path = db.records_dir / f"{key}.json"
        journal["deleted"][path.name] = base64.b64encode(path.read_bytes()).decode()
        path.unlink()
    (db.storage_dir / NAME).write_text(json.dumps(journal))


def between_batches(work: Callable[[], object]) -> Callable[[Any], None]:
    """Does this before each hold of the lock but the first."""
    really = merge_run._Run.get_ready

    def get_ready(run: Any) -> None:
        if run._plan is not None:
            work()
        really(run)

    return get_ready


def test_a_merge_at_work_is_not_undone_by_others(held: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opens the directory meanwhile, or writes to it, leaves the journal to its owner; both succeed."""
    opened: list[BenchmarkDatabase] = []

    def work() -> None:
        opened.append(BenchmarkDatabase(held.storage_dir))
        opened[0].upsert(BenchmarkRecord("beside", "fp16", "m/y"))
        assert (held.storage_dir / NAME).exists()

    # Between two batches, when the lock is free; within one the writer would wait for itself.
    monkeypatch.setattr(merge_run._Run, "get_ready", between_batches(work))
    held.merge(INCOMING)
    assert len(opened) == 6
    opened[0].load()
    assert opened[0].records["r0"].created_at == NEW
    assert len(opened[0].records) == 21


def test_what_others_wrote_during_a_merge_stays_when_it_is_undone(held: BenchmarkDatabase) -> None:
    """In the place of what the merge had written, of what it had not yet written, under a new name, or a deletion."""
    own = {n: BenchmarkRecord(f"r{n}", "fp16", "m/x", context_length=1 + n, throughput_tok_s=7.0) for n in (0, 15, 30)}

    def interfere() -> None:
        for record in own.values():  # as another program does: a rename, and no lock
            aside = held.records_dir / ".other.tmp"
            aside.write_bytes(encode(record))
            aside.rename(held.records_dir / f"{record.id}.json")
        (held.records_dir / "r1.json").unlink()
        raise KeyboardInterrupt

    before = files(held)
    with pytest.raises(KeyboardInterrupt):
        held.merge(INCOMING, on_step=when_written(held, 19, interfere))
    expected = before | {f"{one.id}.json": encode(one) for one in own.values()}
    del expected["r1.json"]
    assert files(held) == expected


def test_a_merge_decided_again_is_undone_to_what_was_there_last(held: BenchmarkDatabase) -> None:
    """Another program changed a record before the merge came to it: that is what comes back."""
    changed = BenchmarkRecord("r9", "fp16", "m/x", context_length=10, created_at=OLD, throughput_tok_s=7.0)
    path = held.records_dir / "r9.json"
    when_two = when_written(held, 2, lambda: path.write_bytes(encode(changed)))

    def on_step(done: int, total: int) -> None:
        when_two(done, total)
        if json.loads(path.read_bytes())["created_at"] == NEW:
            raise KeyboardInterrupt

    before = files(held)
    with pytest.raises(KeyboardInterrupt):
        held.merge(INCOMING, on_step=on_step)
    assert files(held) == before | {"r9.json": encode(changed)}


def test_what_a_merge_wrote_and_then_evicts_is_not_brought_back(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there before. Others fill the directory meanwhile, so that what was taken in first has to go."""
    monkeypatch.setattr(merge_run, "_BATCH", 1)

    def made(key: str, day: int, **fields: Any) -> BenchmarkRecord:
        return BenchmarkRecord(key, "fp16", "m/x", created_at=f"2026-01-{day:02}T00:00:00+00:00", **fields)

    db = BenchmarkDatabase(directory, limits=Limits(max_records=4))
    db.upsert(made("old", 2, context_length=2))
    others = [made(key, 20 + n, context_length=4 + n) for n, key in enumerate(("kept", "z1", "z2"))]
    incoming = [made("kept", 1, context_length=1, tags=["pinned"]), made("first", 9, context_length=3)]
    before = files(db)
    fill = when_written(db, 1, lambda: [(db.records_dir / f"{one.id}.json").write_bytes(encode(one)) for one in others])

    def on_step(done: int, total: int) -> None:
        fill(done, total)
        if total == 1:  # the second plan has one to write, and two to evict
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        db.merge(incoming, on_step=on_step)
    assert files(db) == before | {f"{one.id}.json": encode(one) for one in others}


def test_a_merge_within_a_merge_is_refused(held: BenchmarkDatabase) -> None:
    """It would take the outer one's journal; the outer one is undone, as its user's call failed."""
    before = files(held)
    with pytest.raises(StoreUnavailable, match="under way"):
        held.merge(INCOMING, on_step=lambda *_: held.merge(INCOMING) and None)
    assert files(held) == before


HOSTILE = {
    "a path above": {"version": 1, "deleted": {"../../escaped.json": "e30="}},
    "an absolute path": {"version": 1, "replaced": {"/escaped.json": "e30="}},
    "another version": {"version": 2, "deleted": {"r0.json": "e30="}},
    "not ours": [1, 2, 3],
    "deep": "[" * 100_000,
    "no digest": {"version": 1, "wrote": {"r0": [1]}},
}


WHY = {
    "a path above": "'../../escaped.json' is no name of a record's file",
    "an absolute path": "'/escaped.json' is no name of a record's file",
    "another version": "its version is 2, not 1",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_journal_that_is_none_of_ours_is_left_alone(held: BenchmarkDatabase, name: str, tmp_path: Path) -> None:
    """Nothing it names is touched; reading and writing go on, and only a merge asks for it to be moved away."""
    content: Any = HOSTILE[name]
    journal = held.storage_dir / NAME
    journal.write_text(content if isinstance(content, str) else json.dumps(content))
    before, everything = journal.read_bytes(), sorted(tmp_path.rglob("*.json"))
    assert len(BenchmarkDatabase(held.storage_dir).records) == 10
    held.add("fp16", "m/new", context_length=1)
    with pytest.raises(StoreUnavailable) as caught:
        held.merge(INCOMING)
    assert caught.value.message.startswith(f"{journal} is no journal of a merge: {WHY.get(name, '')}")
    assert caught.value.hint == "move it away; what it says of an interrupted merge is then left as it is"
    assert journal.read_bytes() == before
    assert len(sorted(tmp_path.rglob("*.json"))) == len(everything) + 1
    journal.unlink()
    assert held.merge(INCOMING).counts == {"replaced": 10, "added": 10}


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_journal_that_is_no_plain_file_is_not_read(held: BenchmarkDatabase, kind: str, tmp_path: Path) -> None:
    """A link is not followed, a pipe blocks nobody."""
    journal = held.storage_dir / NAME
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text('{"version": 1, "deleted": {"new.json": "e30="}}')
    {"link": lambda: journal.symlink_to(elsewhere), "pipe": lambda: os.mkfifo(journal), "folder": journal.mkdir}[kind]()
    assert len(BenchmarkDatabase(held.storage_dir).records) == 10
    with pytest.raises(StoreUnavailable):
        held.merge(INCOMING)
    assert not (held.records_dir / "new.json").exists()


def test_verify_tells_of_a_merge_that_was_cut_off(held: BenchmarkDatabase) -> None:
    """And changes nothing; once the directory is opened there is nothing to tell."""
    left_over(held, {"r10": INCOMING[10]})
    assert verify(held.storage_dir).temporary == (NAME,)
    assert (held.storage_dir / NAME).exists()
    BenchmarkDatabase(held.storage_dir)
    assert verify(held.storage_dir).temporary == ()
