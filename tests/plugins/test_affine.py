"""The affine method against mlx-lm's own quantized cache, array by array."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from method_kit import peak
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from veloxquant_plugins.affine import Affine, veloxquant_methods

from veloxquant.caches.held import held_bytes
from veloxquant.errors import MethodRefused
from veloxquant.methods import LayerSpec, Method, Variant
from veloxquant.methods.checks import check_figures, check_parameters, check_variants, sample_part
from veloxquant.methods.parameters import variant_for
from veloxquant.methods.worker import declared_bytes

WIDTHS = (32, 48, 64, 80, 96, 112, 128, 192, 256, 512, 576)
AFFINE = Affine()
VARIANTS = {variant.label: variant for variant in AFFINE.variants()}
FRONTIER = json.loads((Path(__file__).parents[1] / "data" / "quality_frontier.json").read_text())
PACKED = json.loads((Path(__file__).parents[2] / "bench/data/quality/smollm2-135m-4096.json").read_text())


def rows(count: int, width: int, heads: int = 2, dtype: Any = mx.float32) -> Any:
    """K or V of one sequence."""
    return mx.random.normal((1, heads, count, width), key=mx.random.key(count + width)).astype(dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("label", sorted(VARIANTS))
def test_every_width_that_the_group_divides_stores_what_mlx_lm_stores(label: str, width: int) -> None:
    """Words, scales and biases of mlx-lm's own cache of the same bits, K and V each; 3, 5 and 6 bits at any width too.

    The engine's comes from its float cache, since a fresh one fails at those (its buffers have another width).
    """
    variant, part = VARIANTS[label], sample_part(width, 4, heads=2)
    formats = formats_of(variant)
    legal = all(width % group == 0 for _, group in formats)
    assert (AFFINE.refuses(variant, part) is None) == legal
    if not legal:
        with pytest.raises(MethodRefused):
            AFFINE.build(LayerSpec(index=0, part=part), variant)
        return
    ours, floats = AFFINE.build(LayerSpec(index=0, part=part), variant), KVCache()
    keys, values = rows(5, width), rows(7, width)[:, :, :5]
    for start, end in ((0, 3), (3, 5)):
        for cache in (ours, floats):
            cache.update_and_fetch(keys[:, :, start:end], values[:, :, start:end])
    for at, (stored, (bits, group)) in enumerate(zip((ours.keys, ours.values), formats, strict=True)):
        theirs = (floats.to_quantized(group_size=group, bits=bits).keys, floats.to_quantized(group, bits).values)[at]
        for mine, own in zip(stored, theirs, strict=True):
            assert mx.array_equal(mine[..., :5, :], own[..., :5, :])


def formats_of(variant: Variant) -> list[tuple[int, int]]:
    """(bits, group) of keys and of values."""
    given = variant.params
    return [
        (int(given.get(f"{side}_bits", given.get("bits", 8))), int(given.get(f"{side}_group", given.get("group", 64))))
        for side in ("key", "value")
    ]


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("group", [32, 64])
def test_a_fresh_cache_of_mlx_lm_holds_and_answers_the_same(bits: int, group: int) -> None:
    """Where that class works: equal arrays, bytes and slots after 300 tokens and one more, and attention to 1e-5."""
    part = sample_part(64, 4, heads=2)
    ours, theirs = AFFINE.build(LayerSpec(index=0, part=part), VARIANTS[f"affine{bits}-g{group}"]), None
    theirs = QuantizedKVCache(group_size=group, bits=bits)
    keys, values = rows(301, 64), rows(302, 64)[:, :, :301]
    for start, end in ((0, 300), (300, 301)):
        chunk = slice(start, end)
        fetched = [cache.update_and_fetch(keys[:, :, chunk], values[:, :, chunk]) for cache in (ours, theirs)]
        queries = mx.random.normal((1, 4, end - start, 64), key=mx.random.key(end))
        mask = "causal" if end - start > 1 else None
        mine, own = (
            scaled_dot_product_attention(mx.array(queries), *both, cache=cache, scale=0.125, mask=mask)
            for both, cache in zip(fetched, (ours, theirs), strict=True)
        )
        assert float(mx.abs(mine - own).max()) < 1e-5
    assert ours.nbytes == theirs.nbytes == held_bytes(ours)
    for mine, own in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        assert mx.array_equal(mine, own)


@pytest.mark.parametrize("label", sorted(VARIANTS))
def test_declared_bytes_are_the_bytes_the_built_cache_holds(label: str) -> None:
    """300 tokens, then 300 more: 812 slots in the engine's rule, at width 64, in float32 and in bfloat16."""
    variant = VARIANTS[label]
    for itemsize, dtype in ((4, mx.float32), (2, mx.bfloat16)):
        part = sample_part(64, itemsize, heads=2)
        if AFFINE.refuses(variant, part):
            continue
        cache = AFFINE.build(LayerSpec(index=0, part=part), variant)
        zeros = mx.zeros((1, 2, 300, 64), dtype)
        cache.update_and_fetch(zeros, zeros)
        cache.update_and_fetch(zeros, zeros)
        assert cache.keys[0].shape[2] == 812
        assert held_bytes(cache) == declared_bytes(AFFINE, variant, part, [(300, 2)])


