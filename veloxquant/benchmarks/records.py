"""One measured KV-cache outcome, the query it is compared with, and its JSON form."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec

from veloxquant.benchmarks.fingerprint import UNKNOWN
from veloxquant.benchmarks.matching import UNSTATED, chip_factor, size_factor, version_factor
from veloxquant.benchmarks.validation import WHOLE, check_types, invalid, whole
from veloxquant.errors import InvalidParams, RecordInvalid
from veloxquant.profiles import WorkloadProfile

UNDATED = "1970-01-01T00:00:00+00:00"
"""created_at of a record on disk that has none: older than any other, and the same at each load."""

# What a record's workload says on disk. Further fields of WorkloadProfile are written only when they are not at their
# default, so that a plain record has exactly these.
_WORKLOAD_KEYS = (
    "context_length",
    "generation_length",
    "batch_size",
    "num_concurrent_requests",
    "objective",
    "max_latency_ms",
)
_WORKLOAD_FIELDS = {f.name: f.default for f in msgspec.structs.fields(WorkloadProfile)}
_WHOLE_WORKLOAD = frozenset(f.name for f in msgspec.structs.fields(WorkloadProfile) if f.type is int)
_FURTHER_WORKLOAD_KEYS = tuple(name for name in _WORKLOAD_FIELDS if name not in _WORKLOAD_KEYS)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


@dataclass(frozen=True)
class BenchmarkMatchQuery:
    """What a record is wanted for. A context or batch of -1, and a chip or version of "any", are not compared.

    A chip or version of "unknown" is compared, and equals nothing. `batch_size` counts sequences held at once.
    """

    method: str
    model_id: str
    architecture: str = UNKNOWN
    context_length: int = UNSTATED
    batch_size: int = UNSTATED
    chip: str = UNKNOWN
    mlx_version: str = UNKNOWN
    macos_version: str = UNKNOWN

    @property
    def sequences(self) -> int:
        """Sequences held at once, -1 for not compared."""
        return self.batch_size


@dataclass
class BenchmarkRecord:
    """One measurement. 0 in memory_bytes, throughput_tok_s or latency_ms_per_token, and None, mean "not measured".

    memory_bytes: resident KV cache in bytes. memory_reduction: its ratio to the 16-bit cache at the same context and
    batch, in (0, 4]. throughput_tok_s: decoded tokens a second. latency_ms_per_token: milliseconds.
    perplexity_delta: against the 16-bit cache, may be negative. created_at: ISO 8601.
    Nothing is checked here; `from_dict` and every write to a database raise RecordInvalid naming the field.
    """

    id: str
    method: str
    model_id: str
    architecture: str = UNKNOWN
    context_length: int = 4096
    batch_size: int = 1
    memory_bytes: int = 0
    memory_reduction: float | None = None
    throughput_tok_s: float = 0.0
    latency_ms_per_token: float = 0.0
    perplexity_delta: float | None = None
    chip: str = UNKNOWN
    mlx_version: str = UNKNOWN
    macos_version: str = UNKNOWN
    workload: WorkloadProfile = field(default_factory=WorkloadProfile)
    created_at: str = field(default_factory=_now)
    source: str = "manual"
    tags: list[str] = field(default_factory=list)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BenchmarkRecord:
        """A record from its JSON form; keys it does not know are kept and written back by `to_dict`.

        Raises RecordInvalid naming the field that is missing or impossible.
        """
        if not isinstance(data, dict):
            raise invalid("record", data, "a JSON object", "write one object a file")
        for required in ("id", "method", "model_id"):
            if required not in data:
                hint = "every record has an id, a method and a model_id"
                raise RecordInvalid(f"{required} is missing", hint=hint, field=required)
        known, unknown = dict(data), {}
        if not data.keys() <= _FIELD_SET:
            known = {name: value for name, value in data.items() if name in _FIELD_SET}
            unknown = {key: value for key, value in data.items() if key not in _FIELD_SET}
            _check_schema(unknown.get("schema"))
        _spell(known)
        known.setdefault("created_at", UNDATED)
        workload, unknown_workload = read_workload(known.get("workload"))
        known["workload"] = workload
        if isinstance(known.get("tags"), list):
            known["tags"] = list(known["tags"])
        record = cls(**known)
        if unknown or unknown_workload:
            record.__dict__["_unknown"] = (unknown, unknown_workload)
        check_types(record)
        return record

    def to_dict(self) -> dict[str, Any]:
        """JSON form, fields in declared order, the workload as an object, then the keys found at loading."""
        unknown: dict[str, Any]
        unknown_workload: dict[str, Any]
        unknown, unknown_workload = self.__dict__.get("_unknown", _NOTHING)
        data: dict[str, Any] = {name: self.__dict__[name] for name in _FIELD_NAMES}
        data["workload"] = _write_workload(self.workload) | unknown_workload
        data["tags"] = list(self.tags)
        return data | unknown

    @property
    def savings_percent(self) -> float:
        """Memory saved against the 16-bit cache in percent, 0..100; 0.0 when not measured or nothing is saved."""
        if self.memory_reduction is None:
            return 0.0
        return min(100.0, max(0.0, (1.0 - self.memory_reduction) * 100.0))

    @property
    def sequences(self) -> int:
        """Sequences the run held at once: batch_size x the workload's num_concurrent_requests."""
        return self.batch_size * self.workload.num_concurrent_requests

    def match_score(self, other: BenchmarkRecord | BenchmarkMatchQuery) -> float:
        """Closeness in 0..1: the product of one factor each for context, sequences, chip and MLX version.

        1.0 for a perfect match; symmetric; an unknown chip or version costs, unless `other` is this very record.
        """
        if isinstance(other, BenchmarkRecord) and other == self:
            return 1.0
        score = chip_factor(self.chip, other.chip) * version_factor(self.mlx_version, other.mlx_version)
        if other.context_length != UNSTATED:
            score *= size_factor(self.context_length, other.context_length)
        if other.sequences != UNSTATED:
            score *= size_factor(self.sequences, other.sequences)
        return score


