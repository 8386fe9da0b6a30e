"""One record: its fields, its JSON form, and what no record can say."""

from __future__ import annotations

import dataclasses
import json
import math
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.record_text import decode, encode
from veloxquant.errors import RecordInvalid
from veloxquant.profiles import OBJECTIVES, WorkloadProfile

PLAIN = {"id": "a", "method": "fp16", "model_id": "m/x"}
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)
NAME = TEXT.filter(str.strip)
AMOUNT = st.floats(0, 1e12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
WORKLOADS = st.builds(
    WorkloadProfile,
    context_length=st.integers(1, 2**27),
    generation_length=st.integers(0, 2**20),
    batch_size=st.integers(1, 64),
    num_concurrent_requests=st.integers(1, 64),
    objective=st.sampled_from(OBJECTIVES),
    max_latency_ms=st.none() | st.floats(0.001, 1e6),
    max_kl=st.none() | st.floats(0.001, 10),
    allow_eviction=st.booleans(),
)
RECORDS = st.builds(
    BenchmarkRecord,
    id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True),
    method=NAME,
    model_id=NAME,
    architecture=TEXT,
    context_length=st.integers(1, 2**27),
    batch_size=st.integers(1, 2**16),
    memory_bytes=st.integers(0, 2**63 - 1),
    memory_reduction=st.none() | st.floats(0, 4, exclude_min=True),
    throughput_tok_s=AMOUNT,
    latency_ms_per_token=AMOUNT,
    perplexity_delta=st.none() | st.floats(-1e6, 1e6),
    chip=TEXT,
    mlx_version=TEXT,
    macos_version=TEXT,
    workload=WORKLOADS,
    created_at=TEXT,
    source=TEXT,
    tags=st.lists(TEXT, max_size=3),
)


def test_fields_and_defaults_are_the_seeds() -> None:
    """Names, order and defaults of the public document; the stamp is UTC with its offset."""
    record = BenchmarkRecord(**PLAIN)
    names = (
        "id method model_id architecture context_length batch_size memory_bytes memory_reduction throughput_tok_s "
        "latency_ms_per_token perplexity_delta chip mlx_version macos_version workload created_at source tags"
    )
    assert [field.name for field in dataclasses.fields(record)] == names.split()
    assert (record.architecture, record.context_length, record.batch_size, record.memory_bytes) == (
        "unknown",
        4096,
        1,
        0,
    )
    assert record.memory_reduction is None
    assert record.perplexity_delta is None
    assert (record.chip, record.mlx_version, record.macos_version) == ("unknown",) * 3
    assert (record.source, record.tags, record.workload) == ("manual", [], WorkloadProfile())
    assert datetime.fromisoformat(record.created_at).utcoffset() == timedelta(0)
    assert record.created_at.endswith("+00:00")


@given(RECORDS)
def test_a_record_survives_its_json_form(record: BenchmarkRecord) -> None:
    """Everything that may be stored is read back equal, fields in the seed's order."""
    again = decode(encode(record))
    assert again == record
    assert list(record.to_dict()) == [field.name for field in dataclasses.fields(record)]
    assert json.loads(encode(record)) == record.to_dict()


@given(st.dictionaries(TEXT, JSON, max_size=4), st.dictionaries(TEXT, JSON, max_size=4))
def test_unknown_keys_survive(extra: dict[str, Any], extra_workload: dict[str, Any]) -> None:
    """A newer program's fields, in the record and in its workload, are written back as they were."""
    names = [field.name for field in dataclasses.fields(BenchmarkRecord)]
    extra = {key: value for key, value in extra.items() if key not in names}
    extra_workload = {
        key: value for key, value in extra_workload.items() if key not in WorkloadProfile.__struct_fields__
    }
    data = BenchmarkRecord(**PLAIN).to_dict() | extra
    data["workload"] |= extra_workload
    assert BenchmarkRecord.from_dict(data).to_dict() == data
    assert decode(encode(BenchmarkRecord.from_dict(data))).to_dict() == data


def test_the_workload_is_written_with_the_six_known_keys() -> None:
    """Fields that other programs do not know are written only when they say something."""
    record = BenchmarkRecord(**PLAIN)
    six = [
        "context_length",
        "generation_length",
        "batch_size",
        "num_concurrent_requests",
        "objective",
        "max_latency_ms",
    ]
    assert list(record.to_dict()["workload"]) == six
    record.workload = WorkloadProfile(max_kl=0.02)
    assert record.to_dict()["workload"]["max_kl"] == 0.02


