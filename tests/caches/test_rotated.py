"""A codec behind a rotation: scores and sums are those of what is unpacked, and a token's codes are its own."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.caches.codecs import (
    AffineCodec,
    FloatCodec,
    PerChannelCodec,
    RefitAffineCodec,
    RefitPerChannelCodec,
    SymmetricCodec,
    TurboQuantMSE,
    make,
)
from veloxquant.caches.hadamard import rotate
from veloxquant.caches.packed import PackedKVCache
from veloxquant.caches.rotated import RotatedCodec
from veloxquant.errors import InvalidParams, MethodRefused, VeloxError

CODECS = [
    RotatedCodec(64, FloatCodec(64)),
    RotatedCodec(64, AffineCodec(64, 4, 64), seed=3),
    RotatedCodec(80, AffineCodec(96, 3, 32)),
    RotatedCodec(576, AffineCodec(576, 5, 64)),
    RotatedCodec(48, TurboQuantMSE(48, 3, outlier_bits=5, outlier_channels=4)),
]
ALL = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.width}-{codec.inner.describe()['name']}")


def tensor(width: int, tokens: int = 21, seed: int = 0) -> mx.array:
    """(2, 3, tokens, width) normal numbers, two channels ten times as loud."""
    drawn = np.random.default_rng(seed).normal(size=(2, 3, tokens, width))
    drawn[..., [1, width // 2]] *= 10
    return mx.array(drawn.astype(np.float32))


def lost(codec: Any, x: mx.array) -> float:
    """Mean squared error."""
    return float(((codec.decode(codec.encode(x, ()), (), mx.float32) - x) ** 2).mean())


@ALL
def test_scores_and_sums_are_those_of_unpacked_vectors(codec: RotatedCodec) -> None:
    """To 1e-5, against numpy in float64."""
    x, queries = tensor(codec.width), tensor(codec.width, tokens=4, seed=1)
    fixed = codec.start(x[:, :, :1])
    stored = codec.encode(x, fixed)
    decoded = np.array(codec.decode(stored, fixed, mx.float32)).astype(np.float64)
    scores = codec.scores(codec.ready(queries, fixed), stored, fixed)
    weights = mx.softmax(scores / 8, axis=-1)
    mixed = codec.settle(codec.mix(weights, stored, fixed), fixed)
    expected = np.array(queries).astype(np.float64) @ decoded.swapaxes(-1, -2)
    assert decoded.shape == x.shape
    assert np.abs(np.array(scores) - expected).max() < 1e-5 * np.abs(expected).max()
    sums = np.array(weights).astype(np.float64) @ decoded
    assert np.abs(np.array(mixed) - sums).max() < 1e-5 * np.abs(decoded).max()


@ALL
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_a_tokens_codes_do_not_depend_on_its_call(codec: RotatedCodec, dtype: mx.Dtype) -> None:
    """21 tokens at once, in calls of 4, and one by one: every stored bit, in every format."""
    x = tensor(codec.width).astype(dtype)
    fixed = codec.start(x[:, :, :1])
    whole = codec.encode(x, fixed)
    for size in (1, 4):
        parts = [codec.encode(x[:, :, at : at + size], fixed) for at in range(0, 21, size)]
        joined = [mx.concatenate(list(same), axis=2) for same in zip(*parts, strict=True)]
        assert all(mx.array_equal(a, b) for a, b in zip(joined, whole, strict=True))


def test_per_channel_keys_are_packed_rotated() -> None:
    """Whole groups of 64 tokens; scores are those of unpacked keys, and nothing is unpacked for them."""
    codec = RotatedCodec(80, PerChannelCodec(80, 4, 64))
    x, queries = tensor(80, tokens=128), tensor(80, tokens=3, seed=1)
    stored = codec.encode(x, ())
    decoded = np.array(codec.decode(stored, (), mx.float32)).astype(np.float64)
    scores = codec.scores(codec.ready(queries, ()), stored, ())
    expected = np.array(queries).astype(np.float64) @ decoded.swapaxes(-1, -2)
    assert (codec.tokens, codec.native, stored[0].shape[2]) == (64, True, 2)
    assert np.abs(np.array(scores) - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(decoded - np.array(x)).max() < 4
    assert make(codec.describe()) == codec


def test_rotated_floats_come_back() -> None:
    """Nothing but rounding is lost."""
    x = tensor(64)
    codec = RotatedCodec(64, FloatCodec(64))
    assert float(mx.abs(codec.decode(codec.encode(x, ()), (), mx.float32) - x).max()) < 1e-5


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_the_inner_codec_packs_what_hadamard_rotates(dtype: mx.Dtype) -> None:
    """Words, scales and biases are mx.quantize's of the rotated vectors in the format given."""
    x = tensor(128).astype(dtype)
    theirs = mx.quantize(rotate(x, 7).astype(dtype), group_size=64, bits=4)
    ours = RotatedCodec(128, AffineCodec(128, 4, 64), seed=7).encode(x, ())
    assert all(mx.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert ours[1].dtype == dtype


def test_loud_channels_lose_less_behind_a_rotation() -> None:
    """Two channels of 64 ten times as loud: their group's step is set by 10 sigma, and by 2 sigma once they are spread.

    Variances: 62 + 2 x 100 over 64 numbers is 4.1, a standard deviation of 2.0 for every rotated number, against 10.
    """
    x = tensor(64, tokens=400)
    plain, turned = AffineCodec(64, 4, 64), RotatedCodec(64, AffineCodec(64, 4, 64))
    assert lost(turned, x) < lost(plain, x) / 3


def test_zeros_behind_a_narrow_vector_take_their_share_of_the_error() -> None:
    """80 of 96 numbers: each rotated number has 80 / 96 of the variance, and so has the error that comes back."""
    x = mx.array(np.random.default_rng(2).normal(size=(1, 4, 2000, 80)).astype(np.float32))
    full = mx.array(np.random.default_rng(3).normal(size=(1, 4, 2000, 96)).astype(np.float32))
    narrow, wide = RotatedCodec(80, AffineCodec(96, 4, 32)), RotatedCodec(96, AffineCodec(96, 4, 32))
    lost = [
        float(((c.decode(c.encode(y, ()), (), mx.float32) - y) ** 2).mean()) for c, y in ((narrow, x), (wide, full))
    ]
    assert lost[0] / lost[1] == pytest.approx(80 / 96, rel=0.02)


@pytest.mark.parametrize(
    "inner",
    [AffineCodec(96, 4, 32), SymmetricCodec(96, 4, 32), RefitAffineCodec(96, 4, 32), RefitPerChannelCodec(96, 4, 32)],
)
def test_no_tokens_are_packed_to_none(inner: Any) -> None:
    """Arrays of no slots, in the shapes of some."""
    codec = RotatedCodec(96, inner)
    none, some = (codec.encode(tensor(96, tokens=count), ()) for count in (0, 32))
    assert [(a.shape[:2], a.shape[2], a.shape[3:]) for a in none] == [(a.shape[:2], 0, a.shape[3:]) for a in some]


@ALL
def test_a_description_makes_an_equal_codec(codec: RotatedCodec) -> None:
    """The inner one included, through JSON."""
    assert make(json.loads(json.dumps(codec.describe()))) == codec


def test_a_cache_of_rotated_codecs_is_saved_with_them() -> None:
    """Its state makes an equal cache."""
    codec = RotatedCodec(80, AffineCodec(96, 4, 32), seed=2)
    cache = PackedKVCache(codec, codec)
    cache.update_and_fetch(tensor(80), tensor(80, seed=1))
    again = PackedKVCache.from_state(cache.state)
    assert (again.key_codec, again.value_codec) == (codec, codec)


@pytest.mark.parametrize(
    ("width", "inner", "seed", "field"),
    [
        (64, RotatedCodec(64, FloatCodec(64)), 0, "inner"),
        (65, FloatCodec(64), 0, "width"),
        (0, FloatCodec(64), 0, "width"),
        (64, FloatCodec(64), -1, "seed"),
        (64, FloatCodec(64), 1.0, "seed"),
        (90, FloatCodec(90), 0, "width"),
    ],
)
def test_what_cannot_be_rotated_is_refused_by_name(width: int, inner: Any, seed: Any, field: str) -> None:
    """With a hint."""
    with pytest.raises(VeloxError) as caught:
        RotatedCodec(width, inner, seed)
    assert caught.value.field == field
    assert caught.value.hint


@pytest.mark.parametrize("inner", ["", "[", "3", '{"name": "no"}', 7, None, "[" * 100_000])
def test_what_describes_no_inner_codec_is_refused(inner: Any) -> None:
    """A typed error, whatever a file holds."""
    with pytest.raises(InvalidParams):
        make({"name": "rotated", "width": 64, "inner": inner})
    with pytest.raises(MethodRefused):
        make({"name": "rotated", "width": 64, "inner": '{"name": "affine", "width": 80, "bits": 4, "group": 64}'})


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_largest_numbers_stay_finite_and_nan_stays_nan(dtype: mx.Dtype) -> None:
    """A vector of float16's largest number, or of 1e30, comes back finite; a token with a NaN hurts no other token."""
    codec = RotatedCodec(64, FloatCodec(64))
    large = mx.full((1, 1, 1, 64), min(1e30, mx.finfo(dtype).max)).astype(dtype)
    back = codec.decode(codec.encode(large, ()), (), dtype)
    assert bool(mx.isfinite(back).all())
    broken = tensor(64)[:1, :1, :3].astype(dtype)
    broken[0, 0, 1, 5] = float("nan")
    back = codec.decode(codec.encode(broken, ()), (), dtype)
    assert np.array_equal(np.array(mx.isnan(back).all(axis=-1)), [[[False, True, False]]])
