"""Every field that the protocol promises is in a running daemon's answers, under its name and with its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import pytest
from daemon_kit import TINY_LLAMA, Daemon, Wire

from veloxquant.planner.result import Decision, Reason, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

Check = Callable[[Any], bool]

DEEP = {"model": {"config": TINY_LLAMA | {"num_hidden_layers": 32}, "model_id": "deep", "weights_bytes": 2**20}}
TIGHT = DEEP | {
    "workload": {"context_length": 131072},
    "memory_budget_bytes": 1000 * 2**20,
    "methods": ["fp16", "affine8-g64", "affine4-g32", "affine4-g64"],
}
"""32 x 512 bytes x 131,584 slots are 2 GiB of 16-bit cache in a budget of 1,000 MiB: 8.5 bits a number take 1,092, 5 or
4.5 fit, and diverge by more than passes without a word."""


def of(kind: type) -> Check:
    """A value of this JSON type; a bool is no number."""
    return lambda value: isinstance(value, kind) and not isinstance(value, bool)


def one_of(words: Any) -> Check:
    """One of the names the protocol lists."""
    return lambda value: value in get_args(words)


def maybe(check: Check) -> Check:
    """The same or null."""
    return lambda value: value is None or check(value)


def real(value: Any) -> bool:
    """A number; JSON does not tell 1 from 1.0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def flag(value: Any) -> bool:
    """True or false."""
    return isinstance(value, bool)


def anything(_value: Any) -> bool:
    """Any value: a suggestion's number."""
    return True


TEXT, WHOLE, OBJECT = of(str), of(int), of(dict)

EVIDENCE = {
    "source": one_of(Source),
    "record_ids": [TEXT],
    "confidence": lambda x: real(x) and 0 <= x <= 1,
    "notes": [TEXT],
}
LAYERS = dict.fromkeys(("total", "growing", "windowed", "recurrent", "latent", "shared"), WHOLE)
NOTE = {"code": TEXT, "text": TEXT}
CANDIDATE = {
    "method": TEXT,
    "params": OBJECT,
    "label": TEXT,
    "layers": LAYERS | {"packed": WHOLE, "kept": WHOLE, "reasons": OBJECT},
    "memory": {
        "stored_bytes": WHOLE,
        "peak_bytes": WHOLE,
        "fixed_bytes": WHOLE,
        "bytes_per_token": real,
        "fp16_bytes": WHOLE,
        "ratio": real,
        "largest_buffer_bytes": WHOLE,
        "evidence": EVIDENCE,
    },
    "fit": dict.fromkeys(("total_bytes", "headroom_bytes", "max_context_tokens"), WHOLE),
    "speed": dict.fromkeys(("prefill_tok_s", "decode_tok_s", "latency_ms_per_token", "low", "high"), maybe(real))
    | {"evidence": EVIDENCE},
    "quality": {"kl_mean": real, "perplexity_delta": maybe(real), "low": real, "high": real, "evidence": EVIDENCE},
    "cache_config": OBJECT,
    "engine_settings": maybe(OBJECT),
}
REJECTED = {
    "method": TEXT,
    "params": OBJECT,
    "label": TEXT,
    "reason": one_of(Reason),
    "detail": TEXT,
    "short_by_bytes": maybe(WHOLE),
}
MODEL = {"model_id": TEXT, "model_type": TEXT, "source": TEXT, "weights_bytes": maybe(WHOLE), "layers": LAYERS}
BUDGET = dict.fromkeys(("working_set_bytes", "weights_bytes", "kv_budget_bytes"), maybe(WHOLE)) | dict.fromkeys(
    ("active_bytes", "reserve_bytes"), WHOLE
)
WORKLOAD = {
    **dict.fromkeys(("context_length", "generation_length", "batch_size", "num_concurrent_requests"), WHOLE),
    "objective": TEXT,
    "max_latency_ms": maybe(real),
    "max_kl": maybe(real),
    "allow_eviction": flag,
    "prefill_step_size": WHOLE,
}
HARDWARE = {
    **dict.fromkeys(("chip", "tier", "mlx_version", "mlx_lm_version", "os_name", "os_version", "backend"), maybe(TEXT)),
    **dict.fromkeys(("generation", "gpu_cores", "performance_cores", "efficiency_cores"), maybe(WHOLE)),
    **dict.fromkeys(("total_memory_bytes", "working_set_bytes", "max_buffer_bytes", "active_bytes"), maybe(WHOLE)),
    **dict.fromkeys(("available_bytes", "wired_limit_bytes"), maybe(WHOLE)),
    "bandwidth_gbps": maybe(real),
    "sources": OBJECT,
}
PLAN = {
    "schema": lambda x: x == "veloxquant.plan/1",
    "plan_id": TEXT,
    "generation": WHOLE,
    "source": lambda x: x == "daemon",
    "decision": one_of(Decision),
    "chosen": CANDIDATE,
    "alternatives": [CANDIDATE],
    "rejected": [REJECTED],
    "hardware": HARDWARE,
    "model": MODEL,
    "workload": WORKLOAD,
    "engine": {"name": TEXT, "version": TEXT},
    "budget": BUDGET,
    "warnings": [NOTE],
    "suggestions": [NOTE | {"value": anything}],
}
FIT = {
    "schema": lambda x: x == "veloxquant.fit/1",
    "generation": WHOLE,
    "rows": [
        {"method": TEXT, "label": TEXT, "params": OBJECT, "cells": [{"slots": WHOLE, "max_context_tokens": WHOLE}]}
    ],
    "rejected": [REJECTED],
    "model": MODEL,
    "budget": BUDGET,
    "hardware": HARDWARE,
}
METHODS = {
    "generation": WHOLE,
    "methods": [{"name": TEXT, "state": TEXT, "variants": [{"label": TEXT, "params": OBJECT}]}],
}
RECORDS = {
    "generation": WHOLE,
    "directory": TEXT,
    "total": WHOLE,
    "offset": WHOLE,
    "records": of(list),
    "skipped_total": WHOLE,
    "skipped": of(list),
}
STATUS = {
    "schema": lambda x: x == "veloxquant.status/1",
    **dict.fromkeys(("server", "version", "socket"), TEXT),
    **dict.fromkeys(("protocol", "pid", "generation"), WHOLE),
    "uptime_s": real,
    "log_file": maybe(TEXT),
    "config_path": maybe(TEXT),
    "hardware": HARDWARE,
    "methods": {"ready": WHOLE, "quarantined": OBJECT},
    "records": {"directory": TEXT, "used": WHOLE, "skipped": WHOLE, "scan_age_s": real, "watcher": TEXT}
    | {"newest_age_s": maybe(real)},
    "clients": dict.fromkeys(("now", "peak", "subscribed", "refused"), WHOLE),
    "requests": {"total": WHOLE, "by_method": OBJECT, "errors": OBJECT, "p50_ms": maybe(real), "p99_ms": maybe(real)}
    | {"slow": WHOLE},
    "cache": dict.fromkeys(("entries", "bytes", "hits", "misses"), WHOLE),
    "traces": dict.fromkeys(("running", "waiting", "done", "failed"), WHOLE),
    "process": {"rss_bytes": maybe(WHOLE), "fds": maybe(WHOLE), "fd_limit": maybe(WHOLE), "engine_modules": of(list)}
    | {"tasks": WHOLE},
    "warnings": of(list),
}
HELLO = dict.fromkeys(("server", "version"), TEXT) | dict.fromkeys(("protocol", "pid", "generation"), WHOLE)
ANSWERS: list[tuple[str, dict[str, Any], Any]] = [
    ("hello", {}, HELLO | {"capabilities": [TEXT]}),
    ("ping", {}, {"pong": flag, "pid": WHOLE, "generation": WHOLE}),
    ("plan", TIGHT, PLAN),
    ("fit", {"model": DEEP["model"], "memory_budget_bytes": 2**30}, FIT),
    ("explain", TIGHT, {"plan_id": TEXT, "label": maybe(TEXT), "lines": [TEXT]}),
    ("methods", {}, METHODS),
    ("records", {"skipped": True}, RECORDS),
    ("hardware", {}, HARDWARE),
    ("status", {}, STATUS),
    ("metrics", {}, {"content_type": TEXT, "text": TEXT}),
    ("subscribe", {}, {"topics": [TEXT]}),
]


