"""Adaptive's planning half against the caches that its building half makes, and its dealing out by a calibration."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from veloxquant_plugins import adaptive
from veloxquant_plugins.adaptive import Adaptive, veloxquant_methods

from veloxquant.caches.channel_classes import written
from veloxquant.caches.held import held_bytes
from veloxquant.errors import MethodRefused
from veloxquant.methods import Calibration, LayerPlace, LayerSensitivity, LayerSpec, Variant
from veloxquant.methods.checks import check_figures, check_parameters, check_returned, check_variants, sample_part
from veloxquant.methods.per_layer import check_layer_params, for_layer
from veloxquant.methods.worker import declared_bytes

METHOD = Adaptive()
BITS = (2, 3, 4, 5, 6, 8)
HEADS = 2
COUNTS = {part: 4 if part % 4 == 0 else 2 for part in (64, 90, 96, 128, 192, 256)}


def variant(**params: Any) -> Variant:
    """A variant with these parameters."""
    return Variant(method="adaptive", label="asked", params=params)


def part_of(key_width: int = 64, value_width: int = 64, itemsize: int = 2, heads: int = HEADS) -> Any:
    """A plain growing part."""
    return msgspec.structs.replace(sample_part(key_width, itemsize, heads=heads), value_width=value_width)


def sensitive(index: int, part: Any, scale: float = 1.0) -> LayerSensitivity:
    """A fourfold fall a bit; earlier classes and heads cost more."""

    def rows(count: int) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(scale * 4.0**-bits / (1 + 3 * at) for bits in BITS) for at in range(count))

    rng = np.random.default_rng(index)
    order = tuple(tuple(map(int, rng.permutation(part.key_width))) for _ in range(part.heads))
    classes = rows(COUNTS[part.key_width])
    return LayerSensitivity(
        index=index, key=rows(part.heads), value=rows(part.heads), key_order=order, key_classes=classes
    )


def calibration(parts: dict[int, Any], scales: dict[int, float] | None = None, **changes: Any) -> Calibration:
    """Of these layers."""
    layers = tuple(sensitive(index, part, (scales or {}).get(index, 1.0)) for index, part in sorted(parts.items()))
    given = {"config_hash": "0", "tokens": 512, "text": "a test", "bits": BITS, "layers": layers} | changes
    return Calibration(model_id="org/model", architecture="llama", **given)


def places(parts: dict[int, Any]) -> list[LayerPlace]:
    """The packed layers."""
    return [
        LayerPlace(index=index, order=order, count=len(parts), part=part)
        for order, (index, part) in enumerate(sorted(parts.items()))
    ]


def dealt(asked: Variant, parts: dict[int, Any], known: Calibration | None = None) -> list[Variant]:
    """Each layer's variant, checked as the registry checks it."""
    where = places(parts)
    answer = METHOD.layer_params(asked, where, known or calibration(parts))
    told = check_layer_params(METHOD, asked, where, answer)
    assert told is not None
    return [for_layer(asked, own) for own in told]


@pytest.mark.parametrize(
    "params",
    [
        {"bits": 4.0},
        {"bits": 4.25, "group": 32, "recent": 32, "sinks": 0, "recent_bits": 8},
        {"group": 128, "recent": 128},
    ],
    ids=str,
)
@pytest.mark.parametrize(("itemsize", "dtype"), [(4, mx.float32), (2, mx.bfloat16)])
def test_declared_bytes_are_the_bytes_the_built_cache_holds(
    params: dict[str, Any], itemsize: int, dtype: mx.Dtype
) -> None:
    """K and V of equal widths and others, those that groups do not divide included, around a group's boundary."""
    for key_width, value_width in ((64, 64), (96, 128), (128, 80), (90, 64)):
        part = part_of(key_width, value_width, itemsize)
        (own,) = dealt(variant(**params), {0: part})
        assert METHOD.refuses(own, part) is None
        kept = int(params.get("sinks", 4)) + int(params.get("recent", 128)) + int(params.get("group", 64))
        for runs in ([(1, 1)], [(kept - 1, 1)], [(kept, 1), (1, 2)], [(kept + 200, 2), (1, 3)]):
            cache = METHOD.build(LayerSpec(index=0, part=part), own)
            for tokens in itertools.chain.from_iterable([tokens] * times for tokens, times in runs):
                pair = [mx.random.normal((1, HEADS, tokens, width)).astype(dtype) for width in (key_width, value_width)]
                cache.update_and_fetch(*pair)
            assert held_bytes(cache) == cache.nbytes == declared_bytes(METHOD, own, part, runs)


