"""What each policy keeps and what its queries see, against the papers written out in numpy, head by head, by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.caches.evicting import EvictingKVCache
from veloxquant.caches.eviction import (
    LONGEST,
    HeavyHitters,
    Held,
    KeyNorm,
    Rule,
    SnapKV,
    Streaming,
    describe,
    keep,
    make,
)
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.errors import InvalidParams, MethodRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from veloxquant.caches.eviction import Policy

HEADS, REPEATS, WIDTH, BUDGET, STRIDE, TOKENS = 2, 3, 16, 40, 16, 200
SCALE = 0.7
"""Peaked enough for votes to differ."""
Array = np.ndarray[Any, Any]


class Seen(NamedTuple):
    """One KV head at an eviction: positions held, ascending; all weights so far, (queries, query heads, positions)."""

    positions: list[int]
    keys: Array
    weights: Array
    end: int


def streaming(seen: Seen) -> list[int]:
    """StreamingLLM: four sinks and a window."""
    return [*seen.positions[:4], *seen.positions[4 - BUDGET :]]


def knorm(seen: Seen) -> list[int]:
    """The smallest squares of norms in eight bits, the newer of equal ones; the last 8 tokens whatever theirs."""
    old = [position for position in seen.positions if position < seen.end - 8]

    def rank(position: int) -> tuple[float, int]:
        significand, exponent = np.frexp(np.sum(seen.keys[position].astype(np.float64) ** 2))
        return float(np.ldexp(np.round(significand * 256), exponent)), -position

    by_norm = sorted(old, key=rank)
    return [*by_norm[: BUDGET - 8], *range(seen.end - 8, seen.end)]


def snapkv(pool: Callable[[Array], float], window: int = 8, kernel: int = 5) -> Callable[[Seen], list[int]]:
    """Votes of the window, pooled over the neighbours that are held before it."""

    def chosen(seen: Seen) -> list[int]:
        old = [position for position in seen.positions if position < seen.end - window]
        votes = seen.weights[seen.end - window : seen.end].sum(axis=(0, 1))[old]
        padded = np.pad(votes, kernel // 2)
        pooled = [pool(padded[at : at + kernel]) for at in range(len(old))]
        best = sorted(range(len(old)), key=lambda at: (pooled[at], at))[-(BUDGET - window) :]
        return [*(old[at] for at in best), *range(seen.end - window, seen.end)]

    return chosen


def h2o(seen: Seen) -> list[int]:
    """20 recent tokens, and of the others those with the greatest sums over all queries."""
    old = [position for position in seen.positions if position < seen.end - 20]
    sums = seen.weights[: seen.end].sum(axis=(0, 1))
    return [*sorted(old, key=lambda position: float(sums[position]))[-(BUDGET - 20) :], *range(seen.end - 20, seen.end)]


CASES: dict[str, tuple[Policy, Callable[[Seen], list[int]]]] = {
    "streaming": (Streaming(sinks=4), streaming),
    "knorm": (KeyNorm(recent=8), knorm),
    "snapkv-max": (SnapKV(recent=8, kernel=5, pooling="max"), snapkv(np.max)),
    "snapkv-avg": (SnapKV(recent=8, kernel=5, pooling="avg"), snapkv(np.mean)),
    "h2o": (HeavyHitters(recent=20), h2o),
}
ALL = pytest.mark.parametrize("case", CASES)


def drawn(tokens: int = TOKENS, seed: int = 5) -> tuple[Array, Array, Array]:
    """K, V (heads, tokens, width) and queries (heads, repeats, tokens, width)."""
    numbers = np.random.default_rng(seed)
    shapes = ((HEADS, tokens, WIDTH), (HEADS, tokens, WIDTH), (HEADS, REPEATS, tokens, WIDTH))
    keys, values, queries = (numbers.standard_normal(shape).astype(np.float32) for shape in shapes)
    return keys, values, queries


def expected(case: str, allowed: Array | None = None) -> tuple[Array, list[list[int]]]:
    """Outputs (heads, repeats, tokens, width) and the positions that each head holds at the end."""
    keys, values, queries = drawn()
    out = np.zeros_like(queries)
    kept = []
    for head in range(HEADS):
        held: list[int] = []
        weights = np.zeros((TOKENS, REPEATS, TOKENS))
        for now in range(TOKENS):
            held.append(now)
            scores = queries[head, :, now] @ keys[head, held].T * SCALE
            if allowed is not None:
                scores = np.where(allowed[now, held], scores, -np.inf)
            share = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights[now][:, held] = share / share.sum(axis=1, keepdims=True)
            out[head, :, now] = weights[now][:, held] @ values[head, held]
            if (now + 1) % STRIDE == 0 and len(held) > BUDGET:
                held = sorted(CASES[case][1](Seen(held, keys[head], weights, now + 1)))
        kept.append(held)
    return out, kept


def attended(cache: EvictingKVCache, chunk: int, mask: Callable[[int, int], Any] | None = None) -> Array:
    """The cache's outputs for the same tokens, in calls of `chunk`; (heads, repeats, tokens, width)."""
    keys, values, queries = (mx.array(array) for array in drawn())
    rows = queries.reshape(1, HEADS * REPEATS, TOKENS, WIDTH)
    outputs = []
    for first in range(0, TOKENS, chunk):
        span = slice(first, min(first + chunk, TOKENS))
        held_keys, held_values = cache.update_and_fetch(keys[None, :, span], values[None, :, span])
        given = "causal" if mask is None else mask(first, span.stop)
        outputs.append(held_keys.attend(rows[:, :, span], held_values, SCALE, given))
        mx.eval(outputs[-1], cache.state)
    return np.array(mx.concatenate(outputs, axis=2)).reshape(HEADS, REPEATS, TOKENS, WIDTH)


