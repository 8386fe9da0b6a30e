"""Which records speak for a plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.record_set import RecordSet
from veloxquant.profiles import CacheLayer, CachePart, HardwareProfile, ModelProfile, WorkloadProfile

if TYPE_CHECKING:
    from collections.abc import Callable

    from veloxquant.planner.snapshot import Records

    Fill = Callable[..., list[str]]

M4 = HardwareProfile(chip="Apple M4", mlx_version="0.32.4")
MODEL = ModelProfile(model_id="org/Thing-8B", architecture="llama")
AT_8K = WorkloadProfile(context_length=8192)
# 32 layers of 8 KV heads of width 128 in 16 bit: 131,072 bytes a token, as Llama-3.1-8B.
LAYERS = tuple(
    CacheLayer(
        index=index,
        engine_class="KVCache",
        parts=(
            CachePart(
                kind="kv",
                engine_class="KVCache",
                heads=8,
                key_width=128,
                value_width=128,
                key_itemsize=2,
                value_itemsize=2,
            ),
        ),
    )
    for index in range(32)
)


def record(record_id: str = "r", **fields: Any) -> BenchmarkRecord:
    """A measurement that fits MODEL at 8k on an M4 perfectly, but for the fields given."""
    given = {
        "method": "affine4-g64",
        "model_id": "org/Thing-8B",
        "architecture": "llama",
        "context_length": 8192,
        "chip": "M4",
        "mlx_version": "0.32.4",
        "created_at": "2026-01-01T00:00:00+00:00",
    }
    return BenchmarkRecord(id=record_id, **(given | fields))


def matches(*records: BenchmarkRecord, model: ModelProfile = MODEL, **asked: Any) -> list[tuple[float, str]]:
    """Scores and ids for the affine variant on an M4 at 8k, unless asked otherwise."""
    found = RecordSet(records).matches(
        asked.get("label", "affine4-g64"), model, asked.get("workload", AT_8K), asked.get("hardware", M4)
    )
    return [(score, one.id) for score, one in found]


def test_a_record_set_is_what_the_planner_takes() -> None:
    """By its protocol, checked by the type checker as well."""
    records: Records = RecordSet([record()])
    assert records.matches("affine4-g64", MODEL, AT_8K, M4) == ((1.0, record()),)
    assert len(RecordSet([record()])) == 1


def test_best_first() -> None:
    """By score, then the newest, then by id."""
    newer = "2026-02-01T00:00:00+00:00"
    order = matches(record("far", context_length=16384), record("b"), record("a"), record("new", created_at=newer))
    assert [one for _, one in order] == ["new", "a", "b", "far"]
    # One octave away: 1 / (1 + 1/4).
    assert order[-1][0] == pytest.approx(0.8)


def test_other_variants_and_unrelated_machines_are_left_out() -> None:
    """The label must be equal; M4 and M4 Max are two machines; a context 16 times as long is too far away."""
    assert matches(record(), label="affine8-g64") == []
    assert matches(record(chip="M4 Max")) == []
    assert matches(record(chip="AMD EPYC 7M12")) == []
    assert matches(record(context_length=131072)) == []


def test_sequences_count_not_only_the_batch() -> None:
    """Four slots of one are compared as four sequences, on both sides."""
    four_slots = WorkloadProfile(context_length=8192, num_concurrent_requests=4)
    assert matches(record(), workload=four_slots)[0][0] == pytest.approx(1 / 1.5)
    assert matches(record(batch_size=4), workload=four_slots) == [(1.0, "r")]
    assert matches(record(workload=four_slots), workload=four_slots) == [(1.0, "r")]


def test_at_any_length_the_machine_alone_counts() -> None:
    """A context 16 times as long and eight sequences are as good as any other; another machine or model is not."""

    def found(**fields: Any) -> list[tuple[float, str]]:
        seen = RecordSet([record(**fields)]).at_any_length("affine4-g64", MODEL, M4)
        return [(score, one.id) for score, one in seen]

    assert found(context_length=131072, batch_size=8) == [(1.0, "r")]
    assert found(chip="M4 Max") == []
    assert found(model_id="org/Other-8B", tags=["parameters:8000000000"]) == []
    assert found(method="affine8-g64") == []


def test_two_spellings_of_one_model_id() -> None:
    """Hubs do not tell case apart."""
    assert matches(record(model_id="ORG/thing-8b")) == [(1.0, "r")]


@pytest.mark.parametrize(
    "other",
    [
        {"model_id": "org/Other-70B"},
        {"model_id": "org/Other-1B"},
        {"model_id": "org/Other-7B"},
        {"model_id": "org/Other"},
        {"model_id": "org/Other-8B", "architecture": "qwen2"},
        {"model_id": "org/Other-8B", "architecture": "unknown"},
        {"model_id": "org/Other-8B-4bit"},
    ],
)
def test_another_models_record_must_be_of_the_same_size(other: dict[str, str]) -> None:
    """A 70B record is no evidence for an 8B model, nor one of unknown size, other weights or architecture."""
    assert matches(record(**other)) == []


def test_another_model_of_the_same_kind_stands_in_at_a_cost() -> None:
    """Same architecture, size and weight bits; a record of the model itself sends it home."""
    other = record("other", model_id="them/Fine-Tune-8B")
    assert matches(other) == [(0.75, "other")]
    assert matches(other, record("own", context_length=16384)) == [(pytest.approx(0.8), "own")]


def test_sizes_may_come_from_the_profile_and_a_tag() -> None:
    """Where neither name says one; 10 % is the same size, 14 % (7B and 8B) is not."""
    model = ModelProfile(model_id="local/mine", architecture="llama", num_parameters=8_030_261_248)
    tagged = {size: record(model_id="local/other", tags=[f"parameters:{size}"]) for size in (8 * 10**9, 7 * 10**9)}
    assert matches(tagged[8 * 10**9], model=model) == [(0.75, "r")]
    assert matches(tagged[7 * 10**9], model=model) == []
    assert matches(record(model_id="org/Other-8B"), model=model) == [(0.75, "r")]
    unsized = ModelProfile(model_id="local/mine", architecture="llama")
    assert matches(record(model_id="org/Other-8B"), model=unsized) == []


def test_a_namesake_of_another_size_is_no_evidence() -> None:
    """A model is called what its folder is called: a 70B and a 1B may both be "model", and the tag tells them apart."""
    small = ModelProfile(model_id="model", architecture="llama", num_parameters=1_235_814_400)
    tagged = {size: record(model_id="model", tags=[f"parameters:{size}"]) for size in (1_235_814_400, 70_553_706_496)}
    assert matches(tagged[1_235_814_400], model=small) == [(1.0, "r")]
    assert matches(tagged[70_553_706_496], model=small) == []
    assert matches(record(model_id="model"), model=small) == [(1.0, "r")]


@pytest.mark.parametrize(("bytes_a_token", "stands_in"), [(131_072, True), (524_288, False), (32_768, False)])
def test_a_record_that_tells_another_geometry_does_not_stand_in(bytes_a_token: int, stands_in: bool) -> None:
    """Llama-2 keeps 4 times the bytes a token of Llama-3 at about the same size: the record's figures say so."""
    model = ModelProfile(model_id="org/Thing-8B", architecture="llama", layers=LAYERS)
    held = int(bytes_a_token * 8192 * 0.28125)
    other = record(model_id="org/Other-8B", memory_bytes=held, memory_reduction=0.28125)
    assert bool(matches(other, model=model)) is stands_in


