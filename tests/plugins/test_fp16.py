"""The method that leaves the engine alone."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from veloxquant_plugins.fp16 import EngineOwn

from veloxquant.caches.held import held_bytes
from veloxquant.errors import MethodRefused
from veloxquant.methods import LayerSpec
from veloxquant.methods.checks import check_figures, check_parameters, check_variants, sample_part
from veloxquant.methods.worker import declared_bytes

FP16 = EngineOwn()
(VARIANT,) = FP16.variants()


@pytest.mark.parametrize(("itemsize", "dtype"), [(2, mx.bfloat16), (4, mx.float32)])
def test_declared_bytes_are_those_of_the_engines_own_cache(itemsize: int, dtype: mx.Dtype) -> None:
    """Width 80, where nothing can be packed: 300 then 300 tokens take 812 slots."""
    cache = KVCache()
    rows = mx.zeros((1, 2, 300, 80), dtype)
    cache.update_and_fetch(rows, rows)
    cache.update_and_fetch(rows, rows)
    assert held_bytes(cache) == declared_bytes(FP16, VARIANT, sample_part(80, itemsize, heads=2), [(300, 2)])


def test_it_refuses_no_layer_and_costs_no_quality() -> None:
    """It is the reference that every other figure is measured against."""
    check_figures(FP16, check_variants(FP16))
    assert FP16.refuses(VARIANT, sample_part(80, 2)) is None
    prior = FP16.quality_prior(VARIANT)
    assert (prior.low, prior.kl_mean, prior.high) == (0.0, 0.0, 0.0)


def test_it_builds_nothing() -> None:
    """A plan that chooses it packs no layer; asked all the same, it refuses."""
    with pytest.raises(MethodRefused):
        FP16.build(LayerSpec(index=0, part=sample_part(64, 2)), VARIANT)


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_the_standalone_cache_attends_over_what_was_given(dtype: mx.Dtype) -> None:
    """Plain attention, at a width that nothing can pack; 256 slots of K and of V in the format that was given."""
    mx.random.seed(3)
    keys, values = (mx.random.normal((20, 80)).astype(dtype) for _ in range(2))
    query = mx.random.normal((80,))
    cache = FP16.build_standalone(80, VARIANT)
    cache.append(keys, values)
    expected = mx.softmax(query @ keys.astype(mx.float32).T / math.sqrt(80)) @ values.astype(mx.float32)
    assert mx.allclose(cache.attend(query), expected, atol=1e-5)
    assert cache.memory_bytes() == 2 * 256 * 80 * dtype.size


def test_there_is_nothing_to_set() -> None:
    """The engine's own cache has one form."""
    assert check_parameters(FP16) == ()