def fresh(case: str, budget: int = BUDGET) -> EvictingKVCache:
    """An empty cache of floats."""
    return EvictingKVCache(FloatCodec(WIDTH), FloatCodec(WIDTH), CASES[case][0], budget, STRIDE)


def positions(cache: EvictingKVCache) -> list[list[int]]:
    """What each head holds."""
    held = cache.rule.held(cache.offset)
    return cache.slots.positions(held)[0].tolist()  # type: ignore[no-any-return]


@ALL
@pytest.mark.parametrize("chunk", [1, 7, 64, TOKENS])
def test_outputs_and_kept_tokens_are_the_papers(case: str, chunk: int) -> None:
    """200 tokens over a budget of 40, evictions at 48, 64, ...: outputs to 1e-5, the same positions in every head."""
    out, kept = expected(case)
    cache = fresh(case)
    assert np.abs(attended(cache, chunk) - out).max() < 1e-5
    assert positions(cache) == kept
    assert all(len(held) == BUDGET + TOKENS % STRIDE for held in kept)


@ALL
def test_within_the_budget_it_is_plain_attention(case: str) -> None:
    """A budget of 200 for 200 tokens: what MLX's own attention gives, to 1e-5, and everything is held."""
    keys, values, queries = (mx.array(array)[None] for array in drawn())
    cache = fresh(case, budget=TOKENS)
    rows = queries.reshape(1, HEADS * REPEATS, TOKENS, WIDTH)
    plain = mx.fast.scaled_dot_product_attention(rows, keys, values, scale=SCALE, mask="causal")
    ours = attended(cache, 64).reshape(1, HEADS * REPEATS, TOKENS, WIDTH)
    assert float(mx.abs(mx.array(ours) - plain).max()) < 1e-5
    assert positions(cache) == [list(range(TOKENS))] * HEADS


@ALL
@pytest.mark.parametrize("form", ["bool", "additive", "heads", "short"])
def test_a_mask_over_absolute_positions_hides_the_positions_it_names(case: str, form: str) -> None:
    """A window of 30 that mlx-lm gives as an array, in every shape that it may have; the numpy run has the same."""
    now, at = np.indices((TOKENS, TOKENS))
    window = (at <= now) & (at > now - 30)
    out, kept = expected(case, window)

    def mask(first: int, end: int) -> Any:
        rows = mx.array(window[first:end, :end])
        if form == "additive":
            return mx.where(rows, 0.0, -mx.inf)
        if form == "heads":
            return mx.broadcast_to(rows, (1, HEADS * REPEATS, *rows.shape))
        return rows if form == "bool" else rows[None, None]

    cache = fresh(case)
    assert np.abs(attended(cache, 37, mask) - out).max() < 1e-5
    assert positions(cache) == kept


def test_heads_keep_what_each_of_them_attends_to() -> None:
    """The two KV heads of one layer end with different tokens, but for streaming."""
    for case in CASES:
        one, two = expected(case)[1]
        assert (one == two) == (case == "streaming")


def test_of_equal_tokens_the_newer_stay() -> None:
    """Keys that are all alike have one norm: the last 40 tokens stay."""
    cache = EvictingKVCache(FloatCodec(WIDTH), FloatCodec(WIDTH), KeyNorm(), BUDGET, STRIDE)
    same = mx.ones((1, HEADS, 64, WIDTH))
    keys, values = cache.update_and_fetch(same, same)
    mx.eval(keys.attend(mx.ones((1, HEADS, 64, WIDTH)), values, SCALE, "causal"))
    assert positions(cache) == [list(range(24, 64))] * HEADS


