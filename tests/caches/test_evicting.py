"""The bounded cache: however a prompt is cut, what is held is what the rule says."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import pytest
from cache_kit import (
    BUDGET,
    EVICTING,
    FLOAT,
    HEADS,
    POLICIES,
    STRIDE,
    WIDTH,
    attend,
    evicting,
    fed,
    logits,
    model,
    normal,
    operations,
    tokens,
)
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import KVCache, trim_prompt_cache

from veloxquant.caches.codecs import make
from veloxquant.caches.evicting import EvictingKVCache
from veloxquant.caches.eviction import HeavyHitters, Streaming
from veloxquant.caches.held import held_bytes
from veloxquant.errors import InvalidParams, MethodRefused, VeloxError

ALL = pytest.mark.parametrize("kind", EVICTING)
FEW = pytest.mark.parametrize("kind", ["streaming", "snapkv-4bit", "h2o"])


def caches(kind: str, budget: int = BUDGET) -> list[EvictingKVCache]:
    """One for each layer of the model."""
    return [evicting(kind, budget) for _ in model().layers]


@ALL
@pytest.mark.parametrize("chunk", [1, 7, 64, 513])
def test_how_a_prompt_is_cut_changes_neither_logits_nor_what_is_kept(kind: str, chunk: int) -> None:
    """530 tokens over a budget of 96 (150 one by one): the logits of one chunk to 1e-4, the same positions held."""
    prompt = tokens(530 if chunk > 1 else 150)
    held, cut = caches(kind), caches(kind)
    whole = logits(prompt, held, prompt.size)
    assert float(mx.abs(whole - logits(prompt, cut, chunk)).max()) < 1e-4
    for ours, theirs in zip(cut, held, strict=True):
        assert ours.offset == theirs.offset == prompt.size
        assert mx.array_equal(ours.slots.positions(BUDGET), theirs.slots.positions(BUDGET))


@pytest.mark.parametrize("kind", POLICIES)
def test_within_the_budget_the_model_says_what_it_says_without(kind: str) -> None:
    """300 tokens in a budget of 300: the logits of mlx-lm's own cache, to 1e-4."""
    prompt = tokens(300)
    own = logits(prompt, [KVCache() for _ in model().layers], 300)
    assert float(mx.abs(logits(prompt, caches(kind, budget=300), 128) - own).max()) < 1e-4


