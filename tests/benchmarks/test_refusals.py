"""What a store says when the system refuses: what it was about to do, to which path, why, and what helps."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.benchmarks import folder, storage
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.eviction import Limits
from veloxquant.benchmarks.folder import RecordFolder
from veloxquant.benchmarks.lock import StoreLock
from veloxquant.benchmarks.merge_journal import NAME
from veloxquant.benchmarks.record_text import encode
from veloxquant.benchmarks.verify import verify
from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

RECORD = BenchmarkRecord("a", "fp16", "m/x")
LOOK = "check the folder with `ls -ld`, or choose another records.directory"
OURS = "make the folder yours (chown, chmod u+rwx) or choose another records.directory"
IN_THE_WAY = "something that is not a folder is in the way: move it, or choose another records.directory"
FULL = "free some space on the disk; nothing that was stored is lost"
READ_ONLY = "the file system is read-only: choose another records.directory"


def refuse(monkeypatch: pytest.MonkeyPatch, owner: Any, call: str, code: int, ending: str = "") -> None:
    """Let this call fail for paths that end so; whatever else it is asked for is done."""
    really = getattr(owner, call)

    def refusing(*arguments: Any, **keywords: Any) -> Any:
        if any(isinstance(one, str | Path) and str(one).endswith(ending) for one in arguments):
            raise OSError(code, os.strerror(code))
        return really(*arguments, **keywords)

    monkeypatch.setattr(owner, call, refusing)


def said(attempt: Callable[[], object]) -> tuple[str, str]:
    """Message and hint of the refusal that this ends in."""
    with pytest.raises(StoreUnavailable) as caught:
        attempt()
    return caught.value.message, caught.value.hint


def cannot(purpose: str, path: Path, code: int) -> str:
    """The message, with the system's own reason."""
    return f"cannot {purpose} {path}: {os.strerror(code)}"


@pytest.mark.parametrize("ending", ["/benchmarks", "/records"])
def test_a_folder_that_cannot_be_looked_at(directory: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """The directory, or the one of its records."""
    (directory / "records").mkdir(parents=True)
    refuse(monkeypatch, Path, "stat", errno.EACCES, ending)
    place = directory if ending == "/benchmarks" else directory / "records"
    assert said(lambda: BenchmarkDatabase(directory)) == (cannot("look at", place, errno.EACCES), OURS)


def test_a_file_in_the_place_of_the_records(db: BenchmarkDatabase) -> None:
    """Each way to write meets it in the same words, and what reads first says that it cannot read."""
    db.storage_dir.mkdir()
    db.records_dir.write_text("mine")
    for attempt in (db.save, db.clear, lambda: db.upsert(RECORD)):
        assert said(attempt) == (cannot("create", db.records_dir, errno.EEXIST), IN_THE_WAY)
    for attempt in (db.load, lambda: db.merge([RECORD])):
        assert said(attempt) == (cannot("read", db.records_dir, errno.ENOTDIR), IN_THE_WAY)
    assert db.records_dir.read_text() == "mine"


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    """Before anything is read; and a path that is none."""
    (tmp_path / "file").write_text("mine")
    hint = "move it away, or choose another records.directory"
    assert said(lambda: BenchmarkDatabase(tmp_path / "file")) == (f"{tmp_path}/file is not a folder", hint)
    none = f"{tmp_path}/a\0b"
    assert said(lambda: BenchmarkDatabase(none)) == (f"{none!r} is no path", "take the NUL out of records.directory")


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        ((os, "open", errno.EROFS, ".tmp"), READ_ONLY),
        ((os, "replace", errno.EIO, "/a.json"), LOOK),
        ((folder, "flush_folder", errno.ENOSPC, "/records"), FULL),
    ],
    ids=["aside", "in its place", "for good"],
)
def test_a_record_that_cannot_be_written(
    db: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch, call: tuple[Any, str, int, str], hint: str
) -> None:
    """The folder is named, and there is no such record."""
    db.save()
    refuse(monkeypatch, *call)
    message = cannot("write to", db.records_dir, call[2])
    assert said(lambda: db.upsert(RECORD)) == (message, hint)
    assert db.records == {}


