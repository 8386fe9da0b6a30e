"""Caches in tiers, batched: every row is its single run, whatever the others do."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from batch_kit import PLANS, Drive, Shape, played
from cache_kit import WIDTH
from hypothesis import given, settings
from mlx_lm.models.cache import BatchKVCache, KVCache
from tiered_batch_kit import KINDS, drive, held

from veloxquant.caches.codecs import make
from veloxquant.caches.per_channel import PerChannelCodec
from veloxquant.caches.tiered import TieredKVCache

EVERY = pytest.mark.parametrize("kind", KINDS)


@EVERY
def test_eight_unequal_rows_are_their_single_runs(kind: str) -> None:
    """Empty, of one token, shorter than the sinks, at a boundary, before and behind it: prompts, then 70 steps."""
    rows = drive(kind)
    rows.start([0, 1, 3, 67, 68, 69, 0, 300])
    rows.prompt([1, 64, 1, 33, 1, 2, 260, 7], step=100)
    rows.decode(70)
    for row in range(8):
        rows.extract(row)


@pytest.mark.parametrize("padding", [[3, 0], [0, 3]])
def test_two_unequal_rows_are_their_single_runs(padding: list[int]) -> None:
    """Of 0 and 3 tokens before; 100 steps, so that each packs groups at its own time."""
    rows = drive()
    rows.start(padding)
    rows.prompt([60, 75])
    rows.decode(100)


@EVERY
def test_prompts_padded_on_the_left_are_taken_from_their_right_end(kind: str) -> None:
    """As older callers pad an empty batch: in calls of 40, some of which are padding alone for some rows."""
    rows = drive(kind)
    rows.start([0, 0, 0, 0])
    rows.prompt([130, 69, 5, 1], step=40, left=True)
    rows.decode(35)


@EVERY
@settings(max_examples=10)
@given(plan=PLANS)
def test_whatever_is_done_rows_are_their_single_runs(kind: str, plan: list[tuple[str, list[int]]]) -> None:
    """Attention, stored bits, offsets and bytes after every step of a random sequence of calls."""
    played(drive(kind), plan)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_rows_keep_the_models_format(dtype: Any) -> None:
    """Sinks, ring and scales have it as those of the single runs; attention agrees to what it can tell apart."""
    rows = drive(dtype=dtype, near=2e-2)
    rows.start([0, 50])
    rows.prompt([90, 20], step=64)
    rows.decode(3)


def test_many_query_heads_and_unlike_widths_are_kept_apart() -> None:
    """Three KV heads of four query heads each; V of width 64."""

    def one() -> TieredKVCache:
        return TieredKVCache(PerChannelCodec(32, 4, 32), make({"name": "affine", "width": 64, "bits": 4}), recent=32)

    rows = Drive(one, held, shape=Shape(3, 4, 32, 64))
    rows.start([0, 40])
    rows.prompt([100, 90])
    rows.decode(5)


def test_tiles_of_queries_see_what_the_whole_call_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles of 16 queries and blocks of 256 tokens: 700 and 350 tokens in one call."""
    from veloxquant.caches import tiered_attention

    monkeypatch.setattr(tiered_attention, "TILE_ROWS", 64)
    monkeypatch.setattr(tiered_attention, "BLOCK_NUMBERS", 2**14)
    rows = drive()
    rows.start([0, 41])
    rows.prompt([700, 350])


@pytest.mark.parametrize("window", [1, 7, 80])
def test_a_window_counts_from_each_rows_own_position(window: int) -> None:
    """A layer with a window over a growing cache: the mask is the engine's, the rows are their single runs."""
    rows = drive(window=window)
    rows.start([0, 130])
    rows.prompt([90, 20], step=64)
    rows.decode(3)


@pytest.mark.parametrize("additive", [False, True])
def test_masks_of_the_engines_own_batch_cache_are_served(additive: bool) -> None:
    """Its left-padded columns, for a layer that shares the mask with ours; as booleans or as numbers."""
    rows = drive()
    rows.start([5, 90])
    engine = BatchKVCache.merge([_engine(5), _engine(90)])
    twin = rows.twin
    mx.random.seed(1)
    for count, padding in ((7, [2, 0]), (1, None)):
        if padding:
            for cache in (engine, twin):
                cache.prepare(lengths=[count - one for one in padding], right_padding=padding)
        mask, own = engine.make_mask(count), twin.make_mask(count)
        assert mx.array_equal(mask, own)
        if additive:
            mask = mx.where(mask, 0.0, -mx.inf)
        keys, values, queries = (mx.random.normal((2, heads, count, WIDTH)) for heads in (2, 2, 4))
        engine.update_and_fetch(keys, values)
        packed_keys, packed_values = twin.update_and_fetch(keys, values)
        by_position = packed_keys.attend(queries, packed_values, 0.2, own)
        assert float(mx.abs(packed_keys.attend(queries, packed_values, 0.2, mask) - by_position)[0, :, :5].max()) < 1e-6
        assert float(mx.abs(packed_keys.attend(queries, packed_values, 0.2, mask) - by_position)[1].max()) < 1e-6
        if padding:
            engine.finalize()
            twin.finalize()


def _engine(tokens: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, tokens, WIDTH)), mx.zeros((1, 2, tokens, WIDTH)))
    return cache