def test_bits_are_those_of_the_format() -> None:
    """With 16-bit scales: 4.5 bits at 4 bits in groups of 64, 8.5 at 8, 5 at 4 bits in groups of 32."""
    part = sample_part(128, 2)
    expected = {"affine4-g64": 4.5, "affine8-g64": 8.5, "affine4-g32": 5.0, "affine8-g128": 8.25, "affine2-g32": 3.0}
    assert {label: AFFINE.key_bits(VARIANTS[label], part) for label in expected} == expected
    assert {label: AFFINE.value_bits(VARIANTS[label], part) for label in expected} == expected


@pytest.mark.parametrize(("width", "accepted"), [(96, {32}), (80, set()), (112, set()), (128, {32, 64, 128})])
def test_groups_follow_the_head_width(width: int, accepted: set[int]) -> None:
    """Phi-3-mini's 96 takes 32 only; 80 and 112 take none, and say that the group does not divide."""
    part = sample_part(width, 2)
    answers = {group: AFFINE.refuses(VARIANTS[f"affine4-g{group}"], part) for group in (32, 64, 128)}
    assert {group for group, answer in answers.items() if answer is None} == accepted
    for group, answer in answers.items():
        assert answer in (
            None,
            ("width_not_divisible", f"groups of {group} do not divide the key width {width}"),
        )


def test_value_widths_are_checked_too() -> None:
    """Keys of 128 with values of 96, and a latent whose value slot is empty."""
    variant = VARIANTS["affine4-g64"]
    part = sample_part(128, 2)
    uneven = AFFINE.refuses(variant, msgspec.structs.replace(part, value_width=96))
    assert uneven == ("width_not_divisible", "groups of 64 do not divide the value width 96")
    empty = AFFINE.refuses(variant, msgspec.structs.replace(part, value_width=0))
    assert empty is not None
    assert empty[0] == "not_supported_by_engine"


def test_build_refuses_what_refuses_refuses() -> None:
    """A plan that slipped through still fails before a token."""
    with pytest.raises(MethodRefused):
        AFFINE.build(LayerSpec(index=0, part=sample_part(96, 2)), VARIANTS["affine4-g64"])


def test_all_variants_have_sound_figures() -> None:
    """The checks that foreign plugins must pass hold for our own: 18 of equal bits and 4 of unlike ones."""
    variants = check_variants(AFFINE)
    assert len(variants) == 18 + 4
    check_figures(AFFINE, variants)


def test_priors_hold_the_measured_small_model_as_upper_end() -> None:
    """For groups of 32 and 64 the KL of mlx-lm's own caches on SmolLM2-135M lies in the range, at its upper end."""
    measured = {row["label"]: row["kl_mean"] for row in PACKED["rows"]}
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64):
            prior = AFFINE.quality_prior(VARIANTS[f"affine{bits}-g{group}"])
            seen = measured[f"mlx-lm {bits} bit g{group}"]
            assert prior.kl_mean < seen <= 1.01 * prior.high


def test_priors_are_the_published_figures_where_there_are_any() -> None:
    """Llama-3.2-3B: 0.051 at 4 bits and 0.0002 at 8, groups of 64; Llama-3.2-1B's 0.148 and 0.0004 lie in the range."""
    four, eight = (AFFINE.quality_prior(VARIANTS[f"affine{bits}-g64"]) for bits in (4, 8))
    assert (four.kl_mean, eight.kl_mean) == (0.051, 0.0002)
    assert four.high >= 0.148
    assert eight.high >= 0.0004