@pytest.mark.parametrize("budget", [2.5, 2.75, 3.0, 3.5, 4.0, 5.5, 9.0])
def test_what_all_layers_store_is_within_the_budget(budget: float) -> None:
    """Mean stored bits a packed number, in layers of unlike widths and heads; and less than one step is left over."""
    parts = {1: part_of(64, 64), 4: part_of(128, 80), 7: part_of(192, 128, heads=4)}
    own = dealt(variant(bits=budget), parts)
    numbers = stored = largest = 0.0
    for one, part in zip(own, parts.values(), strict=True):
        assert METHOD.refuses(one, part) is None
        numbers += part.heads * (part.key_width + part.value_width)
        stored += part.heads * METHOD.key_bits(one, part) * part.key_width
        stored += part.heads * METHOD.value_bits(one, part) * part.value_width
        largest = max(largest, 2 * part.heads * part.key_width / 4, 2.4 * part.value_width)
    assert stored <= budget * numbers * (1 + 1e-9)
    assert budget == 9.0 or stored > budget * numbers - largest


def test_what_costs_more_gets_more() -> None:
    """The first layer minds ten thousand times as much; in each layer the first class and the first head mind most."""
    parts = {0: part_of(), 1: part_of()}
    first, second = dealt(variant(bits=4.0), parts, calibration(parts, {0: 1.0, 1: 1e-4}))
    for side in ("keys", "values"):
        loud, quiet = ([int(bits) for bits in str(one.params[side]).split(",")] for one in (first, second))
        assert sum(loud) > sum(quiet)
        assert loud == sorted(loud, reverse=True)


def test_the_order_is_written_as_the_codec_reads_it() -> None:
    """Without numpy here, with it there: the same text."""
    for width, heads in ((64, 3), (90, 1), (256, 2)):
        part = part_of(width, 64, heads=heads)
        (own,) = dealt(variant(), {0: part})
        assert own.params["order"] == written(sensitive(0, part).key_order, COUNTS[width])


def test_a_model_without_a_calibration_is_refused_with_the_command() -> None:
    """By layer_params, and by a build without bits."""
    with pytest.raises(MethodRefused) as told:
        METHOD.layer_params(variant(), places({0: part_of()}), None)
    assert "veloxquantctl sensitivity MODEL" in told.value.hint
    assert told.value.field == "calibration"
    with pytest.raises(MethodRefused, match="no bits for its channels"):
        METHOD.build(LayerSpec(index=3, part=part_of()), variant())


def _without(**fields: Any) -> Any:
    return lambda known: msgspec.structs.replace(
        known, layers=tuple(msgspec.structs.replace(layer, **fields) for layer in known.layers)
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda known: msgspec.structs.replace(known, layers=()), "no figures for layer 0"),
        (_without(key_order=()), "no figures for layer 0"),
        (_without(key_classes=()), "no figures for layer 0"),
        (_without(value=((1.0,) * 6,)), "no figures for layer 0 with 2 KV heads"),
        (_without(key_order=(tuple(range(32)),) * 2), "is not one of key width 64"),
        (_without(key_classes=((1.0,) * 6,) * 3), "is not one of key width 64"),
        (_without(key_classes=((1.0,) * 6,) * 8), "is not one of key width 64"),
    ],
)
def test_a_calibration_of_another_shape_is_none(change: Any, why: str) -> None:
    """Other layers, heads or widths, or one without an order of channels."""
    with pytest.raises(MethodRefused, match=why) as told:
        METHOD.layer_params(variant(), places({0: part_of()}), change(calibration({0: part_of()})))
    assert told.value.field == "calibration"