def test_a_record_that_cannot_be_deleted(db: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or all of them."""
    db.upsert(RECORD)
    refuse(monkeypatch, Path, "unlink", errno.EPERM, "/a.json")
    for attempt in (lambda: db.remove("a"), db.clear):
        assert said(attempt) == (cannot("delete from", db.records_dir, errno.EPERM), OURS)
    assert set(db.records) == {"a"}


def test_a_file_that_cannot_be_put_back(tmp_path: Path) -> None:
    """As an interrupted merge asks for."""
    gone = RecordFolder(tmp_path / "gone")
    assert said(lambda: gone.restore("a.json", b"{}")) == (
        cannot("write to", tmp_path / "gone", errno.ENOENT),
        LOOK,
    )


def test_a_lock_that_cannot_be_taken(db: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the directory."""
    db.save()
    refuse(monkeypatch, os, "open", errno.EROFS, "/.lock")
    message = cannot("write to", db.storage_dir, errno.EROFS)
    assert said(lambda: db.upsert(RECORD)) == (message, READ_ONLY)


def test_a_lock_that_another_keeps(directory: Path) -> None:
    """For as long as is waited for it, or at once for those who do not wait: another process, or another thread."""
    path = directory / ".lock"
    first, second = (StoreLock(path, timeout_s=0.02) for _ in range(2))
    busy = (f"another writer is at work in {directory}", "it is tried again by itself; no record is lost")
    with first.held():
        assert said(lambda: second.held().__enter__()) == (
            f"another process has kept {path} locked for 0.02 s",
            "find it with `lsof` on that file; it is stopped or hangs, as a dead one would hold nothing",
        )
        with second.at_once():
            assert said(lambda: second.held().__enter__()) == busy
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(_at_once, first).result() == busy


def _at_once(lock: StoreLock) -> tuple[str, str]:
    with lock.at_once():
        return said(lambda: lock.held().__enter__())


def test_a_file_system_without_locks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network shares have none."""

    def refusing(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr("veloxquant.benchmarks.lock.FileLock.acquire", refusing)
    assert said(lambda: BenchmarkDatabase(directory).upsert(RECORD)) == (
        f"the file system of {directory} has no file locks",
        "choose a records.directory on a local disk",
    )


def test_a_directory_without_room(directory: Path) -> None:
    """For any record, for this one, or for one that is not pinned; just enough room is enough."""
    hint = "unpin some records, or raise records.max_records and records.max_bytes"
    size = len(encode(RECORD))
    none = BenchmarkDatabase(directory, limits=Limits(max_records=0))
    assert said(lambda: none.upsert(RECORD)) == (
        f"{directory} may hold no record: records.max_records is below 1",
        hint,
    )
    small = BenchmarkDatabase(directory, limits=Limits(max_bytes=size - 1))
    assert said(lambda: small.upsert(RECORD)) == (
        f"{directory} may hold {size - 1} bytes, and this record has {size}",
        hint,
    )
    full = BenchmarkDatabase(directory, limits=Limits(max_records=1, max_bytes=size))
    full.upsert(RECORD)
    assert set(full.records) == {"a"}
    pinned = BenchmarkDatabase(directory, limits=Limits(max_records=1))
    pinned.pin("a")
    message = f"{directory} holds as much as it may, and all of it is pinned"
    assert said(lambda: pinned.upsert(BenchmarkRecord("b", "fp16", "m/x"))) == (message, hint)
    assert set(pinned.records) == {"a"}


def test_an_index_that_cannot_be_written(db: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save says it, and the records are there all the same."""
    refuse(monkeypatch, os, "replace", errno.ENOSPC, "/index.json")
    db.upsert(RECORD)
    message = cannot("write", db.index_path, errno.ENOSPC)
    assert said(db.save) == (message, FULL)
    assert message in (db.index_problem or "")
    assert set(BenchmarkDatabase(db.storage_dir).records) == {"a"}


def test_an_index_that_is_left_as_it_is(db: BenchmarkDatabase) -> None:
    """A later program's, by its version; or one that nobody can read, which save says aloud."""
    db.upsert(RECORD)
    db.close()
    db.index_path.write_text('{"version": 2}')
    later = "index.json has the version 2, which may be later than 1; it is left as it is"
    assert BenchmarkDatabase(db.storage_dir).index_problem == later
    db.index_path.unlink()
    db.index_path.mkdir()
    odd = BenchmarkDatabase(db.storage_dir)
    message, hint = said(odd.save)
    assert message.startswith(f"cannot read {db.index_path}: ")
    assert message.endswith("; it is left as it is")
    assert hint == "make it readable, or move it away and the index is made again"
    db.index_path.rmdir()
    odd.save()


def test_a_directory_that_others_may_write(directory: Path) -> None:
    """Who, and the command that mends it."""
    directory.mkdir()
    directory.chmod(0o777)
    message, hint = said(lambda: BenchmarkDatabase(directory))
    assert message.startswith(f"{directory} can be written by others (")
    assert message.endswith("), who would decide what is planned")
    assert hint == f"chmod go-w '{directory}', or choose a records.directory of your own"


def test_a_directory_that_is_not_there_cannot_be_verified(directory: Path) -> None:
    """Nor can a home that nobody knows be found."""
    assert said(lambda: verify(directory)) == (
        f"there is no folder {directory}",
        "name the benchmark directory: --records DIR",
    )
    assert said(lambda: BenchmarkDatabase("~no-such-user/b")) == (
        "cannot find the home that '~no-such-user/b' starts with",
        "give an absolute path, or set HOME",
    )


def test_a_merge_within_a_merge(db: BenchmarkDatabase) -> None:
    """The inner one is refused, and so the outer one is undone."""
    message = f"a merge into {db.storage_dir} is under way and asks for another"
    outer = lambda: db.merge([RECORD], on_step=lambda *_: db.merge([RECORD]) and None)  # noqa: E731 -- twice the same
    assert said(outer) == (message, "merge when it has ended")
    assert db.records == {}


def test_a_journal_that_cannot_be_written(db: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge has not begun, and changes nothing."""
    db.save()
    journal = db.storage_dir / NAME
    refuse(monkeypatch, os, "replace", errno.ENOSPC, f"/{NAME}")
    assert said(lambda: db.merge([RECORD])) == (cannot("write", journal, errno.ENOSPC), FULL)
    assert (db.records, journal.exists()) == ({}, False)


def test_a_journal_that_cannot_be_deleted(db: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge is undone, as it has not happened while the journal is there."""
    db.save()
    journal = db.storage_dir / NAME
    with monkeypatch.context() as patch:
        refuse(patch, Path, "unlink", errno.EPERM, f"/{NAME}")
        assert said(lambda: db.merge([RECORD])) == (cannot("delete", journal, errno.EPERM), OURS)
    assert list(db.records_dir.iterdir()) == []
    assert db.merge([RECORD]).counts == {"added": 1}


def test_what_the_system_says_nothing_of(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind of error stands for its words."""

    def refusing(*_: Any) -> int:
        raise TimeoutError

    directory.mkdir()
    monkeypatch.setattr(storage.ownership, "others", refusing)
    assert said(lambda: BenchmarkDatabase(directory)) == (f"cannot look at {directory}: TimeoutError", LOOK)
