"""The JSON schema that ships, judged by a reader of schemas that is not ours."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from veloxquant.benchmarks import record_schema, validation
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.errors import RecordInvalid
from veloxquant.profiles import OBJECTIVES, WorkloadProfile
from veloxquant.profiles.workload import MAX_CONTEXT_TOKENS, MAX_PREFILL_STEP, MAX_ROWS

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = record_schema.shipped()
JUDGE = Draft202012Validator(SCHEMA)
WORKLOAD = SCHEMA["properties"]["workload"]["properties"]
LARGEST = 1.7976931348623157e308


def as_json(value: Any) -> Any:
    """What a reader of the file gets."""
    return json.loads(json.dumps(value, allow_nan=False))


def test_the_schema_is_one() -> None:
    """By the metaschema that it names."""
    assert SCHEMA["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    Draft202012Validator.check_schema(SCHEMA)


def test_every_field_has_a_rule() -> None:
    """In the order of the fields, with the defaults of the classes."""
    plain = BenchmarkRecord("a", "b", "c").to_dict()
    assert list(SCHEMA["properties"]) == [*plain, "schema"]
    defaults = {key: rule["default"] for key, rule in SCHEMA["properties"].items() if "default" in rule}
    assert defaults.items() <= plain.items()
    assert list(WORKLOAD) == list(WorkloadProfile.__struct_fields__)
    assert WorkloadProfile(**{key: rule["default"] for key, rule in WORKLOAD.items()}) == WorkloadProfile()


@pytest.mark.parametrize(
    ("schema", "is_read"),
    [
        ("veloxquant.record/1", True),
        ("veloxquant.record/2", False),
        ("veloxquant.record/10", False),
        ("veloxquant.record/1\n", False),
        ("another program's", True),
        (7, True),
    ],
)
def test_r24_a_later_schema_of_ours_is_not_read(schema: object, is_read: bool) -> None:
    """By either reader: its fields may mean something else. What others write under that name is kept like any key."""
    data = BenchmarkRecord("a", "b", "c").to_dict() | {"schema": schema}
    assert JUDGE.is_valid(as_json(data)) == is_read
    if is_read:
        assert BenchmarkRecord.from_dict(data).to_dict()["schema"] == schema
    else:
        with pytest.raises(RecordInvalid) as caught:
            BenchmarkRecord.from_dict(data)
        assert caught.value.field == "schema"


AMOUNTS = st.floats(0, LARGEST) | st.integers(0, 10**30)
COUNTS = st.integers(1, MAX_ROWS)
WORDS = st.text("ab \n/é", min_size=1).filter(str.strip)
LIMITS = st.none() | st.floats(0, LARGEST, exclude_min=True)
LENGTHS = st.integers(1, MAX_CONTEXT_TOKENS)
RECORDS = st.builds(
    BenchmarkRecord,
    id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", fullmatch=True),
    method=WORDS,
    model_id=WORDS,
    architecture=st.text(max_size=5),
    context_length=LENGTHS,
    batch_size=COUNTS,
    memory_bytes=st.integers(0, validation.MAX_BYTES),
    memory_reduction=st.none() | st.floats(0, 4, exclude_min=True),
    throughput_tok_s=AMOUNTS,
    latency_ms_per_token=AMOUNTS,
    perplexity_delta=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    chip=st.text(max_size=5),
    workload=st.builds(
        WorkloadProfile,
        context_length=LENGTHS,
        generation_length=st.integers(0, MAX_CONTEXT_TOKENS),
        batch_size=COUNTS,
        num_concurrent_requests=COUNTS,
        objective=st.sampled_from(OBJECTIVES),
        max_latency_ms=LIMITS,
        max_kl=LIMITS,
        allow_eviction=st.booleans(),
        prefill_step_size=st.integers(1, MAX_PREFILL_STEP),
    ),
    tags=st.lists(st.text(max_size=3), max_size=3),
)


@given(RECORDS)
def test_every_record_that_is_written_validates(record: BenchmarkRecord) -> None:
    """What the rules let through, the schema lets through, and it comes back equal."""
    data = as_json(record.to_dict())
    JUDGE.validate(data)
    assert BenchmarkRecord.from_dict(data) == record


def test_files_on_the_disk_validate(db: BenchmarkDatabase, recorded: Path) -> None:
    """Ours, and those that the public tool wrote."""
    db.load()
    db.add("affine4-g64", "m/x", context_length=4096, tags=["a"])
    files = list((recorded / "records").glob("*.json"))
    assert len(files) == len(db.records)
    for path in files:
        JUDGE.validate(json.loads(path.read_text()))


EDGES = sorted(
    {
        edge + step
        for edge in (0, 1, 4, MAX_ROWS, MAX_PREFILL_STEP, MAX_CONTEXT_TOKENS, validation.MAX_BYTES, 10**400)
        for step in (-1, 0, 1)
    }
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(EDGES),
    st.sampled_from([float(edge) for edge in EDGES if edge < 10**300]),
    st.sampled_from((-0.0, 0.5, 4.000001, 5e-324, LARGEST, -LARGEST, 1 / 3)),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(),
    st.sampled_from(("", " ", "\n", "a\n", "a\0b", "\0", "../x", ".x", "a" * 128, "a" * 129, "é", "\u2028", "\x1f")),
    st.sampled_from(OBJECTIVES),
    st.text(max_size=4),
    st.lists(st.none() | st.text(max_size=2) | st.integers(0, 1), max_size=2),
    st.just({}),
)
PLACES = st.sampled_from([(name,) for name in SCHEMA["properties"]] + [("workload", name) for name in WORKLOAD])


def put(data: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    """Set a field of the record or of its workload."""
    for name in place[:-1]:
        data = data[name]
    data[place[-1]] = value


@given(RECORDS, PLACES, VALUES)
@example(BenchmarkRecord("a", "b", "c"), ("id",), "a\n")
@example(BenchmarkRecord("a", "b", "c"), ("context_length",), 4096.0)
@example(BenchmarkRecord("a", "b", "c"), ("workload", "batch_size"), 2.0)
@example(BenchmarkRecord("a", "b", "c"), ("workload", "max_kl"), 0)
@example(BenchmarkRecord("a", "b", "c"), ("workload", "max_kl"), 10**400)
@example(BenchmarkRecord("a", "b", "c"), ("workload", "context_length"), MAX_CONTEXT_TOKENS + 1)
def test_schema_and_store_agree_on_every_field(record: BenchmarkRecord, place: tuple[str, ...], value: Any) -> None:
    """One field at a time, whatever it holds: both accept, or both refuse and name that field."""
    data = as_json(record.to_dict())
    put(data, place, as_json(value))
    problem = best_match(JUDGE.iter_errors(data))
    if problem is None:
        BenchmarkRecord.from_dict(data)
        return
    assert problem.absolute_path[0] == place[0]
    with pytest.raises(RecordInvalid) as caught:
        BenchmarkRecord.from_dict(data)
    assert (caught.value.field or "").split(".")[0] == place[0]


@given(RECORDS, st.dictionaries(PLACES, VALUES, max_size=4), st.sets(PLACES, max_size=3), st.booleans())
def test_schema_and_store_agree_on_the_whole(
    record: BenchmarkRecord, changed: dict[tuple[str, ...], Any], left_out: set[tuple[str, ...]], extra: bool
) -> None:
    """Several fields changed, left out or unknown: the same verdict from both, in both directions."""
    data = as_json(record.to_dict() | ({"later": list(changed.values())} if extra else {}))
    for place in sorted(changed, key=len, reverse=True):
        put(data, place, as_json(changed[place]))
    for place in sorted(left_out, key=len, reverse=True):
        holder = data if len(place) == 1 else data.get("workload")
        if isinstance(holder, dict):
            holder.pop(place[-1], None)
    try:
        BenchmarkRecord.from_dict(data)
    except RecordInvalid:
        assert not JUDGE.is_valid(data)
    else:
        assert JUDGE.is_valid(data)


@pytest.mark.parametrize("data", [None, [], "a", 3, {}, {"id": "a"}, {"id": "a", "method": "b"}])
def test_what_is_no_record_at_all(data: Any) -> None:
    """Another kind of value, or one without what every record has."""
    assert not JUDGE.is_valid(data)
    with pytest.raises(RecordInvalid):
        BenchmarkRecord.from_dict(data)


def test_a_whole_number_may_be_written_with_a_point(db: BenchmarkDatabase, recorded: Path) -> None:
    """4096.0 is 4096 in JSON, and some languages write no other; a file that says so is read, and is not an edit."""
    data = BenchmarkRecord("floats", "b", "c").to_dict() | {"context_length": 2048.0, "memory_bytes": 1e6}
    data["workload"] |= {"batch_size": 2.0}
    path = recorded / "records" / "floats.json"
    path.write_text(json.dumps(data))
    db.load()
    found = db.find("floats")
    assert found is not None
    assert (repr(found.context_length), repr(found.memory_bytes), repr(found.workload.batch_size)) == (
        "2048",
        "1000000",
        "2",
    )
    db.save()
    assert json.loads(path.read_text())["context_length"] == 2048.0
    assert path.read_text() == json.dumps(data)
