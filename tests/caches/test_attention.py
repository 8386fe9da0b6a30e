"""Attention over packed caches equals MLX's own over the same numbers, however blocks and tiles fall."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from cache_kit import WIDTH, operations

from veloxquant.caches import affine_codec, attention
from veloxquant.caches.affine_codec import AffineCodec
from veloxquant.caches.attention import Packed, attend
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.caches.turboquant import TurboQuantMSE, TurboQuantProd

if TYPE_CHECKING:
    from veloxquant.caches.codec import Codec

SCALE = WIDTH**-0.5
exact = pytest.mark.skipif(sys.platform != "linux", reason="only there are a row's products known to be the same bits")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few queries and blocks of a few tokens, so that small arrays have many of both."""
    monkeypatch.setattr(attention, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(attention, "TILE_ROWS", 64)
    monkeypatch.setattr(attention, "BLOCK_NUMBERS", 2**11)


def packed(x: Any) -> Packed:
    """Keys or values as they are."""
    return Packed(FloatCodec(x.shape[-1]), [x], (), x.shape[2])


def arrays(heads: int, groups: int, queries: int, tokens: int, value_width: int = WIDTH) -> tuple[Any, Any, Any]:
    """Random queries, keys and values of two sequences."""
    mx.random.seed(queries * 1000 + tokens)
    return (
        mx.random.normal((2, heads, queries, WIDTH)),
        mx.random.normal((2, groups, tokens, WIDTH)),
        mx.random.normal((2, groups, tokens, value_width)),
    )


def furthest(a: Any, b: Any) -> float:
    """The greatest difference."""
    return float(mx.abs(a - b).max())


SHAPES = [
    (4, 2, 1, 1),
    (4, 2, 1, 333),
    (8, 1, 3, 100),
    (6, 3, 40, 40),
    (4, 4, 65, 200),
    (8, 2, 513, 700),
]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("heads", "groups", "queries", "tokens"), SHAPES)
@pytest.mark.parametrize("mask", [None, "causal"])
def test_equals_the_fused_kernel(heads: int, groups: int, queries: int, tokens: int, mask: str | None) -> None:
    """Grouped heads, one query or many, with and without a causal mask: mx.fast's result to 1e-5."""
    q, k, v = arrays(heads, groups, queries, tokens)
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask=mask)
    assert furthest(attend(q, packed(k), packed(v), SCALE, mask), expected) < 1e-5


