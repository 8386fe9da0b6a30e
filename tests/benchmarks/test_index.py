"""index.json is made from the records and never trusted over them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from veloxquant.benchmarks import directory, index
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.benchmarks.index_writer import CHEAP_S, IndexWriter
from veloxquant.benchmarks.storage import signature
from veloxquant.benchmarks.verify import verify
from veloxquant.errors import StoreUnavailable

Fill = Callable[..., list[str]]
InIndex = Callable[[Path], set[str]]

BROKEN = [
    b"",
    b'{"version": 1, "records": {"83',
    b"[]",
    b"null",
    b"\xff",
    b'{"version": 1, "records": {}}',
    b'{"version": 1, "records": {"gone": {"method": "m", "model_id": "m", "path": "records/gone.json"}}}',
    b'{"version": 1, "records": 7}',
    b'{"version": 0, "records": {}}',
    b'{"version": null, "name": "a web project"}',
    b'{"version": 1, "records": {"a": {"method": "\xff"}}}',
    b"[" * 60_000,
]


@pytest.mark.parametrize("content", [None, *BROKEN])
def test_r25_a_broken_index_is_made_again_and_loses_nothing(
    db: BenchmarkDatabase, fill: Fill, in_index: InIndex, content: bytes | None
) -> None:
    """Missing, truncated, foreign, stale: every record is there, and the index says so again."""
    ids = set(fill(db, 3))
    db.close()
    db.index_path.unlink() if content is None else db.index_path.write_bytes(content)
    again = BenchmarkDatabase(db.storage_dir)
    assert set(again.records) == ids
    again.close()
    assert in_index(db.storage_dir) == ids
    again.add("fp16", "m/y", context_length=1)
    again.close()
    assert len(in_index(db.storage_dir)) == 4


LATER = ["2", "99", "1.5", '"2"', '"2.0-beta"', '"0.1.0"', '"1"', "[2, 0]", '{"major": 2}', "1e999", "1" + "0" * 40]


@pytest.mark.parametrize("version", LATER)
def test_an_index_of_a_later_version_is_left_as_it_is(db: BenchmarkDatabase, fill: Fill, version: str) -> None:
    """Its records are read and written all the same, and the store says why its index is not up to date."""
    fill(db, 2)
    db.close()
    content = f'{{"version": {version}, "shards": ["a"]}}'.encode()
    db.index_path.write_bytes(content)
    again = BenchmarkDatabase(db.storage_dir)
    assert "may be later" in (again.index_problem or "")
    again.add("fp16", "m/y", context_length=1)
    again.save()
    again.clear()
    again.close()
    assert db.index_path.read_bytes() == content
    assert "may be later" in (again.index_problem or "")
    assert verify(db.storage_dir).index_differs == ()


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


UNREADABLE: list[Callable[[Path], None]] = [_loop, os.mkfifo, Path.mkdir]


@pytest.mark.parametrize("make", UNREADABLE)
def test_an_index_that_cannot_be_read_is_left_as_it_is(
    db: BenchmarkDatabase, fill: Fill, make: Callable[[Path], None]
) -> None:
    """Nobody knows what it is: no write replaces it, the store says so, and save says it aloud."""
    db.save()
    db.index_path.unlink()
    make(db.index_path)
    before = signature(db.index_path.lstat())
    ids = fill(db, 2)
    again = BenchmarkDatabase(db.storage_dir)
    assert set(again.records) == set(ids)
    assert "index.json" in (again.index_problem or "")
    with pytest.raises(StoreUnavailable, match="left as it is"):
        again.save()
    again.close()
    db.close()
    assert signature(db.index_path.lstat()) == before
    assert "cannot read" in verify(db.storage_dir).index_differs[0]
    db.index_path.rmdir() if db.index_path.is_dir() else db.index_path.unlink()
    again.save()
    assert again.index_problem is None
    assert set(json.loads(db.index_path.read_text())["records"]) == set(ids)


def test_keys_beside_ours_are_kept(db: BenchmarkDatabase, fill: Fill) -> None:
    """Another program's notes in the index survive its making."""
    db.storage_dir.mkdir()
    db.index_path.write_text('{"version": 1, "records": {}, "fleet": {"host": "a"}}')
    fill(db, 1)
    db.save()
    assert json.loads(db.index_path.read_text())["fleet"] == {"host": "a"}


