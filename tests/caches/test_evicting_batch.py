"""The batch of bounded caches: every row keeps, sees and answers what its own single run does."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from batch_kit import PLANS, Drive, Request, agree, alone, played, serve
from cache_kit import FLOAT, FOUR_BITS, HEADS, WIDTH, model, operations, prompt, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import BatchKVCache, KVCache, load_prompt_cache, save_prompt_cache

from veloxquant.caches.codecs import make
from veloxquant.caches.evicting import EvictingKVCache
from veloxquant.caches.evicting_batch import BatchEvictingKVCache
from veloxquant.caches.eviction import HeavyHitters, KeyNorm, SnapKV, Streaming
from veloxquant.caches.held import arrays, held_bytes
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from pathlib import Path

    from veloxquant.caches.eviction import Policy

BUDGET, STRIDE = 40, 16
POLICIES: dict[str, Policy] = {
    "streaming": Streaming(sinks=4),
    "knorm": KeyNorm(recent=8),
    "snapkv": SnapKV(recent=8, kernel=5),
    "h2o": HeavyHitters(recent=20),
}
CODECS = {"float": FLOAT, "4bit": FOUR_BITS}
ALL = pytest.mark.parametrize("kind", [(policy, codec) for policy in POLICIES for codec in CODECS], ids="-".join)
FEW = pytest.mark.parametrize("kind", [("streaming", "float"), ("h2o", "4bit")], ids="-".join)
Kind = tuple[str, str]
NEAR = 2e-5


def fresh(kind: Kind, budget: int = BUDGET) -> EvictingKVCache:
    """An empty single cache."""
    policy, codec = kind
    return EvictingKVCache(make(CODECS[codec]), make(CODECS[codec]), POLICIES[policy], budget, STRIDE)


def drive(kind: Kind) -> Drive:
    """Batch and single runs beside each other."""
    return Drive(lambda: fresh(kind), stored, near=NEAR)


@ALL
def test_rows_evict_at_their_own_positions_and_are_what_they_are_alone(kind: Kind) -> None:
    """Rows of 0, 30 and 100 tokens, prompts padded and cut anywhere, decode, rows that come, go and are taken out."""
    rows = drive(kind)
    rows.start([0, 30, 100])
    rows.prompt([5, 70, 33], step=20)
    rows.decode(20)
    rows.start([0, 7])
    rows.prompt([3, 50, 1, 60, 20])
    rows.decode(18)
    rows.extract(1)
    rows.filter([0, 2, 4])
    rows.copy()
    rows.restore()
    other = rows.split([1])
    other.decode(1)
    rows.decode(1)
    rows.join(other)
    rows.prompt([20, 30, 3], step=7)


@given(
    kind=st.sampled_from([("streaming", "float"), ("snapkv", "float"), ("knorm", "4bit"), ("h2o", "4bit")]), plan=PLANS
)
@settings(max_examples=20, deadline=None)
def test_any_sequence_of_calls_leaves_rows_as_their_single_runs(kind: Kind, plan: list[tuple[str, list[int]]]) -> None:
    """Attention, stored bits, offsets and bytes after every step of a random sequence of calls."""
    played(drive(kind), plan)


def caches(kind: Kind) -> list[EvictingKVCache]:
    """One for each layer of the model."""
    return [fresh(kind) for _ in model().layers]


@FEW
def test_two_unequal_sequences_are_served_as_each_alone(kind: Kind) -> None:
    """By mlx-lm's BatchGenerator, 20 and 150 tokens: the same tokens and logprobs, rows x bytes of the longer."""
    requests = [Request(prompt(20, 1), leaves=40), Request(prompt(150, 2), leaves=30)]
    seen = []

    def each(batch: list[Any]) -> None:
        seen.extend(type(cache) for cache in batch)
        mx.eval([cache.state for cache in batch])
        for cache in batch:
            room = cache.rule.slots(max(cache.offset.tolist()))
            row = sum(array.nbytes // (array.shape[0] * array.shape[2]) for array in cache.slots.arrays)
            assert held_bytes(cache) == cache.nbytes == cache.rows.count * room * row

    together = serve(model(), lambda: caches(kind), requests, each)
    assert set(seen) == {BatchEvictingKVCache}
    for ours, request in zip(together, requests, strict=True):
        agree(ours, alone(model(), caches(kind), request), 1e-4)
        assert [type(cache) for cache in ours.caches] == [EvictingKVCache] * 2


@FEW
def test_eight_sequences_that_come_and_go_are_served_as_each_alone(kind: Kind) -> None:
    """Prompts of 1 to 200 tokens, arriving while others decode: the same tokens and logprobs."""
    lengths = (1, 200, 39, 40, 48, 77, 130, 9)
    requests = [
        Request(prompt(length, at), leaves=6 + 5 * at, arrives=(0, 0, 1, 4, 4, 9, 12, 12)[at])
        for at, length in enumerate(lengths)
    ]
    for ours, request in zip(serve(model(), lambda: caches(kind), requests), requests, strict=True):
        agree(ours, alone(model(), caches(kind), request), 1e-4)


def test_a_decode_step_makes_as_many_calls_for_any_rows_and_heads() -> None:
    """Unequal rows, a third of which evict: as many nodes in the graph for 6 rows as for 15, for 2 heads as for 8."""

    def calls(copies: int, heads: int) -> int:
        singles = []
        for length in (10, 63, 100) * copies:
            single = fresh(("h2o", "4bit"))
            new = mx.random.normal((1, heads, length, WIDTH), key=mx.random.key(length))
            keys, values = single.update_and_fetch(new, new)
            mx.eval(keys.attend(mx.repeat(new, 2, axis=1), values, 0.3, "causal"), single.state)
            singles.append(single)
        twin = EvictingKVCache.merge(singles)
        new = mx.random.normal((3 * copies, heads, 1, WIDTH))
        queries = mx.repeat(new, 2, axis=1)
        mx.eval(twin.state, new, queries)
        keys, values = twin.update_and_fetch(new, new)
        return operations(keys.attend(queries, values, 0.3), *twin.slots.arrays)

    base = calls(2, 2)
    assert 40 < base < 200
    assert calls(5, 2) == calls(2, 8) == base


@FEW
def test_a_batch_is_saved_and_goes_on_as_it_would(kind: Kind, tmp_path: Path) -> None:
    """The engine's own save and load; and the state lists every array."""
    rows = drive(kind)
    rows.start([5, 0, 90])
    file = str(tmp_path / "batch.safetensors")
    save_prompt_cache(file, [rows.twin])
    (loaded,) = load_prompt_cache(file)
    assert type(loaded) is BatchEvictingKVCache
    assert {id(array) for array in arrays(loaded)} == {id(array) for array in arrays(loaded.state)}
    rows.twin = loaded
    rows.decode(50)


def test_a_batch_that_does_not_hang_together_is_refused() -> None:
    """Rows that are not described, or others than the arrays have: typed."""
    rows = drive(("h2o", "float"))
    rows.start([5, 90])
    held, text = rows.twin.state
    parts = json.loads(text)
    for other in ({}, {**parts["rows"], "lengths": [5, 300, 9]}, {**parts["rows"], "lengths": [5, 3]}, [5, 90]):
        with pytest.raises(MethodRefused):
            BatchEvictingKVCache.from_state((held, json.dumps({**parts, "rows": other})))
    assert BatchEvictingKVCache.from_state((held, text)).rows.lengths == [5, 90]


def test_masks_are_those_of_the_engines_own_batch() -> None:
    """For layers that keep the engine's cache: right-aligned columns, with and without a window."""
    keys = mx.ones((2, HEADS, 70, WIDTH))
    engine = BatchKVCache([0, 20])
    engine.update_and_fetch(keys, keys)
    singles = []
    for length in (70, 50):
        single = fresh(("streaming", "float"))
        held_keys, held_values = single.update_and_fetch(keys[:1, :, :length], keys[:1, :, :length])
        mx.eval(held_keys.attend(keys[:1, :, :length], held_values, 0.3, "causal"))
        singles.append(single)
    twin = EvictingKVCache.merge(singles)
    for count in (1, 5):
        for window in (None, 30):
            options = {"return_array": True, "window_size": window}
            assert mx.array_equal(twin.make_mask(count, **options), engine.make_mask(count, **options))


@FEW
def test_windows_of_a_batch_are_seen_by_true_positions(kind: Kind) -> None:
    """A layer whose mask has a window of 25: rows answer as their single runs under the same window."""
    rows = Drive(lambda: fresh(kind), stored, near=NEAR, window=25)
    rows.start([0, 30, 100])
    rows.prompt([5, 70, 33], step=20)
    rows.decode(20)


def test_caches_that_drop_tokens_in_unlike_ways_make_no_batch() -> None:
    """Another policy, budget or format; several sequences in one cache; another count of rows. Nothing changes."""
    one = fresh(("h2o", "float"))
    for other in (fresh(("h2o", "4bit")), fresh(("knorm", "float")), fresh(("h2o", "float"), budget=48)):
        with pytest.raises(MethodRefused, match="unlike ways"):
            EvictingKVCache.merge([one, other])
        twin, rest = EvictingKVCache.merge([one]), EvictingKVCache.merge([other])
        with pytest.raises(MethodRefused, match="unlike ways"):
            twin.extend(rest)
        assert twin.rows.count == 1
    new = mx.ones((2, HEADS, 3, WIDTH))
    several = fresh(("h2o", "float"))
    several.update_and_fetch(new, new)
    with pytest.raises(MethodRefused, match="several sequences"):
        EvictingKVCache.merge([several])
    with pytest.raises(MethodRefused, match="2 rows for a batch of 3"):
        EvictingKVCache.merge([one] * 3).update_and_fetch(new, new)


def test_merging_leaves_the_single_caches_alone() -> None:
    """And a batch without rows holds nothing."""
    single = fresh(("h2o", "float"))
    new = mx.random.normal((1, HEADS, 60, WIDTH))
    keys, values = single.update_and_fetch(new, new)
    mx.eval(keys.attend(mx.repeat(new, 2, axis=1), values, 0.3, "causal"))
    before = copy.deepcopy(stored(single))
    twin = EvictingKVCache.merge([single, single])
    more = mx.ones((2, HEADS, 20, WIDTH))
    keys, values = twin.update_and_fetch(more, more)
    mx.eval(keys.attend(mx.repeat(more, 2, axis=1), values, 0.3, "causal"), twin.state)
    assert all(mx.array_equal(a, b) for a, b in zip(stored(single), before, strict=True))
    assert not twin.is_trimmable()
    twin.filter([])
    assert twin.empty()
    assert twin.nbytes == held_bytes(twin) == twin.rows.count == 0


def test_it_is_no_cache_of_the_engines_and_takes_its_place() -> None:
    """`merge` on a list of ours never gives the engine's float batch."""
    assert type(KVCache.merge([KVCache()])) is BatchKVCache
    assert type(EvictingKVCache.merge([fresh(("h2o", "float"))])) is BatchEvictingKVCache