@pytest.mark.parametrize(("reduction", "percent"), [(0.19, 81.0), (1.0, 0.0), (None, 0.0), (1.7, 0.0)])
def test_savings_are_percent_of_the_16_bit_cache(reduction: float | None, percent: float) -> None:
    """0.19 of the baseline is 81 % saved; more than the baseline saves nothing."""
    assert BenchmarkRecord(**PLAIN, memory_reduction=reduction).savings_percent == pytest.approx(percent)


BAD = [
    ("id", "../../etc/passwd"),
    ("id", ""),
    ("id", ".hidden"),
    ("id", "x" * 200),
    ("id", 5),
    ("method", ""),
    ("method", "a\0b"),
    ("model_id", None),
    ("model_id", "   "),
    ("model_id", "\ud800"),
    ("architecture", None),
    ("context_length", 0),
    ("context_length", -4096),
    ("context_length", 4096.5),
    ("context_length", True),
    ("context_length", "4096"),
    ("context_length", 10**9),
    ("batch_size", 0),
    ("memory_bytes", -1),
    ("memory_bytes", 10**40),
    ("memory_bytes", 1.5),
    ("memory_reduction", 0),
    ("memory_reduction", 4.1),
    ("memory_reduction", -0.5),
    ("memory_reduction", math.nan),
    ("memory_reduction", "0.5"),
    ("throughput_tok_s", math.nan),
    ("throughput_tok_s", math.inf),
    ("throughput_tok_s", -1.0),
    ("throughput_tok_s", None),
    ("throughput_tok_s", 10**400),
    ("latency_ms_per_token", -math.inf),
    ("latency_ms_per_token", True),
    ("perplexity_delta", math.nan),
    ("perplexity_delta", "low"),
    ("chip", 4),
    ("created_at", 1764500000),
    ("workload", "default"),
    ("workload", {"context_length": -1}),
    ("workload", {"objective": "speed"}),
    ("workload", {"batch_size": [1]}),
    ("workload", {"batch_size": True}),
    ("tags", "fast"),
    ("tags", [1]),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_from_dict_names_the_field_that_is_wrong(field: str, value: object) -> None:
    """What no measurement can be is refused by name, with a way out."""
    with pytest.raises(RecordInvalid) as caught:
        BenchmarkRecord.from_dict(PLAIN | {field: value})
    assert (caught.value.field or "").split(".")[0] == field
    assert field in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("field", "value"), [("context_length", 4096.0)] + [pair for pair in BAD if not isinstance(pair[1], dict)]
)
def test_upsert_refuses_the_same_and_stores_nothing(db: BenchmarkDatabase, field: str, value: Any) -> None:
    """A record edited into nonsense does not reach the disk."""
    record = BenchmarkRecord(**PLAIN)
    setattr(record, field, value)
    with pytest.raises(RecordInvalid) as caught:
        db.upsert(record)
    assert caught.value.field == field
    assert not db.storage_dir.exists()


@pytest.mark.parametrize("missing", ["id", "method", "model_id"])
def test_what_makes_a_record_must_be_there(missing: str) -> None:
    """Everything else has a default."""
    with pytest.raises(RecordInvalid, match=missing):
        BenchmarkRecord.from_dict({key: value for key, value in PLAIN.items() if key != missing})
    assert BenchmarkRecord.from_dict(PLAIN) == BenchmarkRecord.from_dict(PLAIN)


def test_a_truth_value_is_no_number() -> None:
    """A cache of workloads keyed by value would take True for a 1 seen before."""
    BenchmarkRecord.from_dict(PLAIN | {"workload": {"batch_size": 1}})
    with pytest.raises(RecordInvalid):
        BenchmarkRecord.from_dict(PLAIN | {"workload": {"batch_size": True}})


def test_a_record_that_could_not_be_read_back_is_not_written(db: BenchmarkDatabase) -> None:
    """64 KiB is the limit of reading, so it is the limit of writing, and the long field is named."""
    with pytest.raises(RecordInvalid) as caught:
        db.add("fp16", "m/x", context_length=1, tags=["long" * 20_000])
    assert caught.value.field == "tags"
    assert len(db.records) == 0
