"""The short way from a file's bytes to a record, which nearly every file can take.

A file with our fields only, each of its type and in range, is decoded and checked in one step. Whatever is out of the
ordinary (further keys, a slip, another type) is left to `BenchmarkRecord.from_dict`, which keeps it or says what is
wrong. Both ways give equal records.
"""

from __future__ import annotations

from functools import lru_cache
from sys import intern
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Raw

from veloxquant.benchmarks import validation
from veloxquant.benchmarks.fingerprint import UNKNOWN
from veloxquant.benchmarks.records import UNDATED, BenchmarkRecord, read_workload
from veloxquant.benchmarks.validation import MAX_REDUCTION
from veloxquant.errors import RecordInvalid

if TYPE_CHECKING:
    from veloxquant.profiles import WorkloadProfile

Amount = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)]
Ratio = Annotated[int, Meta(ge=1, le=int(MAX_REDUCTION))] | Annotated[float, Meta(gt=0, le=MAX_REDUCTION)]
_LOW_CONTEXT, _HIGH_CONTEXT = validation.WHOLE["context_length"]
_LOW_BATCH, _HIGH_BATCH = validation.WHOLE["batch_size"]
_LOW_BYTES, _HIGH_BYTES = validation.WHOLE["memory_bytes"]
_ABSENT = Raw(b"null")


class _Plain(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: str
    method: str
    model_id: str
    architecture: str = UNKNOWN
    context_length: Annotated[int, Meta(ge=_LOW_CONTEXT, le=_HIGH_CONTEXT)] = 4096
    batch_size: Annotated[int, Meta(ge=_LOW_BATCH, le=_HIGH_BATCH)] = 1
    memory_bytes: Annotated[int, Meta(ge=_LOW_BYTES, le=_HIGH_BYTES)] = 0
    memory_reduction: Ratio | None = None
    throughput_tok_s: Amount = 0.0
    latency_ms_per_token: Amount = 0.0
    perplexity_delta: int | float | None = None
    chip: str = UNKNOWN
    mlx_version: str = UNKNOWN
    macos_version: str = UNKNOWN
    workload: Raw = _ABSENT
    created_at: str = UNDATED
    source: str = "manual"
    tags: list[str] = []


_decoder = msgspec.json.Decoder(_Plain)


def read_plain(data: bytes) -> BenchmarkRecord | None:
    """The record in a file's bytes, None where `BenchmarkRecord.from_dict` must judge."""
    try:
        plain = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    workload = _workload(bytes(plain.workload))
    amounts = (plain.throughput_tok_s, plain.latency_ms_per_token, plain.perplexity_delta)
    if workload is None or not (_is_name(plain.method) and _is_name(plain.model_id)) or not _are_floats(amounts):
        return None
    if validation.ID.fullmatch(plain.id) is None:
        return None
    return BenchmarkRecord(
        plain.id,
        intern(plain.method),
        intern(plain.model_id),
        intern(plain.architecture),
        plain.context_length,
        plain.batch_size,
        plain.memory_bytes,
        plain.memory_reduction,
        plain.throughput_tok_s,
        plain.latency_ms_per_token,
        plain.perplexity_delta,
        intern(plain.chip),
        intern(plain.mlx_version),
        intern(plain.macos_version),
        workload,
        plain.created_at,
        intern(plain.source),
        plain.tags,
    )


def _are_floats(amounts: tuple[int | float | None, ...]) -> bool:
    """Whole numbers may be beyond the largest float, so they go the long way, but for a plain 0."""
    return all(amount is None or type(amount) is float or amount == 0 for amount in amounts)


@lru_cache(maxsize=4096)
def _is_name(text: str) -> bool:
    return bool(text.strip()) and "\0" not in text


@lru_cache(maxsize=4096)
def _workload(data: bytes) -> WorkloadProfile | None:
    """The workload, shared by the records of a run; None where it has further keys or is wrong."""
    try:
        workload, unknown = read_workload(msgspec.json.decode(data))
    except (msgspec.DecodeError, RecursionError, RecordInvalid):
        return None
    return None if unknown else workload
