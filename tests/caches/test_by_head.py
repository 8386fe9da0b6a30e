"""Heads with codecs of their own, against each codec by itself."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.caches import codecs
from veloxquant.caches.affine_codec import AffineCodec
from veloxquant.caches.by_head import ByHeadCodec
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.caches.per_channel import PerChannelCodec
from veloxquant.caches.rotated import RotatedCodec
from veloxquant.caches.symmetric import SymmetricCodec
from veloxquant.caches.turboquant import TurboQuantProd
from veloxquant.errors import InvalidParams

WIDTH = 40
"""Filled up to 64 by the rotation: spaces differ."""
WIDE = RotatedCodec(WIDTH, SymmetricCodec(64, 3, 64))
KINDS = (WIDE, FloatCodec(WIDTH), RotatedCodec(WIDTH, SymmetricCodec(64, 2, 32)))
LAYOUTS = [(0, 1, 2, 1), (2, 1, 0, 0, 1), (0, 0, 1, 1, 2, 2), (1, 2, 0)]


def values(heads: int, tokens: int = 9) -> Any:
    """Random."""
    mx.random.seed(3)
    return mx.random.normal((2, heads, tokens, WIDTH))


@pytest.mark.parametrize("heads", LAYOUTS, ids=str)
def test_each_head_is_kept_and_read_as_its_own_codec_does(heads: tuple[int, ...]) -> None:
    """Stored, read back, scored and mixed, with an order of heads that mixes the kinds."""
    made, x = ByHeadCodec(KINDS, heads), values(len(heads))
    fixed = made.start(x[:, :, :1])
    stored = made.encode(x, fixed)
    queries, weights = mx.random.normal((2, len(heads), 2, WIDTH)), mx.random.uniform(shape=(2, len(heads), 2, 9))
    read = made.decode(stored, fixed, mx.float32)
    scores = made.scores(made.ready(queries, fixed), stored, fixed)
    mixed = made.settle(made.mix(weights, stored, fixed), fixed)
    for head, kind in enumerate(heads):
        alone, own = KINDS[kind], slice(head, head + 1)
        kept = alone.start(x[:, own, :1])
        packed = alone.encode(x[:, own], kept)
        assert mx.array_equal(read[:, own], alone.decode(packed, kept, mx.float32))
        np.testing.assert_allclose(
            np.array(scores[:, own]),
            np.array(alone.scores(alone.ready(queries[:, own], kept), packed, kept)),
            rtol=1e-5,
            atol=1e-5,
        )
        np.testing.assert_allclose(
            np.array(mixed[:, own]),
            np.array(alone.settle(alone.mix(weights[:, own], packed, kept), kept)),
            rtol=1e-5,
            atol=1e-5,
        )


def test_bytes_are_those_of_each_heads_codec() -> None:
    """Nothing is stored twice, and no head takes the room of another's codec."""
    heads = (0, 1, 2, 1)
    made, x = ByHeadCodec(KINDS, heads), values(4)
    alone = [KINDS[kind].encode(x[:, head : head + 1], ()) for head, kind in enumerate(heads)]
    expected = sum(array.nbytes for arrays in alone for array in arrays)
    assert sum(array.nbytes for array in made.encode(x, made.start(x[:, :, :1]))) == expected


def test_arrays_that_do_not_grow_are_each_codecs_own() -> None:
    """A sketch codec keeps some; the float head beside it none."""
    sketch = TurboQuantProd(64, 2)
    made = ByHeadCodec((FloatCodec(64), sketch), (1, 0))
    x = mx.random.normal((1, 2, 4, 64))
    fixed = made.start(x[:, :, :1])
    kept = sketch.start(x[:, :1, :1])
    assert len(fixed) == len(kept)
    read = made.decode(made.encode(x, fixed), fixed, mx.float32)
    assert mx.array_equal(read[:, :1], sketch.decode(sketch.encode(x[:, :1], kept), kept, mx.float32))
    assert mx.array_equal(read[:, 1:], x[:, 1:])


def test_a_description_makes_an_equal_codec() -> None:
    """In any process."""
    made = ByHeadCodec(KINDS, (2, 0, 1, 1))
    assert codecs.make(made.describe()) == made


@pytest.mark.parametrize(
    ("kinds", "heads", "field"),
    [
        (KINDS, (0, 1), "heads"),
        (KINDS, (0, 1, 2, 3), "heads"),
        ((), (), "heads"),
        ((FloatCodec(64), FloatCodec(32)), (0, 1), "codecs"),
        ((AffineCodec(64, 4, 32), PerChannelCodec(64, 4, 32)), (0, 1), "codecs"),
    ],
)
def test_kinds_that_do_not_go_together_are_refused(kinds: Any, heads: Any, field: str) -> None:
    """Each is used, and all have one width and one count of tokens a slot."""
    with pytest.raises(InvalidParams) as told:
        ByHeadCodec(kinds, heads)
    assert told.value.field == field


@pytest.mark.parametrize(("inner", "heads"), [("[", "0"), ("4", "0"), ("[4]", "0"), ("[" * 10**5, "0"), ("[]", "")])
def test_a_broken_description_is_refused(inner: str, heads: str) -> None:
    """With a typed error."""
    with pytest.raises(InvalidParams):
        codecs.make({"name": "by_head", "codecs": inner, "heads": heads})


def test_another_number_of_heads_is_refused() -> None:
    """Before anything is packed."""
    with pytest.raises(InvalidParams, match="3 KV heads, and codecs for 4"):
        ByHeadCodec(KINDS, (0, 1, 2, 1)).encode(values(3), ())
