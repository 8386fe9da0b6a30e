"""Records arranged for matching: the answers are those of looking at every record, and few are looked at."""

from __future__ import annotations

import math
import threading
from collections import Counter
from dataclasses import replace
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks import nearest, record_groups, sorted_run
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkMatchQuery, BenchmarkRecord
from veloxquant.benchmarks.eviction import recorded_at
from veloxquant.benchmarks.record_groups import RecordGroups
from veloxquant.profiles import CacheLayer, CachePart, ModelProfile, WorkloadProfile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL = ModelProfile(model_id="org/Thing-8B", architecture="llama")
METHODS = ("a", "b", "c")


def record(record_id: str, **fields: Any) -> BenchmarkRecord:
    """A measurement of MODEL."""
    given = {"method": "a", "model_id": "org/Thing-8B", "architecture": "llama", "chip": "M4", "mlx_version": "0.32.4"}
    return BenchmarkRecord(id=record_id, **(given | fields))


RECORDS = st.builds(
    record,
    st.integers(0, 30).map(str),
    method=st.sampled_from(METHODS),
    model_id=st.sampled_from(("org/Thing-8B", "ORG/thing-8b", "org/Other-8B", "org/Other-70B", "local/mine")),
    context_length=st.sampled_from((1, 512, 1024, 1025, 2048, 4096, 2**20)),
    batch_size=st.sampled_from((1, 2, 8)),
    chip=st.sampled_from(("M4", "Apple M4", "M3", "M4 Max", "M4-Max", "unknown", "EPYC", "any", "Any")),
    mlx_version=st.sampled_from(
        ("0.32.4", "0.31.0", "v0.32.4", "0.32.9.dev1", "0.32.20", "1.0", "main", "any", "unknown")
    ),
    created_at=st.sampled_from(("2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00", "2026-01-01T23:00:00-03:00")),
    tags=st.sampled_from(([], ["parameters:8030261248"], ["parameters:70000000000"])),
)
QUERIES = st.builds(
    BenchmarkMatchQuery,
    st.just(""),
    st.just(MODEL.model_id),
    context_length=st.sampled_from((1, 700, 1024, 3000, 2**21)),
    batch_size=st.sampled_from((1, 3)),
    chip=st.sampled_from(("any", "M4", "M3", "unknown", "epyc")),
    mlx_version=st.sampled_from(("any", "0.32.4", "0.32.18", "0.30.1", "main", "unknown")),
)
ASKED = st.sampled_from(
    (
        MODEL,
        ModelProfile(model_id="local/mine", architecture="llama", num_parameters=8 * 10**9),
        ModelProfile(model_id="x/y"),
    )
)


@given(
    st.lists(RECORDS, max_size=40, unique_by=lambda one: one.id), QUERIES, ASKED, st.sampled_from((0.0, 0.3, 0.6, 1.0))
)
def test_the_best_is_the_first_of_all(
    records: list[BenchmarkRecord], query: BenchmarkMatchQuery, model: ModelProfile, threshold: float
) -> None:
    """Found without scoring all, for one label and for every label; and all are those that reach the threshold."""
    groups = RecordGroups(records)
    every = {label: groups.matches(label, model, query, threshold) for label in METHODS}
    first = {label: found[0][1] for label, found in every.items() if found}
    assert groups.best(model, query, threshold, None) == first
    for label in METHODS:
        assert groups.best(model, query, threshold, [label]) == {k: v for k, v in first.items() if k == label}
        found = every[label]
        assert found == sorted(found, key=lambda one: (-one[0], -recorded_at(one[1]), one[1].id))
        own = [one for one in records if one.method == label and one.model_id.lower() == model.model_id.lower()]
        plain = [one for one in own if not one.tags or "8B" in one.model_id or "8b" in one.model_id]
        reaching = {one.id for one in plain if one.match_score(query) >= threshold}
        assert reaching <= {one.id for _, one in found}


@given(st.lists(st.tuples(RECORDS, st.booleans())))
def test_groups_kept_up_to_date_equal_groups_made_new(steps: list[tuple[BenchmarkRecord, bool]]) -> None:
    """One change after another or all at once: the same records in the same order; and what was frozen stays."""
    groups, now = RecordGroups(), dict[str, BenchmarkRecord]()
    frozen, then = groups.frozen(), dict(now)
    for number, (new, stays) in enumerate(steps):
        groups.change(now.pop(new.id, None), new if stays else None)
        if stays:
            now[new.id] = new
        if number == len(steps) // 2:
            frozen, then = groups.frozen(), dict(now)
    assert flat(groups) == flat(RecordGroups(now.values()))
    assert flat(frozen) == flat(RecordGroups(then.values()))
    for held, records in ((groups, now), (frozen, then)):
        assert held.labels == Counter(record.method for record in records.values())


