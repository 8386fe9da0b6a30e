"""The JSON schema of a record, made from the rules that `validation` checks; `record.schema.json` ships its text."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from veloxquant.benchmarks import validation
from veloxquant.benchmarks.records import BenchmarkRecord
from veloxquant.profiles import WorkloadProfile
from veloxquant.profiles.workload import OBJECTIVES

NAME = "record.schema.json"
_NUMBER = {"type": "number", "minimum": -sys.float_info.max, "maximum": sys.float_info.max}
_TEXT = {"type": "string"}
_WORD = {"type": "string", "pattern": r"^[^\u0000]*[^\s\u0000][^\u0000]*$"}
_UNITS = {
    "id": "file name of the record and its key: benchmark_fingerprint(), or one of your own",
    "method": "variant label (affine4-g64) or method name",
    "model_id": "hub id, or name of the folder",
    "context_length": "tokens",
    "batch_size": "sequences in a batch",
    "memory_bytes": "resident KV cache in bytes, 0 for not measured",
    "memory_reduction": "ratio to the 16-bit cache at the same context and batch, null for not measured",
    "throughput_tok_s": "decoded tokens a second, 0 for not measured",
    "latency_ms_per_token": "milliseconds a token, 0 for not measured",
    "perplexity_delta": "against the 16-bit cache, null for not measured",
    "created_at": "ISO 8601",
    "tags": 'free words; "pinned" keeps a record from eviction, "parameters:N" states the size of the model',
}


def schema() -> dict[str, Any]:
    """JSON Schema 2020-12. Further keys are allowed, as they are kept."""
    rules = _rules()
    made: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "veloxquant benchmark record",
        "type": "object",
        "required": ["id", "method", "model_id"],
        "properties": {},
    }
    for field in fields(BenchmarkRecord):
        rule = dict(rules[field.name])
        if field.name in _UNITS:
            rule["description"] = _UNITS[field.name]
        if field.default is not MISSING:
            rule["default"] = field.default
        made["properties"][field.name] = rule
    return made


@cache
def shipped() -> dict[str, Any]:
    """The schema as it lies in the package."""
    found: dict[str, Any] = msgspec.json.decode(files("veloxquant.benchmarks").joinpath(NAME).read_bytes())
    return found


def _rules() -> dict[str, dict[str, Any]]:
    rules: dict[str, dict[str, Any]] = {"id": {"type": "string", "pattern": f"^{validation.ID_PATTERN}$"}}
    rules |= dict.fromkeys(validation.WORDS, _WORD) | dict.fromkeys(validation.TEXTS, _TEXT)
    for name, (low, high) in validation.WHOLE.items():
        rules[name] = {"type": "integer", "minimum": low, "maximum": high}
    rules |= dict.fromkeys(validation.AMOUNTS, _NUMBER | {"minimum": 0})
    ratio = {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": validation.MAX_REDUCTION}
    rules["memory_reduction"] = ratio
    rules["perplexity_delta"] = _NUMBER | {"type": ["number", "null"]}
    rules["tags"] = {"type": "array", "items": _TEXT}
    rules["workload"] = _workload()
    return rules


def _workload() -> dict[str, Any]:
    """Types, defaults and least values of the workload's fields."""
    made: dict[str, Any] = msgspec.json.schema(WorkloadProfile)["$defs"]["WorkloadProfile"]["properties"]
    for name, rule in made.items():
        if rule.get("type") == "integer":
            rule["minimum"] = 0 if name == "generation_length" else 1
    made["objective"]["enum"] = list(OBJECTIVES)
    return {"type": ["object", "null"], "properties": made}
