"""TurboQuant as codecs: each token by itself, products in rotated space, outliers apart, and what is stored."""

from __future__ import annotations

import json
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.caches.codecs import TurboQuantMSE, TurboQuantProd, make
from veloxquant.caches.held import held_bytes

Codec = TurboQuantMSE | TurboQuantProd

CODECS = [
    TurboQuantMSE(64, 2),
    TurboQuantMSE(80, 3, seed=5),
    TurboQuantMSE(96, 8),
    TurboQuantMSE(3, 4),
    TurboQuantMSE(1, 2),
    TurboQuantMSE(112, 3, outlier_bits=5, outlier_channels=9),
    TurboQuantMSE(80, 2, unbiased=True),
    TurboQuantMSE(64, 3, outlier_bits=4, outlier_channels=32, unbiased=True),
    TurboQuantProd(64, 2, jl_dim=64),
    TurboQuantProd(80, 1),
    TurboQuantProd(128, 4, jl_dim=200, seed=2),
    TurboQuantProd(576, 3),
    TurboQuantProd(72, 2, jl_dim=40, outlier_bits=4, outlier_channels=8),
    TurboQuantProd(64, 1, outlier_bits=3, outlier_channels=1),
]
DTYPES = [mx.float16, mx.bfloat16, mx.float32]


def label(codec: Codec) -> str:
    """Name of a test case."""
    return "-".join(str(value) for value in codec.describe().values())


