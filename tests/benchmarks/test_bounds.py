"""The bounds of a store at work: what a change may evict, what it may not, and several processes at the limit."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from veloxquant.benchmarks import index_writer
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.eviction import Limits
from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FEW = Limits(max_records=5)


def contents(directory: Path) -> dict[str, bytes]:
    """Every record file with its bytes."""
    return {path.stem: path.read_bytes() for path in (directory / "records").iterdir()}


def differing(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    """Ids of files that came, went or changed."""
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@pytest.fixture
def overfull(directory: Path, fill: Callable[..., list[str]]) -> list[str]:
    """Eight records where five are allowed, put there by somebody with more room; the oldest first."""
    db = BenchmarkDatabase(directory)
    added = fill(db, 8)
    db.close()
    return added


@pytest.mark.parametrize("limits", [FEW, Limits(max_bytes=2000)])
def test_a_pin_in_an_overfull_directory_changes_one_file(directory: Path, overfull: list[str], limits: Limits) -> None:
    """Pinning and unpinning evict nothing, at the call or at the next index, though the record's bytes grow."""
    for pinned in (True, False):
        db, before = BenchmarkDatabase(directory, limits=limits), contents(directory)
        assert db.pin(overfull[4], pinned=pinned)
        db.save()
        db.close()
        assert differing(before, contents(directory)) == {overfull[4]}


def test_replacing_in_an_overfull_directory_evicts_nothing(directory: Path, overfull: list[str]) -> None:
    """`upsert` of an id that is there, and `add` of a measurement that is there on the same MLX."""
    db, before = BenchmarkDatabase(directory, limits=FEW), contents(directory)
    db.upsert(BenchmarkRecord(overfull[0], "affine4-g64", "m/x-1B"))
    db.add("affine4-g64", "m/x-1B", context_length=1025, chip="Apple M4", mlx_version="0.32.4")
    db.save()
    db.close()
    assert differing(before, contents(directory)) == set(overfull[:2])


def test_a_replacement_makes_room_for_the_bytes_that_it_has_more(directory: Path, overfull: list[str]) -> None:
    """In a directory beyond its bytes: as much goes as came, the oldest first, and not all that is too much."""
    before = contents(directory)
    size = len(before[overfull[7]])
    db = BenchmarkDatabase(directory, limits=Limits(max_bytes=size))
    grown = db.find(overfull[7])
    assert grown is not None
    db.upsert(BenchmarkRecord.from_dict(grown.to_dict() | {"source": "x" * (size + size // 2)}))
    db.close()
    assert set(contents(directory)) == set(overfull[2:])


def test_a_new_record_in_an_overfull_directory_brings_it_to_its_limits(directory: Path, overfull: list[str]) -> None:
    """The oldest go, the new one stays."""
    db = BenchmarkDatabase(directory, limits=FEW)
    added = db.add("fp16", "m/y", context_length=1)
    assert set(contents(directory)) == {*overfull[4:], added.id}


def test_a_record_larger_than_the_store_costs_no_other(directory: Path, overfull: list[str]) -> None:
    """It is refused before anything goes."""
    before = contents(directory)
    db = BenchmarkDatabase(directory, limits=Limits(max_bytes=sum(map(len, before.values()))))
    with pytest.raises(StoreUnavailable, match="this record has"):
        db.add("fp16", "m/y", context_length=1, source="x" * 8000)
    assert contents(directory) == before


def test_only_unpinning_takes_a_pin_off(db: BenchmarkDatabase) -> None:
    """A record put in place of a pinned one without the tag is pinned, its other tags as given."""
    pinned = db.add("fp16", "m/x", context_length=1, tags=["pinned", "a"])
    assert db.upsert(BenchmarkRecord(pinned.id, "fp16", "m/x", tags=["b"])).tags == ["b", "pinned"]
    assert BenchmarkDatabase(db.storage_dir).records[pinned.id].tags == ["b", "pinned"]
    later = BenchmarkRecord(pinned.id, "fp16", "m/x", created_at="2099-01-01T00:00:00+00:00", context_length=4096)
    db.merge([later])
    assert db.records[pinned.id].tags == ["pinned"]
    assert db.pin(pinned.id, pinned=False)
    assert db.upsert(BenchmarkRecord(pinned.id, "fp16", "m/x", tags=["b"])).tags == ["b"]


def test_an_evicted_record_that_a_crash_brings_back_is_tolerated(directory: Path) -> None:
    """It serves at the next open, nothing is set aside, and it goes with the next record that comes."""
    db = BenchmarkDatabase(directory, limits=FEW)
    first = db.add("fp16", "m/x", context_length=1).id
    file = directory / "records" / f"{first}.json"
    whole = file.read_bytes()
    for n in range(5):
        db.add("fp16", "m/x", context_length=2 + n)
    db.close()
    assert not file.exists()
    file.write_bytes(whole)
    db = BenchmarkDatabase(directory, limits=FEW)
    assert (len(db.records), first in db.records, db.skipped) == (6, True, {})
    db.add("fp16", "m/x", context_length=99)
    assert (len(contents(directory)), file.exists()) == (5, False)


def test_writers_together_exceed_the_bound_by_what_they_add_between_two_looks(
    directory: Path, fill: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps it for what it has seen; the first index that one of them writes brings the directory back."""
    monkeypatch.setattr(index_writer, "INTERVAL_S", 3600.0)
    writers = [BenchmarkDatabase(directory, limits=FEW) for _ in range(3)]
    for writer in writers:
        writer.close()
    for turn in range(4):
        for number, writer in enumerate(writers):
            fill(writer, 3, chip=f"M{number + 1}", mlx_version=f"0.{turn}")
        assert len(contents(directory)) <= 5 + 3 * (len(writers) - 1)
    for writer in writers:
        writer.close()
    assert len(contents(directory)) == 5


def test_four_processes_that_add_at_the_limit_keep_it(directory: Path) -> None:
    """100 records each with room for 150: when all have closed, 150 are there, every one whole, and in the index."""
    script = (
        "import sys; from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase\n"
        "from veloxquant.benchmarks.eviction import Limits\n"
        "db = BenchmarkDatabase(sys.argv[1], limits=Limits(max_records=150))\n"
        "for n in range(100): db.add('fp16', sys.argv[2], context_length=1 + n)\n"
        "db.close()"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(directory), f"m/{n}"]) for n in range(4)]
    assert [writer.wait(100) for writer in writers] == [0] * 4
    db = BenchmarkDatabase(directory)
    assert (len(db.records), db.skipped, len(contents(directory))) == (150, {}, 150)
    assert db.prune(dry_run=True) == []


def test_a_directory_that_may_hold_nothing_says_what_to_raise(directory: Path) -> None:
    """To the word, as the way out is two settings by name."""
    with pytest.raises(StoreUnavailable, match="max_records is below 1") as caught:
        BenchmarkDatabase(directory, limits=Limits(max_records=0)).upsert(BenchmarkRecord("a", "fp16", "m/x"))
    assert caught.value.hint == "unpin some records, or raise records.max_records and records.max_bytes"


def test_a_pin_leaves_what_its_holder_changed(directory: Path) -> None:
    """Tags that are not saved yet stay beside the pin, on it and off it."""
    db = BenchmarkDatabase(directory)
    db.upsert(BenchmarkRecord("a", "fp16", "m/x"))
    held = db.records["a"]
    held.tags.append("mine")
    assert db.pin("a")
    assert held.tags == ["mine", "pinned"]
    assert BenchmarkDatabase(directory).records["a"].tags == ["pinned"]
    assert db.pin("a", pinned=False)
    assert held.tags == ["mine"]