def test_priors_fall_with_bits_and_rise_with_the_group() -> None:
    """More bits are never worse, and a wider group never better; the unmeasured group of 128 has a wider range."""
    for group in (32, 64, 128):
        means = [AFFINE.quality_prior(VARIANTS[f"affine{bits}-g{group}"]).kl_mean for bits in (8, 6, 5, 4, 3, 2)]
        assert means == sorted(means)
    for bits in (8, 6, 5, 4, 3, 2):
        narrow, middle, wide = (AFFINE.quality_prior(VARIANTS[f"affine{bits}-g{group}"]) for group in (32, 64, 128))
        assert narrow.kl_mean <= middle.kl_mean <= wide.kl_mean
        assert wide.high / wide.low > middle.high / middle.low
        assert "not measured" in wide.source


PAIRS = ("affine-k6v4-g64", "affine-k5v4-g64", "affine-k5v3-g64", "affine-k4v3-g64")


@pytest.mark.parametrize("label", PAIRS)
def test_unlike_bits_are_offered_where_they_beat_equal_ones_of_the_same_bytes(label: str) -> None:
    """Half the KL or little more, by the simulated figures; the prior's upper end holds its own, and says how known."""
    measured = {row["m"]: row for row in FRONTIER["rows"]}
    variant, part = VARIANTS[label], sample_part(128, 2)
    seen = measured[f"affK{label[8]}V{label[10]}g64"]
    stored = (AFFINE.key_bits(variant, part) + AFFINE.value_bits(variant, part)) / 2
    assert stored == seen["bits"]
    alike = [row for name, row in measured.items() if name.startswith("affine") and row["bits"] <= stored]
    assert seen["kl"] <= 0.51 * min(row["kl"] for row in alike)
    prior = AFFINE.quality_prior(variant)
    assert prior.low < prior.kl_mean < seen["kl"] <= prior.high
    packed = any(row["label"] == label for row in PACKED["rows"])
    assert "really packed (bench/quality.py" in prior.source
    assert ("simulated" in prior.source) is not packed


def test_priors_of_any_unlike_bits_are_those_of_keys_and_values_together() -> None:
    """The upper end is above every simulated pair, by at most 60%; equal bits are as ever."""
    pairs = [row for row in FRONTIER["rows"] if row["m"].startswith("affK")]
    assert len(pairs) == 9
    for row in pairs:
        bits = {"key_bits": int(row["m"][4]), "value_bits": int(row["m"][6])}
        prior = AFFINE.quality_prior(variant_for(AFFINE, bits))
        assert prior.low < prior.kl_mean < row["kl"] <= prior.high <= 1.6 * row["kl"]
    same = AFFINE.quality_prior(variant_for(AFFINE, {"key_bits": 4, "value_bits": 4}))
    assert same == AFFINE.quality_prior(VARIANTS["affine4-g64"])
    mixed = AFFINE.quality_prior(variant_for(AFFINE, {"bits": 4, "key_group": 32, "value_group": 128}))
    low, high = (AFFINE.quality_prior(VARIANTS[f"affine4-g{group}"]).kl_mean for group in (32, 128))
    assert low < mixed.kl_mean < high


WORK = [
    (32, 8, 1, 4000, 128),
    (8, 8, 1, 3000, 64),
    (32, 8, 64, 1500, 128),
    (4, 2, 200, 1000, 64),
    (16, 1, 300, 600, 256),
    (48, 1, 1, 3000, 64),
]


@pytest.mark.parametrize("work", WORK, ids=str)
@pytest.mark.parametrize("label", ["affine8-g32", "affine-k5v3-g64"])
def test_workspace_bounds_the_measured_peak(label: str, work: tuple[int, ...]) -> None:
    """MLX's own count of what attention and packing take beside what is held and the result."""
    heads, groups, queries, slots, width = work
    part = sample_part(width, 4, groups, heads)
    cache = AFFINE.build(LayerSpec(index=0, part=part), VARIANTS[label])
    cache.update_and_fetch(rows(slots - queries, width, groups), rows(slots - queries, width, groups))
    asked, new = rows(queries, width, heads), rows(queries, width, groups)
    mx.eval(cache.state, asked, new)
    bound = AFFINE.workspace_bytes(VARIANTS[label], part, queries, slots)
    cache.trim(queries)  # so that no growth is counted, which is the planner's matter
    keys, values = cache.update_and_fetch(new, new)
    packing = peak(cache.state)
    keys, values = cache.keys_and_values()
    out = keys.attend(asked, values, 0.1, "causal" if queries > 1 else None)
    attending = peak([out]) - out.nbytes
    assert max(packing, attending) <= bound


