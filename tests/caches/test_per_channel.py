"""Keys in groups along tokens: MLX's affine format of the transposed matrix, group by group."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.caches.codecs import AffineCodec, make
from veloxquant.caches.per_channel import PerChannelCodec
from veloxquant.errors import InvalidParams, MethodRefused

PAIRS = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
WIDTH = 80
"""No group divides it: groups run along tokens, and any width will do."""


def keys(tokens: int, seed: int = 0, width: int = WIDTH) -> mx.array:
    """(2, 3, tokens, width) in float32; a channel is up to 10 times as loud as another, and off centre."""
    numbers = np.random.default_rng(seed)
    loud, middle = numbers.uniform(1, 10, size=(3, 1, width)), numbers.normal(size=(3, 1, width))
    return mx.array((numbers.normal(size=(2, 3, tokens, width)) * loud + middle).astype(np.float32))


@pytest.mark.parametrize(("bits", "group"), PAIRS)
def test_a_group_is_what_mlx_makes_of_it_transposed(bits: int, group: int) -> None:
    """Words, scales and biases of each group alone are mx.quantize's, and slots are counted along axis 2."""
    codec, x = PerChannelCodec(WIDTH, bits, group), keys(3 * group)
    words, scales, biases = codec.encode(x, ())
    assert words.shape == (2, 3, 3, WIDTH, group * bits // 32)
    assert scales.shape == biases.shape == (2, 3, 3, WIDTH, 1)
    for at in range(3):
        alone = x[:, :, at * group : (at + 1) * group].swapaxes(-1, -2)
        theirs = mx.quantize(mx.contiguous(alone), group_size=group, bits=bits)
        ours = (words[:, :, at], scales[:, :, at], biases[:, :, at])
        assert all(mx.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))
        read = codec.decode(tuple(array[:, :, at : at + 1] for array in (words, scales, biases)), (), mx.float32)
        assert mx.array_equal(read, mx.dequantize(*theirs, group_size=group, bits=bits).swapaxes(-1, -2))


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 64), (8, 128)])
def test_no_number_is_off_by_more_than_half_a_step(bits: int, group: int) -> None:
    """A step is the channel's range in the group over 2**bits - 1.

    Half a step and, since MLX moves the levels so that the largest end is met exactly, as much again at the other end.
    """
    x = keys(2 * group)
    codec = PerChannelCodec(WIDTH, bits, group)
    read = np.array(codec.decode(codec.encode(x, ()), (), mx.float32)).reshape(2, 3, 2, group, WIDTH)
    apart = np.array(x).reshape(2, 3, 2, group, WIDTH)
    step = (apart.max(axis=3) - apart.min(axis=3)) / (2**bits - 1)
    assert (np.abs(read - apart).max(axis=3) <= 1.01 * step).all()


def test_loud_channels_spoil_no_others() -> None:
    """At 4 bits the error of quiet channels is less than a tenth of what groups along the width leave them.

    The published reason for the layout (KIVI, section 3.1); one channel in 32 is 100 times as loud here.
    """
    numbers = np.random.default_rng(5)
    x = numbers.normal(size=(1, 1, 128, 64)).astype(np.float32)
    x[..., ::32] *= 100
    quiet = np.arange(64) % 32 != 0

    def error(codec: Any) -> float:
        read = np.array(codec.decode(codec.encode(mx.array(x), ()), (), mx.float32))
        return float(np.sqrt(((read - x)[..., quiet] ** 2).mean()))

    assert error(PerChannelCodec(64, 4, 32)) < error(AffineCodec(64, 4, 32)) / 10


@pytest.mark.parametrize("rows", [1, 4, 40], ids=["one query", "a few", "many: unpacked once"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (3, 32)])
def test_products_are_those_of_decoded_numbers(rows: int, dtype: mx.Dtype, bits: int, group: int) -> None:
    """Scores and mixes to 1e-5 of numpy's with scales and biases in float64, in float32 whatever is stored."""
    codec, x = PerChannelCodec(WIDTH, bits, group), keys(3 * group).astype(dtype)
    queries = keys(rows, seed=1).astype(dtype)
    stored = codec.encode(x, ())
    wide = (stored[0], *(array.astype(mx.float32) for array in stored[1:]))
    decoded = np.array(codec.decode(wide, (), mx.float32)).astype(np.float64)
    scores = codec.scores(codec.ready(queries, ()), stored, ())
    weights = mx.softmax(scores / 100, axis=-1)
    mixed = codec.settle(codec.mix(weights, stored, ()), ())
    expected = np.array(queries).astype(np.float64) @ decoded.swapaxes(-1, -2)
    assert (scores.dtype, mixed.dtype) == (mx.float32, mx.float32)
    assert np.abs(np.array(scores) - expected).max() < 1e-5 * np.abs(expected).max()
    expected = np.array(weights).astype(np.float64) @ decoded
    assert np.abs(np.array(mixed) - expected).max() < 1e-5 * np.abs(decoded).max()


def test_only_whole_groups_are_packed() -> None:
    """65 tokens are none."""
    with pytest.raises(MethodRefused, match="65 tokens are no whole groups of 64"):
        PerChannelCodec(WIDTH, 4).encode(keys(65), ())


def test_a_description_makes_an_equal_codec() -> None:
    """By name, as a saved cache has it."""
    codec = PerChannelCodec(96, 3, 32)
    assert make(codec.describe()) == codec
    assert (codec.tokens, codec.space, codec.start(keys(1))) == (32, 96, ())


@pytest.mark.parametrize("wrong", [{"bits": 7}, {"bits": 4, "group": 16}, {"bits": True}, {"bits": 4, "group": "64"}])
def test_other_bits_and_groups_are_refused(wrong: dict[str, Any]) -> None:
    """With the parameter named."""
    with pytest.raises(InvalidParams) as refused:
        PerChannelCodec(64, **wrong)
    assert refused.value.field in wrong
