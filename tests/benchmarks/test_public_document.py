"""Names, signatures, fields and properties of the public tool's documented store: programs written for it run here.

The signatures are those of its documentation of `benchmarks.benchmark_db`, as its pages print them; a bare `*` stands
where the document lists what is given by name.
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import pytest

import veloxquant
from veloxquant.benchmarks import benchmark_db
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkMatchQuery, BenchmarkRecord
from veloxquant.profiles import WorkloadProfile

DOCUMENTED = {
    "BenchmarkRecord": (
        "(id, method, model_id, architecture='unknown', context_length=4096, batch_size=1, memory_bytes=0, "
        "memory_reduction=None, throughput_tok_s=0.0, latency_ms_per_token=0.0, perplexity_delta=None, "
        "chip='unknown', mlx_version='unknown', macos_version='unknown', workload=<factory>, created_at=<factory>, "
        "source='manual', tags=<factory>)"
    ),
    "BenchmarkRecord.from_dict": "(data)",
    "BenchmarkRecord.to_dict": "(self)",
    "BenchmarkRecord.match_score": "(self, other)",
    "BenchmarkDatabase": "(storage_dir=None)",
    "BenchmarkDatabase.load": "(self)",
    "BenchmarkDatabase.save": "(self)",
    "BenchmarkDatabase.find": "(self, record_id)",
    "BenchmarkDatabase.find_best_match": ("(self, model, workload, methods=None, *, threshold=0.6, hardware=None)"),
    "BenchmarkDatabase.upsert": "(self, record)",
    "BenchmarkDatabase.add": (
        "(self, method, model_id, *, context_length, batch_size=1, memory_bytes=0, memory_reduction=None, "
        "throughput_tok_s=0.0, latency_ms_per_token=0.0, perplexity_delta=None, chip='unknown', "
        "mlx_version='unknown', macos_version='unknown', workload=None, source='manual', tags=None, "
        "architecture=None, model=None)"
    ),
    "BenchmarkDatabase.remove": "(self, record_id)",
    "BenchmarkDatabase.clear": "(self)",
    "benchmark_fingerprint": "(method, model_id, context_length, batch_size, chip='unknown')",
    "default_benchmark_dir": "()",
}
OURS = {"BenchmarkDatabase": ("limits",)}
"""What ours takes beyond the document: by name only and with a default, so that documented calls mean what they did."""
TYPES = {
    "id": str,
    "method": str,
    "model_id": str,
    "architecture": str,
    "context_length": int,
    "batch_size": int,
    "memory_bytes": int,
    "memory_reduction": float | None,
    "throughput_tok_s": float,
    "latency_ms_per_token": float,
    "perplexity_delta": float | None,
    "chip": str,
    "mlx_version": str,
    "macos_version": str,
    "workload": WorkloadProfile,
    "created_at": str,
    "source": str,
    "tags": list[str],
}


def _bare(target: Any, added: tuple[str, ...]) -> str:
    """The signature without annotations, as the document prints it, and without what we added."""
    signature = inspect.signature(target)
    given = signature.parameters
    assert all(given[name].kind is given[name].KEYWORD_ONLY for name in added)
    assert all(given[name].default is not inspect.Parameter.empty for name in added)
    bare = [parameter.replace(annotation=parameter.empty) for name, parameter in given.items() if name not in added]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_signatures_are_the_documented_ones(name: str) -> None:
    """Every callable: names, order, defaults, and what is given by name only."""
    target: Any = benchmark_db
    for word in name.split("."):
        target = getattr(target, word)
    assert _bare(target, OURS.get(name, ())) == DOCUMENTED[name]


def test_fields_have_the_documented_types_and_fresh_defaults() -> None:
    """In the documented order; two records never share a list or a stamp of import time."""
    assert get_type_hints(BenchmarkRecord) == TYPES
    assert [field.name for field in fields(BenchmarkRecord)] == list(TYPES)
    made = [field.name for field in fields(BenchmarkRecord) if field.default_factory is not MISSING]
    assert made == ["workload", "created_at", "tags"]
    assert BenchmarkRecord("a", "b", "c").tags is not BenchmarkRecord("a", "b", "c").tags


def test_properties_are_properties() -> None:
    """`records` and `savings_percent` are read without a call."""
    assert isinstance(inspect.getattr_static(BenchmarkDatabase, "records"), property)
    assert isinstance(inspect.getattr_static(BenchmarkRecord, "savings_percent"), property)


def test_return_types_are_the_documented_ones() -> None:
    """What each call gives back."""
    expected = {
        "load": type(None),
        "save": type(None),
        "find": BenchmarkRecord | None,
        "find_best_match": dict[str, BenchmarkRecord],
        "upsert": BenchmarkRecord,
        "add": BenchmarkRecord,
        "remove": bool,
        "clear": type(None),
    }
    for name, kind in expected.items():
        assert get_type_hints(getattr(BenchmarkDatabase, name))["return"] == kind
    assert get_type_hints(BenchmarkRecord.match_score)["other"] == BenchmarkRecord | BenchmarkMatchQuery
    assert get_type_hints(BenchmarkRecord.match_score)["return"] is float


def test_a_query_is_scored_like_a_record() -> None:
    """The same context, batch, chip and version score 1.0; what a query leaves out costs nothing."""
    record = BenchmarkRecord("a", "fp16", "m/x", context_length=8192, chip="Apple M4", mlx_version="0.32.4")
    query = BenchmarkMatchQuery("fp16", "m/x", context_length=8192, batch_size=1, chip="M4", mlx_version="0.32.4")
    assert record.match_score(query) == 1.0
    assert record.match_score(BenchmarkMatchQuery("fp16", "m/x", chip="M4", mlx_version="0.32.4")) == 1.0
    assert record.match_score(BenchmarkMatchQuery("fp16", "m/x", context_length=16384, chip="M4")) < 1.0


def test_the_names_can_be_imported_from_one_place() -> None:
    """All of them from `benchmark_db`, the two classes from the package as well."""
    assert set(benchmark_db.__all__) == {name for name in DOCUMENTED if "." not in name} | {"BenchmarkMatchQuery"}
    assert veloxquant.BenchmarkDatabase is BenchmarkDatabase
    assert veloxquant.BenchmarkRecord is BenchmarkRecord
