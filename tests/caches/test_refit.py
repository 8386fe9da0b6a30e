"""Refitted levels and symmetric ones: never worse than mx.quantize in its own format, each group by itself."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.caches import refit
from veloxquant.caches.codecs import (
    AffineCodec,
    PerChannelCodec,
    RefitAffineCodec,
    RefitPerChannelCodec,
    SymmetricCodec,
    make,
)
from veloxquant.errors import InvalidParams, MethodRefused

BITS = (2, 3, 4, 5, 6, 8)
PAIRS = [(bits, group) for bits in BITS for group in (32, 64, 128)]
FORMATS = pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)


def normal(groups: int, group: int = 64, seed: int = 0) -> np.ndarray:
    """Standard normal groups."""
    return np.random.default_rng(seed).normal(size=(groups, group)).astype(np.float32)


def read(stored: Any, group: int, bits: int) -> np.ndarray:
    """What MLX reads back in float32, as float64."""
    words, *others = stored
    wide = [array.astype(mx.float32) for array in others]
    return np.array(mx.dequantize(words, *wide, group_size=group, bits=bits)).astype(np.float64)


def lost(x: mx.array, stored: Any, bits: int) -> np.ndarray:
    """Sum of squared errors of each group, in float64."""
    given = np.array(x.astype(mx.float32)).astype(np.float64)
    return ((read(stored, x.shape[-1], bits) - given) ** 2).sum(axis=-1)


def lost_by(codec: Any, x: mx.array) -> float:
    """Mean squared error of a codec, rows (n, width)."""
    rows = x[None, None]
    return float(((codec.decode(codec.encode(rows, ()), (), mx.float32) - rows.astype(mx.float32)) ** 2).mean())


@pytest.mark.parametrize(("bits", "group"), PAIRS)
@FORMATS
def test_no_group_loses_more_than_mx_quantize_loses(bits: int, group: int, dtype: mx.Dtype) -> None:
    """Normal, one-sided, far from zero and tiny groups; to 1e-5, as sums are compared in float32."""
    plain = normal(200, group)
    for numbers in (plain, np.exp(2 * plain), plain * 0.01 + 1, plain * 1e-3):
        x = mx.array(numbers).astype(dtype)
        theirs = lost(x, mx.quantize(x, group_size=group, bits=bits), bits)
        assert (lost(x, refit.affine(x, bits), bits) <= theirs * (1 + 1e-5)).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-(2.0**50), 2.0**50, width=32, allow_subnormal=False), min_size=32, max_size=32),
    st.sampled_from(BITS),
)
def test_whatever_the_numbers_no_group_loses_more(numbers: list[float], bits: int) -> None:
    """Any 32 floats, zeros, equal ones and single outliers among them."""
    x = mx.array(numbers, dtype=mx.float32)[None]
    theirs = lost(x, mx.quantize(x, group_size=32, bits=bits), bits)
    assert (lost(x, refit.affine(x, bits), bits) <= theirs * (1 + 1e-4)).all()


@pytest.mark.parametrize(("bits", "less"), [(2, 0.20), (3, 0.11), (4, 0.09), (5, 0.07)])
def test_normal_groups_lose_clearly_less(bits: int, less: float) -> None:
    """Of mx.quantize's squared error in groups of 64 so much goes."""
    x = mx.array(normal(4000))
    ours, theirs = lost(x, refit.affine(x, bits), bits), lost(x, mx.quantize(x, group_size=64, bits=bits), bits)
    assert ours.sum() < (1 - less) * theirs.sum()


UNBIASED = [
    RefitAffineCodec(64, 2, 64, unbiased=True),
    RefitAffineCodec(64, 4, 32, unbiased=True),
    SymmetricCodec(64, 2, 64),
]


@pytest.mark.parametrize("codec", UNBIASED, ids=repr)
@FORMATS
def test_unbiased_numbers_are_not_shrunk(codec: Any, dtype: mx.Dtype) -> None:
    """The regression of what is read back on what was there has a slope of 1 in each group, to the format of scales.

    For affine levels about the group's mean; plain refitting has a slope of 1 less its share of error lost.
    """
    x = mx.array(normal(500)).astype(dtype)
    words, *others = codec.encode(x[None, None], ())
    wide = [array.astype(mx.float32) for array in others]
    rows = np.array(codec.decode((words, *wide), (), mx.float32)).astype(np.float64)
    read, was = (np.asarray(array).reshape(-1, codec.group) for array in (rows, np.array(x.astype(mx.float32))))
    middle = 0 if isinstance(codec, SymmetricCodec) else was.mean(axis=-1, keepdims=True)
    slopes = ((was - middle) * read).sum(axis=-1) / ((was - middle) * was).sum(axis=-1)
    assert np.abs(slopes - 1).max() < {mx.float32: 1e-5, mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype]
    plain = RefitAffineCodec(64, 2, 64)
    shrunk = (
        np.array(x.astype(mx.float32)) * np.array(plain.decode(plain.encode(x[None, None], ()), (), mx.float32))
    ).sum()
    assert shrunk / float((x.astype(mx.float32) ** 2).sum()) < 0.95


