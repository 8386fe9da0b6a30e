"""What is said of a record that no measurement can be: the field, its value, what it should be, what helps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.benchmarks.adding import add
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.merging import version_id
from veloxquant.benchmarks.record_text import decode, encode
from veloxquant.benchmarks.validation import is_id
from veloxquant.errors import RecordInvalid

if TYPE_CHECKING:
    from collections.abc import Callable

NOT_MEASURED = "leave it 0 when it was not measured"
FINITE = "a finite number of at least 0"
HUGE = 10**400
"""No float is as large."""
FIELDS = [
    ("id", "a/b", "a file name of letters, digits and . _ -", "use benchmark_fingerprint()"),
    ("method", 7, "text", "give method as a string"),
    ("method", " ", "a name", "say what the method was"),
    ("model_id", "a\0b", "a name", "say what the model_id was"),
    ("chip", None, "text", "give chip as a string"),
    ("created_at", 7, "text", "give created_at as a string"),
    ("context_length", 0, "a whole number from 1 to 134217728", "give the context_length of the run"),
    ("context_length", 4096.0, "a whole number from 1 to 134217728", "give the context_length of the run"),
    ("batch_size", True, "a whole number from 1 to 65536", "give the batch_size of the run"),
    ("memory_bytes", -1, "a whole number from 0 to 9223372036854775807", NOT_MEASURED),
    ("memory_bytes", 2**63, "a whole number from 0 to 9223372036854775807", NOT_MEASURED),
    ("throughput_tok_s", -0.5, FINITE, NOT_MEASURED),
    ("throughput_tok_s", math.nan, FINITE, NOT_MEASURED),
    ("latency_ms_per_token", math.inf, FINITE, NOT_MEASURED),
    ("latency_ms_per_token", HUGE, FINITE, NOT_MEASURED),
    ("latency_ms_per_token", False, FINITE, NOT_MEASURED),
    ("memory_reduction", 0.0, "above 0 and at most 4", "leave it None when not measured"),
    ("memory_reduction", 4.5, "above 0 and at most 4", "leave it None when not measured"),
    ("memory_reduction", math.nan, "above 0 and at most 4", "leave it None when not measured"),
    ("perplexity_delta", -math.inf, "a finite number", "leave it None when it was not measured"),
    ("workload", {}, "a WorkloadProfile", "build one with the run's lengths"),
    ("tags", ("a",), "a list of words", "give a list, empty for none"),
    ("tags", [7], "text", "give tags as a string"),
]


def said(attempt: Callable[[], object]) -> tuple[str, str, str | None]:
    """Message, hint and field of the refusal that this ends in."""
    with pytest.raises(RecordInvalid) as caught:
        attempt()
    return caught.value.message, caught.value.hint, caught.value.field


@pytest.mark.parametrize(("field", "value", "wanted", "hint"), FIELDS)
def test_a_field_that_no_measurement_has(field: str, value: Any, wanted: str, hint: str, db: BenchmarkDatabase) -> None:
    """A value that is too long is cut, others are as Python writes them; nothing is stored."""
    one = BenchmarkRecord(**({"id": "a", "method": "fp16", "model_id": "m/x"} | {field: value}))
    message, *rest = said(lambda: db.upsert(one))
    of_tags = value[0] if value == [7] else value
    written = message.removeprefix(f"{field} is ").removesuffix(f", which is not {wanted}")
    assert written == repr(of_tags) if value is not HUGE else len(written) < 100
    assert rest == [hint, field]
    assert db.records == {}


BOUNDS = {
    "context_length": (1, 2**27),
    "batch_size": (1, 2**16),
    "memory_bytes": (0, 2**63 - 1),
    "throughput_tok_s": (0.0, 1.7976931348623157e308),
    "latency_ms_per_token": (0, 5e-324),
    "memory_reduction": (5e-324, 4.0),
    "perplexity_delta": (-1e308, 1e308),
}


@pytest.mark.parametrize("field", BOUNDS)
def test_the_least_and_the_most_that_is_stored(field: str, db: BenchmarkDatabase) -> None:
    """Bounds are within."""
    for value in BOUNDS[field]:
        stored = db.upsert(BenchmarkRecord(**({"id": "a", "method": "fp16", "model_id": "m/x"} | {field: value})))
        assert getattr(stored, field) == value
    assert getattr(BenchmarkDatabase(db.storage_dir).records["a"], field) == value


def test_what_cannot_be_written() -> None:
    """Too large by its longest field, or no JSON at all."""
    large = BenchmarkRecord("a", "fp16", "m/x", chip="c" * 40_000, source="s" * 50_000)
    size = len(encode(BenchmarkRecord("a", "fp16", "m/x", chip="", source=""))) + 90_000
    assert said(lambda: encode(large)) == (
        f"source is {size}, which is not a record of at most 65536 bytes",
        "shorten source",
        "source",
    )
    odd = BenchmarkRecord("a", "fp16", "m/x", throughput_tok_s=math.nan)
    message, hint, field = said(lambda: encode(odd))
    assert message == "record is 'a', which is not made of finite numbers and text in UTF-8"
    assert (hint.startswith("Out of range float values"), field) == (True, "record")


def test_what_cannot_be_read() -> None:
    """No JSON, or numbers that JSON has not; where a field is to blame, it is named."""
    message, hint, field = said(lambda: decode(b"{"))
    assert (message.startswith("it is not JSON: "), hint, field) == (True, "write it again, or delete it", None)
    plain = encode(BenchmarkRecord("a", "fp16", "m/x"))
    beside = plain.replace(b'"id": "a"', b'"id": "a", "beside": NaN')
    message, hint, field = said(lambda: decode(beside))
    assert (message.startswith("it is not strict JSON: "), field) == (True, None)
    assert hint == "write NaN and infinities as null"
    assert said(lambda: decode(plain.replace(b'"throughput_tok_s": 0.0', b'"throughput_tok_s": NaN'))) == (
        f"throughput_tok_s is nan, which is not {FINITE}",
        NOT_MEASURED,
        "throughput_tok_s",
    )


def test_what_has_no_id_left(db: BenchmarkDatabase) -> None:
    """A model that is none, a record that is none, an id whose every file is damaged, every name apart taken."""
    wrong: Any = object()
    message, *rest = said(lambda: db.add("fp16", "m/x", context_length=1, model=wrong))
    assert message == f"model is {wrong!r}, which is not a ModelProfile"
    assert rest == ["leave it out, or give a traced profile", "model"]
    message, *rest = said(lambda: db.upsert(wrong))
    assert message == f"record is {wrong!r}, which is not a BenchmarkRecord"
    assert rest == ["build one, or use add()", "record"]
    front, other = BenchmarkRecord("a", "fp16", "m/x", mlx_version="1"), BenchmarkRecord("a", "fp16", "m/x")
    taken = BenchmarkRecord("x", "fp16", "m/other")
    message, *rest = said(lambda: add(other, lambda key: front if key == "a" else taken))
    assert message.startswith("id is 'a-mlx")
    assert message.endswith("', which is not free")
    assert rest == ["remove what is stored under this id", "id"]


def test_an_id_whose_files_are_all_damaged(db: BenchmarkDatabase) -> None:
    """There are a thousand names for it, and none is written over."""
    db.save()
    for name in ("a", *(f"a.{n}" for n in range(2, 1000))):
        (db.records_dir / f"{name}.json").write_text("{")
    assert said(lambda: db.upsert(BenchmarkRecord("a", "fp16", "m/x"))) == (
        "id is 'a', which is not free",
        "move the damaged files of this id elsewhere",
        "id",
    )
    (db.records_dir / "a.999.json").unlink()
    db.upsert(BenchmarkRecord("a", "fp16", "m/x"))
    assert b'"method": "fp16"' in (db.records_dir / "a.999.json").read_bytes()


def test_an_id_can_be_made_of_any_version() -> None:
    """Half a letter, as a damaged file may hold, included."""
    assert is_id(version_id("a", "\ud800"))
    assert version_id("a", "\ud800") != version_id("a", "\ud801")


def test_what_an_add_does_not_say(db: BenchmarkDatabase) -> None:
    """Is unknown, nothing, or measured by hand."""
    one = db.add("fp16", "m/x", context_length=7)
    assert (one.source, one.tags, one.architecture) == ("manual", [], "unknown")
    assert (one.chip, one.mlx_version, one.macos_version) == ("unknown", "unknown", "unknown")
    assert (one.batch_size, one.memory_bytes, one.throughput_tok_s, one.latency_ms_per_token) == (1, 0, 0.0, 0.0)
    assert (one.memory_reduction, one.perplexity_delta) == (None, None)
    assert (one.workload.context_length, one.workload.batch_size) == (7, 1)
