"""Two directories become one: what stays, what gives way, and that order does not matter."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import example, given
from hypothesis import strategies as st

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord, benchmark_fingerprint
from veloxquant.benchmarks.eviction import measured, recorded_at
from veloxquant.benchmarks.merging import Holdings, place, version_id
from veloxquant.benchmarks.validation import is_id

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"


def record(record_id: str = "", **fields: object) -> BenchmarkRecord:
    """A measurement under its fingerprint, or under the id given."""
    made = BenchmarkRecord(**({"id": "x", "method": "fp16", "model_id": "m/x-1B", "created_at": OLD} | fields))  # type: ignore[arg-type]
    own = benchmark_fingerprint(made.method, made.model_id, made.context_length, made.batch_size, made.chip)
    return replace(made, id=record_id or own)


def merged(*sources: list[BenchmarkRecord]) -> dict[str, BenchmarkRecord]:
    """What a store holds that took these in, one after the other."""
    held: dict[str, BenchmarkRecord] = {}
    for one in itertools.chain(*sources):
        placing = place(one, held.get, Holdings(held))
        held |= {put.id: put for put in placing.puts}
        for gone in placing.deletes:
            del held[gone]
    return held


RECORDS = st.lists(
    st.builds(
        record,
        record_id=st.sampled_from(("", "", "", "own", version_id("own", "0.31.0"))),
        context_length=st.sampled_from((1024, 2048)),
        mlx_version=st.sampled_from(("0.30.0", "0.31.0", "unknown")),
        throughput_tok_s=st.sampled_from((1.0, 2.0)),
        created_at=st.sampled_from((OLD, NEW, "2026-03-01T00:00:00+01:00", "no time")),
    ),
    max_size=8,
)


def directory_of(records: list[BenchmarkRecord]) -> list[BenchmarkRecord]:
    """As a directory: one record an id."""
    return list({one.id: one for one in records}.values())


@given(RECORDS, RECORDS)
def test_no_measurement_of_a_version_is_lost(ours: list[BenchmarkRecord], theirs: list[BenchmarkRecord]) -> None:
    """Of every measurement and MLX version, the latest figures of either side are held, whatever ids they came with."""
    sources = [*directory_of(ours), *directory_of(theirs)]
    held = merged(directory_of(ours), directory_of(theirs)).values()
    for one in sources:
        same = [other for other in sources if _kind(other) == _kind(one)]
        latest = max(map(recorded_at, same))
        figures = {other.throughput_tok_s for other in same if recorded_at(other) == latest}
        assert figures <= {other.throughput_tok_s for other in held if _kind(other) == _kind(one)}


@given(st.lists(st.tuples(st.sampled_from(("0.30.0", "0.31.0", "0.32.0")), st.integers(1, 9)), max_size=6))
def test_order_of_merging_does_not_matter(runs: list[tuple[str, int]]) -> None:
    """Fingerprinted records of any versions and moments end in the same files, whoever is merged into whom."""
    records = [
        record(mlx_version=version, created_at=f"2026-01-0{day}T00:00:00+00:00", throughput_tok_s=float(day))
        for version, day in runs
    ]
    forward, backward = merged(records), merged(records[::-1])
    assert forward == backward
    assert {one.mlx_version for one in forward.values()} == {version for version, _ in runs}


def _outcome(incoming: BenchmarkRecord, ours: BenchmarkRecord) -> str:
    held = {ours.id: ours}
    return place(incoming, held.get, Holdings(held)).outcome


def _kind(one: BenchmarkRecord) -> tuple[object, ...]:
    return (*measured(one), one.mlx_version)


def test_a_newer_record_takes_the_place() -> None:
    """Same measurement and version: the later created_at stays, in whatever time zone it is written."""
    older, newer = record(created_at="2026-01-01T12:00:00+00:00"), record(created_at="2026-01-01T09:00:00-05:00")
    assert _outcome(newer, older) == "replaced"
    assert _outcome(older, newer) == "older"


def test_another_version_is_kept_beside() -> None:
    """The later one stands under the fingerprint, the other under <fingerprint>-mlx<version>."""
    ours, theirs = record(mlx_version="0.31.0"), record(mlx_version="0.32.0", created_at=NEW)
    held = merged([ours], [theirs])
    assert {key: one.mlx_version for key, one in held.items()} == {
        ours.id: "0.32.0",
        f"{ours.id}-mlx0.31.0": "0.31.0",
    }
    assert merged([theirs], [ours]) == held


@given(st.lists(st.tuples(st.text("ab.-", max_size=90).map("x".__add__), st.text("0.+-_/é", max_size=50)), unique=True))
@example([("a", "0.30.0+abc"), ("a", "0.30.0-abc"), ("a", "0.30.0_abc")])
@example([("a" * 100, "0.30"), ("a" * 101, "0.30"), ("a", "1" * 50), ("a", "1" * 51)])
def test_no_two_versions_share_an_id(pairs: list[tuple[str, str]]) -> None:
    """What an id cannot hold makes a difference; every one can be a record's id."""
    pairs = [(stem, version) for stem, version in pairs if "-mlx" not in stem]
    ids = [version_id(stem, version) for stem, version in pairs]
    assert len(set(ids)) == len(ids)
    assert all(map(is_id, ids))