def flat(groups: RecordGroups) -> dict[Any, list[BenchmarkRecord]]:
    """The records of every run."""
    return {
        (key, size, like, chip, version, sequences, label, machine.labels[label]): [entry[3] for entry in chain(*run)]
        for key, sizes in groups.table.items()
        for size, likenesses in chain(*sizes)
        for like, machines in likenesses.items()
        for chip, machine in machines.items()
        for version, by_sequences in chain(*machine.versions)
        for sequences, runs in chain(*by_sequences)
        for label, run in runs.items()
    }


ENTRIES = st.tuples(st.integers(0, 9), st.integers(0, 9), st.uuids().map(str))


@given(st.lists(ENTRIES, unique=True), st.data())
def test_a_run_is_a_sorted_sequence(entries: list[sorted_run.Entry], data: st.DataObject) -> None:
    """Put and taken one by one, in parts of any size: what a sorted list holds, and where it is looked up."""
    run, rest = sorted_run.made([]), list[sorted_run.Entry]()
    for entry in entries:
        run, rest = sorted_run.put(run, entry), sorted([*rest, entry])
        if len(rest) > 3 and data.draw(st.booleans()):
            gone = rest.pop(data.draw(st.integers(0, len(rest) - 1)))
            run = sorted_run.take(run, gone)
            assert sorted_run.take(run, gone) is run
    assert [entry for chunk in run for entry in chunk] == rest
    assert list(sorted_run.upwards(sorted_run.made(rest), (-1,))) == rest
    for bound in range(11):
        assert list(sorted_run.upwards(run, (bound,))) == [entry for entry in rest if entry[0] >= bound]
        assert sorted_run.last_below(run, (bound,)) == max((e for e in rest if e[0] < bound), default=None)


def test_a_change_copies_a_part_only() -> None:
    """Of 50,000 entries in order, all but some hundreds are in parts that the old run and the new one share."""
    run = sorted_run.made([(n, 0, "x") for n in range(50_000)])
    grown = sorted_run.put(run, (25_000, 1, "x"))
    shared = {id(chunk) for chunk in run}
    assert sum(len(chunk) for chunk in grown if id(chunk) not in shared) <= 2 * sorted_run.CHUNK
    for n in range(5 * sorted_run.CHUNK):
        grown = sorted_run.put(grown, (25_000, 2 + n, "x"))
    assert max(map(len, grown)) < 2 * sorted_run.CHUNK


def test_a_match_looks_at_few_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10,000 records of 50 methods near the model, one or two a method; nothing of methods that have none near."""
    looked: list[str] = []

    def count(one: BenchmarkRecord, _model: ModelProfile) -> bool:
        looked.append(one.id)
        return False

    monkeypatch.setattr(record_groups, "is_namesake", count)
    shape = product(range(50), range(0, 8192, 82), ("M4", "M3"))
    many = [record(f"{m}-{c}-{chip}", method=f"m{m}", context_length=4096 + c, chip=chip) for m, c, chip in shape]
    far = [record(f"far{n}", method=f"far{n}", model_id="org/Else-1B", architecture="phi3") for n in range(1000)]
    groups = RecordGroups(many + far)
    asked = BenchmarkMatchQuery("", MODEL.model_id, context_length=8000, batch_size=1, chip="M4", mlx_version="0.32.4")
    assert len(groups.best(MODEL, asked, 0.6, None)) == 50
    assert len(looked) <= 100
    looked.clear()
    assert groups.best(MODEL, asked, 0.6, ["m7"]).keys() == {"m7"}
    assert len(looked) <= 2


class Looks:
    """How often a run is opened or a factor computed, and which records are asked whether they are of the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.asked: list[str] = []
        for room, name in ((nearest, "size_factor"), (nearest, "numbers_factor"), (nearest, "chip_factor")):
            monkeypatch.setattr(room, name, self._counting(getattr(room, name)))
        monkeypatch.setattr(nearest._Search, "_open", self._counting(nearest._Search._open))
        for name in ("is_namesake", "has_same_cache"):
            real = getattr(record_groups, name)
            monkeypatch.setattr(record_groups, name, self._asking(real))

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            self.count += 1
            return real(*given)

        return counted

    def _asking(self, real: Callable[..., bool]) -> Callable[..., bool]:
        def asked(one: BenchmarkRecord, model: ModelProfile) -> bool:
            self.asked.append(one.id)
            return real(one, model)

        return asked