@pytest.mark.parametrize(("bits", "figure"), [(2, 0.1188), (3, 0.03744), (4, 0.01154)])
def test_symmetric_groups_lose_no_more_than_the_best_fixed_levels_unbiased(bits: int, figure: float) -> None:
    """2^bits uniform levels for all normal numbers lose D (Max 1960, table II), stretched to no bias D / (1 - D)."""
    assert lost_by(SymmetricCodec(64, bits, 64), mx.array(normal(4000))) < figure / (1 - figure)


@pytest.mark.parametrize(
    "codec",
    [RefitAffineCodec(128, 3, 64, unbiased=True), RefitAffineCodec(128, 2, 32), SymmetricCodec(128, 3, 64)],
    ids=lambda c: type(c).__name__,
)
@FORMATS
def test_a_tokens_codes_do_not_depend_on_its_call(codec: Any, dtype: mx.Dtype) -> None:
    """2,100 rows at once, which are several pieces, the same in calls of 700, and 40 of them one by one: every bit."""
    x = mx.array(normal(2100, 128)).reshape(1, 1, 2100, 128).astype(dtype)
    whole = codec.encode(x, ())
    assert x.size > 2 * refit._AT_ONCE
    for size, count in ((700, 2100), (1, 40)):
        parts = [codec.encode(x[:, :, at : at + size], ()) for at in range(0, count, size)]
        for joined, expected in zip(zip(*parts, strict=True), whole, strict=True):
            assert mx.array_equal(mx.concatenate(list(joined), axis=2), expected[:, :, :count])


@pytest.mark.parametrize(("bits", "group"), PAIRS)
@FORMATS
def test_the_formats_are_those_of_mx_quantize(bits: int, group: int, dtype: mx.Dtype) -> None:
    """Shapes and formats; a symmetric codec has no biases, and its words with biases made of scales are its numbers."""
    x = mx.array(normal(6, 128)).reshape(1, 2, 3, 128).astype(dtype)
    theirs = mx.quantize(x, group_size=group, bits=bits)
    affine, symmetric = RefitAffineCodec(128, bits, group), SymmetricCodec(128, bits, group)
    ours, halved = affine.encode(x, ()), symmetric.encode(x, ())
    assert [(array.shape, array.dtype) for array in ours] == [(array.shape, array.dtype) for array in theirs]
    assert [(array.shape, array.dtype) for array in halved] == [(array.shape, array.dtype) for array in theirs[:2]]
    words, scales = halved
    biases = scales.astype(mx.float32) * (-(2**bits - 1) / 2)
    decoded = symmetric.decode(halved, (), mx.float32)
    assert np.array_equal(np.array(decoded), read((words, scales, biases), group, bits).astype(np.float32))


