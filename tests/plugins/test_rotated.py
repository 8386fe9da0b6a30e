"""Rotated keys and values: the planning half against the caches that the building half makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from method_kit import built, odd_llama, peak, rows, variant
from mlx_lm.models.cache import KVCache
from veloxquant_plugins import rotated
from veloxquant_plugins.affine import Affine
from veloxquant_plugins.rotated import Rotated, RotatedToken, veloxquant_methods

from veloxquant.caches import attention, hadamard, packed
from veloxquant.caches.held import held_bytes
from veloxquant.errors import VeloxError
from veloxquant.methods.checks import check_figures, check_parameters, check_returned, check_variants, sample_part
from veloxquant.methods.worker import declared_bytes

if TYPE_CHECKING:
    from veloxquant.methods import Method

TIERS, TOKEN = Rotated(), RotatedToken()
SETS: list[tuple[Method, dict[str, Any]]] = [
    *((method, dict(variant.params)) for method in (TIERS, TOKEN) for variant in method.variants()),
    (TIERS, {"key_bits": 8, "value_bits": 6, "group": 32, "recent": 32, "recent_bits": 8}),
    (TIERS, {"group": 128, "sinks": 0, "seed": 9, "recent_bits": 8}),
    (TIERS, {"recent": 0, "sinks": 17, "recent_bits": 16}),
    (TOKEN, {"key_bits": 3, "value_bits": 2, "group": 128}),
    (TOKEN, {"key_bits": 8, "value_bits": 8, "group": 32}),
]
WIDTHS = ((64, 64), (80, 80), (96, 112), (128, 40), (192, 128), (576, 64))


@pytest.mark.parametrize(("method", "params"), SETS)
@pytest.mark.parametrize(("itemsize", "dtype"), [(4, mx.float32), (2, mx.bfloat16)])
def test_declared_bytes_are_the_bytes_the_built_cache_holds(
    method: Method, params: dict[str, Any], itemsize: int, dtype: mx.Dtype
) -> None:
    """Whole widths and others, K and V alike and not: after 3, 300 and 603 tokens, in both formats."""
    for key_width, value_width in WIDTHS:
        part = msgspec.structs.replace(sample_part(key_width, itemsize, heads=2), value_width=value_width)
        assert method.refuses(variant(method, params), part) is None
        cache, runs = built(method, params, part), []
        for tokens in (3, 297, 303):
            cache.update_and_fetch(*rows(part, tokens, dtype))
            runs.append((tokens, 1))
            assert held_bytes(cache) == cache.nbytes == declared_bytes(method, variant(method, params), part, runs)


def test_bits_are_those_of_the_format() -> None:
    """16-bit scales, groups of 64: keys by channel 32 bits a group, values 16; at width 80 the words of 96."""
    four = variant(TIERS, {"key_bits": 4, "value_bits": 3})
    assert (TIERS.key_bits(four, sample_part(64, 2)), TIERS.value_bits(four, sample_part(64, 2))) == (4.5, 3.25)
    assert (TOKEN.key_bits(four, sample_part(64, 2)), TOKEN.value_bits(four, sample_part(64, 2))) == (4.25, 3.25)
    narrow = sample_part(80, 2)
    assert (TIERS.key_bits(four, narrow), TIERS.value_bits(four, narrow)) == (4.5, 3.5 * 96 / 80)


def test_figures_are_sound() -> None:
    """The checks that foreign plugins must pass hold for our own."""
    assert list(check_returned(veloxquant_methods())) != []
    for method in veloxquant_methods():
        check_parameters(method)
        check_figures(method, check_variants(method))
        assert (method.batchable, method.drops_tokens) == (True, False)
        assert method.idea
        assert method.keeps


def test_priors_rise_with_each_bit_taken_away() -> None:
    """For every pair that can be set."""
    for method in (TIERS, TOKEN):
        for fixed in (2, 3, 4, 5, 6, 8):
            for name, other in (("key_bits", "value_bits"), ("value_bits", "key_bits")):
                asked = [variant(method, {name: bits, other: fixed}) for bits in (8, 6, 5, 4, 3, 2)]
                priors = [method.quality_prior(one).kl_mean for one in asked]
                assert priors == sorted(priors)


@pytest.mark.parametrize(
    ("params", "widths", "code", "text"),
    [
        ({}, {"value_width": 0}, "not_supported_by_engine", "keeps no values of their own"),
        ({}, {"key_width": 0}, "not_supported_by_engine", "keeps no keys of their own"),
        ({}, {"key_width": 33}, "width_not_divisible", "the key width 33 is rotated neither at once nor in blocks"),
        ({}, {"value_width": 8200}, "width_not_divisible", "the value width 8200"),
        ({"recent": 65}, {}, "not_supported_by_engine", "65 recent tokens are no multiple of 32"),
    ],
)
def test_what_cannot_be_is_refused_and_not_built(
    params: dict[str, Any], widths: dict[str, int], code: str, text: str
) -> None:
    """By planning with a code and a sentence, by building with a typed error."""
    part = msgspec.structs.replace(sample_part(64, 2), **widths)
    refused = TIERS.refuses(variant(TIERS, params), part)
    assert refused is not None
    assert refused[0] == code
    assert text in refused[1]
    with pytest.raises(VeloxError):
        built(TIERS, params, part)


def test_planning_knows_which_widths_rotate() -> None:
    """As the rotation itself says, for every width up to 700 and some wide ones."""
    for width in (*range(1, 701), 2048, 2049, 7168, 8192, 8193, 8224):
        try:
            hadamard.block(width)
            rotates = True
        except VeloxError:
            rotates = False
        assert rotated._rotates(width) == rotates


@pytest.mark.parametrize(
    ("method", "params"), [(TIERS, {"key_bits": 8, "value_bits": 8}), (TOKEN, {"key_bits": 8, "value_bits": 8})]
)
@pytest.mark.parametrize("width", [48, 80])
def test_a_model_of_odd_widths_answers_nearly_as_with_its_own_cache(
    method: Method, params: dict[str, Any], width: int
) -> None:
    """A tiny llama at 8 bits: logits to 2 % of their size, after a prompt in chunks and steps."""
    model = odd_llama(width)
    part = sample_part(width, 4, heads=2)
    ours, theirs = [built(method, params, part) for _ in range(2)], [KVCache() for _ in range(2)]
    prompt = mx.random.randint(0, 50, (1, 200))
    for start, stop in ((0, 150), (150, 199), (199, 200)):
        answer, expected = (model(prompt[:, start:stop], cache=held) for held in (ours, theirs))
        assert float(mx.abs(answer - expected).max()) < 0.02 * float(mx.abs(expected).max())


def test_a_rotation_keeps_loud_channels_from_spoiling_the_others() -> None:
    """Values with one channel of 64 twenty times as loud: attention over 3 bits is nearer than over affine 4 bits."""
    part = sample_part(64, 4, heads=1)
    keys, values = rows(part, 500)
    values = values * mx.where(mx.arange(64) == 5, 20.0, 1.0)
    queries = mx.random.normal((1, 4, 1, 64))
    exact = mx.softmax(queries @ keys.swapaxes(-1, -2) / 8, axis=-1) @ values
    cache = built(TIERS, {"key_bits": 8, "value_bits": 3, "recent": 0, "sinks": 0}, part)
    held_keys, held_values = cache.update_and_fetch(keys, values)
    ours = held_keys.attend(queries, held_values, 1 / 8)
    flat = mx.dequantize(*mx.quantize(values, group_size=64, bits=4), group_size=64, bits=4)
    theirs = mx.softmax(queries @ keys.swapaxes(-1, -2) / 8, axis=-1) @ flat
    quiet = np.arange(64) != 5
    lost = [float(np.square(np.array(found - exact))[..., quiet].mean()) for found in (ours, theirs)]
    assert lost[0] < lost[1]


WORK = [
    (32, 8, 1, 8192, 128),
    (32, 8, 256, 1024, 128),
    (9, 3, 64, 2048, 64),
    (16, 1, 32, 1024, 256),
    (8, 8, 128, 700, 80),
    (48, 1, 1, 3000, 64),
]


@pytest.mark.parametrize(("heads", "groups", "queries", "slots", "width"), WORK)
def test_workspace_bounds_the_measured_peak(heads: int, groups: int, queries: int, slots: int, width: int) -> None:
    """MLX's own count of what attention and packing take beside what is held and the result."""
    part = sample_part(width, 4, groups, heads)
    asked, new = mx.random.normal((1, heads, queries, width)), rows(part, queries)
    for method, params in (SETS[1], SETS[4], SETS[5]):
        cache = built(method, params, part)
        cache.update_and_fetch(*rows(part, slots - queries))
        mx.eval(cache.state, asked, new)
        bound = method.workspace_bytes(variant(method, params), part, queries, slots)
        keys, values = cache.update_and_fetch(*new)
        out = keys.attend(asked, values, 0.1, "causal" if queries > 1 else None)
        assert peak([cache.state, out]) - out.nbytes <= bound


