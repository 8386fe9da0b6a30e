"""The affine method against mlx-lm's own quantized cache, cell by cell."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.models.cache import QuantizedKVCache
from veloxquant_plugins.affine import Affine, veloxquant_methods

from veloxquant.caches.held import held_bytes
from veloxquant.errors import MethodRefused
from veloxquant.methods import LayerSpec, Method
from veloxquant.methods.checks import check_figures, check_parameters, check_variants, sample_part
from veloxquant.methods.parameters import variant_for
from veloxquant.methods.worker import declared_bytes

WIDTHS = (32, 48, 64, 80, 96, 112, 128, 192, 256, 512, 576)
AFFINE = Affine()
VARIANTS = {variant.label: variant for variant in AFFINE.variants()}
FRONTIER = json.loads((Path(__file__).parents[1] / "data" / "quality_frontier.json").read_text())


def engine_runs(bits: int, group: int, width: int) -> bool:
    """Whether a fresh cache of mlx-lm takes a write, then another, and gives back what was written, roughly."""
    cache = QuantizedKVCache(group_size=group, bits=bits)
    rows = mx.linspace(-1, 1, width)[None, None, None]
    try:
        cache.update_and_fetch(mx.repeat(rows, 3, axis=2), mx.repeat(rows, 3, axis=2))
        keys, _ = cache.update_and_fetch(rows, rows)
        back = mx.dequantize(*keys, group_size=group, bits=bits)
        mx.eval(back)
    except ValueError:
        return False
    step = 2 / (2**bits - 1)
    return back.shape == (1, 1, 4, width) and float(mx.abs(back - rows).max()) <= step


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("label", sorted(VARIANTS))
def test_refuses_exactly_what_a_fresh_engine_cache_refuses(label: str, width: int) -> None:
    """Every pair of bits and group at every width: offered where a real write works, refused where it raises."""
    variant = VARIANTS[label]
    bits, group = int(variant.params["bits"]), int(variant.params["group"])
    assert (AFFINE.refuses(variant, sample_part(width, 4)) is None) == engine_runs(bits, group, width)


@pytest.mark.parametrize("label", sorted(VARIANTS))
def test_declared_bytes_are_the_bytes_the_built_cache_holds(label: str) -> None:
    """300 tokens, then 300 more: 812 slots in the engine's rule, at width 64, in float32 and in bfloat16."""
    variant = VARIANTS[label]
    for itemsize, dtype in ((4, mx.float32), (2, mx.bfloat16)):
        part = sample_part(64, itemsize, heads=2)
        if AFFINE.refuses(variant, part):
            continue
        cache = AFFINE.build(LayerSpec(index=0, part=part), variant)
        rows = mx.zeros((1, 2, 300, 64), dtype)
        cache.update_and_fetch(rows, rows)
        cache.update_and_fetch(rows, rows)
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


def test_all_eighteen_variants_have_sound_figures() -> None:
    """The checks that foreign plugins must pass hold for our own."""
    variants = check_variants(AFFINE)
    assert len(variants) == 18
    check_figures(AFFINE, variants)


def test_priors_hold_the_measured_small_model_as_upper_end() -> None:
    """For groups of 32 and 64 the measured KL of SmolLM2-135M lies in the range, at or near its upper end."""
    measured = {row["m"]: row["kl"] for row in FRONTIER["rows"]}
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64):
            prior = AFFINE.quality_prior(VARIANTS[f"affine{bits}-g{group}"])
            assert prior.kl_mean < measured[f"affine{bits}g{group}"] <= prior.high


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


def test_engine_settings_pack_from_the_first_token() -> None:
    """mlx-lm's flags by its own names; its default start of 5000 tokens would leave short prompts unpacked."""
    settings = AFFINE.engine_settings(VARIANTS["affine8-g32"])
    assert settings == {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}


def test_everything_that_can_be_set_is_a_variant() -> None:
    """So that whatever a user builds has a prior; nothing set is mlx-lm's own default, 8 bits in groups of 64."""
    bits, group = check_parameters(AFFINE)
    for pair in itertools.product(bits.choices, group.choices):
        made = variant_for(AFFINE, dict(zip(("bits", "group"), pair, strict=True)))
        assert VARIANTS[made.label] == made
    default = QuantizedKVCache()
    assert variant_for(AFFINE, {}).params == {"bits": default.bits, "group": default.group_size}


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
    """And the engine has no batch twin for it, so that it must not claim to batch."""
    (method,) = veloxquant_methods()
    assert isinstance(method, Method)
    assert (method.name, method.batchable, method.fused_attention) == ("affine", False, False)
    assert not hasattr(QuantizedKVCache, "merge")