_SCHEMAS = "veloxquant.record/"
RECORD_SCHEMA = f"{_SCHEMAS}1"
_NOTHING: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
_PLAIN_WORKLOAD = WorkloadProfile()
_FIELD_NAMES = tuple(f.name for f in fields(BenchmarkRecord))
_FIELD_SET = frozenset(_FIELD_NAMES)
# Words that most records share; kept once in memory.
_REPEATED = ("method", "model_id", "architecture", "chip", "mlx_version", "macos_version", "source")


def _check_schema(schema: object) -> None:
    """A record need not say its schema. One that says a later one of ours may mean something else by its fields."""
    if isinstance(schema, str) and schema.startswith(_SCHEMAS) and schema != RECORD_SCHEMA:
        raise invalid("schema", schema, f"{RECORD_SCHEMA}, which this version reads", "read it with a newer veloxquant")


def _spell(values: dict[str, Any]) -> None:
    """Equal words as one object, and whole numbers as such."""
    for name in _REPEATED:
        if type(values.get(name)) is str:
            values[name] = sys.intern(values[name])
    for name in WHOLE:
        if type(values.get(name)) is float:
            values[name] = whole(values[name])


def read_workload(data: Any) -> tuple[WorkloadProfile, dict[str, Any]]:
    """The workload and the keys it does not know. Absent means the default workload, as it does in `add`."""
    if data is None:
        return _PLAIN_WORKLOAD, {}
    if not isinstance(data, dict):
        raise invalid("workload", data, "a JSON object", "give context_length, batch_size and so on")
    # The type is part of the key, as True, 1 and 1.0 are equal to a cache.
    known = tuple(
        [
            (key, type(value), whole(value) if key in _WHOLE_WORKLOAD and type(value) is float else value)
            for key, value in data.items()
            if key in _WORKLOAD_FIELDS
        ]
    )
    unknown = {} if len(known) == len(data) else {key: data[key] for key in data if key not in _WORKLOAD_FIELDS}
    try:
        return _workload(known), unknown
    except (TypeError, msgspec.ValidationError) as error:
        raise invalid("workload", data, "made of plain numbers and words", str(error)) from error
    except InvalidParams as error:
        name = f"workload.{error.field}"
        raise invalid(name, data.get(error.field or ""), "in range", error.hint) from error


@lru_cache(maxsize=4096)
def _workload(items: tuple[tuple[str, type, Any], ...]) -> WorkloadProfile:
    """Shared by the records that have it: a frozen value, and most records of a run share theirs."""
    return msgspec.convert({key: value for key, _, value in items}, WorkloadProfile)


def _write_workload(workload: WorkloadProfile) -> dict[str, Any]:
    data = {key: getattr(workload, key) for key in _WORKLOAD_KEYS}
    further = {key: getattr(workload, key) for key in _FURTHER_WORKLOAD_KEYS}
    return data | {key: value for key, value in further.items() if value != _WORKLOAD_FIELDS[key]}