@pytest.mark.parametrize("bits", BITS)
def test_symmetric_levels_are_half_odd_multiples_of_the_scale(bits: int) -> None:
    """(c - (2^bits - 1) / 2) x scale: written out by hand for codes 0 to 2^bits - 1 of a packed row."""
    codec = SymmetricCodec(64, bits, 64)
    top = 2**bits - 1
    x = (mx.arange(64) * top // 63).astype(mx.float32) - top / 2
    decoded = codec.decode(codec.encode((3 * x)[None, None, None], ()), (), mx.float32)
    assert mx.allclose(decoded[0, 0, 0], 3 * x, atol=1e-5)


@pytest.mark.parametrize(
    "codec", [RefitAffineCodec(128, 4, 32), SymmetricCodec(128, 4, 64)], ids=lambda c: type(c).__name__
)
@FORMATS
def test_products_are_those_of_decoded_numbers(codec: Any, dtype: mx.Dtype) -> None:
    """Scores and sums, to 1e-5 of float64 (decoded in float32, where scales of 16 bits are exact)."""
    x = mx.array(normal(18, 128)).reshape(2, 1, 9, 128).astype(dtype)
    queries = mx.array(normal(8, 128, seed=1)).reshape(2, 1, 4, 128)
    stored = codec.encode(x, ())
    wide = (stored[0], *(array.astype(mx.float32) for array in stored[1:]))
    decoded = np.array(codec.decode(wide, (), mx.float32)).astype(np.float64)
    scores = codec.scores(codec.ready(queries, ()), stored, ())
    weights = mx.softmax(scores, axis=-1)
    mixed = codec.settle(codec.mix(weights, stored, ()), ())
    expected = np.array(queries).astype(np.float64) @ decoded.swapaxes(-1, -2)
    assert np.abs(np.array(scores) - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(np.array(mixed) - np.array(weights).astype(np.float64) @ decoded).max() < 1e-5


@FORMATS
def test_channels_are_refitted_group_by_group(dtype: mx.Dtype) -> None:
    """In the layout of PerChannelCodec, with the codes of each channel's 64 tokens by itself, and less error."""
    x = mx.array(normal(192, 80)).reshape(1, 1, 192, 80).astype(dtype)
    ours, plain = RefitPerChannelCodec(80, 2, 64), PerChannelCodec(80, 2, 64)
    stored = ours.encode(x, ())
    expected = refit.affine(x[0, 0, 64:128].T, 2)
    assert all(mx.array_equal(array[0, 0, 1], other) for array, other in zip(stored, expected, strict=True))
    assert [a.shape for a in stored] == [a.shape for a in plain.encode(x, ())]
    wrong = [((c.decode(c.encode(x, ()), (), mx.float32) - x) ** 2).mean().item() for c in (ours, plain)]
    assert wrong[0] < 0.85 * wrong[1]


@FORMATS
def test_groups_without_a_range_are_kept_as_they_are(dtype: mx.Dtype) -> None:
    """Zeros stay zeros under both; equal numbers come back under affine levels, and nearly so under symmetric ones."""
    x = mx.array([[0.0] * 64, [3.0] * 64, [-3.0] * 64])[None, None].astype(dtype)
    symmetric = SymmetricCodec(64, 2, 64)
    for affine in (RefitAffineCodec(64, 2, 64), RefitAffineCodec(64, 2, 64, unbiased=True)):
        assert mx.array_equal(affine.decode(affine.encode(x, ()), (), dtype), x)
    assert mx.allclose(symmetric.decode(symmetric.encode(x, ()), (), mx.float32), x.astype(mx.float32), rtol=2**-7)


@FORMATS
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_broken_number_breaks_its_group_alone(dtype: mx.Dtype, number: float) -> None:
    """Affine words are then mx.quantize's own; a symmetric group is NaN; the group beside it is untouched."""
    x = mx.array(normal(1, 128))
    x[0, 70] = number
    x = x.astype(dtype)
    clean = refit.affine(x.reshape(2, 64)[:1], 4)
    ours, theirs = refit.affine(x.reshape(2, 64), 4), mx.quantize(x.reshape(2, 64), group_size=64, bits=4)
    for mine, their, alone in zip(ours, theirs, clean, strict=True):
        assert mx.array_equal(mine[1], their[1], equal_nan=True)
        assert mx.array_equal(mine[:1], alone)
    unbiased = refit.affine(x.reshape(2, 64), 4, unbiased=True)
    assert all(mx.array_equal(mine[1], their[1], equal_nan=True) for mine, their in zip(unbiased, theirs, strict=True))
    codec = SymmetricCodec(128, 4, 64)
    broken = codec.decode(codec.encode(x[None, None], ()), (), mx.float32)[0, 0, 0]
    assert bool(mx.isnan(broken[64:]).all())
    assert bool(mx.isfinite(broken[:64]).all())


def test_the_stored_format_of_scales_is_taken_into_account() -> None:
    """8 bits with scales in bfloat16, which lose 8 of 24 bits: codes chosen for what is read back lose a third less."""
    x = mx.array(normal(1000)).astype(mx.bfloat16)
    ours, theirs = lost(x, refit.affine(x, 8), 8), lost(x, mx.quantize(x, group_size=64, bits=8), 8)
    assert ours.sum() < 0.67 * theirs.sum()


@pytest.mark.parametrize(
    "codec",
    [RefitAffineCodec(96, 3, 32), SymmetricCodec(64, 5, 64), RefitPerChannelCodec(80, 2, 64, unbiased=True)],
    ids=lambda c: type(c).__name__,
)
def test_a_description_makes_an_equal_codec(codec: Any) -> None:
    """Of its own class, and unequal to the plain affine one."""
    again = make(json.loads(json.dumps(codec.describe())))
    assert again == codec
    assert type(again) is type(codec)
    assert codec not in (AffineCodec(96, 3, 32), AffineCodec(64, 5, 64), PerChannelCodec(80, 2, 64))


@pytest.mark.parametrize("codec", [RefitAffineCodec, RefitPerChannelCodec])
def test_unbiased_is_true_or_false(codec: type) -> None:
    """By name."""
    with pytest.raises(InvalidParams) as caught:
        codec(64, 4, 64, unbiased=1)
    assert caught.value.field == "unbiased"


@pytest.mark.parametrize("codec", [RefitAffineCodec, SymmetricCodec])
def test_a_width_the_group_does_not_divide_is_refused(codec: type) -> None:
    """With the group that would do."""
    with pytest.raises(MethodRefused) as caught:
        codec(96, 4, 64)
    assert "32" in caught.value.hint
