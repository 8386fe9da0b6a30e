"""index.json is made from the records and never trusted over them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.benchmarks.index_writer import IndexWriter
from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
    b'{"version": "one", "records": {}}',
    b'{"name": "a web project", "version": "0.1.0"}',
]


@pytest.mark.parametrize("content", [None, *BROKEN])
def test_a_broken_index_is_made_again_and_loses_nothing(
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


@pytest.mark.parametrize("version", [2, 1.5, 99])
def test_an_index_of_a_later_version_is_left_as_it_is(db: BenchmarkDatabase, fill: Fill, version: float) -> None:
    """Its records are read and written all the same."""
    fill(db, 2)
    db.close()
    content = json.dumps({"version": version, "shards": ["a"]}).encode()
    db.index_path.write_bytes(content)
    again = BenchmarkDatabase(db.storage_dir)
    again.add("fp16", "m/y", context_length=1)
    again.save()
    again.clear()
    assert db.index_path.read_bytes() == content
    assert again.index_problem is None


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


def test_an_index_that_cannot_be_written_costs_no_record(db: BenchmarkDatabase, fill: Fill) -> None:
    """A folder in its place: records are stored, the problem is told, and save says it aloud."""
    db.index_path.mkdir(parents=True)
    ids = fill(db, 2)
    assert set(BenchmarkDatabase(db.storage_dir).records) == set(ids)
    assert "index.json" in (db.index_problem or "")
    with pytest.raises(StoreUnavailable):
        db.save()


def test_the_index_is_written_when_a_program_ends(directory: Path, in_index: InIndex) -> None:
    """A script that never closes the database leaves an index that lists all it added."""
    script = (
        "import sys; from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase as D; d = D(sys.argv[1])\n"
        "for n in range(5): d.add('fp16', 'm/x', context_length=1 + n)"
    )
    subprocess.run([sys.executable, "-c", script, str(directory)], check=True, capture_output=True)
    assert len(in_index(directory)) == 5


def test_the_index_is_written_when_the_object_goes(directory: Path, fill: Fill, in_index: InIndex) -> None:
    """Without close, too."""
    fill(BenchmarkDatabase(directory), 5)
    assert len(in_index(directory)) == 5


def test_the_index_is_written_when_a_child_process_ends(directory: Path, in_index: InIndex) -> None:
    """Children of multiprocessing skip the interpreter's exit functions; one forked with the database works too."""
    script = (
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
    deadline = time.monotonic() + 20
    while len(writes) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(writes) == 2
    writer.close()
    assert len(writes) == 2
