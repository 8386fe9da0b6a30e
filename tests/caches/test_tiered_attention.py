"""Attention over tiers: masks, rows of different lengths, blocks and tiles, and what a step costs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from cache_kit import WIDTH, normal, operations
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention

from veloxquant.caches import tiered_attention
from veloxquant.caches.codecs import AffineCodec, FloatCodec
from veloxquant.caches.per_channel import PerChannelCodec
from veloxquant.caches.tiered import TieredKVCache
from veloxquant.caches.tiered_attention import Tier, Tiered
from veloxquant.caches.tiered_sight import Sight

SCALE = 0.3


def floats(width: int = WIDTH) -> TieredKVCache:
    """Nothing is quantized: attention is that of plain K and V, whatever is in which tier."""
    return TieredKVCache(FloatCodec(width), FloatCodec(width), recent=64)


def kivi(width: int = WIDTH) -> TieredKVCache:
    """Keys by channel, values by token, 4 bits."""
    return TieredKVCache(PerChannelCodec(width, 4, 32), AffineCodec(width, 4, 32), recent=32)


def masks(tokens: int, count: int, heads: int) -> dict[str, Any]:
    """Every form that mlx-lm and its models use, over absolute positions."""
    causal = create_causal_mask(count, tokens - count)
    padded = mx.arange(tokens)[None, None, None] != 11
    return {
        "None": None,
        "causal": "causal",
        "bool": causal,
        "window": create_causal_mask(count, tokens - count, window_size=40),
        "added": mx.where(causal, normal(5, count, tokens), mx.finfo(mx.float32).min),
        "a row a head": mx.where(causal, normal(6, 1, heads, 1, tokens), -mx.inf),
        "one for all queries": padded,
        "one for all tokens": normal(7, 1, heads, count, 1),
    }


@pytest.mark.parametrize("small", [False, True], ids=["at once", "tiles and blocks"])
@pytest.mark.parametrize(("before", "count"), [(0, 300), (290, 10), (299, 1), (0, 3)])
@pytest.mark.parametrize("name", masks(3, 1, 1))
def test_masks_hide_what_they_hide_elsewhere(
    name: str, before: int, count: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With floats in every tier, the result is MLX's own attention under the same mask, to 1e-5.

    Also where blocks are of 64 tokens and tiles of 16 queries.
    """
    if small:
        for constant, value in (("BLOCK_NUMBERS", 2**11), ("BLOCK_TOKENS", 64), ("TILE_ROWS", 64)):
            monkeypatch.setattr(tiered_attention, constant, value)
        monkeypatch.setattr(tiered_attention, "_is_native", lambda _: False)
    tokens = before + count
    keys, values, queries = (
        normal(1, 1, 2, tokens, WIDTH),
        normal(2, 1, 2, tokens, WIDTH),
        normal(3, 1, 4, count, WIDTH),
    )
    mask = masks(tokens, count, 4)[name]
    cache = floats()
    if before:
        cache.update_and_fetch(keys[:, :, :before], values[:, :, :before])
    ours = cache.update_and_fetch(keys[:, :, before:], values[:, :, before:])
    found = ours[0].attend(queries, ours[1], SCALE, mask)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)
    assert float(mx.abs(found - expected).max()) < 1e-5