def test_a_calibration_of_other_widths_of_codes_is_read_for_those_that_can_be_packed() -> None:
    """1 and 7 bits are left out; none that can be packed is refused."""
    part = part_of()
    known = calibration({0: part})
    layer = msgspec.structs.replace(known.layers[0], key=((1.0,) * 3,) * 2, value=((3.0, 2.0, 1.0),) * 2)
    layer = msgspec.structs.replace(layer, key_classes=((3.0, 2.0, 1.0),) * 4)
    (own,) = dealt(variant(bits=9.0), {0: part}, msgspec.structs.replace(known, bits=(1, 3, 7), layers=(layer,)))
    assert (own.params["keys"], own.params["values"]) == ("3,3,3,3", "3,3")
    with pytest.raises(MethodRefused, match="none of"):
        dealt(variant(), {0: part}, msgspec.structs.replace(known, bits=(1, 7, 9), layers=(layer,)))


def test_more_channels_than_an_answer_holds_are_refused() -> None:
    """80 layers of 64 KV heads of width 128 take 80 x 2,732 letters; 90 are too many for four variants in 1 MiB."""
    part = part_of(128, 128, heads=64)
    one = sensitive(0, part)
    fits, exceeds = (dict.fromkeys(range(count), part) for count in (80, 90))
    told = [
        calibration({0: part}, layers=tuple(msgspec.structs.replace(one, index=at) for at in parts))
        for parts in (fits, exceeds)
    ]
    orders = [str(own["order"]) for own in METHOD.layer_params(variant(), places(fits), told[0]) or ()]
    assert sum(map(len, orders)) == 80 * 2732
    assert 4 * 80 * 2732 < 2**20
    with pytest.raises(MethodRefused, match="245880 letters"):
        METHOD.layer_params(variant(), places(exceeds), told[1])


@pytest.mark.parametrize(
    ("params", "widths", "reason", "why"),
    [
        ({"recent": 32}, (64, 64), "not_supported_by_engine", "no whole groups of 64"),
        ({"bits": 2.5}, (64, 64), None, ""),
        ({"keys": "4,4,4", "values": "4,4"}, (64, 64), "width_not_divisible", "3 classes"),
        ({"keys": "4,4,4,4,4,4,4,4", "values": "4,4"}, (64, 64), "not_supported_by_engine", "8 classes"),
        ({"keys": "4,7", "values": "4,4"}, (64, 64), "not_supported_by_engine", "are not all of"),
        ({"keys": "", "values": "4,4"}, (64, 64), "not_supported_by_engine", "are not all of"),
        ({"keys": "4", "values": "4"}, (64, 64), "not_supported_by_engine", "value bits for 1 heads"),
        ({}, (64, 0), "not_supported_by_engine", "no values of their own"),
        ({}, (0, 64), "not_supported_by_engine", "no keys of their own"),
        ({}, (512, 64), "width_not_divisible", "above 256"),
        ({}, (64, 2**13 + 1), "width_not_divisible", "above 8192"),
    ],
)
def test_what_cannot_be_kept_is_refused(params: Any, widths: tuple[int, int], reason: str | None, why: str) -> None:
    """With a stable word and a sentence."""
    answer = METHOD.refuses(variant(**params), part_of(*widths))
    assert (answer and answer[0]) == reason
    assert answer is None or why in answer[1]


def test_a_budget_that_does_not_buy_two_bits_is_refused() -> None:
    """In 16 bits 2 + 1/2 for keys and 2 + 1/4 for values, 2.375 together; in 32 bits 2.75."""
    assert METHOD.refuses(variant(bits=2.5), part_of(itemsize=2)) is None
    assert METHOD.refuses(variant(bits=2.75), part_of(itemsize=4)) is None
    answer = METHOD.refuses(variant(bits=2.7), part_of(itemsize=4))
    assert answer is not None
    assert "the least is 2.75" in answer[1]


def test_a_number_costs_its_code_and_its_scales() -> None:
    """Two numbers of 16 bits for 64 tokens make keys of 6, 4, 3, 3 bits 4.5; one makes values of 4 and 2 bits 3.25."""
    part = part_of()
    own = variant(keys="6,4,3,3", values="4,2", order="")
    assert (METHOD.key_bits(own, part), METHOD.value_bits(own, part)) == (4.5, 3.25)
    assert METHOD.value_bits(own, part_of(value_width=80)) == 3.25 * 96 / 80 + 0.25 * 96 / 80
    assert METHOD.key_bits(variant(bits=3.0), part) == METHOD.value_bits(variant(bits=3.0), part) == 3.0