def test_temporary_arrays_are_bounded_at_any_length() -> None:
    """32 KV heads of width 256, chunks of 8,192 over a million tokens: some hundred MiB where scores would be TiB."""
    four = VARIANTS["affine4-g64"]
    most = AFFINE.workspace_bytes(four, sample_part(256, 2, heads=32), 8192, 2**20)
    assert most < 256 * 2**20
    step = [AFFINE.workspace_bytes(four, sample_part(128, 2), 1, slots) for slots in (2**14, 2**20)]
    assert step[0] <= step[1] < 1024 * 2**20


def test_engine_settings_pack_from_the_first_token() -> None:
    """mlx-lm's flags by its own names; its default start of 5000 tokens would leave short prompts unpacked."""
    settings = AFFINE.engine_settings(VARIANTS["affine8-g32"])
    assert settings == {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}


def test_the_engines_flags_say_nothing_of_unlike_bits() -> None:
    """mlx-lm has one pair of bits and group for K and V; written apart and equal, they are that pair."""
    assert all(AFFINE.engine_settings(VARIANTS[label]) is None for label in PAIRS)
    equal = variant_for(AFFINE, {"key_bits": 4, "value_bits": 4, "key_group": 32, "value_group": 32})
    assert AFFINE.engine_settings(equal) == AFFINE.engine_settings(VARIANTS["affine4-g32"])


def test_everything_that_can_be_set_is_a_variant() -> None:
    """So that whatever a user builds has a prior; nothing set is mlx-lm's own default, 8 bits in groups of 64."""
    bits, group, *_ = check_parameters(AFFINE)
    for pair in itertools.product(bits.choices, group.choices):
        made = variant_for(AFFINE, dict(zip(("bits", "group"), pair, strict=True)))
        assert VARIANTS[made.label] == made
    default = QuantizedKVCache()
    assert variant_for(AFFINE, {}).params == {"bits": default.bits, "group": default.group_size}
    assert variant_for(AFFINE, {"key_bits": 6, "value_bits": 4}).label == "affine-k6v4-g64"


@pytest.mark.parametrize(("bits", "group", "width"), [(4, 64, 64), (8, 32, 64), (2, 32, 96), (5, 32, 96), (3, 64, 192)])
def test_the_standalone_cache_attends_over_what_mx_quantize_keeps(bits: int, group: int, width: int) -> None:
    """Plain attention over the dequantized rows, at widths too where the engine's own cache cannot start (5 bits, 96).

    Bytes: 256 slots of K and of V, each width x bits / 8 + a float32 scale and bias a group.
    """
    mx.random.seed(3)
    keys, values = mx.random.normal((20, width)), mx.random.normal((20, width))
    query = mx.random.normal((width,))
    cache = AFFINE.build_standalone(width, VARIANTS[f"affine{bits}-g{group}"])
    for key, value in zip(keys, values, strict=True):
        cache.append(key, value)
    k, v = (mx.dequantize(*mx.quantize(x, group, bits), group_size=group, bits=bits) for x in (keys, values))
    expected = mx.softmax(query @ k.T / math.sqrt(width)) @ v
    assert mx.allclose(cache.attend(query), expected, atol=1e-5)
    assert cache.memory_bytes() == held_bytes(cache) == 2 * 256 * (width * bits // 8 + 2 * 4 * width // group)
    assert len(cache) == 20


def test_a_standalone_width_that_groups_do_not_divide_is_refused() -> None:
    """With the group that would do."""
    with pytest.raises(MethodRefused, match="groups of 64 do not divide the width 96") as caught:
        AFFINE.build_standalone(96, VARIANTS["affine4-g64"])
    assert "32" in caught.value.hint


def test_the_hook_returns_the_one_method() -> None:
    """Its caches merge into batches that stay packed, which mlx-lm's own class does not."""
    (method,) = veloxquant_methods()
    assert isinstance(method, Method)
    assert (method.name, method.batchable, method.fused_attention) == ("affine", True, True)
    assert hasattr(method.build(LayerSpec(index=0, part=sample_part(64, 2)), VARIANTS["affine4-g64"]), "merge")
    assert not hasattr(QuantizedKVCache, "merge")
