"""The tiered cache: tiers by position alone, however the tokens come."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cache_kit import (
    AFFINE,
    CHANNELS,
    GROUP,
    HEADS,
    RECENT,
    SINKS,
    TIERED,
    WIDTH,
    drawn,
    filled,
    logits,
    model,
    same,
    stored,
    tiered,
    tokens,
)
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import KVCache

from veloxquant.caches.codecs import make
from veloxquant.caches.held import held_bytes
from veloxquant.caches.tiered import TieredKVCache
from veloxquant.errors import InvalidParams, MethodRefused

RING = RECENT + GROUP
ALL = pytest.mark.parametrize("kind", TIERED)


def caches(kind: str = "kivi") -> list[TieredKVCache]:
    """One for each layer of the model."""
    return [tiered(kind) for _ in model().layers]


@ALL
def test_one_call_leaves_what_any_calls_leave(kind: str) -> None:
    """40 tokens, fewer than are ever packed, and 421: every array of every tier, slack too, is equal to the bit."""
    for count, cuts in ((40, ([1] * 40, [3, 1, 36])), (421, ([1] * 421, [7] * 60 + [1], [64] * 6 + [37], [300, 121]))):
        keys, values = drawn(count)
        whole = filled(tiered(kind), keys, values, [count])
        for chunks in cuts:
            assert same(stored(filled(tiered(kind), keys, values, chunks)), stored(whole)), chunks[0]


@ALL
def test_tiers_are_by_position(kind: str) -> None:
    """Sinks are the first tokens; the ring has the last, token p in slot (p - S) mod C; what is between is packed.

    After 4 + 64 + 3 x 32 tokens and any of the next 31, three groups are: positions 4 to 99. The ring always has the
    newest token of each residue.
    """
    keys, values = drawn(200)
    for count in (3, 4, 5, 4 + 64 + 31, 4 + 64 + 32, 4 + 64 + 3 * 32, 4 + 64 + 4 * 32 - 1):
        cache = filled(tiered(kind), keys, values, [count])
        sinks, recent, group, step = cache.layout
        packed = max(0, (count - sinks - recent) // group) * group
        for part, x in ((cache.key_part, keys), (cache.value_part, values)):
            for at in range(min(sinks, count)):
                assert mx.array_equal(part.sinks[0][:, :, at], x[:, :, at])
            ring = part.recent_codec.decode(tuple(part.recent), part.recent_fixed, mx.float32)
            expected = part.recent_codec.decode(part.recent_codec.encode(x, ()), (), mx.float32)
            for at in range(max(sinks, count - recent - group), count):
                assert mx.array_equal(ring[:, :, (at - sinks) % (recent + group)], expected[:, :, at])
            slots = {array.shape[2] * part.codec.tokens for array in part.packed}
            assert slots == ({-(-packed // step) * step} if packed else set())
            if packed:
                coded = part.codec.encode(expected[:, :, sinks : sinks + packed], part.fixed)
                assert same(
                    [array[:, :, : new.shape[2]] for array, new in zip(part.packed, coded, strict=True)], list(coded)
                )


def expected_attention(cache: TieredKVCache, keys: Any, values: Any, queries: Any, scale: float) -> Any:
    """By the definition, in float64, each query by itself: what is packed for it is read as its codec decodes it."""
    sinks, recent, group, _ = cache.layout
    read = []
    for part, x in ((cache.key_part, keys), (cache.value_part, values)):
        whole = (x.shape[2] - sinks) // group * group
        near = part.recent_codec.decode(part.recent_codec.encode(x, ()), (), mx.float32)
        fixed = part.codec.start(x[:, :, :1])
        far = part.codec.decode(part.codec.encode(near[:, :, sinks : sinks + whole], fixed), fixed, mx.float32)
        near = mx.concatenate([x[:, :, :sinks], near[:, :, sinks:]], axis=2)
        read.append((np.array(near).astype(np.float64), np.array(far).astype(np.float64)))
    out = np.zeros((1, queries.shape[1], queries.shape[2], values.shape[-1]))
    for at in range(queries.shape[2]):
        packed = max(0, (at + 1 - sinks - recent) // group) * group
        seen = []
        for near, far in read:
            one = near[0, :, : at + 1].copy()
            one[:, sinks : sinks + packed] = far[0, :, :packed]
            seen.append(one)
        for head in range(queries.shape[1]):
            group_of = head // (queries.shape[1] // HEADS)
            scores = seen[0][group_of] @ np.array(queries[0, head, at]).astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            out[0, head, at] = weights @ seen[1][group_of] / weights.sum()
    return out


@ALL
@pytest.mark.parametrize("chunks", [[300], [1] * 300, [7] * 43, [250, 1, 1, 48]], ids=lambda chunks: str(chunks[0]))
def test_every_query_sees_what_its_own_position_says(kind: str, chunks: list[int]) -> None:
    """300 queries in one call or in many: each to 2e-5 of the definition computed with numpy in float64."""
    keys, values = drawn(300)
    queries = mx.random.normal((1, 2 * HEADS, 300, WIDTH), key=mx.random.key(4))
    cache, found, at = tiered(kind), [], 0
    for count in chunks:
        count = min(count, 300 - at)  # noqa: PLW2901 -- the last chunk is what is left
        part = slice(at, at + count)
        packed_keys, packed_values = cache.update_and_fetch(keys[:, :, part], values[:, :, part])
        mask = "causal" if count > 1 else None
        found.append(packed_keys.attend(queries[:, :, part], packed_values, 0.3, mask))
        mx.eval(found[-1], cache.state)
        at += count
    expected = expected_attention(cache, keys, values, queries, 0.3)
    assert np.abs(np.array(mx.concatenate(found, axis=2)) - expected).max() < 2e-5


@ALL
@pytest.mark.parametrize("chunk", [1, 7, 64, 513])
def test_how_a_prompt_is_cut_moves_logits_by_noise_only(kind: str, chunk: int) -> None:
    """530 tokens in chunks of any size, against one chunk: at most 2 % of what packing itself moves the logits.

    Sums of another order differ in their last bits, and one that flips a code of the next layer moves later logits by
    more. Both moves are root mean squares over all logits. With recent tokens in 8 bits 5 %: there every token has
    codes that may flip, and one at the end of a packed group moves all levels of the group.
    """
    prompt = tokens(530 if chunk > 1 else 250)
    whole, cut = logits(prompt, caches(kind), prompt.size), logits(prompt, caches(kind), chunk)
    own = logits(prompt, [KVCache() for _ in model().layers], prompt.size)
    moved = float(mx.sqrt(mx.square(whole - own).mean()))
    assert float(mx.sqrt(mx.square(whole - cut).mean())) < (0.05 if "8 bits" in kind else 0.02) * moved


@ALL
def test_bytes_are_those_of_the_arrays(kind: str) -> None:
    """After each of 1, 60, 300, 1, 1, 200 tokens: nbytes is what a walk over the cache finds."""
    keys, values = drawn(563)
    cache, at = tiered(kind), 0
    assert cache.nbytes == held_bytes(cache) == 0
    for count in (1, 60, 300, 1, 1, 200):
        cache.update_and_fetch(keys[:, :, at : at + count], values[:, :, at : at + count])
        at += count
        assert cache.nbytes == held_bytes(cache)
        assert cache.offset == cache.size() == at


def test_bytes_are_the_sum_of_the_tiers() -> None:
    """In float16, 4-bit keys and values, groups of 32: 4 sinks and 96 slots of 2 bytes a number, then 5 bits a number.

    4 + 2 x 16 / 32 = 5 bits.
    """
    keys, values = (x.astype(mx.float16) for x in drawn(1000))
    cache = filled(tiered("kivi"), keys, values, [1000])
    packed = (1000 - SINKS - RECENT) // GROUP * GROUP
    assert cache.nbytes == 2 * HEADS * WIDTH * ((SINKS + RING) * 2 + packed * 5 // 8)


def test_speculative_decoding_is_refused_before_the_first_token() -> None:
    """mlx-lm asks `is_trimmable` and says no; nothing was processed."""
    held = caches()
    run = speculative_generate_step(tokens(40), model(), model(seed=4), prompt_cache=[*held, *caches()])
    with pytest.raises(ValueError, match="requires a trimmable prompt cache"):
        next(run)
    assert [cache.offset for cache in held] == [0, 0]


def test_what_was_packed_cannot_be_undone() -> None:
    """Trimming is a typed refusal, and changes nothing; trimming nothing is nothing."""
    keys, values = drawn(150)
    cache = filled(tiered("kivi"), keys, values, [150])
    assert not cache.is_trimmable()
    assert cache.trim(0) == 0
    with pytest.raises(MethodRefused, match="cannot forget its last 3 tokens"):
        cache.trim(3)
    assert cache.offset == 150


def test_layers_that_share_k_and_v_may_ask_after_one_token_only() -> None:
    """`keys_and_values` gives the attention of the last call after one token, and is refused after several."""
    keys, values = drawn(151)
    cache = filled(tiered("kivi"), keys[:, :, :150], values[:, :, :150], [150])
    with pytest.raises(MethodRefused, match="several tokens"):
        cache.keys_and_values()
    queries = mx.random.normal((1, 4, 1, WIDTH), key=mx.random.key(9))
    first, second = cache.update_and_fetch(keys[:, :, 150:], values[:, :, 150:])
    again, also = cache.keys_and_values()
    assert mx.array_equal(first.attend(queries, second, 0.2), again.attend(queries, also, 0.2))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"recent": 33}, "recent"), ({"sinks": -1}, "sinks"), ({"step": 48}, "step"), ({"step": 0}, "step")],
)
def test_tiers_of_other_sizes_are_refused(wrong: dict[str, int], field: str) -> None:
    """Recent tokens are a multiple of 32, the step is whole groups, and nothing is negative."""
    codecs = make({**CHANNELS, "width": WIDTH}), make({**AFFINE, "width": WIDTH})
    with pytest.raises(InvalidParams) as refused:
        TieredKVCache(*codecs, **wrong)
    assert refused.value.field == field


def test_the_recent_tier_takes_codecs_of_one_token_a_slot() -> None:
    """Groups would have to be complete, and recent tokens never are."""
    codecs = make({**CHANNELS, "width": WIDTH}), make({**AFFINE, "width": WIDTH})
    with pytest.raises(MethodRefused, match="one token a slot"):
        TieredKVCache(*codecs, recent_key_codec=codecs[0])


def test_a_number_format_stays_that_of_the_first_token() -> None:
    """Tokens in another 16-bit format do not make 32 bits of the scales."""
    cache, same_format = tiered(), tiered()
    for count, dtype in ((200, mx.float16), (200, mx.bfloat16), (1, mx.float32)):
        x = mx.ones((1, HEADS, count, WIDTH), dtype=dtype)
        cache.update_and_fetch(x, x)
        same_format.update_and_fetch(*[x.astype(mx.float16)] * 2)
    assert cache.nbytes == same_format.nbytes == held_bytes(cache)
