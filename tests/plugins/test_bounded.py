"""The methods that drop tokens: planned bytes are held bytes, refusals come before any token, papers' arithmetic."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from veloxquant_plugins.h2o import HeavyHitters
from veloxquant_plugins.knorm import KeyNorm
from veloxquant_plugins.pyramidkv import PyramidKV, pyramid
from veloxquant_plugins.snapkv import SnapKV
from veloxquant_plugins.streaming import Streaming

from veloxquant.caches import eviction
from veloxquant.caches.evicting import EvictingKVCache
from veloxquant.caches.held import held_bytes
from veloxquant.errors import InvalidParams
from veloxquant.methods import LayerSpec, Variant
from veloxquant.methods.checks import check_figures, check_parameters, check_variants, sample_part
from veloxquant.methods.parameters import variant_for
from veloxquant.methods.per_layer import for_layer, layer_params
from veloxquant.methods.worker import declared_bytes

if TYPE_CHECKING:
    from veloxquant.methods.bounded import BoundedMethod

METHODS: dict[str, BoundedMethod] = {
    method.name: method for method in (Streaming(), SnapKV(), HeavyHitters(), KeyNorm(), PyramidKV())
}
ALL = pytest.mark.parametrize("name", METHODS)
BUDGETS = (64, 128, 256, 512, 1024, 2048)


def attended(cache: Any, count: int, width: int = 64, heads: int = 2, dtype: Any = mx.float32) -> None:
    """One call of so many tokens."""
    keys = mx.random.normal((1, heads, count, width), key=mx.random.key(count)).astype(dtype)
    queries = mx.random.normal((1, 2 * heads, count, width), key=mx.random.key(1)).astype(dtype)
    ours = cache.update_and_fetch(keys, keys)
    mx.eval(ours[0].attend(queries, ours[1], 0.1, "causal"), cache.state)


@ALL
def test_a_method_says_what_planning_asks(name: str) -> None:
    """Three variants, parameters and figures of the right types, an idea, what it keeps, a paper; it drops tokens."""
    method = METHODS[name]
    variants = check_variants(method)
    assert len(variants) <= 3
    assert check_parameters(method)
    check_figures(method, variants)
    assert method.drops_tokens
    assert method.batchable
    assert not method.trimmable
    assert all((method.idea, method.keeps, method.paper, method.summary))


@ALL
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_declared_bytes_are_held_bytes_after_any_calls(name: str, bits: int) -> None:
    """Budget 100, in float32 and bfloat16: 1, 63, 64, 65, 163, 164, 200 and 700 tokens, in one call or two."""
    method = METHODS[name]
    variant = variant_for(method, {"budget": 100, "bits": bits})
    for itemsize, dtype in ((4, mx.float32), (2, mx.bfloat16)):
        part = sample_part(64, itemsize, heads=2)
        assert method.refuses(variant, part) is None
        for count in (1, 63, 64, 65, 163, 164, 200, 700):
            for calls in ([count], [count // 2, count - count // 2]):
                cache = method.build(LayerSpec(index=0, part=part), variant)
                for call in filter(None, calls):
                    attended(cache, call, dtype=dtype)
                assert held_bytes(cache) == declared_bytes(method, variant, part, [(count, 1)])


@ALL
def test_bytes_by_hand(name: str) -> None:
    """Width 128 in a 16-bit model, 8 heads, budget 1,024 at 8 bits: 1,088 slots at any length from 1,025 on."""
    method = METHODS[name]
    variant = variant_for(method, {"budget": 1024, "bits": 8})
    part = sample_part(128, 2)
    marks = 4 if name in ("streaming", "knorm") else 8
    row = 2 * (128 + 2 * 2 * 2) + marks  # codes, two groups of scale and bias in 16 bits; a position, a sum
    for tokens, slots in ((1, 64), (64, 64), (1024, 1024), (1025, 1088), (100_000, 1088)):
        assert declared_bytes(method, variant, part, [(tokens, 1)]) == slots * 8 * row


@ALL
def test_the_temporary_bytes_are_no_more_than_planned(name: str) -> None:
    """A prefill of 1,000 tokens and a decode step with an eviction, 16 query heads over 8, float32, 16 and 8 bits."""
    method = METHODS[name]
    part = sample_part(64, 4, query_heads=16)
    for bits in (16, 8):
        variant = variant_for(method, {"budget": 256, "bits": bits})
        cache = method.build(LayerSpec(index=0, part=part), variant)
        for count, seen in ((1000, 1000), (23, 1023), (1, 1024)):
            new, queries = mx.random.normal((1, 8, count, 64)), mx.random.normal((1, 16, count, 64))
            mx.eval(new, queries, cache.state)
            before = mx.get_active_memory() - cache.nbytes
            mx.reset_peak_memory()
            ours = cache.update_and_fetch(new, new)
            out = ours[0].attend(queries, ours[1], 0.1, "causal")
            mx.eval(out, cache.state)
            taken = mx.get_peak_memory() - before - out.nbytes - cache.nbytes
            slots = method.slots(variant, part, seen)
            assert slots is not None
            assert taken <= method.workspace_bytes(variant, part, count, slots)


@ALL
def test_packed_groups_must_divide_the_width(name: str) -> None:
    """96 takes groups of 32 by itself; 80 takes none, and is kept at 16 bits; a group that is set must fit."""
    method = METHODS[name]
    packed, plain = (variant_for(method, {"bits": bits}) for bits in (8, 16))
    assert method.refuses(packed, sample_part(96, 2)) is None
    assert method.key_bits(packed, sample_part(96, 2)) == pytest.approx(
        8 + 32 / 32 + (1 if name in ("streaming", "knorm") else 2) * 32 / 96
    )
    refusal = method.refuses(packed, sample_part(80, 2))
    assert refusal is not None
    assert refusal[0] == "width_not_divisible"
    assert method.refuses(plain, sample_part(80, 2)) is None
    wide = method.refuses(variant_for(method, {"bits": 8, "group": 128}), sample_part(64, 2))
    assert wide == ("width_not_divisible", "groups of 128 do not divide the key width 64")


@ALL
def test_what_cannot_be_is_refused_before_any_token(name: str) -> None:
    """A budget below what is always kept, values without a width, and parameters out of range: typed, with a reason."""
    method = METHODS[name]
    part = sample_part(64, 2)
    always = {
        "streaming": {"sinks": 20},
        "knorm": {"recent": 9},
        "h2o": {"recent": 11},
        "snapkv": {"window": 11},
        "pyramidkv": {"window": 11},
    }[name]
    tight = variant_for(method, {"budget": 10, **always})
    refusal = method.refuses(tight, part)
    assert refusal is not None
    assert refusal[0] == "not_supported_by_engine"
    with pytest.raises(InvalidParams):
        method.build(LayerSpec(index=0, part=part), tight)
    assert method.refuses(variant_for(method, {}), sample_part(0, 2)) is not None
    for wrong in ({"budget": 0}, {"bits": 3}, {"group": 48}, {"stride": 0}, {"later": 1}):
        with pytest.raises(InvalidParams):
            variant_for(method, wrong)


def test_windows_longer_than_a_stride_and_even_kernels_are_refused() -> None:
    """The window must lie between two evictions; a kernel has a middle."""
    for wrong in ({"window": 100}, {"kernel": 4}):
        refusal = METHODS["snapkv"].refuses(variant_for(METHODS["snapkv"], wrong), sample_part(64, 2))
        assert refusal is not None
        assert refusal[0] == "not_supported_by_engine"
    longer = variant_for(METHODS["snapkv"], {"window": 100, "stride": 128})
    assert METHODS["snapkv"].refuses(longer, sample_part(64, 2)) is None


@pytest.mark.parametrize(
    ("name", "params", "policy"),
    [
        ("streaming", {"sinks": 8}, eviction.Streaming(sinks=8)),
        ("knorm", {}, eviction.KeyNorm(sinks=4, recent=512)),
        ("knorm", {"budget": 100, "recent": 0, "sinks": 0}, eviction.KeyNorm(sinks=0, recent=0)),
        ("h2o", {"budget": 300}, eviction.HeavyHitters(recent=150)),
        ("snapkv", {"window": 16, "kernel": 5, "pooling": "avg"}, eviction.SnapKV(16, 5, "avg")),
        ("pyramidkv", {}, eviction.SnapKV(32, 7, "max")),
    ],
)
def test_parameters_reach_the_cache(name: str, params: dict[str, Any], policy: Any) -> None:
    """The policy, the budget and the stride of the cache that is built."""
    method = METHODS[name]
    variant = variant_for(method, {"stride": 40, **params})
    cache = method.build(LayerSpec(index=0, part=sample_part(64, 4)), variant)
    assert type(cache) is EvictingKVCache
    assert cache.policy == policy
    assert cache.rule == (params.get("budget", 1024), 40)


def test_pyramids_are_the_papers_arithmetic() -> None:
    """A mean of 992, beta 20, 32 layers: 49 in the last, 1,935 in the first, equal steps between, the mean kept."""
    rooms = pyramid(992, 32, 20)
    assert rooms[0] == 2 * 992 - 49
    assert rooms[-1] == 49
    steps = {above - below for above, below in pairwise(rooms)}
    assert max(steps) - min(steps) <= 1
    assert sum(rooms) == pytest.approx(32 * 992, abs=32)
    assert pyramid(992, 1, 20) == [992]
    assert pyramid(992, 0, 20) == []
    assert pyramid(992, 4, 1) == [992] * 4


def test_a_pyramids_layers_are_asked_and_built_with_their_own_budgets() -> None:
    """12 layers of a mean of 1,024: each layer holds its own bytes, all together those of 12 equal layers, nearly."""
    method = METHODS["pyramidkv"]
    variant = variant_for(method, {"bits": 8})
    part = sample_part(64, 4, heads=2)
    chosen = layer_params(method, variant, dict.fromkeys(range(12), part), None)
    budgets = [int(params["budget"]) for params in chosen]
    assert budgets == sorted(budgets, reverse=True)
    assert math.isclose(sum(budgets) / 12, 1024, rel_tol=0.001)
    for params in (chosen[0], chosen[-1]):
        own = for_layer(variant, params)
        cache = method.build(LayerSpec(index=0, part=part), own)
        attended(cache, 2300)
        assert cache.rule.budget == params["budget"]
        assert held_bytes(cache) == declared_bytes(method, own, part, [(2300, 1)])
    for name in ("streaming", "snapkv", "h2o", "knorm"):
        assert layer_params(METHODS[name], variant_for(METHODS[name], {}), {0: part}, None) == ()


def test_a_pyramid_too_narrow_for_its_window_is_refused_where_it_is() -> None:
    """A budget of 33 leaves one token beside the window: none in the last layer, which holds its window alone."""
    method = METHODS["pyramidkv"]
    variant = variant_for(method, {"budget": 33})
    part = sample_part(64, 4)
    chosen = layer_params(method, variant, dict.fromkeys(range(8), part), None)
    assert min(int(params["budget"]) for params in chosen) == 32
    assert all(method.refuses(for_layer(variant, params), part) is None for params in chosen)


@ALL
def test_priors_fall_with_the_budget_and_begin_with_nothing_lost(name: str) -> None:
    """Low, middle and upper end at 64 to 2,048, below what was measured too; 0.44 of the measured in the middle."""
    method = METHODS[name]
    for bits in (16, 8, 4):
        priors = [method.quality_prior(variant_for(method, {"budget": at, "bits": bits})) for at in BUDGETS]
        assert [prior.kl_mean for prior in priors] == sorted({prior.kl_mean for prior in priors}, reverse=True)
        for prior in priors:
            assert prior.low == 0
            assert prior.kl_mean < prior.high
            assert "SmolLM2" in prior.source
    eighth = method.quality_prior(variant_for(method, {"budget": 512}))
    assert (eighth.kl_mean, eighth.high) == pytest.approx((0.44 * method.measured.eighth[0], method.measured.eighth[0]))
    assert method.quality_prior(variant_for(method, {"budget": 1, "stride": 1})).high <= math.log(49152)


@ALL
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_what_is_lost_grows_with_the_text(name: str, bits: int) -> None:
    """At the budgets and the length that were measured it is what was measured; nothing at 16 bits up to the budget."""
    method = METHODS[name]
    at = (16, 8, 4).index(bits)
    for budget, measured in ((1024, method.measured.quarter[at]), (512, method.measured.eighth[at])):
        asked = variant_for(method, {"budget": budget, "bits": bits})
        assert method.quality_at(asked, 4096).high == pytest.approx(measured)
        within = method.quality_at(asked, budget)
        assert within.high == max(0.0, method.measured.quarter[at] - method.measured.quarter[0])
        assert bits < 16 or within.low == within.kl_mean == within.high == 0
        lengths = [budget * n // 4 for n in range(4, 4000, 7)]
        told = [method.quality_at(asked, tokens) for tokens in lengths]
        assert [one.kl_mean for one in told] == sorted(one.kl_mean for one in told)
        assert all(one.low <= one.kl_mean <= one.high for one in told)
        assert method.quality_at(asked, 131_072).kl_mean > 2 * within.kl_mean


def test_a_label_names_budget_and_bits() -> None:
    """Sixteen bits, the model's own, are not named."""
    labels = {variant.label for method in METHODS.values() for variant in method.variants()}
    assert {"streaming-1024", "streaming-1024-8bit", "h2o-2048-8bit", "pyramidkv-1024"} <= labels
    assert isinstance(METHODS["h2o"].variants()[0], Variant)