@pytest.fixture
def wire(shared: Daemon) -> Iterator[Wire]:
    """A connection to the module's daemon."""
    wire = Wire(shared.socket)
    yield wire
    wire.close()


def wrong(value: Any, shape: Any, place: str = "") -> list[str]:
    """Where a value lacks what its shape promises."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{place} is no object"]
        missing = [f"{place}.{name} is missing" for name in shape if name not in value]
        return missing + [x for k, s in shape.items() if k in value for x in wrong(value[k], s, f"{place}.{k}")]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{place} is no list"]
        return [x for n, one in enumerate(value) for x in wrong(one, shape[0], f"{place}[{n}]")]
    return [] if shape(value) else [f"{place} is {value!r}"]


@pytest.mark.parametrize(("method", "params", "shape"), ANSWERS, ids=[method for method, _, _ in ANSWERS])
def test_the_answer_has_every_promised_field(wire: Wire, method: str, params: dict[str, Any], shape: Any) -> None:
    """Names and types, in the whole depth of the answer."""
    assert wrong(wire.call(method, params), shape) == []


def test_the_plan_that_is_looked_at_leaves_nothing_out(wire: Wire) -> None:
    """A choice, others, rejected ones, a warning and a suggestion: no list of the answer above is empty."""
    plan = wire.call("plan", TIGHT)
    assert plan["decision"] == "quantize"
    for name in ("alternatives", "rejected", "warnings", "suggestions"):
        assert plan[name], name
    assert {one["reason"] for one in plan["rejected"]} > {"does_not_fit"}
    assert plan["chosen"]["layers"]["packed"] == plan["chosen"]["layers"]["total"] == 32


def test_what_is_missing_or_of_another_type_is_found() -> None:
    """The walk itself: a field that is gone, null or a text where a number belongs."""
    shape = {"a": [{"b": WHOLE, "c": maybe(TEXT)}]}
    assert wrong({"a": [{"b": 1, "c": None}]}, shape) == []
    assert wrong({"a": [{"c": "x"}, {"b": True, "c": 1}]}, shape) == [
        ".a[0].b is missing",
        ".a[1].b is True",
        ".a[1].c is 1",
    ]
    assert wrong({"a": None}, shape) == [".a is no list"]