def test_streaming_is_the_engines_attention_over_sinks_and_a_window() -> None:
    """MLX's own attention over a full cache, with the sinks and the window of each query's time as a mask."""
    count = 400
    keys, values, queries = (
        normal(1, 1, HEADS, count, WIDTH),
        normal(2, 1, HEADS, count, WIDTH),
        normal(3, 1, 2 * HEADS, count, WIDTH),
    )
    now, at = mx.arange(count)[:, None], mx.arange(count)
    evicted = mx.where(now < 128, 0, now // STRIDE * STRIDE - BUDGET + 4)
    mask = (at <= now) & ((at < 4) | (at >= evicted))
    cache = evicting("streaming")
    ours = cache.update_and_fetch(keys, values)
    out = ours[0].attend(queries, ours[1], 0.3, "causal")
    engine = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
    assert float(mx.abs(out - engine).max()) < 1e-5


@ALL
def test_bytes_follow_from_the_length_alone_and_are_bounded(kind: str) -> None:
    """Calls of 40, 1, 200, 7: slots by the rule, nbytes what a walk finds, no more at 2,000 tokens than at 128."""
    policy, codec = EVICTING[kind]
    number = 32 if codec is FLOAT else 4 + 2 * 32 / 32
    row = 2 * WIDTH * number / 8 + 4 + (4 if policy.watches else 0)
    cache, seen = evicting(kind), 0
    assert cache.nbytes == held_bytes(cache) == 0
    for count, slots in ((40, 64), (1, 64), (200, 128), (7, 128), (1752, 128)):
        mx.eval(attend(cache, count), cache.state)
        seen += count
        assert cache.offset == cache.size() == seen
        assert cache.nbytes == held_bytes(cache) == slots * HEADS * row


def test_a_prefill_holds_no_scores_of_the_whole_prompt() -> None:
    """4,096 queries of 8 heads over as many tokens make 512 MiB of scores; the call takes less than 64 MiB."""
    cache = evicting("h2o", budget=512)
    keys, values, queries = (normal(seed, 1, heads, 4096, WIDTH) for seed, heads in ((1, 2), (2, 2), (3, 8)))
    mx.eval(keys, values, queries)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    ours = cache.update_and_fetch(keys, values)
    mx.eval(ours[0].attend(queries, ours[1], 0.3, "causal"), cache.state)
    assert mx.get_peak_memory() - before < 2**26


@pytest.mark.parametrize("kind", POLICIES)
def test_decode_leaves_nothing_uncomputed_behind(kind: str) -> None:
    """mlx-lm asks for tokens alone: after each of 200 steps MLX holds the cache's bytes, and less than 64 KiB more."""
    cache = evicting(kind)
    new, queries = normal(3, 1, HEADS, 1, WIDTH), normal(4, 1, 2 * HEADS, 1, WIDTH)
    mx.eval(new, queries)
    before = mx.get_active_memory()
    for _ in range(200):
        keys, values = cache.update_and_fetch(new, new)
        mx.eval(keys.attend(queries, values, 0.3))
        assert mx.get_active_memory() - before < cache.nbytes + 2**16


def step_calls(kind: str, rows: int, heads: int, count: int) -> int:
    """MLX operations of a decode step, cache and attention: the nodes of its graph, nothing else being unevaluated."""
    cache = evicting(kind)
    mx.eval(attend(cache, count, rows=rows, heads=heads), cache.state)
    new, queries = normal(3, rows, heads, 1, WIDTH), normal(4, rows, 2 * heads, 1, WIDTH)
    mx.eval(new, queries)
    keys, values = cache.update_and_fetch(new, new)
    return operations(keys.attend(queries, values, 0.3), *cache.slots.arrays)


@ALL
@pytest.mark.parametrize("seen", [150, 159])
def test_a_step_makes_as_many_calls_for_any_rows_heads_and_tokens(kind: str, seen: int) -> None:
    """8 rows as 1, 8 heads as 2, ten strides more; between evictions, and with one (after 159 tokens of 160)."""
    base = step_calls(kind, 1, 2, seen)
    assert 15 < base < (70 if seen == 150 else 180)
    assert step_calls(kind, 8, 2, seen) == step_calls(kind, 1, 8, seen) == step_calls(kind, 1, 2, seen + 320) == base


@ALL
def test_it_says_from_the_start_that_it_cannot_be_trimmed(kind: str) -> None:
    """Empty, short or long: never; mlx-lm's own function then takes nothing, and a direct call is refused, typed."""
    for chunks in ([], [20], [300]):
        cache = fed(evicting(kind), chunks)
        assert not cache.is_trimmable()
        assert trim_prompt_cache([cache], 5) == 0
        assert cache.trim(0) == 0
        with pytest.raises(MethodRefused, match="a rewind of 5"):
            cache.trim(5)
        assert cache.offset == sum(chunks)


@FEW
def test_speculative_decoding_is_refused_before_any_token(kind: str) -> None:
    """By mlx-lm, which names the class; nothing was read and nothing was written."""
    both = [*caches(kind), *[KVCache() for _ in model().layers]]
    steps = speculative_generate_step(tokens(40), model(), model(seed=4), max_tokens=5, prompt_cache=both)
    with pytest.raises(ValueError, match="EvictingKVCache"):
        next(steps)
    assert all(cache.empty() for cache in both)


@ALL
def test_an_attention_that_comes_twice_or_never_is_refused(kind: str) -> None:
    """What the first queries did not want is gone; and tokens are stored when they are attended to."""
    cache = fed(evicting(kind), [150])
    new, queries = normal(1, 1, HEADS, 3, WIDTH), normal(2, 1, 4, 3, WIDTH)
    keys, values = cache.update_and_fetch(new, new)
    with pytest.raises(MethodRefused, match="never attended"):
        cache.update_and_fetch(new, new)
    other = evicting(kind).update_and_fetch(new, new)
    with pytest.raises(MethodRefused, match="not of the same call"):
        keys.attend(queries, other[1], 0.3)
    mx.eval(keys.attend(queries, values, 0.3))
    with pytest.raises(MethodRefused, match="second attention"):
        keys.attend(queries, values, 0.3)
    with pytest.raises(AttributeError, match="no 'shape'"):
        _ = keys.shape
    with pytest.raises(MethodRefused, match="other layers"):
        cache.keys_and_values()


def test_masks_and_heads_that_make_no_sense_are_refused() -> None:
    """As in attention over any packed cache."""
    new = normal(1, 1, HEADS, 3, WIDTH)
    for queries, mask, why in (
        (normal(2, 1, 3, 3, WIDTH), "causal", "not a multiple"),
        (normal(2, 1, 4, 3, WIDTH), "banded", "not known"),
        (normal(2, 1, 4, 3, WIDTH), mx.ones((1, 3, 3, 3)), "a mask of shape"),
    ):
        keys, values = evicting("h2o").update_and_fetch(new, new)
        with pytest.raises(ValueError, match=why):
            keys.attend(queries, values, 0.3, mask)


def test_codecs_that_cannot_lose_a_token_are_refused() -> None:
    """Groups of tokens; channels chosen by the first token, which may go; and a budget that is too small."""
    refused = [
        {"name": "per_channel", "width": WIDTH, "bits": 4},
        {"name": "turboquant_mse", "width": WIDTH, "bits": 2, "outlier_bits": 6, "outlier_channels": 5},
    ]
    for codec in refused:
        for pair in ((codec, FLOAT), (FLOAT, codec)):
            with pytest.raises(MethodRefused):
                EvictingKVCache(make(pair[0]), make(pair[1]), Streaming(), BUDGET)
    with pytest.raises(InvalidParams):
        EvictingKVCache(make(FLOAT), make(FLOAT), HeavyHitters(recent=97), BUDGET)


def test_a_state_that_does_not_hang_together_is_refused() -> None:
    """No JSON, parts that are missing, arrays too few or too short for the tokens, a length below 0."""
    held, offset, text = fed(evicting("h2o"), [150]).state
    parts = json.loads(text)
    short = tuple(array[:, :, :40] for array in held)
    texts = ["x", "[]", json.dumps({"layout": 1}), json.dumps({**parts, "policy": "h2o"})]
    wrong = [(held, offset, other) for other in texts]
    wrong += [
        (held[:-1], offset, text),
        ((), offset, text),
        (short, offset, text),
        (held[:-1] + short[:1], offset, text),
    ]
    wrong += [(held, other, text) for other in (-5, 0, 64)]
    for state in wrong:
        with pytest.raises(VeloxError):
            EvictingKVCache.from_state(state)
    assert EvictingKVCache.from_state((held, offset, text)).offset == offset


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_sixteen_bits_stay_sixteen_bits(dtype: Any) -> None:
    """K and V of a 16-bit model are stored in its format, and attention answers in it, near the 32-bit answer."""
    cache, wide = evicting("h2o"), evicting("h2o")
    keys, values, queries = (
        normal(1, 1, HEADS, 200, WIDTH),
        normal(2, 1, HEADS, 200, WIDTH),
        normal(3, 1, 4, 200, WIDTH),
    )
    rounded = [array.astype(dtype) for array in (keys, values, queries)]
    ours = cache.update_and_fetch(*rounded[:2])
    out = ours[0].attend(rounded[2], ours[1], 0.3, "causal")
    theirs = wide.update_and_fetch(*(array.astype(mx.float32) for array in rounded[:2]))
    exact = theirs[0].attend(rounded[2].astype(mx.float32), theirs[1], 0.3, "causal")
    assert out.dtype == cache.slots.arrays[0].dtype == dtype
    assert float(mx.abs(out.astype(mx.float32) - exact).max()) < 2e-2
