"""The builder with TurboQuant: the example of the profiling interface, and lists for models."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest

from veloxquant import KVCacheBuilder, KVCacheConfig
from veloxquant.caches.held import held_bytes
from veloxquant.errors import InvalidParams, MethodRefused


def test_the_example_builds_and_attends() -> None:
    """Two bits, width 64 and a sketch of 64 rows: 40 tokens in one head, packed, and attention near the true one.

    256 slots: keys of 1 bit, 64 signs and two root mean squares; values of 2 bits and one; float32 as given.
    """
    cache = (
        KVCacheBuilder()
        .with_method("turboquant_prod")
        .with_head_dim(64)
        .with_bit_width(inlier=2)
        .with_jl_dim(64)
        .build()
    )
    mx.random.seed(1)
    keys, values, query = mx.random.normal((40, 64)), mx.random.normal((40, 64)), mx.random.normal((64,))
    for key, value in zip(keys, values, strict=True):
        cache.append(key, value)
    assert (len(cache), bool(cache), cache.head_dim, cache._d) == (40, True, 64, 64)
    assert cache.memory_bytes() == held_bytes(cache) == 256 * ((64 + 64) // 8 + 2 * 4 + 2 * 64 // 8 + 4)
    attended = cache.attend(query)
    exact = mx.softmax(query @ keys.T / 8) @ values
    assert attended.shape == (64,)
    cosine = mx.sum(attended * exact) / (mx.linalg.norm(attended) * mx.linalg.norm(exact))
    assert float(cosine) > 0.5


@pytest.mark.parametrize("method", ["turboquant_mse", "turboquant_prod"])
@pytest.mark.parametrize("width", [64, 80])
def test_a_list_for_a_model_runs_and_is_packed(tiny: Any, method: str, width: int) -> None:
    """Any head width; the model generates with the list, and a fresh one is empty."""
    model = tiny.llama(layers=2, width=width)
    builder = KVCacheBuilder().with_method(method).with_bit_width(inlier=4).with_seed(3)
    caches = KVCacheBuilder.for_model(model, builder)
    assert {type(cache).__name__ for cache in caches} == {"PackedKVCache"}
    assert len(tiny.generate(model, caches, 40, 5)) == 5
    plain = KVCacheBuilder.for_model(model, KVCacheConfig(method="fp16"))
    tiny.generate(model, plain, 40, 5)
    assert held_bytes(caches) < held_bytes(plain) / 4
    assert [cache.offset for cache in KVCacheBuilder.for_model(model, builder)] == [0, 0]


def test_looking_at_a_model_computes_nothing(tiny: Any) -> None:
    """Rehearsing packed caches leaves no array behind; the rotations are the process's and are made before."""
    model = tiny.llama(layers=2)
    config = KVCacheConfig(method="turboquant_prod", params={"bits": 3})
    KVCacheBuilder.for_model(model, config)
    gc.collect()
    before = mx.get_active_memory()
    caches = KVCacheBuilder.for_model(model, config)
    assert mx.get_active_memory() == before
    assert held_bytes(caches) == 0


def test_a_variants_own_bits_are_that_variant() -> None:
    """So that its prior and its records are those of what is built."""
    config = KVCacheBuilder().with_method("turboquant_mse").with_bit_width(inlier=4).config()
    assert config.params == {"bits": 4}
    config = KVCacheBuilder().with_method("turboquant_mse").with_bit_width(4, 6).with_outlier_channels(8).config()
    assert config.params == {"bits": 4, "outlier_bits": 6, "outlier_channels": 8, "seed": 0, "unbiased": False}
    assert KVCacheConfig.from_toml(config.to_toml()) == config


def test_the_method_itself_judges_combinations(tiny: Any) -> None:
    """A sketch is no part of algorithm 1; outlier bits without channels, or more channels than there are, no set."""
    with pytest.raises(InvalidParams, match="turboquant_mse has no parameter 'jl_dim'") as caught:
        KVCacheBuilder().with_method("turboquant_mse").with_jl_dim(64)
    assert caught.value.hint == "it has: bits, value_bits, unbiased, outlier_bits, outlier_channels, seed"
    for builder in (
        KVCacheBuilder().with_method("turboquant_mse").with_bit_width(2, 4),
        KVCacheBuilder().with_method("turboquant_mse").with_bit_width(2, 4).with_outlier_channels(64),
    ):
        with pytest.raises(MethodRefused, match="outlier"):
            builder.with_head_dim(64).build()
        with pytest.raises(MethodRefused, match=r"layer 0: .*outlier"):
            KVCacheBuilder.for_model(tiny.llama(layers=1), builder.config())