def tensor(codec: Codec, tokens: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    """(2, 3, tokens, width): two sequences, three heads; one channel loud, as in real keys."""
    drawn = np.random.default_rng(seed).normal(size=(2, 3, tokens, codec.width))
    drawn[..., codec.width // 2] *= 8
    return mx.array(drawn.astype(np.float32)).astype(dtype)


def bits_of(arrays: tuple[Any, ...]) -> list[np.ndarray]:
    """Arrays as bytes, so that equal means bit-equal."""
    return [np.array(mx.view(mx.contiguous(array), mx.uint8)) for array in arrays]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_forty_tokens_at_once_are_forty_tokens_one_by_one(codec: Codec, dtype: mx.Dtype) -> None:
    """Bit by bit, in calls of 1 and in calls of 7."""
    x = tensor(codec, 40, seed=codec.width, dtype=dtype)
    fixed = codec.start(x[:, :, :1])
    at_once = bits_of(codec.encode(x, fixed))
    for size in (1, 7):
        cut = [bits_of(codec.encode(x[:, :, at : at + size], fixed)) for at in range(0, 40, size)]
        for whole, *parts in zip(at_once, *cut, strict=True):
            assert np.array_equal(whole, np.concatenate(parts, axis=2))


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 130), bits=st.integers(1, 8), tokens=st.integers(2, 70))
def test_a_token_does_not_depend_on_its_company(seed: int, width: int, bits: int, tokens: int) -> None:
    """Nor on how many heads and sequences there are: one token of one head alone has the same bits."""
    codec = TurboQuantProd(width, bits)
    x = tensor(codec, tokens, seed=seed)
    together = codec.encode(x, ())
    at = seed % tokens
    alone = codec.encode(x[1:, 2:, at : at + 1], ())
    for whole, single in zip(bits_of(together), bits_of(alone), strict=True):
        assert np.array_equal(whole[1:, 2:, at : at + 1], single)


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_products_in_rotated_space_are_those_of_decoded_vectors(codec: Codec) -> None:
    """Scores, and mixes over two blocks, to 1e-5 of the size of what is multiplied."""
    x, queries = tensor(codec, 50), tensor(codec, 4, seed=1)
    fixed = codec.start(x[:, :, :1])
    stored = codec.encode(x, fixed)
    decoded = np.array(codec.decode(stored, fixed, mx.float32)).astype(np.float64)
    scores = np.array(codec.scores(codec.ready(queries, fixed), stored, fixed))
    expected = np.array(queries).astype(np.float64) @ decoded.swapaxes(-1, -2)
    size = np.linalg.norm(np.array(queries), axis=-1).max() * np.linalg.norm(decoded, axis=-1).max()
    assert np.abs(scores - expected).max() < 1e-5 * size

    weights = np.random.default_rng(2).dirichlet(np.ones(50), size=(2, 3, 4)).astype(np.float32)
    blocks = [
        (mx.array(weights[..., span]), tuple(array[:, :, span] for array in stored))
        for span in (slice(0, 31), slice(31, 50))
    ]
    mixed = sum((codec.mix(*block, fixed) for block in blocks[1:]), codec.mix(*blocks[0], fixed))
    settled = np.array(codec.settle(mixed, fixed))
    assert settled.shape == (2, 3, 4, codec.width)
    assert np.abs(settled - weights.astype(np.float64) @ decoded).max() < 1e-5 * np.abs(decoded).max()


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_a_description_makes_an_equal_codec(codec: Codec) -> None:
    """Also after a way through JSON; and its words are read the same."""
    again = make(json.loads(json.dumps(codec.describe())))
    assert again == codec
    x = tensor(codec, 2)
    fixed = codec.start(x[:, :, :1])
    stored = codec.encode(x, fixed)
    assert np.array_equal(*(np.array(one.decode(stored, fixed, mx.float32)) for one in (codec, again)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_what_is_stored_is_the_documented_arithmetic(codec: Codec, dtype: mx.Dtype) -> None:
    """Words of 32 bits, a root mean square or two in the input's format, 4 bytes for each loud channel once a head."""
    x = tensor(codec, 10, dtype=dtype)
    fixed = codec.start(x[:, :, :1])
    stored = codec.encode(x, fixed)

    def row_bytes(width: int, bits: int, rows: int) -> int:
        blocks = -(-width // 32)
        if isinstance(codec, TurboQuantMSE):
            return 4 * bits * blocks + dtype.size
        scales = 1 if bits == 1 else 2
        return 4 * (bits - 1) * blocks + 4 * -(-rows // 32) + scales * dtype.size

    loud = codec.outlier_channels
    quiet = codec.width - loud
    rows = getattr(codec, "jl_dim", None) or quiet
    expected = row_bytes(quiet, codec.bits, rows) + (row_bytes(loud, codec.outlier_bits, loud) if loud else 0)
    assert sum(array.nbytes for array in stored) == 2 * 3 * 10 * expected
    assert sum(array.nbytes for array in fixed) == 2 * 3 * 4 * loud
    assert {array.dtype for array in stored} == {mx.uint32, dtype}
    assert all(array.shape[:3] == (2, 3, 10) for array in stored)
    assert codec.decode(stored, fixed, mx.float16).dtype == mx.float16


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_a_codec_holds_no_arrays(codec: Codec) -> None:
    """Also once used: its matrices are constants of the process, so that no cache's bytes count them."""
    codec.encode(tensor(codec, 1), codec.start(tensor(codec, 1)))
    assert held_bytes(codec) == 0


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_a_zero_vector_comes_back_as_zero(codec: Codec) -> None:
    """Among others that do not."""
    x = tensor(codec, 3)
    x[:, :, 1] = 0
    fixed = codec.start(x[:, :, :1])
    decoded = np.array(codec.decode(codec.encode(x, fixed), fixed, mx.float32))
    assert not decoded[:, :, 1].any()
    assert np.isfinite(decoded).all()
    assert decoded[:, :, 0].any()


@pytest.mark.parametrize(("dtype", "size"), [(mx.float16, 65504.0), (mx.bfloat16, 3e38), (mx.float32, 3e38)], ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_the_largest_numbers_of_a_format_do_not_overflow(codec: Codec, dtype: mx.Dtype, size: float) -> None:
    """The root mean square is not greater than the greatest number, and what is read back is held within the format."""
    signs = np.sign(np.random.default_rng(0).normal(size=(1, 1, 4, codec.width))).astype(np.float32)
    x = mx.array(signs * size).astype(dtype)
    fixed = codec.start(x[:, :, :1])
    stored = codec.encode(x, fixed)
    assert all(np.isfinite(np.array(array.astype(mx.float32))).all() for array in stored)
    assert np.isfinite(np.array(codec.decode(stored, fixed, dtype).astype(mx.float32))).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_token_with_no_number_in_it_is_nan_and_alone_so(bad: float) -> None:
    """Its neighbours are what they would be without it."""
    codec = TurboQuantProd(64, 3)
    x = tensor(codec, 3)
    clean = codec.decode(codec.encode(x, ()), (), mx.float32)
    x[:, :, 1, 7] = bad
    decoded = codec.decode(codec.encode(x, ()), (), mx.float32)
    assert np.isnan(np.array(decoded[:, :, 1])).all()
    assert np.array_equal(np.array(decoded[:, :, ::2]), np.array(clean[:, :, ::2]))


def test_a_vector_is_scaled_exactly_by_a_power_of_two() -> None:
    """Codes do not see the size of a vector: 2**-20 and 2**20 times as long give the same words."""
    codec = TurboQuantProd(80, 3)
    x = tensor(codec, 5)
    words = [[np.array(codec.encode(x * scale, ())[at]) for at in (0, 2)] for scale in (1.0, 2.0**-20, 2.0**20)]
    assert all(np.array_equal(one, other) for same in words[1:] for one, other in zip(words[0], same, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unbiased_vectors_are_not_shrunk(dtype: mx.Dtype) -> None:
    """sum(x y) = sum(x x) of each vector to the format of its size; with least error it is short by that, 0.117."""
    x = tensor(TurboQuantMSE(80, 2), 50, dtype=dtype)
    was = np.array(x.astype(mx.float32)).astype(np.float64)
    slopes = []
    for codec in (TurboQuantMSE(80, 2, unbiased=True), TurboQuantMSE(80, 2)):
        read = np.array(codec.decode(codec.encode(x, ()), (), mx.float32)).astype(np.float64)
        slopes.append((was * read).sum(axis=-1) / (was * was).sum(axis=-1))
    assert np.abs(slopes[0] - 1).max() < {mx.float32: 1e-4, mx.float16: 2**-10, mx.bfloat16: 2**-8}[dtype]
    assert slopes[1].mean() == pytest.approx(1 - 0.117, abs=0.02)