def test_the_index_follows_the_directory(db: BenchmarkDatabase, fill: Fill, in_index: InIndex) -> None:
    """Files that appear and disappear without us show in it after a load."""
    first, second = fill(db, 2)
    db.close()
    (db.records_dir / f"{first}.json").unlink()
    again = BenchmarkDatabase(db.storage_dir)
    again.close()
    assert in_index(db.storage_dir) == {second}


# Who writes: the caller where that is cheap, a thread where it is not.
CHEAP = pytest.mark.parametrize("head", ["", "import veloxquant.benchmarks.index_writer as w; w.CHEAP_S = -1.0\n"])


@CHEAP
def test_the_index_is_written_when_a_program_ends(directory: Path, in_index: InIndex, head: str) -> None:
    """A script that never closes the database leaves an index that lists all it added."""
    script = head + (
        "import sys; from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase as D; d = D(sys.argv[1])\n"
        "for n in range(5): d.add('fp16', 'm/x', context_length=1 + n)"
    )
    subprocess.run([sys.executable, "-c", script, str(directory)], check=True, capture_output=True)
    assert len(in_index(directory)) == 5


def test_the_index_is_written_when_the_object_goes(directory: Path, fill: Fill, in_index: InIndex) -> None:
    """Without close, too."""
    fill(BenchmarkDatabase(directory), 5)
    assert len(in_index(directory)) == 5


def test_a_program_that_ends_waits_for_the_write_under_way(directory: Path, in_index: InIndex) -> None:
    """The thread that writes is half-way when the main thread is done: the index is whole, and no litter is left."""
    script = (
        "import sys, threading, time; from veloxquant.benchmarks import directory, index_writer\n"
        "index_writer.CHEAP_S, begun, writing = -1.0, threading.Event(), directory.write_aside\n"
        "def slowly(*a, **k): begun.set(); time.sleep(0.3); return writing(*a, **k)\n"
        "directory.write_aside = slowly\n"
        "from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase as D; d = D(sys.argv[1])\n"
        "d.add('fp16', 'm/x', context_length=1); assert begun.wait(20)"
    )
    subprocess.run([sys.executable, "-c", script, str(directory)], check=True, capture_output=True)
    assert len(in_index(directory)) == 1
    assert [path for path in directory.iterdir() if path.suffix == ".tmp"] == []


@CHEAP
def test_the_index_is_written_when_a_child_process_ends(directory: Path, in_index: InIndex, head: str) -> None:
    """Children of multiprocessing skip the interpreter's exit functions; one forked with the database works too."""
    script = head + (
        "import multiprocessing, sys; from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase\n"
        "db = BenchmarkDatabase(sys.argv[1]); db.add('fp16', 'm/x', context_length=1)\n"
        "def work(): [db.add('fp16', 'm/y', context_length=1 + n) for n in range(5)]\n"
        "child = multiprocessing.get_context('fork').Process(target=work); child.start(); child.join()\n"
        "import os; os._exit(child.exitcode)"
    )
    subprocess.run([sys.executable, "-c", script, str(directory)], check=True, capture_output=True)
    assert len(in_index(directory)) == 6


def test_many_marks_make_few_writes() -> None:
    """The first at once, the others together, the rest at close."""
    writes: list[float] = []
    writer = IndexWriter(lambda: writes.append(time.monotonic()))
    for _ in range(1000):
        writer.mark()
    assert len(writes) == 1
    writer.close()
    assert len(writes) == 2
    writer.close()
    assert len(writes) == 2


