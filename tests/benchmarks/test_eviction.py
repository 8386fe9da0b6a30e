"""A store that is full: what goes, what never goes, and that several writers keep the bound together."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.eviction import EvictionOrder, Limits, measured, newness, recorded_at
from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FEW = Limits(max_records=5)


def record(record_id: str, day: int, context: int = 1024, version: str = "0.31.0", *tags: str) -> BenchmarkRecord:
    """A measurement of a day in January."""
    at = f"2026-01-{day:02}T00:00:00+00:00"
    return BenchmarkRecord(
        record_id, "fp16", "m/x", context_length=context, mlx_version=version, created_at=at, tags=[*tags]
    )


def going(records: list[BenchmarkRecord]) -> list[str]:
    """The ids in the order in which they go."""
    held = {one.id: one for one in records}
    order, gone = EvictionOrder(held), []
    while (one := order.pop()) is not None:
        gone.append(one.id)
        order.change(held.pop(one.id), None)
    return gone


def test_superseded_measurements_go_first_the_oldest_first() -> None:
    """A newer MLX supersedes whatever the day; of one version the later day does; then the oldest of the rest."""
    records = [
        record("latest of 1024", 3, 1024, "0.32.0"),
        record("older version, later day", 9, 1024, "0.31.0"),
        record("same version, earlier day", 2, 1024, "0.32.0"),
        record("only one of 2048", 1, 2048),
        record("pinned", 1, 1024, "0.31.0", "pinned"),
    ]
    expected = ["same version, earlier day", "older version, later day", "only one of 2048", "latest of 1024"]
    assert going(records) == expected


MANY = st.lists(
    st.builds(
        record,
        st.uuids().map(str),
        st.integers(1, 28),
        st.sampled_from((1024, 2048, 4096)),
        st.sampled_from(("0.30.0", "0.31.0", "unknown")),
        st.sampled_from(("pinned", "", "", "")),
    ),
    max_size=20,
)


@given(MANY, MANY)
def test_the_order_kept_up_to_date_is_the_order_made_anew(
    before: list[BenchmarkRecord], after: list[BenchmarkRecord]
) -> None:
    """Records that come, change and go one by one lead where a fresh look at the rest leads: the plain definition."""
    held = {one.id: one for one in before}
    order = EvictionOrder(held)
    for old, new in zip(before, after, strict=False):
        held[old.id] = changed = replace(new, id=old.id)
        order.change(old, changed)
    while True:
        free = [one for one in held.values() if "pinned" not in one.tags]
        expected = min(free, key=lambda one: (_is_newest(one, held), recorded_at(one), one.id), default=None)
        assert order.pop() is expected
        if expected is None:
            break
        order.change(held.pop(expected.id), None)


@given(MANY, st.integers(0, 20), st.integers(0, 5))
def test_an_order_made_by_and_by_is_the_order_made_at_once(
    records: list[BenchmarkRecord], changed: int, step: int
) -> None:
    """Whatever comes, changes and goes in between."""
    held: dict[str, BenchmarkRecord] = {}
    order = EvictionOrder(held)
    for one in records[changed:]:
        held[one.id] = one
    order = EvictionOrder(held)
    for one in records[:changed]:
        order.advance(step)
        held[one.id] = one
        order.change(None, one)
        gone = next(iter(held))
        order.change(held.pop(gone), None)
    left = dict(held)
    fresh = EvictionOrder(left)
    while (expected := fresh.pop()) is not None:
        found = order.pop()
        assert found is expected
        assert (order.newest(found) or found).id == (fresh.newest(expected) or expected).id
        order.change(held.pop(expected.id), None)
        fresh.change(left.pop(expected.id), None)
    assert order.pop() is None


def test_replacing_one_record_again_and_again_does_not_grow_the_order() -> None:
    """A store near its limit that never evicts, as each write replaces; the order stays right."""
    held = {str(n): record(str(n), 1 + n, 1024 + n) for n in range(19)}
    order = EvictionOrder(held)
    order.complete()
    for n in range(2000):
        before, held["5"] = held["5"], record("5", 20 + n % 9, 2048)
        order.change(before, held["5"])
    assert len(order._heap) <= 8 * len(held) + 64
    assert going(list(held.values()))[-1] == "5"
    assert order.pop() is held["0"]


def test_no_add_makes_the_whole_order(
    directory: Path, fill: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a directory fills up, each add places a few; a directory that is opened full has it before any add."""
    placed: list[int] = []
    completing = EvictionOrder.complete

    def complete(order: EvictionOrder) -> None:
        before = len(order._placed)
        completing(order)
        placed.append(len(order._placed) - before)

    monkeypatch.setattr(EvictionOrder, "complete", complete)
    monkeypatch.setattr("veloxquant.benchmarks.directory._FEW", 12)
    filling = BenchmarkDatabase(directory, limits=Limits(max_records=100))
    fill(filling, 105)
    assert len(filling.records) == 100
    assert sum(placed) == 0
    full = BenchmarkDatabase(directory, limits=Limits(max_records=100))
    assert sum(placed) == 100
    fill(full, 3, chip="M1")
    assert sum(placed) == 100


