"""Codecs without a rotation, floats as they are and MLX's affine format, and codecs made from descriptions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.caches.codecs import AffineCodec, FloatCodec, TurboQuantProd, make
from veloxquant.errors import InvalidParams, MethodRefused, VeloxError

PAIRS = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]


def tensor(tokens: int = 9, width: int = 128, seed: int = 0) -> mx.array:
    """(2, 3, tokens, width) standard normal numbers in float32."""
    return mx.array(np.random.default_rng(seed).normal(size=(2, 3, tokens, width)).astype(np.float32))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_floats_come_back_as_they_are(dtype: mx.Dtype) -> None:
    """In the format given, not one bit changed."""
    x = tensor().astype(dtype)
    codec = FloatCodec(128)
    assert codec.start(x[:, :, :1]) == ()
    (stored,) = codec.encode(x, ())
    assert stored.dtype == dtype
    assert mx.array_equal(codec.decode((stored,), (), dtype), x)


def test_floats_can_be_kept_in_another_format() -> None:
    """As MLX casts them."""
    (stored,) = FloatCodec(128, dtype="bfloat16").encode(tensor(), ())
    assert mx.array_equal(stored, tensor().astype(mx.bfloat16))


@pytest.mark.parametrize(("bits", "group"), PAIRS)
def test_the_affine_format_is_mlxs_own(bits: int, group: int) -> None:
    """Words, scales, biases and what is read back are mx.quantize's and mx.dequantize's, also one token at a time."""
    codec, x = AffineCodec(128, bits, group), tensor()
    theirs = mx.quantize(x, group_size=group, bits=bits)
    ours = codec.encode(x, ())
    assert all(mx.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert mx.array_equal(codec.decode(ours, (), mx.float32), mx.dequantize(*theirs, group_size=group, bits=bits))
    single = [codec.encode(x[:, :, at : at + 1], ()) for at in range(9)]
    assert all(
        mx.array_equal(mx.concatenate(parts, axis=2), whole) for *parts, whole in zip(*single, ours, strict=True)
    )


@pytest.mark.parametrize("codec", [FloatCodec(128), FloatCodec(128, "float16"), AffineCodec(128, 4, 32)], ids=str)
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=str)
def test_products_are_those_of_decoded_numbers(codec: Any, dtype: mx.Dtype) -> None:
    """Scores and mixes to 1e-5, computed and returned in float32 whatever is stored.

    To 2**-10 of the affine format in 16 bits: there mx.dequantize rounds to 16 bits, and products do not.
    """
    tolerance = 2.0**-10 if isinstance(codec, AffineCodec) and dtype == mx.float16 else 1e-5
    x, queries = tensor().astype(dtype), tensor(tokens=4, seed=1)
    stored = codec.encode(x, ())
    decoded = np.array(codec.decode(stored, (), mx.float32)).astype(np.float64)
    scores = codec.scores(codec.ready(queries.astype(dtype), ()), stored, ())
    weights = mx.softmax(scores, axis=-1)
    mixed = codec.settle(codec.mix(weights, stored, ()), ())
    expected = np.array(queries.astype(dtype)).astype(np.float64) @ decoded.swapaxes(-1, -2)
    assert (scores.dtype, mixed.dtype) == (mx.float32, mx.float32)
    assert np.abs(np.array(scores) - expected).max() < tolerance * np.abs(expected).max()
    assert (
        np.abs(np.array(mixed) - np.array(weights).astype(np.float64) @ decoded).max()
        < tolerance * np.abs(decoded).max()
    )


@pytest.mark.parametrize("codec", [FloatCodec(80), FloatCodec(80, "float32"), AffineCodec(96, 3, 32)], ids=str)
def test_a_description_makes_an_equal_codec(codec: Any) -> None:
    """Also a float codec whose format is not set."""
    assert make(codec.describe()) == codec


@pytest.mark.parametrize(
    ("description", "field"),
    [
        ({"name": "turboquant_max", "width": 64}, "name"),
        ({"width": 64}, "name"),
        ({"name": 3, "width": 64}, "name"),
        (["float", 64], None),
        (None, None),
        ({"name": "affine", "width": 64, "bits": 4.0, "group": 64}, "bits"),
        ({"name": "float", "width": 64, "dtype": ["float16"]}, "dtype"),
        ({"name": "float", "width": 64, "bits": 3}, None),
        ({"name": "affine", "width": 64}, None),
        ({"name": "float", "width": 64, "dtype": "int8"}, "dtype"),
        ({"name": "float", "width": "wide"}, "width"),
        ({"name": "affine", "width": 64, "bits": 7, "group": 64}, "bits"),
        ({"name": "affine", "width": 64, "bits": 4, "group": 16}, "group"),
        ({"name": "turboquant_mse", "width": 64, "bits": 2, "jl_dim": 64}, None),
    ],
)
def test_what_no_codec_wrote_is_refused(description: Any, field: str | None) -> None:
    """A typed error with a hint, and the field where there is one."""
    with pytest.raises(InvalidParams) as caught:
        make(description)
    assert caught.value.field == field
    assert caught.value.hint


@pytest.mark.parametrize(("width", "hint"), [(80, "choose a method without groups"), (96, "use groups of 32")])
def test_a_width_the_group_does_not_divide_is_refused(width: int, hint: str) -> None:
    """With the group that would do, where there is one."""
    with pytest.raises(MethodRefused, match=f"groups of 64 do not divide the width {width}") as caught:
        AffineCodec(width, 4, 64)
    assert caught.value.hint == hint


def test_codecs_are_values() -> None:
    """Equal when their parameters are, usable as keys, and not to be changed."""
    assert {TurboQuantProd(64, 2): 1}[TurboQuantProd(64, 2)] == 1
    assert TurboQuantProd(64, 2) != TurboQuantProd(64, 2, seed=1)
    with pytest.raises(AttributeError):
        FloatCodec(64).width = 3  # type: ignore[misc]
    assert issubclass(InvalidParams, VeloxError)