def test_a_query_of_which_all_is_packed_needs_no_recent_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sinks and recent tokens, each query in a tile of its own, at a boundary too."""
    monkeypatch.setattr(tiered_attention, "TILE_ROWS", 4)
    keys, values, queries = (normal(seed, 1, heads, 130, WIDTH) for seed, heads in ((1, 2), (2, 2), (3, 4)))
    cache = TieredKVCache(FloatCodec(WIDTH), FloatCodec(WIDTH), sinks=0, recent=0)
    ours = cache.update_and_fetch(keys, values)
    found = ours[0].attend(queries, ours[1], SCALE, "causal")
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask="causal")
    assert float(mx.abs(found - expected).max()) < 1e-5


def test_a_query_that_sees_nothing_gets_no_nan() -> None:
    """Under False for every token it gets a mean, under -inf zeros."""
    keys, values, queries = normal(1, 1, 2, 200, WIDTH), normal(2, 1, 2, 200, WIDTH), normal(3, 1, 4, 1, WIDTH)
    cache = floats()
    ours = cache.update_and_fetch(keys, values)
    ours = cache.update_and_fetch(keys[:, :, :1], values[:, :, :1])
    found = ours[0].attend(queries, ours[1], SCALE, mx.zeros((1, 201), dtype=mx.bool_))
    assert bool(mx.isfinite(found).all())
    found = ours[0].attend(queries, ours[1], SCALE, mx.full((1, 201), -mx.inf))
    assert float(mx.abs(found).max()) == 0


def test_the_engines_own_dispatcher_reaches_it_in_its_format() -> None:
    """In float16 the answer is float16, within a rounding of the same K and V in float32."""
    keys, values, queries = (normal(seed, 1, heads, 150, WIDTH) for seed, heads in ((1, 2), (2, 2), (3, 4)))
    half, single = floats(), floats()
    found = []
    for cache, dtype in ((half, mx.float16), (single, mx.float32)):
        as_half = [x.astype(mx.float16).astype(dtype) for x in (keys, values, queries)]
        ours = cache.update_and_fetch(*as_half[:2])
        found.append(scaled_dot_product_attention(as_half[2], *ours, cache, SCALE, "causal"))
    assert found[0].dtype == mx.float16
    assert mx.array_equal(found[0], found[1].astype(mx.float16))


@pytest.mark.parametrize(
    ("mask", "why"),
    [("later", "is not known"), (mx.zeros((7, 9)), "a mask of shape"), (mx.zeros((1, 3, 1, 1)), "a mask of shape")],
)
def test_other_masks_are_refused(mask: Any, why: str) -> None:
    """With what was given in the message."""
    cache = floats()
    ours = cache.update_and_fetch(normal(1, 1, 2, 30, WIDTH), normal(2, 1, 2, 30, WIDTH))
    with pytest.raises(ValueError, match=why):
        ours[0].attend(normal(3, 1, 4, 30, WIDTH), ours[1], SCALE, mask)


def test_values_of_another_kind_and_odd_heads_are_refused() -> None:
    """Keys in tiers go with values in tiers, and query heads are a multiple of KV heads."""
    cache = floats()
    keys, values = cache.update_and_fetch(normal(1, 1, 2, 30, WIDTH), normal(2, 1, 2, 30, WIDTH))
    with pytest.raises(TypeError, match="values that are not"):
        keys.attend(normal(3, 1, 4, 30, WIDTH), normal(2, 1, 2, 30, WIDTH), SCALE)
    with pytest.raises(ValueError, match="not a multiple"):
        keys.attend(normal(3, 1, 3, 30, WIDTH), values, SCALE)
    with pytest.raises(AttributeError, match="outside attention"):
        _ = keys.shape


def joined(caches: list[TieredKVCache], which: str) -> Tier:
    """Rows of caches of one sequence each, packed slots filled up with zeros."""
    parts = [getattr(cache, which) for cache in caches]
    slots = max(array.shape[2] for part in parts for array in part.packed[:1])

    def wide(array: Any) -> Any:
        return mx.pad(array, [(0, 0), (0, 0), (0, slots - array.shape[2]), *[(0, 0)] * (array.ndim - 3)])

    like = next(part.packed for part in parts if part.packed)
    none = [array[:, :, :0] for array in like]
    packed = [[wide(array) for array in part.packed or none] for part in parts]
    return Tier(
        codec=parts[0].codec,
        packed=tuple(mx.concatenate(list(same)) for same in zip(*packed, strict=True)),
        fixed=(),
        recent_codec=parts[0].recent_codec,
        recent=tuple(mx.concatenate(list(same)) for same in zip(*(part.recent for part in parts), strict=True)),
        recent_fixed=(),
        sinks=mx.concatenate([part.sinks[0] for part in parts]),
    )


def test_rows_of_any_lengths_are_each_what_they_are_alone() -> None:
    """One token each after 2, 40, 131, 132 and 400: with sinks unfilled, nothing packed, at and off a boundary."""
    lengths = (2, 40, 131, 132, 400)
    queries, caches, alone = normal(9, len(lengths), 4, 1, WIDTH), [], []
    for row, length in enumerate(lengths):
        keys, values = normal(2 * row, 1, 2, length, WIDTH), normal(2 * row + 1, 1, 2, length, WIDTH)
        cache = kivi()
        cache.update_and_fetch(keys[:, :, :-1], values[:, :, :-1])
        ours = cache.update_and_fetch(keys[:, :, -1:], values[:, :, -1:])
        alone.append(ours[0].attend(queries[row : row + 1], ours[1], SCALE))
        caches.append(cache)
    layout = caches[0].layout
    sight = Sight(layout, tuple(length - 1 for length in lengths), lengths, None, layout.ring)
    keys, values = (Tiered(joined(caches, part), sight) for part in ("key_part", "value_part"))
    together = keys.attend(queries, values, SCALE)
    assert float(mx.abs(together - mx.concatenate(alone)).max()) < 1e-6


def step_calls(make: Any, rows: int, heads: int, tokens: int) -> int:
    """MLX operations of a decode step, cache and attention: the nodes of its graph, nothing else being unevaluated."""
    cache = make()
    cache.update_and_fetch(normal(1, rows, heads, tokens, WIDTH), normal(2, rows, heads, tokens, WIDTH))
    new, queries = normal(3, rows, heads, 1, WIDTH), normal(4, rows, 4 * heads, 1, WIDTH)
    mx.eval(cache.state, new, queries)
    keys, values = cache.update_and_fetch(new, new)
    return operations(keys.attend(queries, values, SCALE), *[a for g in cache.key_part.arrays for a in g])


@pytest.mark.parametrize("make", [floats, kivi])
def test_a_step_makes_as_many_calls_for_any_rows_heads_and_tokens(make: Any) -> None:
    """8 rows as 1, 8 heads as 2, 5,000 tokens as 500; and a number that a step may cost, below 80.

    At 500 and 4,980 tokens alike no group is completed by the step, for groups of 32 and of 64.
    """
    base = step_calls(make, 1, 2, 500)
    assert 20 < base < 80
    assert step_calls(make, 8, 2, 500) == step_calls(make, 1, 8, 500) == step_calls(make, 1, 2, 4980) == base


def test_no_scores_of_more_than_a_tile_and_a_block_exist() -> None:
    """4,096 queries of 8 heads over as many tokens make 512 MiB of scores; the call takes less than 48 MiB."""
    cache = kivi()
    keys, values, queries = (normal(seed, 1, heads, 4096, WIDTH) for seed, heads in ((1, 2), (2, 2), (3, 8)))
    mx.eval(keys, values, queries)
    ours = cache.update_and_fetch(keys, values)
    mx.eval(cache.state)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(ours[0].attend(queries, ours[1], SCALE, "causal"))
    assert mx.get_peak_memory() - before < 48 * 2**20


def test_many_query_heads_over_one_kv_head_never_unpack_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 heads, for which native codecs unpack: a step's temporary arrays are a part of 16,384 unpacked keys."""
    monkeypatch.setattr(tiered_attention, "BLOCK_NUMBERS", 2**15)
    tokens, width = 2**14, 128
    cache = kivi(width)
    x = normal(1, 1, 1, tokens, width)
    cache.update_and_fetch(x, x)
    one, queries = normal(2, 1, 1, 1, width), normal(3, 1, 40, 1, width)
    mx.eval(cache.state, one, queries)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    keys, values = cache.update_and_fetch(one, one)
    mx.eval(keys.attend(queries, values, SCALE))
    assert mx.get_peak_memory() - before < tokens * width * 4 / 2