def test_ids_of_plain_versions_are_plain() -> None:
    """As they are in directories that were written before."""
    assert version_id("0123456789abcdef", "0.32.4") == "0123456789abcdef-mlx0.32.4"
    assert version_id("own", "0.32.0.dev20260101") == "own-mlx0.32.0.dev20260101"


def test_a_build_does_not_erase_another(directory: Path) -> None:
    """0.30.0+abc and 0.30.0-abc, each superseded in turn: three versions, three records."""
    db = BenchmarkDatabase(directory)
    for version in ("0.30.0+abc", "0.30.0-abc", "0.31.0"):
        db.add("fp16", "m/x-1B", context_length=1, mlx_version=version)
    assert {one.mlx_version for one in db.records.values()} == {"0.30.0+abc", "0.30.0-abc", "0.31.0"}


def test_records_that_share_only_an_id_both_stay() -> None:
    """Ids given by hand clash; the newcomer goes under its fingerprint."""
    ours, theirs = record("run1"), record("run1", method="affine4-g64")
    held = merged([ours], [theirs])
    own = benchmark_fingerprint("affine4-g64", "m/x-1B", 4096, 1)
    assert held == {"run1": ours, own: replace(theirs, id=own)}


def test_two_records_of_one_moment_that_differ_both_stay() -> None:
    """Neither is the later one, so neither gives way; and either order ends alike."""
    one, other = record(throughput_tok_s=1.0), record(throughput_tok_s=2.0)
    held = merged([one], [other])
    assert sorted(found.throughput_tok_s for found in held.values()) == [1.0, 2.0]
    assert merged([other], [one]) == held


def test_unknown_keys_and_pins_survive() -> None:
    """Keys we do not know come along; a pin of ours stays on what takes the place, theirs is no difference."""
    theirs = BenchmarkRecord.from_dict(record(created_at=NEW).to_dict() | {"later": {"a": 1}})
    ours = record(tags=["pinned"])
    (held,) = merged([ours], [theirs]).values()
    assert held.to_dict() == theirs.to_dict() | {"tags": ["pinned"]}
    assert _outcome(replace(ours, tags=[]), ours) == "same"


def test_a_merge_is_on_the_disk_and_told(directory: Path, tmp_path: Path) -> None:
    """Counts, the report of each record, the index, and a dry run that foretells it all and writes nothing."""
    other = BenchmarkDatabase(tmp_path / "other")
    for n in range(450):
        other.upsert(record(context_length=1 + n))
    db = BenchmarkDatabase(directory)
    db.upsert(record(context_length=1, created_at=NEW))
    before = sorted(path.name for path in (directory / "records").iterdir())
    foretold = db.merge(other.records.values(), dry_run=True)
    assert sorted(path.name for path in (directory / "records").iterdir()) == before
    steps: list[tuple[int, int]] = []
    merged = db.merge(other.records.values(), on_step=lambda *step: steps.append(step))
    assert merged == foretold
    assert merged.counts == {"added": 449, "older": 1}
    assert [record_id for record_id, _ in merged.outcomes] == list(other.records)
    assert steps[-449:] == [(n, 449) for n in range(1, 450)]
    assert len(BenchmarkDatabase(directory).records) == 450
    assert db.merge(other.records.values()).counts == {"same": 449, "older": 1}
