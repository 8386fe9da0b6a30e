"""The JSON schema that ships: equal to the rules in the code, and true of every record that is written."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks import record_schema
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.errors import RecordInvalid
from veloxquant.profiles import WorkloadProfile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
}
# Keywords of JSON Schema 2020-12 that judge one value; each concerns values of its own kind only.
JUDGES: dict[str, Callable[[Any, Any], bool]] = {
    "type": lambda rule, value: any(TYPES[name](value) for name in ([rule] if isinstance(rule, str) else rule)),
    "minimum": lambda rule, value: not TYPES["number"](value) or value >= rule,
    "maximum": lambda rule, value: not TYPES["number"](value) or value <= rule,
    "exclusiveMinimum": lambda rule, value: not TYPES["number"](value) or value > rule,
    "pattern": lambda rule, value: not isinstance(value, str) or re.search(rule, value) is not None,
    "enum": lambda rule, value: value in rule,
    "required": lambda rule, value: not isinstance(value, dict) or set(rule) <= set(value),
    "anyOf": lambda rule, value: any(validates(one, value) for one in rule),
    "items": lambda rule, value: not isinstance(value, list) or all(validates(rule, one) for one in value),
    "properties": lambda rule, value: (
        not isinstance(value, dict) or all(validates(rule[key], value[key]) for key in rule.keys() & value.keys())
    ),
}
WORDS_ONLY = {"$schema", "title", "description", "default"}


def validates(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value is what the schema describes; a keyword that is not known here is an error."""
    return all(JUDGES[keyword](rule, value) for keyword, rule in schema.items() if keyword not in WORDS_ONLY)


def test_what_ships_is_what_the_code_says() -> None:
    """record.schema.json lies in the package and equals the schema made from the rules."""
    assert record_schema.shipped() == record_schema.schema()


def test_every_field_has_a_rule() -> None:
    """In the order of the fields, with the defaults of the class."""
    properties = record_schema.schema()["properties"]
    plain = BenchmarkRecord("a", "b", "c").to_dict()
    assert list(properties) == list(plain)
    assert {key: rule["default"] for key, rule in properties.items() if "default" in rule}.items() <= plain.items()
    assert properties["workload"]["properties"].keys() >= plain["workload"].keys()


AMOUNT = st.floats(0, 1e308)


@given(
    st.builds(
        BenchmarkRecord,
        id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", fullmatch=True),
        method=st.text("ab \n/", min_size=1).filter(str.strip),
        model_id=st.just("m/x"),
        context_length=st.integers(1, 2**27),
        batch_size=st.integers(1, 2**16),
        memory_bytes=st.integers(0, 2**63 - 1),
        memory_reduction=st.none() | st.floats(0, 4, exclude_min=True),
        throughput_tok_s=AMOUNT | st.integers(0, 10**30),
        latency_ms_per_token=AMOUNT,
        perplexity_delta=st.none() | st.floats(allow_nan=False, allow_infinity=False),
        workload=st.builds(
            WorkloadProfile,
            generation_length=st.integers(0, 2**27),
            objective=st.sampled_from(("balanced", "quality")),
            max_latency_ms=st.none() | st.floats(0.1, 1e6),
            allow_eviction=st.booleans(),
        ),
        tags=st.lists(st.text("xyz"), max_size=3),
    )
)
def test_every_record_that_is_written_validates(record: BenchmarkRecord) -> None:
    """What the rules let through, the schema lets through."""
    assert validates(record_schema.shipped(), json.loads(json.dumps(record.to_dict())))


def test_files_on_the_disk_validate(db: BenchmarkDatabase, recorded: Path) -> None:
    """Ours, and those that the public tool wrote."""
    db.load()
    db.add("affine4-g64", "m/x", context_length=4096, tags=["a"])
    files = list((recorded / "records").glob("*.json"))
    assert len(files) == len(db.records)
    assert all(validates(record_schema.shipped(), json.loads(path.read_text())) for path in files)


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "../x"},
        {"id": ""},
        {"method": " "},
        {"model_id": "a\0b"},
        {"context_length": 0},
        {"batch_size": -1},
        {"batch_size": True},
        {"memory_bytes": -1},
        {"memory_reduction": 0},
        {"memory_reduction": 4.5},
        {"throughput_tok_s": -0.5},
        {"throughput_tok_s": "33"},
        {"perplexity_delta": "0"},
        {"tags": "a"},
        {"tags": [1]},
        {"workload": 3},
        {"workload": {"batch_size": 0}},
        {"workload": {"objective": "speed"}},
        {"created_at": None},
    ],
)
def test_what_is_set_aside_does_not_validate(wrong: dict[str, Any]) -> None:
    """The schema refuses what the store refuses."""
    data = BenchmarkRecord("a", "b", "c").to_dict() | wrong
    assert not validates(record_schema.shipped(), data)
    with pytest.raises(RecordInvalid):
        BenchmarkRecord.from_dict(data)
