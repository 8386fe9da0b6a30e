"""A trace of 24 tokens extrapolated, against real runs of longer sequences: equal bytes in each layer's cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from veloxquant.caches.held import held_bytes
from veloxquant.methods import worker
from veloxquant.models.exchange import ProbeRequest
from veloxquant.models.trace_worker import engine, tracing
from veloxquant.models.trace_worker.probes import Prober
from veloxquant.profiles.slots import part_bytes, schedule

_ARCHS = json.loads((Path(__file__).parent.parent / "data" / "mlx_lm_archs.json").read_text())["archs"]
RUNS = schedule(300, 40, 128)
"""Chunks of 128, 128 and 43, the last prompt token, 40 generated ones: past windows, chunks, growths and cuts."""

PACKED = {
    "baichuan_m1": 0,  # states beside windows or growing caches in each entry
    "deepseek_v32": 0,  # latents and index keys in one entry
    "exaone4": 1,
    "gemma2": 0,  # attention by hand
    "gemma4_text": 0,  # its only full layer is a donor
    "gpt_oss": 0,  # sinks
    "kimi_linear": 0,  # a latent of width 8
    "laguna": 1,
    "llama4": 1,
    "longcat_flash": 0,
    "mellum": 2,
    "minicpm3": 4,
    "nanbeige": 8,  # twice as many caches as layers
    "olmo_hybrid": 2,
    "plamo3": 2,
    "qwen3_next": 1,
    "step3p5": 2,
}
"""Unlike architectures, and how many of their layers take mlx-lm's quantized cache at 8 bits in groups of 32."""

VARIANT: tuple[str, str, dict[str, Any]] = ("affine", "affine8-g32", {"bits": 8, "group": 32})


def run(model: Any, caches: list[Any]) -> list[int]:
    """Bytes in each entry of the cache list after really computing every call."""
    for tokens, calls in RUNS:
        for _ in range(calls):
            mx.eval(model(mx.ones((1, tokens), mx.int32), cache=caches), [cache.state for cache in caches])
    return [held_bytes(cache) for cache in caches]


@pytest.fixture(scope="module")
def factory() -> worker.Factory:
    """The installed methods, as the trace worker gets them."""
    return worker.load()


@pytest.mark.parametrize("name", PACKED)
def test_real_runs_hold_what_the_short_trace_foretells(name: str, factory: worker.Factory) -> None:
    """Own caches and packed ones, layer by layer, after 340 computed tokens."""
    config = _ARCHS[name]["runs"][0]["config"]
    profile = tracing.trace(config, "float32")
    model = engine.build(config, "float32")
    method, label, params = VARIANT
    probe = Prober(model, profile, factory).probe(ProbeRequest(method=method, label=label, params=params))
    assert len(probe.packed) == PACKED[name]
    mx.eval(model.parameters())
    foretold = [sum(part_bytes(part, RUNS) for part in layer.parts) for layer in profile.layers]
    assert run(model, engine.fresh_caches(model)) == foretold
    caches = engine.fresh_caches(model)
    for index in probe.packed:
        part = profile.layers[index].packable
        assert part is not None
        caches[index] = factory.build(method, label, params, index, part)
        foretold[index] = factory.declared_bytes(method, label, params, part, RUNS)
    if probe.packed:
        assert run(model, caches) == foretold


def test_every_kind_of_cache_is_among_them() -> None:
    """Growing, window, chunk, state and composite caches are really run."""
    classes = {record["kind"] for name in PACKED for record in _ARCHS[name]["runs"][0]["cache_runs"]}
    assert classes == {"KVCache", "RotatingKVCache", "ChunkedKVCache", "ArraysCache", "CacheList"}