def _is_newest(one: BenchmarkRecord, held: dict[str, BenchmarkRecord]) -> bool:
    return max((other for other in held.values() if measured(other) == measured(one)), key=newness) is one


def test_adding_keeps_the_number(directory: Path) -> None:
    """In memory and on the disk, at every add; the earlier versions go, pinned ones stay."""
    db = BenchmarkDatabase(directory, limits=FEW)
    pinned = db.add("fp16", "m/x", context_length=1, mlx_version="0.30.0", tags=["pinned"]).id
    for n in range(12):
        for version in ("0.31.0", "0.32.0"):
            added = db.add("fp16", "m/x", context_length=2 + n, mlx_version=version)
            assert added.id in db.records
            assert len(db.records) == len(list((directory / "records").iterdir())) <= 5
    assert pinned in db.records
    assert {one.mlx_version for key, one in db.records.items() if key != pinned} == {"0.32.0"}


def test_adding_keeps_the_bytes(directory: Path, fill: Callable[..., list[str]]) -> None:
    """The bytes of the record files, as the disk has them."""
    db = BenchmarkDatabase(directory, limits=Limits(max_bytes=5000))
    fill(db, 40)
    sizes = [path.stat().st_size for path in (directory / "records").iterdir()]
    assert 5000 - max(sizes) < sum(sizes) <= 5000


def test_a_store_full_of_pinned_records_refuses(directory: Path) -> None:
    """Nothing pinned goes for a newcomer, and the newcomer leaves nothing behind; replacing still works."""
    db = BenchmarkDatabase(directory, limits=FEW)
    kept = [db.add("fp16", "m/x", context_length=1 + n, tags=["pinned"]).id for n in range(5)]
    with pytest.raises(StoreUnavailable, match="pinned"):
        db.add("fp16", "m/x", context_length=99)
    again = db.add("fp16", "m/x", context_length=1, throughput_tok_s=2.0)
    assert (again.id, again.tags) == (kept[0], ["pinned"])
    assert set(BenchmarkDatabase(directory).records) == set(kept)


def test_a_pin_can_be_set_and_taken_off(directory: Path) -> None:
    """It is a tag in the record's file; other tags and keys stay; an unknown id is False."""
    db = BenchmarkDatabase(directory)
    assert not db.pin("none")
    made = db.add("fp16", "m/x", context_length=1, tags=["a"])
    assert db.pin(made.id)
    assert BenchmarkDatabase(directory).records[made.id].tags == ["a", "pinned"]
    assert db.pin(made.id, pinned=False)
    assert BenchmarkDatabase(directory).records[made.id].tags == ["a"]


def test_reading_evicts_nothing_and_prune_does(directory: Path, fill: Callable[..., list[str]]) -> None:
    """A dry run tells what prune then does; a directory that somebody else filled stays as it is until then."""
    added = fill(BenchmarkDatabase(directory), 8)
    db = BenchmarkDatabase(directory, limits=FEW)
    db.load()
    db.close()
    foretold = db.prune(dry_run=True)
    sizes = {path.stem: path.stat().st_size for path in (directory / "records").iterdir()}
    assert len(sizes) == 8
    gone = db.prune()
    assert [victim.size_bytes for victim in gone] == [sizes[key] for key in added[:3]]
    assert [victim.size_bytes for victim in foretold] == [sizes[key] for key in added[:3]]
    assert [victim.record.id for victim in gone] == [victim.record.id for victim in foretold] == added[:3]
    assert [victim.superseded_by for victim in gone] == [None] * 3
    assert set(BenchmarkDatabase(directory).records) == set(added[3:])
    assert db.prune() == []


def test_a_record_that_changed_elsewhere_is_not_evicted_for_what_it_was(directory: Path) -> None:
    """Another process pinned it, and this one has not looked since."""
    db = BenchmarkDatabase(directory, limits=FEW)
    oldest, *_ = [db.add("fp16", "m/x", context_length=1 + n).id for n in range(5)]
    db.prune()
    BenchmarkDatabase(directory).pin(oldest)
    db.add("fp16", "m/x", context_length=99)
    assert oldest in db.records
    assert len(db.records) == 5


def test_processes_keep_the_bound_together(directory: Path) -> None:
    """Three processes with room for 20: when they have closed, 20 are there, all of them whole."""
    script = (
        "import sys; from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase\n"
        "from veloxquant.benchmarks.eviction import Limits\n"
        "db = BenchmarkDatabase(sys.argv[1], limits=Limits(max_records=20))\n"
        "for n in range(40): db.add('fp16', sys.argv[2], context_length=1 + n)\n"
        "db.close()"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(directory), f"m/{n}"]) for n in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    db = BenchmarkDatabase(directory)
    assert (len(db.records), db.skipped) == (20, {})