def test_a_deferred_write_comes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that adds and then only waits does not leave the index behind."""
    monkeypatch.setattr("veloxquant.benchmarks.index_writer.INTERVAL_S", 0.05)
    writes: list[int] = []
    writer = IndexWriter(lambda: writes.append(1))
    writer.mark()
    writer.mark()
    assert comes(lambda: len(writes) == 2)
    writer.close()
    assert len(writes) == 2


def test_who_adds_does_not_write_where_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a look at the directory, or a write, that took longer than is cheap, a thread of its own writes."""
    monkeypatch.setattr("veloxquant.benchmarks.index_writer.COST_MULTIPLE", 0.0)
    monkeypatch.setattr("veloxquant.benchmarks.index_writer.INTERVAL_S", 0.0)
    threads: list[threading.Thread] = []
    writer = IndexWriter(lambda: threads.append(threading.current_thread()))
    writer.rest(2 * CHEAP_S)
    writer.mark()
    assert comes(lambda: len(threads) == 1)
    assert threads[0] is not threading.current_thread()
    writer.rest(0.0)
    assert comes(lambda: not writer.is_due)
    monkeypatch.setattr("veloxquant.benchmarks.index_writer.CHEAP_S", -1.0)  # the write took longer than that
    writer.mark()
    assert comes(lambda: len(threads) == 2)
    assert threads[1] is not threading.current_thread()


def test_what_is_marked_during_a_write_is_written_after_it() -> None:
    """By whoever closes, who waits for the write under way; and nobody waits who only marks."""
    begun, may_end = threading.Event(), threading.Event()
    writes: list[int] = []

    def write() -> None:
        begun.set()
        assert may_end.wait(20)
        writes.append(1)

    writer = IndexWriter(write)
    writing = threading.Thread(target=writer.flush)
    writing.start()
    assert begun.wait(20)
    writer.mark()
    assert writes == []
    closing = threading.Thread(target=writer.close)
    closing.start()
    may_end.set()
    for thread in (writing, closing):
        thread.join(20)
    assert writes == [1, 1]
    assert not writer.is_due


def test_others_add_while_the_index_is_made(db: BenchmarkDatabase, fill: Fill, in_index: InIndex) -> None:
    """The lock is free while the text is made; what came meanwhile is in the next index, by close at the latest."""
    ids = fill(db, 3)
    rendering, added = index.render, []

    def render(listed: Iterable[index.Listed], before: index.Index) -> Iterator[bytes]:
        if not added:
            adding = threading.Thread(target=lambda: added.extend(fill(db, 1, chip="M1")))
            adding.start()
            adding.join(20)
            assert len(added) == 1
        return rendering(listed, before)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(index, "render", render)
        db.save()
    assert in_index(db.storage_dir) == set(ids)
    db.close()
    assert in_index(db.storage_dir) == {*ids, *added}


@pytest.mark.parametrize("meddle", ["writes", "sweeps"])
def test_an_older_index_does_not_replace_a_newer_one(
    db: BenchmarkDatabase, fill: Fill, in_index: InIndex, meddle: str
) -> None:
    """Another process adds, and writes the index, or takes ours for litter, while ours is made: ours is made again."""
    ids = fill(db, 2)
    made: list[int] = []
    writing = directory.write_aside

    def write(path: Path, data: bytes, *, durable: bool) -> Path:
        aside = writing(path, data, durable=durable)
        made.append(len(data))
        if len(made) == 1:
            other = BenchmarkDatabase(db.storage_dir)
            if meddle == "writes":
                ids.extend(fill(other, 1, chip="M1"))
                other.save()
            assert not aside.exists()
        return aside

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(directory, "write_aside", write)
        db.save()
    assert in_index(db.storage_dir) == set(ids)
    assert set(db.records) == set(ids)
    assert [path.name for path in db.storage_dir.iterdir() if path.suffix == ".tmp"] == []


def test_an_index_that_is_up_to_date_is_not_made_again(
    db: BenchmarkDatabase, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By no open, load, save or close."""
    fill(db, 3)
    db.save()
    rendered: list[int] = []
    rendering = index.render

    def render(listed: list[index.Listed], before: index.Index) -> Iterator[bytes]:
        rendered.append(len(listed))
        return rendering(listed, before)

    monkeypatch.setattr(index, "render", render)
    again = BenchmarkDatabase(db.storage_dir)
    for one in (db, again):
        one.load()
        one.save()
        one.close()
    assert rendered == []
    fill(again, 4)
    again.close()
    assert rendered[-1] == 4


def comes(holds: Callable[[], bool]) -> bool:
    """Whether this holds before long."""
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()
