"""What no measurement can be, field by field. The planner never sees a record that fails here."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from veloxquant.errors import RecordInvalid, quoted
from veloxquant.profiles import WorkloadProfile
from veloxquant.profiles.workload import MAX_CONTEXT_TOKENS, MAX_ROWS

if TYPE_CHECKING:
    from veloxquant.benchmarks.records import BenchmarkRecord

MAX_REDUCTION = 4.0
"""A cache four times the size of the 16-bit one is a slip of units, not a cache."""
MAX_BYTES = 2**63 - 1

# An id is a file name on every system.
ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"
ID = re.compile(ID_PATTERN)
WORDS = ("method", "model_id")
TEXTS = ("architecture", "chip", "mlx_version", "macos_version", "created_at", "source")
WHOLE = {
    "context_length": (1, MAX_CONTEXT_TOKENS),
    "batch_size": (1, MAX_ROWS),
    "memory_bytes": (0, MAX_BYTES),
}
AMOUNTS = ("throughput_tok_s", "latency_ms_per_token")


def invalid(name: str, value: object, wanted: str, hint: str) -> RecordInvalid:
    """The error for one field: what it is, what it should be, what to do."""
    return RecordInvalid(f"{name} is {quoted(value)}, which is not {wanted}", hint=hint, field=name)


def is_id(value: object) -> bool:
    """Whether a record can have this id; what cannot be one is nowhere, and no file is looked for."""
    return isinstance(value, str) and ID.fullmatch(value) is not None


def whole(value: float) -> float:
    """4096.0 as 4096, which is the same number in JSON, and what is no whole number as it is."""
    return int(value) if value.is_integer() else value


def check_types(record: BenchmarkRecord) -> None:
    """Raise RecordInvalid naming the first field that no measurement can have."""
    if not _is_plain(record.__dict__):
        _check_each(record)


def _check_each(record: BenchmarkRecord) -> None:
    values = record.__dict__
    if not is_id(record.id):
        raise invalid("id", record.id, "a file name of letters, digits and . _ -", "use benchmark_fingerprint()")
    for name in WORDS:
        _check_text(name, values[name])
        if not values[name].strip() or "\0" in values[name]:
            raise invalid(name, values[name], "a name", f"say what the {name} was")
    for name in TEXTS:
        _check_text(name, values[name])
    for name, (low, high) in WHOLE.items():
        value = values[name]
        if type(value) is not int or not low <= value <= high:
            raise invalid(name, value, f"a whole number from {low} to {high}", _hint(name))
    for name in AMOUNTS:
        if not _finite(values[name]) or values[name] < 0:
            raise invalid(name, values[name], "a finite number of at least 0", "leave it 0 when it was not measured")
    _check_ratios(record)
    if not isinstance(record.workload, WorkloadProfile):
        raise invalid("workload", record.workload, "a WorkloadProfile", "build one with the run's lengths")
    _check_tags(record.tags)


def _is_plain(values: dict[str, Any]) -> bool:
    """Whether each value is of the very type and in range: true of nearly all, and told without a call for each."""
    for name in WORDS + TEXTS:
        if type(values[name]) is not str or not _is_plain_text(values[name]):
            return False
    for name, (low, high) in WHOLE.items():
        if type(values[name]) is not int or not low <= values[name] <= high:
            return False
    for name in AMOUNTS:
        if type(values[name]) is not float or not 0.0 <= values[name] <= sys.float_info.max:
            return False
    return (
        values["memory_reduction"] is None
        or (type(values["memory_reduction"]) is float and 0.0 < values["memory_reduction"] <= MAX_REDUCTION)
    ) and (
        values["perplexity_delta"] is None
        and not values["tags"]
        and type(values["tags"]) is list
        and type(values["workload"]) is WorkloadProfile
        and type(values["id"]) is str
        and ID.fullmatch(values["id"]) is not None
    )


@lru_cache(maxsize=4096)
def _is_plain_text(text: str) -> bool:
    return text.isascii() and text.isprintable() and bool(text.strip())


def _check_ratios(record: BenchmarkRecord) -> None:
    reduction, delta = record.memory_reduction, record.perplexity_delta
    if reduction is not None and not (_finite(reduction) and 0 < reduction <= MAX_REDUCTION):
        raise invalid(
            "memory_reduction", reduction, f"above 0 and at most {MAX_REDUCTION:g}", "leave it None when not measured"
        )
    if delta is not None and not _finite(delta):
        raise invalid("perplexity_delta", delta, "a finite number", "leave it None when it was not measured")


def _check_tags(tags: object) -> None:
    if not isinstance(tags, list):
        raise invalid("tags", tags, "a list of words", "give a list, empty for none")
    for tag in tags:
        _check_text("tags", tag)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise invalid(name, value, "text", f"give {name} as a string")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise invalid(name, value, "text in UTF-8", "remove the lone surrogate")


def _finite(value: Any) -> bool:
    # By comparison, as math.isfinite raises for a whole number beyond the largest float.
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def _hint(name: str) -> str:
    return "leave it 0 when it was not measured" if name == "memory_bytes" else f"give the {name} of the run"
