"""Key channels in classes with bits of their own, against mx.dequantize and plain products."""

from __future__ import annotations

import base64
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.caches import codecs
from veloxquant.caches.channel_classes import ChannelClassesCodec, written
from veloxquant.caches.refit import RefitPerChannelCodec
from veloxquant.errors import InvalidParams, MethodRefused

WIDTH, HEADS, GROUP = 16, 3, 32
ORDERS = [list(np.random.default_rng(head).permutation(WIDTH)) for head in range(HEADS)]


def codec(classes: str = "6,4,3,2", width: int = WIDTH, orders: Any = None, group: int = GROUP) -> ChannelClassesCodec:
    """One of three heads, each with its own order."""
    count = classes.count(",") + 1
    return ChannelClassesCodec(width, classes, written(ORDERS if orders is None else orders, count), group)


def keys(tokens: int = 2 * GROUP, batch: int = 2, dtype: mx.Dtype = mx.float32, width: int = WIDTH) -> Any:
    """Channels of unlike size."""
    mx.random.seed(2)
    sizes = mx.exp(mx.random.normal((1, HEADS, 1, width)))
    return (mx.random.normal((batch, HEADS, tokens, width)) * sizes).astype(dtype)


def bits_of(classes: str) -> list[list[int]]:
    """Of each head's channels, by place."""
    each = WIDTH // (classes.count(",") + 1)
    found = [[0] * WIDTH for _ in range(HEADS)]
    for head, order in enumerate(ORDERS):
        for place, channel in enumerate(order):
            found[head][channel] = int(classes.split(",")[place // each])
    return found


@pytest.mark.parametrize("classes", ["6,4,3,2", "3,3,2,2", "2,4,2,4", "8,5", "4"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_every_channel_is_packed_as_by_itself_with_the_bits_of_its_class(classes: str, dtype: mx.Dtype) -> None:
    """Bit for bit what a per-channel codec of so many bits gives for that channel."""
    made, x = codec(classes), keys(dtype=dtype)
    fixed = made.start(x[:, :, :1])
    read = made.decode(made.encode(x, fixed), fixed, mx.float32)
    for head, bits in enumerate(bits_of(classes)):
        for channel, own in enumerate(bits):
            part = x[:, head : head + 1, :, channel : channel + 1]
            words, *scaling = RefitPerChannelCodec(1, own, GROUP).encode(part, ())
            wide = (array.astype(mx.float32) for array in scaling)
            alone = mx.dequantize(words, *wide, group_size=GROUP, bits=own)
            assert mx.array_equal(read[:, head, :, channel].reshape(alone.shape), alone)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("classes", ["6,4,3,2", "3,3,2,2", "4"])
def test_products_are_those_with_what_is_read_back(rows: int, classes: str) -> None:
    """Scores and mixed values, with a few queries, on native kernels, and with many."""
    made, x = codec(classes), keys()
    fixed = made.start(x[:, :, :1])
    stored = made.encode(x, fixed)
    read = np.array(made.decode(stored, fixed, mx.float32), dtype=np.float64)
    queries, weights = mx.random.normal((2, HEADS, rows, WIDTH)), mx.random.uniform(shape=(2, HEADS, rows, 2 * GROUP))
    scores = np.array(made.scores(made.ready(queries, fixed), stored, fixed))
    mixed = np.array(made.settle(made.mix(weights, stored, fixed), fixed))
    np.testing.assert_allclose(scores, np.array(queries) @ read.swapaxes(-1, -2), rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(mixed, np.array(weights) @ read, rtol=2e-4, atol=2e-4)


def test_groups_do_not_know_of_each_other() -> None:
    """Two groups in one call are two calls of one group, array by array."""
    made, x = codec(), keys()
    fixed = made.start(x[:, :, :1])
    once = made.encode(x, fixed)
    apart = [made.encode(x[:, :, at : at + GROUP], fixed) for at in (0, GROUP)]
    for whole, *pieces in zip(once, *apart, strict=True):
        assert mx.array_equal(whole, mx.concatenate(pieces, axis=2))
        assert whole.shape[2] == 2


def test_bytes_are_those_of_the_bits() -> None:
    """32 tokens of 16 channels of 3 heads, 4 each at 6, 4, 3 and 2 bits with two numbers of 16 bits a channel."""
    made, x = codec(), keys(GROUP, batch=1, dtype=mx.float16)
    stored = made.encode(x, made.start(x[:, :, :1]))
    assert sum(array.nbytes for array in stored) == HEADS * (4 * GROUP * (6 + 4 + 3 + 2) // 8 + WIDTH * 2 * 2)
    assert [array.nbytes for array in made.start(x[:, :, :1])] == [HEADS * WIDTH]


def test_an_order_is_read_as_it_was_written() -> None:
    """Channels of a class side by side; for numbers of channels that fill no byte as well, and for many heads."""
    for width, heads, classes in ((18, 3, 2), (6, 1, 2), (128, 8, 4), (5, 3, 1), (256, 2, 4)):
        orders = [list(np.random.default_rng(head).permutation(width)) for head in range(heads)]
        made = ChannelClassesCodec(width, ",".join(["3"] * classes), written(orders, classes))
        (found,) = made.start(mx.zeros((1, heads, 1, width)))
        for order, own in zip(orders, np.array(found)[0], strict=True):
            assert [set(part) for part in np.split(own, classes)] == [
                set(part) for part in np.split(np.array(order), classes)
            ]


def test_a_description_makes_an_equal_codec() -> None:
    """In any process."""
    made = codec()
    assert codecs.make(made.describe()) == made


@pytest.mark.parametrize("value", [mx.nan, mx.inf])
def test_a_number_that_is_none_stays_in_its_channel(value: float) -> None:
    """And in its group; the other channels, heads and groups are as without it."""
    made, x = codec(), keys()
    fixed = made.start(x[:, :, :1])
    before = np.array(made.decode(made.encode(x, fixed), fixed, mx.float32))
    x[0, 1, 3, 5] = value
    after = np.array(made.decode(made.encode(x, fixed), fixed, mx.float32))
    after[0, 1, :GROUP, 5] = before[0, 1, :GROUP, 5]
    assert np.array_equal(before, after)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"classes": "6,4,3,7"}, "classes"),
        ({"classes": ""}, "classes"),
        ({"classes": "a"}, "classes"),
        ({"classes": 4}, "classes"),
        ({"classes": "4,4,4"}, "classes"),
        ({"classes": "4,4,4,4,4,4,4,4"}, "classes"),
        ({"width": 0}, "width"),
        ({"width": 300}, "width"),
        ({"group": 48}, "group"),
        ({"order": "?"}, "order"),
        ({"order": ""}, "order"),
        ({"order": None}, "order"),
        ({"order": base64.b64encode(bytes(12)).decode()}, "order"),
        ({"order": written(ORDERS, 4)[:4]}, "order"),
    ],
)
def test_what_describes_no_classes_is_refused(changes: dict[str, Any], field: str) -> None:
    """By the parameter that is wrong."""
    given = {"width": WIDTH, "classes": "6,4,3,2", "order": written(ORDERS, 4), "group": GROUP}
    with pytest.raises((InvalidParams, MethodRefused)) as told:
        ChannelClassesCodec(**{**given, **changes})
    assert told.value.field == field
    assert told.value.hint


def test_other_heads_and_parts_of_groups_are_refused() -> None:
    """Before anything is packed."""
    made = codec()
    with pytest.raises(InvalidParams, match="4 KV heads, and an order of channels for 3"):
        made.start(mx.zeros((1, 4, 1, WIDTH)))
    with pytest.raises(MethodRefused, match="33 tokens are no whole groups of 32"):
        made.encode(mx.zeros((1, HEADS, 33, WIDTH)), made.start(mx.zeros((1, HEADS, 1, WIDTH))))