def test_float_noise_in_norms_chooses_nothing() -> None:
    """Normalised keys have one norm but for the last bits of float32: the newer stay, as of equal ones."""
    places = mx.arange(60, dtype=mx.int32)[None, None]
    for seed in range(3):
        noise = 1 + 1e-5 * mx.random.uniform(shape=(60,), key=mx.random.key(seed))
        keys = mx.broadcast_to((mx.sqrt(noise) / 2).reshape(1, 1, 60, 1), (1, 1, 60, WIDTH))
        assert float(abs((keys * keys).sum(axis=-1) - WIDTH / 4).max()) > 0
        held = Held(places, mx.array([[[60]]]), None, lambda keys=keys: keys)
        assert keep(KeyNorm(), BUDGET, held).tolist() == [[list(range(20, 60))]]


def test_a_norm_that_is_smaller_by_a_hundredth_stays() -> None:
    """Older or not: eight bits tell norms apart that differ by more than one in 256."""
    keys = mx.where(mx.arange(60) < 30, 1.0, 1.01).reshape(1, 1, 60, 1)
    held = Held(mx.arange(60, dtype=mx.int32)[None, None], mx.array([[[60]]]), None, lambda: keys)
    assert keep(KeyNorm(), BUDGET, held).tolist() == [[[*range(30), *range(50, 60)]]]


def test_a_key_without_bounds_is_worth_more_than_an_empty_slot() -> None:
    """Three tokens and an empty slot, a budget of three: the tokens stay, though one key has an infinite norm."""
    places = mx.array([[[0, 1, 2, LONGEST]]], dtype=mx.int32)
    keys = mx.array([mx.inf, 1.0, 1.0, 0.0]).reshape(1, 1, 4, 1)
    held = Held(places, mx.array([[[3]]]), None, lambda: keys)
    assert keep(KeyNorm(), 3, held).tolist() == [[[0, 1, 2]]]


def test_sums_of_attention_do_not_overflow() -> None:
    """128 query heads over one KV head, all of whose attention goes to token 0, for 256 tokens: it stays."""
    cache = EvictingKVCache(FloatCodec(WIDTH), FloatCodec(WIDTH), HeavyHitters(recent=20), BUDGET, 64)
    queries = mx.ones((1, 128, 256, WIDTH))
    same = mx.where(mx.arange(256)[:, None] == 0, 10.0, 0.0) * mx.ones((1, 1, 256, WIDTH))
    keys, values = cache.update_and_fetch(same, same)
    mx.eval(keys.attend(queries, values, SCALE, "causal"))
    assert positions(cache)[0] == [0, *range(256 - BUDGET + 1, 256)]


def test_the_rule_is_arithmetic_of_length() -> None:
    """Budget 40, stride 16: the first eviction at 48, then every 16; between 40 and 56 held, 56 slots at most."""
    rule = Rule(40, 16)
    assert [length for length in range(200) if rule.due(length)] == list(range(48, 200, 16))
    assert [rule.held(length) for length in (0, 39, 47, 48, 49, 63, 64, 80)] == [0, 39, 47, 40, 41, 55, 40, 40]
    assert [rule.slots(length) for length in (0, 1, 16, 17, 47, 48, 49, 10**9)] == [0, 16, 16, 32, 48, 48, 56, 56]
    assert all(rule.held(length) <= rule.slots(length) for length in range(300))
    assert Rule(48, 16).first == 64


def test_what_a_policy_always_keeps_must_fit() -> None:
    """Typed, with the field; and so are numbers that mean nothing."""
    for policy in (Streaming(sinks=50), KeyNorm(sinks=20, recent=30), SnapKV(recent=50), HeavyHitters(recent=41)):
        with pytest.raises(InvalidParams) as refusal:
            Rule(40, 64).check(policy)
        assert refusal.value.field == "budget"
    with pytest.raises(InvalidParams) as refusal:
        Rule(100, 16).check(SnapKV(recent=32))
    assert refusal.value.field == "stride"
    wrong: list[Callable[[], Any]] = [
        lambda: SnapKV(kernel=4),
        lambda: SnapKV(pooling="sum"),
        lambda: Streaming(sinks=-1),
        lambda: SnapKV(recent=0),
        lambda: Rule(0, 16).check(Streaming(0)),
        lambda: Rule(16, 0).check(Streaming(0)),
    ]
    for attempt in wrong:
        with pytest.raises(InvalidParams):
            attempt()


@ALL
def test_a_description_makes_the_same_policy(case: str) -> None:
    """And one that is not ours is refused, typed."""
    policy = CASES[case][0]
    assert make(describe(policy)) == policy
    for change in ({"name": "later"}, {"later": 1}):
        with pytest.raises(MethodRefused):
            make({**describe(policy), **change})
