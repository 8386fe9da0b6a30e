"""Our own methods under the profilers: the documented example as it stands, and servable caches in a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from veloxquant import KVCacheBuilder, KVCacheProfiler, MLXCacheProfiler
from veloxquant.caches.held import held_bytes
from veloxquant.profiling import format_profile_table, profile_layers

if TYPE_CHECKING:
    from pathlib import Path

METHODS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "affine": {"bits": 4, "group": 32},
    "turboquant_mse": {"bits": 3},
    "turboquant_prod": {"bits": 3},
}


def builder(method: str) -> KVCacheBuilder:
    """The method with its parameters."""
    made = KVCacheBuilder().with_method(method)
    for name, value in METHODS[method].items():
        made = made.with_parameter(name, value)
    return made


def test_the_documented_example_end_to_end() -> None:
    """Builder, profiler, report and table, name by name as documented."""
    keys, values = mx.random.normal((2, 20, 64), key=mx.random.key(1))
    query = keys[3]

    cache = (
        KVCacheBuilder()
        .with_method("turboquant_prod")
        .with_head_dim(64)
        .with_bit_width(inlier=2)
        .with_jl_dim(64)
        .build()
    )
    profiled = KVCacheProfiler(cache, head_dim=64, layer_id=0)

    for k, v in zip(keys, values, strict=True):
        profiled.append(k, v)
    attended = profiled.attend(query)

    report = profile_layers([profiled], elapsed_s=0.05)
    assert mx.array_equal(attended, cache.attend(query))
    (layer,) = report.layers
    assert (layer.n_quantize_calls, layer.n_dequantize_calls, layer.tokens_written) == (20, 1, 20)
    assert layer.fp16_baseline_bytes == 20 * 2 * 64
    assert layer.resident_bytes == layer.reported_bytes == held_bytes(cache) > 0
    assert report.tokens_per_sec == pytest.approx(400)
    lines = format_profile_table(report).splitlines()
    assert lines[4] == "Total tokens:        20"
    assert lines[7] == "Tokens/sec:          400.0"


@pytest.mark.parametrize("method", METHODS)
def test_standalone_caches_report_what_they_hold(method: str) -> None:
    """memory_bytes is the walk, and the width of the baseline is the cache's own."""
    profiled = KVCacheProfiler(builder(method).with_head_dim(96).build())
    for number in range(3):
        profiled.append(mx.full((96,), 1.0 + number), mx.full((96,), 2.0))
    profile = profiled.profile()
    assert profile.reported_bytes == profile.resident_bytes > 0
    assert (profile.fp16_baseline_bytes, profile.true_fp16_bytes) == (3 * 2 * 96, 3 * 2 * 2 * 96)
    assert (profile.sequence_tokens, len(profiled)) == (3, 3)


@pytest.mark.parametrize("method", METHODS)
def test_servable_caches_profiled_give_the_same_logits_and_true_bytes(method: str, tiny: Any, tmp_path: Path) -> None:
    """In a model, after being saved and loaded, and trimmed: what is reported is what is walked."""
    model = tiny("llama")
    config = builder(method).config()

    def run(caches: list[Any]) -> mx.array:
        return mx.concatenate([model(mx.arange(tokens)[None], cache=caches) for tokens in (20, 1, 1)], axis=1)

    plain = KVCacheBuilder.for_model(model, config)
    profilers = [MLXCacheProfiler(cache, i) for i, cache in enumerate(KVCacheBuilder.for_model(model, config))]
    assert mx.array_equal(run(plain), run(profilers))
    report = profile_layers(profilers)
    assert report.resident_bytes == report.reported_bytes == held_bytes(plain)
    assert report.true_fp16_bytes == sum(layer.true_fp16_bytes for layer in self_counted(model))
    assert report.sequence_tokens == 22
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, profilers)
    step = mx.array([[5]])
    assert mx.array_equal(model(step, cache=load_prompt_cache(file)), model(step, cache=plain))
    assert profilers[0].trim(2) == 2
    assert not profilers[0].profile().is_lying


def self_counted(model: Any) -> list[Any]:
    """Profiles of the engine's own caches over the same 22 tokens: what is given does not depend on the method."""
    caches = [MLXCacheProfiler(cache) for cache in make_prompt_cache(model)]
    model(mx.arange(22)[None], cache=caches)
    return profile_layers(caches).layers