def test_the_prior_follows_its_figures() -> None:
    """Each by its bits; 64 more recent tokens divide by 1.29, no sinks double, more bits never lose more.

    What was run had 64 recent tokens in the model's format, and only that is said to be.
    """
    for bits, hard in adaptive._HARD_KL:
        assert METHOD.quality_prior(variant(bits=bits)).high == pytest.approx(hard)
        assert METHOD.quality_prior(variant(bits=bits, recent=128)).high == pytest.approx(hard / 1.29)
        assert METHOD.quality_prior(variant(bits=bits, sinks=0)).high == pytest.approx(2 * hard)
        assert METHOD.quality_prior(variant(bits=bits, recent_bits=8)).high == pytest.approx(hard + 0.0004)
    priors = [METHOD.quality_prior(variant(bits=bits)).kl_mean for bits in np.linspace(2.5, 9, 40)]
    assert priors == sorted(priors, reverse=True)
    assert "between" not in METHOD.quality_prior(variant(bits=3.5)).source
    for other in ({"bits": 3.25}, {"bits": 3.5, "recent": 128}, {"bits": 3.5, "recent_bits": 8}):
        assert "between" in METHOD.quality_prior(variant(**other)).source


@pytest.mark.parametrize(
    ("bits", "recent", "recent_bits", "label"),
    [
        (3.0, 0, 16, "adaptive bits=3.0 recent=0"),
        (3.0, 192, 16, "adaptive bits=3.0 recent=192"),
        (3.5, 128, 16, "adaptive bits=3.5 recent=128"),
        (4.0, 192, 16, "adaptive bits=4.0 recent=192"),
        (3.0, 128, 8, "adaptive bits=3.0 recent=128 recent_bits=8"),
        (3.5, 128, 8, "adaptive bits=3.5 recent=128 recent_bits=8"),
    ],
)
def test_what_is_said_of_other_recent_tokens_is_near_what_was_measured(
    bits: float, recent: int, recent_bits: int, label: str
) -> None:
    """Within 15 % of the row of bench/quality.py."""
    data = Path(__file__).parents[2] / "bench/data/quality/smollm2-135m-4096.json"
    seen = {row["label"]: row["kl_mean"] for row in json.loads(data.read_text(encoding="utf-8"))["rows"]}
    prior = METHOD.quality_prior(variant(bits=bits, recent=recent, recent_bits=recent_bits))
    assert prior.high == pytest.approx(seen[label], rel=0.15)


def test_every_figure_passes_the_checks_of_a_plugin() -> None:
    """As at load."""
    (method,) = veloxquant_methods()
    check_returned([method])
    parameters = check_parameters(method)
    variants = check_variants(method)
    check_figures(method, variants)
    assert [one.label for one in variants] == ["adaptive-5", "adaptive-4", "adaptive-3"]
    assert {name for one in variants for name in one.params} <= {one.name for one in parameters}


@pytest.mark.parametrize("queries", [1, 7, 300])
def test_the_workspace_is_not_exceeded(queries: int) -> None:
    """What MLX's allocator gives out in one call of attention, packing included, beside what is held."""
    part = msgspec.structs.replace(part_of(64, 64, itemsize=4), query_heads=2 * HEADS)
    (own,) = dealt(variant(bits=3.5), {0: part})
    cache = METHOD.build(LayerSpec(index=0, part=part), own)
    cache.update_and_fetch(*(mx.random.normal((1, HEADS, 700, 64)) for _ in range(2)))
    mx.eval(
        [leaf for leaf in cache.state if isinstance(leaf, mx.array)], *cache.key_part.arrays, *cache.value_part.arrays
    )
    pair = [mx.random.normal((1, HEADS, queries, 64)) for _ in range(2)]
    asked = mx.random.normal((1, 2 * HEADS, queries, 64))
    mx.eval(pair, asked)
    held, before = cache.nbytes, mx.get_active_memory()
    mx.reset_peak_memory()
    keys, values = cache.update_and_fetch(*pair)
    mx.eval(keys.attend(asked, values, 0.125, "causal" if queries > 1 else None))
    most = mx.get_peak_memory() - before
    assert most <= METHOD.workspace_bytes(own, part, queries, 700 + queries) + cache.nbytes + held
