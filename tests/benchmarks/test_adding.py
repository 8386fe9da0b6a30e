"""A new measurement beside those of other MLX versions: pins stay with their version, and it is all or nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks import folder
from veloxquant.benchmarks.adding import add
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.eviction import Limits
from veloxquant.errors import StoreUnavailable


def measure(db: BenchmarkDatabase, version: str, speed: float = 1.0, **fields: Any) -> BenchmarkRecord:
    """One measurement, the same but for the MLX version."""
    return db.add("fp16", "m/x", context_length=64, chip="M4", mlx_version=version, throughput_tok_s=speed, **fields)


def kept(db: BenchmarkDatabase) -> dict[str, tuple[float, bool]]:
    """Speed and pin by version, as another program finds them; one of each."""
    records = BenchmarkDatabase(db.storage_dir).records.values()
    found = {one.mlx_version: (one.throughput_tok_s, "pinned" in one.tags) for one in records}
    assert len(found) == len(records)
    return found


def contents(db: BenchmarkDatabase) -> dict[str, bytes]:
    """The folder of records, litter included."""
    return {path.name: path.read_bytes() for path in db.records_dir.iterdir()}


def test_a_pin_stays_with_its_version(db: BenchmarkDatabase) -> None:
    """Whether the measurement stands in front or apart when it is made again, and the other version gets none."""
    db.pin(measure(db, "0.30", 1.0).id)
    measure(db, "0.31", 2.0)
    assert kept(db) == {"0.30": (1.0, True), "0.31": (2.0, False)}
    measure(db, "0.30", 3.0)
    assert kept(db) == {"0.30": (3.0, True), "0.31": (2.0, False)}
    measure(db, "0.31", 4.0)
    assert kept(db) == {"0.30": (3.0, True), "0.31": (4.0, False)}


def test_versions_that_read_alike_do_not_displace_each_other(db: BenchmarkDatabase) -> None:
    """Signs that no file name has become the same one, and the ids still differ."""
    versions = ["0.30.0+abc", "0.30.0-abc", "0.30.0 abc", "0.31", "", "0.30.0_abc"]
    for speed, version in enumerate([*versions, *versions], 1):
        measure(db, version, float(speed))
    assert kept(db) == {version: (6.0 + number, False) for number, version in enumerate(versions, 1)}


def test_another_record_under_the_id_apart_stays(db: BenchmarkDatabase) -> None:
    """It is neither overwritten nor deleted when the version comes back."""
    first = measure(db, "0.30")
    other = db.upsert(BenchmarkRecord(f"{first.id}-mlx0.30", "kivi", "m/y"))
    for version in ("0.31", "0.30", "0.31"):
        measure(db, version)
    assert db.records[other.id] == other
    assert sorted(one.mlx_version for one in db.records.values() if one.id != other.id) == ["0.30", "0.31"]


@given(st.lists(st.tuples(st.sampled_from(("0.30", "0.31", "0.30+a", "0.30-a")), st.booleans()), max_size=12))
def test_the_newest_of_each_version_is_kept_and_each_pin(adds: list[tuple[str, bool]]) -> None:
    """By a dictionary: the last of a version, pinned once any of it was."""
    held: dict[str, BenchmarkRecord] = {}
    expected: dict[str, tuple[float, bool]] = {}
    for speed, (version, pinned) in enumerate(adds):
        new = BenchmarkRecord("f00d", "fp16", "m/x", mlx_version=version, throughput_tok_s=float(speed))
        new.tags = ["pinned"] * pinned
        plan = add(new, held.get)
        held |= {one.id: one for one in (plan.apart, plan.record) if one is not None}
        if plan.gives_way is not None:
            del held[plan.gives_way]
        expected[version] = float(speed), pinned or expected.get(version, (0.0, False))[1]
    assert len(held) == len(expected)
    assert {r.mlx_version: (r.throughput_tok_s, "pinned" in r.tags) for r in held.values()} == expected


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("after", range(6))
def test_an_add_that_fails_at_any_step_leaves_the_store_as_it_was(
    db: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    """The disk is full or breaks at the first, second, third such call of moving one version apart; none is lost."""
    first = measure(db, "0.30", 1.0)
    measure(db, "0.31", 2.0)
    db.close()
    before, records = contents(db), db.records
    left = after
    place = Path if call == "replace" else os if call == "fsync" else folder
    name = "write_aside" if call == "write" else call
    really = getattr(place, name)

    def fails_once(*words: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really(*words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, fails_once)
        try:
            measure(db, "0.32", 3.0)
        except StoreUnavailable:
            assert {key: data for key, data in contents(db).items() if before.get(key) != data} == {}
            assert set(contents(db)) == set(before)
            assert db.records == records
        else:
            assert set(kept(db)) == {"0.30", "0.31", "0.32"}
    assert set(kept(db)) >= {"0.30", "0.31"}
    assert db.find(first.id) is not None


@pytest.mark.parametrize("after", range(4))
def test_a_save_without_room_for_all_writes_none(
    db: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Four edits, and the disk takes none, one, two or three of them; the next save takes all."""
    ids = [db.add("fp16", "m/x", context_length=length).id for length in (1, 2, 3, 4)]
    db.close()
    before = contents(db)
    for record_id in ids:
        db.records[record_id].source = "edited"
    left, really = after, folder.write_aside

    def fails_from_there(*words: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really(*words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(folder, "write_aside", fails_from_there)
        with pytest.raises(StoreUnavailable):
            db.save()
    assert contents(db) == before
    db.save()
    assert {one.source for one in BenchmarkDatabase(db.storage_dir).records.values()} == {"edited"}


def test_a_store_full_of_pins_refuses_another_version_and_stays(directory: Path) -> None:
    """What was moved apart for it stands in front again."""
    db = BenchmarkDatabase(directory, limits=Limits(1))
    db.pin(measure(db, "0.30", 1.0).id)
    before = contents(db)
    with pytest.raises(StoreUnavailable, match="pinned"):
        measure(db, "0.31", 2.0)
    assert contents(db) == before
    assert kept(db) == {"0.30": (1.0, True)}


def test_a_full_store_loses_nothing_when_a_version_comes_back(directory: Path) -> None:
    """Two versions, room for two, the older pinned: made again, both are still there."""
    db = BenchmarkDatabase(directory, limits=Limits(2))
    db.pin(measure(db, "0.30", 1.0).id)
    measure(db, "0.31", 2.0)
    measure(db, "0.30", 3.0)
    assert kept(db) == {"0.30": (3.0, True), "0.31": (2.0, False)}


def test_a_store_that_may_hold_nothing_says_so(directory: Path) -> None:
    """Its limit is named, and no pin that nobody set."""
    db = BenchmarkDatabase(directory, limits=Limits(0))
    with pytest.raises(StoreUnavailable, match="max_records is below 1"):
        db.upsert(BenchmarkRecord("a", "fp16", "m/x"))
    assert db.records == {}


@pytest.mark.parametrize(
    "wrong", ["../evil", "x" * 300, "", "a/b", "a\0b", "\ud800", ".", "evil/../evil", None, 5, ["a"]]
)
def test_what_cannot_be_an_id_is_not_there(db: BenchmarkDatabase, wrong: Any) -> None:
    """Whatever files lie about, none is looked for."""
    good = db.upsert(BenchmarkRecord("a", "fp16", "m/x"))
    evil = db.storage_dir / "evil.json"
    evil.write_bytes((db.records_dir / "a.json").read_bytes().replace(b'"a"', b'"ghost"'))
    assert (db.find(wrong), db.remove(wrong), db.pin(wrong)) == (None, False, False)
    assert (db.records, db.skipped) == ({"a": good}, {})
    db.clear()
    assert evil.exists()