MACHINES = [f"M{generation}{tier}" for generation in range(1, 6) for tier in ("", " Pro", " Max", " Ultra")]
ASKED_HERE = BenchmarkMatchQuery("", MODEL.model_id, "llama", 4096, 1, "M4 Max", "0.32.4")
SHAPES: dict[str, Callable[[int], dict[str, Any]]] = {
    "many machines": lambda n: {
        "chip": MACHINES[n % 20],
        "mlx_version": f"0.{30 + n // 20 % 3}.{n // 60 % 5}",
        "batch_size": 2 ** (n // 300 % 4),
    },
    "a version each": lambda n: {"chip": "M4 Max", "mlx_version": f"0.{n % 60}.{n}"},
    "a build each": lambda n: {"chip": "M4 Max", "mlx_version": f"0.32.0.dev{n}"},
    "a version each, without numbers": lambda n: {"chip": "M4 Max", "mlx_version": f"main-g{n:x}"},
    "a batch each": lambda n: {"chip": "M4 Max", "batch_size": 1 + n},
    "a size each": lambda n: {"chip": "M4 Max", "model_id": f"local/{n}", "tags": [f"parameters:{n + 1}000000"]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_machines_versions_and_sizes_that_do_not_count_are_not_looked_at(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12,000 records of 4 methods, all different: some hundreds of steps, and some records a method."""
    records = [
        record(
            f"{n}",
            method=f"m{n % 4}",
            context_length=1024 + 7919 * n % 8191,
            **({"mlx_version": "0.32.4"} | SHAPES[shape](n // 4)),
        )
        for n in range(12_000)
    ]
    groups = RecordGroups(records)
    model = (
        MODEL
        if shape != "a size each"
        else ModelProfile(model_id="local/mine", architecture="llama", num_parameters=15 * 10**8)
    )
    looks = Looks(monkeypatch)
    found = groups.best(model, ASKED_HERE, 0.6, None)
    assert len(found) == 4
    assert looks.count <= 600
    assert len(looks.asked) <= 60
    monkeypatch.undo()
    assert found == {label: groups.matches(label, model, ASKED_HERE, 0.6)[0][1] for label in found}


def test_records_of_another_cache_are_not_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 of the model's size, and 5,000 under its own name, whose bytes a token are a quarter of its own."""
    part = CachePart(
        kind="kv", engine_class="any", heads=8, key_width=128, value_width=128, key_itemsize=2, value_itemsize=2
    )
    layers = tuple(CacheLayer(index=n, engine_class="any", parts=(part,)) for n in range(32))
    model = ModelProfile(model_id=MODEL.model_id, architecture="llama", layers=layers)
    a_token = 32 * 2 * 8 * 128 * 2 // 4

    def measured(n: int, model_id: str, times: int) -> BenchmarkRecord:
        figures = {"memory_reduction": 0.28125, "memory_bytes": int(0.28125 * a_token * (2048 + n) * times)}
        return record(f"{model_id}-{n}", model_id=model_id, context_length=2048 + n, chip="M4 Max", **figures)

    others = [measured(n, model_id, 1) for n in range(5000) for model_id in (MODEL.model_id, "org/Other-8B")]
    looks = Looks(monkeypatch)
    assert RecordGroups(others).best(model, ASKED_HERE, 0.6, None) == {}
    assert looks.asked == []
    right = measured(7000, "org/Other-8B", 4)
    assert RecordGroups([*others, right]).best(model, ASKED_HERE, 0.3, None) == {"a": right}


def test_an_endless_context_scores_nothing() -> None:
    """It is no number, and no ratio of it is."""
    endless = record("a", context_length=math.inf)
    assert endless.match_score(replace(ASKED_HERE, context_length=math.inf)) == 0.0  # type: ignore[arg-type]


def test_ten_thousand_measurements_of_one_thing_are_not_all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same context, machine and moment: the first in order of id answers."""
    looked: list[str] = []
    monkeypatch.setattr(record_groups, "is_namesake", lambda one, _model: bool(looked.append(one.id)))  # type: ignore[func-returns-value]
    groups = RecordGroups([record(f"{n:05}", created_at="2026-01-01T00:00:00+00:00") for n in range(10_000)])
    asked = BenchmarkMatchQuery("", MODEL.model_id, context_length=8192, chip="any", mlx_version="any")
    assert groups.best(MODEL, asked, 0.6, None)["a"].id == "00000"
    assert looked == ["00000"]


def test_a_match_waits_for_no_lock(directory: Path) -> None:
    """While another thread keeps the lock, as one that reads files or writes does, a match answers."""
    db = BenchmarkDatabase(directory)
    added = db.add("a", MODEL.model_id, context_length=1024)
    found: list[dict[str, BenchmarkRecord]] = []
    asking = threading.Thread(
        target=lambda: found.append(db.find_best_match(MODEL, WorkloadProfile(context_length=1024)))
    )
    with db._store.lock.threads():
        asking.start()
        asking.join(20)
        assert found == [{"a": added}]


def test_groups_are_there_when_the_database_is_open(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first match builds nothing."""
    BenchmarkDatabase(directory).add("a", MODEL.model_id, context_length=1024)
    db = BenchmarkDatabase(directory)
    monkeypatch.delattr(RecordGroups, "__init__")
    monkeypatch.delattr(RecordGroups, "change")
    assert db.find_best_match(MODEL, WorkloadProfile(context_length=1024)).keys() == {"a"}
