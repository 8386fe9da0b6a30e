"""Every recorded run of mlx-lm's architectures: the trace gives the bytes a real run held, layer by layer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from veloxquant.models.exchange import TRACE_RUNS
from veloxquant.models.trace_worker import engine, tracing
from veloxquant.profiles.slots import part_bytes

if TYPE_CHECKING:
    from veloxquant.profiles import CacheLayer, CachePart, ModelProfile

_ARCHS = json.loads((Path(__file__).parent.parent / "data" / "mlx_lm_archs.json").read_text())["archs"]
RUNS = {f"{name}-{at}": run for name, arch in _ARCHS.items() for at, run in enumerate(arch["runs"])}

NOT_RUN = {
    "bitnet-0": ("not_supported", "recorded as failing: its layers are a Metal kernel"),
    "mistral4-0": ("config_invalid", "recorded as failing: the tiny config lacks rope parameters the module reads"),
}
"""Runs the file itself records as failed, with what the trace must answer and why."""

TOKENS = sum(tokens * calls for tokens, calls in TRACE_RUNS)


@cache
def traced(name: str) -> ModelProfile:
    """The trace of one run, once for all tests."""
    return tracing.trace(RUNS[name]["config"], RUNS[name]["dtype"])


def recorded_layers(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The run's cache records, one for each layer (the file groups equal neighbours)."""
    return [record for record in run["cache_runs"] for _ in range(record["layers"][0], record["layers"][1] + 1)]


def tokens_only_bytes(part: CachePart) -> int:
    """Bytes of the tokens held, slack left out."""
    if part.kind == "state":
        return part.state_bytes
    # A chunked cache is cut to its chunk before the last call, which then adds its token.
    room = {"kv": TOKENS, "window": part.window, "chunked": part.window + TRACE_RUNS[-1][0]}
    return min(TOKENS, room[part.kind]) * part.slot_bytes


def shapes(layer: CacheLayer) -> list[tuple[int, int, str]]:
    """(heads, width, number format) of each K and V of a layer."""
    return [
        (part.heads, width, part.dtype)
        for part in layer.parts
        if part.kind != "state"
        for width in (part.key_width, part.value_width)
    ]


@pytest.mark.parametrize("name", [name for name in RUNS if name not in NOT_RUN])
def test_bytes_of_every_layer_are_those_of_the_recorded_run(name: str) -> None:
    """Class, bytes with slack and bytes of tokens alone equal the recorded ones, in each layer and in sum."""
    run = RUNS[name]
    profile = traced(name)
    records = recorded_layers(run)
    held = [sum(part_bytes(part, TRACE_RUNS) for part in layer.parts) for layer in profile.layers]
    assert [layer.engine_class for layer in profile.layers] == [record["kind"] for record in records]
    assert held == [record["nbytes"] for record in records]
    assert sum(held) == run["total_nbytes"]
    exact = [sum(tokens_only_bytes(part) for part in layer.parts) for layer in profile.layers]
    assert exact == [record["exact_bytes"] for record in records]
    assert profile.num_parameters == run["params"]


@pytest.mark.parametrize("name", [name for name in RUNS if name not in NOT_RUN])
def test_widths_and_formats_are_those_of_the_recorded_arrays(name: str) -> None:
    """Heads, widths and number formats of K and V equal those of the recorded arrays."""
    for layer, record in zip(traced(name).layers, recorded_layers(RUNS[name]), strict=True):
        states = len(record["arrays"]) - len(shapes(layer))  # arrays of a state come first
        assert shapes(layer) == [(shape[1], shape[3], dtype) for shape, dtype in record["arrays"][states:]]


@pytest.mark.parametrize("name", sorted(NOT_RUN))
def test_runs_recorded_as_failing_are_refused_in_the_engines_words(name: str) -> None:
    """What did not run when it was recorded does not get a profile, and the answer carries the recorded error."""
    kind, _ = NOT_RUN[name]
    run = RUNS[name]
    assert not run["ok"]
    if name == "bitnet-0" and mx.metal.is_available():
        assert tracing.trace(run["config"], "float16").layers
        return
    with pytest.raises(engine.EngineRefused) as refused:
        tracing.trace(run["config"], "float16")
    assert refused.value.kind == kind
    assert run["error"].split("\n")[0] in str(refused.value)
