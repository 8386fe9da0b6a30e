"""The real model, profiled: SmolLM2-135M with plain, 8-bit and 4-bit caches of mlx-lm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import generate
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from veloxquant.profiling import MLXCacheProfiler, format_profile_table, profile_layers

PROMPT = "The three primary colours are"
LAYERS, HEADS, WIDTH = 30, 3, 64
ROW_BYTES = {16: WIDTH * 4, 8: WIDTH + 2 * 4 * 1, 4: WIDTH // 2 + 2 * 4 * 1}
"""Bytes of a row: float32 numbers (the model runs in 32 bits on a CPU); or words, one scale and one bias of 32 bits."""


def caches(model: Any, bits: int) -> list[Any]:
    """Fresh caches of mlx-lm, one a layer."""
    if bits == 16:
        return list(make_prompt_cache(model))
    return [QuantizedKVCache(64, bits) for _ in make_prompt_cache(model)]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_profiled_generation_gives_the_same_text_and_the_bytes_of_the_format(bits: int, smollm: Any) -> None:
    """30 layers of 3 heads, 256 slots, K and V; ten tokens the same as unprofiled."""
    model, tokenizer = smollm
    profilers = [MLXCacheProfiler(cache, layer) for layer, cache in enumerate(caches(model, bits))]
    text = generate(model, tokenizer, PROMPT, max_tokens=10, prompt_cache=profilers)
    assert text == generate(model, tokenizer, PROMPT, max_tokens=10, prompt_cache=caches(model, bits))
    report = profile_layers(profilers, elapsed_s=1.0)
    assert report.resident_bytes == report.reported_bytes == LAYERS * 2 * HEADS * 256 * ROW_BYTES[bits]
    tokens = report.sequence_tokens
    assert tokens == len(tokenizer.encode(PROMPT)) + 10
    assert report.true_fp16_bytes == LAYERS * 2 * HEADS * tokens * WIDTH * 2
    assert report.total_tokens == LAYERS * tokens
    assert {layer.fp16_baseline_bytes for layer in report.layers} == {tokens * 2 * WIDTH}
    assert all(layer.quantize_ms_total > 0 for layer in report.layers)
    assert format_profile_table(report).count("\nLayer ") == 2 * LAYERS + 1


def test_profiled_logits_are_the_unprofiled_ones(smollm: Any) -> None:
    """Bit by bit, over a prompt and a step."""
    model, tokenizer = smollm
    tokens = mx.array(tokenizer.encode(PROMPT))[None]

    def run(made: list[Any]) -> mx.array:
        return mx.concatenate([model(tokens, cache=made), model(tokens[:, :1], cache=made)], axis=1)

    plain = [KVCache() for _ in range(LAYERS)]
    assert mx.array_equal(run(plain), run([MLXCacheProfiler(KVCache()) for _ in range(LAYERS)]))