def test_sizes_are_those_of_the_caches() -> None:
    """The planning half cannot import them, and must not drift from them."""
    assert (packed.ENCODE_NUMBERS, attention.SLACK) == (rotated._ENCODE_NUMBERS, rotated._SLACK)


def test_a_standalone_cache_is_of_the_same_codecs() -> None:
    """What attention over the served cache gives, to 1e-5; the tiered method serves only, and says so."""
    params = {"key_bits": 4, "value_bits": 4}
    alone = TOKEN.build_standalone(80, variant(TOKEN, params))
    mx.random.seed(2)
    keys, values = rows(sample_part(80, 4, heads=1), 20)
    query = mx.random.normal((80,))
    for key, value in zip(keys[0, 0], values[0, 0], strict=True):
        alone.append(key, value)
    k, v = built(TOKEN, params, sample_part(80, 4, heads=1)).update_and_fetch(keys, values)
    expected = k.attend(query[None, None, None], v, 80**-0.5).flatten()
    assert float(mx.abs(alone.attend(query) - expected).max()) < 1e-5
    with pytest.raises(VeloxError):
        TIERS.build_standalone(64, variant(TIERS, {}))


def test_at_equal_bytes_the_prior_is_better_than_the_engines() -> None:
    """4.25 bits a number against mlx-lm's 4.5, both scaled from the same hard case."""
    affine = {one.label: one for one in Affine().variants()}
    engine = Affine().quality_prior(affine["affine4-g64"])
    for method in (TIERS, TOKEN):
        assert method.quality_prior(variant(method, {"key_bits": 5, "value_bits": 3})).high < engine.high