@pytest.mark.parametrize("tokens", [1, 300, 5000])
@pytest.mark.parametrize("kind", ["none", "bool", "added", "hidden"])
@pytest.mark.parametrize("numbers", [2**21, 2**12])
def test_one_query_over_what_products_read(
    tokens: int, kind: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every kind of mask, two sequences, in one span or ten: mx.fast's result; all hidden gives zeros."""
    monkeypatch.setattr(attention, "SPAN_NUMBERS", numbers)
    q, k, v = arrays(8, 2, 1, tokens)
    codec = AffineCodec(WIDTH, 4, 32)
    keys, values = coded(codec, k, tokens), coded(codec, v, tokens)
    full = [codec.decode(each.stored, (), mx.float32) for each in (keys, values)]
    mask = {
        "none": None,
        "bool": (mx.random.uniform(shape=(2, 1, 1, tokens)) > 0.4) | (mx.arange(tokens) == 0),
        "added": mx.random.normal((8, 1, tokens)),
        "hidden": mx.full((1, tokens), -mx.inf),
    }[kind]
    found = attend(q, keys, values, SCALE, mask)
    if kind == "hidden":
        assert float(mx.abs(found).max()) == 0.0
        return
    expected = mx.fast.scaled_dot_product_attention(q, *full, scale=SCALE, mask=mask)
    assert furthest(found, expected) < 1e-5
    assert mx.array_equal(attend(q, keys, values, SCALE, mask), found)
    assert furthest(attend(q.astype(mx.float16), keys, values, SCALE, mask), expected) < 2e-2


def test_where_many_heads_share_keys_a_query_works_in_blocks() -> None:
    """64 query heads over one KV head and 20,000 tokens: what is unpacked of 10 MiB stays below 40 MiB in all."""
    assert attention.MANY_ROWS == affine_codec.MANY_ROWS
    q, k, v = (x[:1] for x in arrays(64, 1, 1, 20_000))
    codec = AffineCodec(WIDTH, 4, 32)
    keys, values = coded(codec, k, 20_000), coded(codec, v, 20_000)
    full = [codec.decode(each.stored, (), mx.float32) for each in (keys, values)]
    mx.eval(q, keys.stored, values.stored, full)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = attend(q, keys, values, SCALE)
    mx.eval(found)
    assert mx.get_peak_memory() - before < 40 * 2**20
    assert furthest(found, mx.fast.scaled_dot_product_attention(q, *full, scale=SCALE)) < 1e-5


def test_one_query_costs_the_same_calls_over_many_tokens_as_over_few() -> None:
    """The graph of a step over 40,000 tokens has the operations of one over 40."""
    found = set()
    for tokens in (40, 40_000):
        x = mx.zeros((1, 2, tokens, WIDTH))
        codec = AffineCodec(WIDTH, 4, 32)
        keys = coded(codec, x, tokens)
        mx.eval(keys.stored)
        found.add(operations(attend(mx.ones((1, 4, 1, WIDTH)), keys, keys, SCALE)))
    assert len(found) == 1


MASK_SHAPES = [(30, 90), (1, 90), (8, 30, 90), (2, 1, 30, 90), (2, 8, 30, 90), (2, 1, 1, 90), (1, 8, 30, 1)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_array_masks_are_cut_to_each_block(shape: tuple[int, ...], kind: str) -> None:
    """Every shape that broadcasts to (batch, heads, queries, tokens), bool or added."""
    q, k, v = arrays(8, 2, 30, 90)
    mask = mx.random.normal(shape) if kind == "added" else mx.random.uniform(shape=shape) > 0.4
    if kind == "bool":
        mask = mask | (mx.arange(shape[-1]) == 0)  # no row without a token that it sees
    full = mx.broadcast_to(mask, (2, 8, 30, 90))
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask=full)
    assert furthest(attend(q, packed(k), packed(v), SCALE, mask), expected) < 1e-5


@pytest.mark.usefixtures("small_blocks")
def test_values_may_have_another_width_than_keys() -> None:
    """Keys of 32 with values of 48: softmax(q k) v written out."""
    q, k, v = arrays(4, 4, 5, 130, value_width=48)
    expected = mx.softmax(SCALE * q @ k.swapaxes(-1, -2), axis=-1) @ v
    assert furthest(attend(q, packed(k), packed(v), SCALE), expected) < 1e-5


@pytest.mark.usefixtures("small_blocks")
def test_blocks_that_are_wholly_hidden_change_nothing() -> None:
    """The first 64 of 130 tokens hidden, by False and by -inf: attention over the others alone."""
    q, k, v = arrays(4, 2, 3, 130)
    expected = mx.fast.scaled_dot_product_attention(q, k[:, :, 64:], v[:, :, 64:], scale=SCALE)
    seen = mx.broadcast_to(mx.arange(130) >= 64, (3, 130))
    assert furthest(attend(q, packed(k), packed(v), SCALE, seen), expected) < 1e-5
    assert furthest(attend(q, packed(k), packed(v), SCALE, mx.where(seen, 0.0, -mx.inf)), expected) < 1e-5


@pytest.mark.usefixtures("small_blocks")
def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    """Scores of some thousands, the greatest in the last block: its value, as softmax gives."""
    q = mx.full((1, 1, 1, WIDTH), 100.0)
    k = mx.linspace(-10, 10, 200)[None, None, :, None] * mx.ones((1, 1, 1, WIDTH))
    v = mx.arange(200)[None, None, :, None] * mx.ones((1, 1, 1, WIDTH))
    assert furthest(attend(q, packed(k), packed(v), 1.0), mx.full((1, 1, 1, WIDTH), 199.0)) == 0.0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_result_has_the_format_of_the_queries(dtype: mx.Dtype) -> None:
    """As a model's next layer expects, and the caller's queries are left as they were."""
    q, k, v = (x.astype(dtype) for x in arrays(4, 2, 3, 20))
    before = mx.array(q)
    out = attend(q, packed(k), packed(v), SCALE)
    assert out.dtype == dtype
    assert mx.array_equal(q, before)
    expected = mx.fast.scaled_dot_product_attention(*(x.astype(mx.float32) for x in (q, k, v)), scale=SCALE)
    assert furthest(out.astype(mx.float32), expected) < 0.02


@pytest.mark.parametrize("shape", [(29, 90), (30, 89), (4, 30, 90), (2, 3, 30, 90)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """What does not broadcast raises ValueError, as MLX's own does."""
    q, k, v = arrays(8, 2, 30, 90)
    with pytest.raises(ValueError, match="a mask of shape"):
        attend(q, packed(k), packed(v), SCALE, mx.zeros(shape))


def test_other_words_and_heads_that_do_not_divide_are_refused() -> None:
    """An unknown kind of mask, and 4 query heads over 3."""
    q, k, v = arrays(4, 3, 2, 5)
    with pytest.raises(ValueError, match="4 query heads over 3 KV heads"):
        attend(q, packed(k), packed(v), SCALE)
    q, k, v = arrays(4, 2, 2, 5)
    with pytest.raises(ValueError, match="'banded' is not known"):
        attend(q, packed(k), packed(v), SCALE, "banded")


CODECS: list[Codec] = [
    FloatCodec(WIDTH),
    AffineCodec(WIDTH, 4, 32),
    TurboQuantMSE(WIDTH, 3),
    TurboQuantProd(WIDTH, 3, jl_dim=80),
    TurboQuantMSE(WIDTH, 2, outlier_bits=6, outlier_channels=5),
]


def coded(codec: Codec, x: Any, tokens: int) -> Packed:
    """The first tokens, packed."""
    fixed = codec.start(x[:, :, :1])
    return Packed(codec, codec.encode(x, fixed), fixed, tokens)


@exact
@pytest.mark.parametrize("count", [130, 600])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.describe()["name"])
def test_a_query_has_the_same_result_to_the_bit_in_any_call(
    codec: Codec, count: int, request: pytest.FixtureRequest
) -> None:
    """9 small blocks or 3 of the usual: one causal call, smaller ones, and alone before later tokens are there.

    Where products read what is stored, a query that comes alone takes all tokens at once: the same to rounding.
    """
    if count < attention.BLOCK_TOKENS:
        request.getfixturevalue("small_blocks")
    q, k, v = arrays(6, 2, count, count)
    whole = attend(q, coded(codec, k, count), coded(codec, v, count), SCALE, "causal")
    calls = [(0, 1), (0, 7), (7, 71), (71, count), (0, count - 87), (31, 32), (32, 33), (127, 128), (count - 1, count)]
    for first, last in calls:
        keys, values = coded(codec, k, last), coded(codec, v, last)
        mask = "causal" if last - first > 1 else None
        found, expected = attend(q[:, :, first:last], keys, values, SCALE, mask), whole[:, :, first:last]
        if last - first == 1 and getattr(codec, "native", False):
            assert furthest(found, expected) < 1e-6
        else:
            assert mx.array_equal(found, expected)


@exact
@pytest.mark.usefixtures("small_blocks")
def test_tokens_that_are_hidden_are_as_tokens_that_are_not_there() -> None:
    """The last 67 of 100 hidden, by False and by -inf: to the bit what the first 33 give."""
    q, k, v = arrays(4, 2, 3, 100)
    codec = TurboQuantMSE(WIDTH, 3)
    alone = attend(q, coded(codec, k, 33), coded(codec, v, 33), SCALE)
    seen = mx.broadcast_to(mx.arange(100) < 33, (3, 100))
    for mask in (seen, mx.where(seen, 0.0, -mx.inf)):
        assert mx.array_equal(attend(q, coded(codec, k, 100), coded(codec, v, 100), SCALE, mask), alone)


def test_a_row_that_sees_nothing_is_the_mean_as_in_the_engine() -> None:
    """All False: every token weighs the same, those that fill the last block up not at all; all -inf: zeros."""
    q, k, v = arrays(4, 2, 1, 300)
    hidden = attend(q, packed(k), packed(v), SCALE, mx.zeros((1, 300), dtype=mx.bool_))
    assert furthest(hidden, mx.repeat(v.mean(axis=2, keepdims=True), 2, axis=1)) < 1e-5
    assert furthest(attend(q, packed(k), packed(v), SCALE, mx.full((1, 300), -mx.inf)), mx.zeros_like(q)) == 0.0


def test_blocks_are_counted_in_the_space_of_the_codec() -> None:
    """A sketch of 8,192 signs unpacks each of 1,024 x 8 keys to 8,256 numbers, 258 MiB; the peak stays below 32 MiB."""
    codec = TurboQuantProd(64, 4, jl_dim=8192)
    one = codec.encode(mx.random.normal((1, 8, 1, 64)), ())
    keys = Packed(codec, [mx.repeat(array, 1024, axis=2) for array in one], (), 1024)
    q = mx.random.normal((1, 8, 1, 64))
    mx.eval(q, keys.stored)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(keys.attend(q, keys, 0.125))
    assert mx.get_peak_memory() - held < 2**25


def test_no_score_matrix_is_ever_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 queries of 8 heads over 4,096 tokens make 32 MiB of scores; the peak stays below 20 blocks of 2 MiB."""
    mx.random.seed(1)
    codec = TurboQuantMSE(64, 4)
    q = mx.random.normal((1, 8, 256, 64))
    stored = codec.encode(mx.random.normal((1, 2, 4096, 64)), ())
    keys = Packed(codec, stored, (), 4096)
    mx.eval(q, keys.stored)
    monkeypatch.setattr(attention, "BLOCK_NUMBERS", 2**19)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(keys.attend(q, keys, 0.125, "causal"))
    assert mx.get_peak_memory() - held < 20 * 4 * 2**19