def test_find_best_match_gives_one_record_a_method(db: BenchmarkDatabase) -> None:
    """The best of each method asked for, all methods by default."""
    for method, context in (("a", 4096), ("a", 8192), ("b", 8192), ("c", 1)):
        db.upsert(record(f"{method}{context}", method=method, context_length=context))
    best = db.find_best_match(MODEL, AT_8K, hardware=M4)
    assert {method: one.id for method, one in best.items()} == {"a": "a8192", "b": "b8192"}
    assert list(db.find_best_match(MODEL, AT_8K, ["b", "nothing"], hardware=M4)) == ["b"]
    assert list(db.find_best_match(MODEL, AT_8K, threshold=0.0, hardware=M4)) == ["a", "b", "c"]


def test_hardware_makes_the_chip_count(db: BenchmarkDatabase) -> None:
    """Without it chips and versions are not compared; an unknown chip of this machine is."""
    db.upsert(record(chip="M1 Ultra", mlx_version="0.1"))
    assert list(db.find_best_match(MODEL, AT_8K)) == ["affine4-g64"]
    assert db.find_best_match(MODEL, AT_8K, hardware=M4) == {}
    db.upsert(record())
    loose = db.find_best_match(MODEL, AT_8K, hardware=SimpleNamespace(chip=None), threshold=0.4)
    assert list(loose) == ["affine4-g64"]
    assert db.find_best_match(MODEL, AT_8K, hardware=SimpleNamespace(chip=None)) == {}


def test_a_record_set_is_frozen(db: BenchmarkDatabase, fill: Fill) -> None:
    """What happens to the database afterwards does not show in it."""
    first, second = fill(db, 2)
    model, near = ModelProfile(model_id="m/x-1B"), WorkloadProfile(context_length=1024)
    frozen = db.record_set()
    before = frozen.matches("affine4-g64", model, near, M4)
    assert {one.id for _, one in before} == {first, second}
    db.remove(first)
    fill(db, 5)
    db.clear()
    assert frozen.matches("affine4-g64", model, near, M4) == before
    assert len(frozen) == 2
    assert len(db.record_set()) == 0
