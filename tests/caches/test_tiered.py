"""The tiered cache in mlx-lm's place: tiers by position alone, and what is saved is what was held."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from functools import cache as once
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

from veloxquant.caches.codecs import make
from veloxquant.caches.held import arrays, held_bytes
from veloxquant.caches.tiered import TieredKVCache
from veloxquant.errors import InvalidParams, MethodRefused, VeloxError

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY, WIDTH, HEADS = 97, 32, 2
GROUP, SINKS, RECENT = 32, 4, 64
RING = RECENT + GROUP
CHANNELS = {"name": "per_channel", "bits": 4, "group": GROUP}
AFFINE = {"name": "affine", "bits": 4, "group": 32}
EIGHT = {"name": "affine", "bits": 8, "group": 32}
KINDS: dict[str, dict[str, Any]] = {
    "kivi": {"keys": CHANNELS, "values": AFFINE},
    "3 and 2 bits": {"keys": {**CHANNELS, "bits": 3}, "values": {**AFFINE, "bits": 2}},
    "no sinks, nothing recent": {"keys": CHANNELS, "values": AFFINE, "sinks": 0, "recent": 0},
    "recent in 8 bits": {"keys": CHANNELS, "values": AFFINE, "recent_codec": EIGHT},
    "a token a slot, steps": {"keys": {"name": "turboquant_mse", "bits": 4}, "values": AFFINE, "step": 256},
    "fewer recent than a group": {"keys": {**CHANNELS, "group": 128}, "values": AFFINE, "recent": 96},
    "outliers": {
        "keys": CHANNELS,
        "values": {"name": "turboquant_mse", "bits": 2, "outlier_bits": 6, "outlier_channels": 5},
    },
}
ALL = pytest.mark.parametrize("kind", KINDS)


def fresh(kind: str = "kivi", width: int = WIDTH) -> TieredKVCache:
    """An empty cache."""
    chosen = dict(KINDS[kind])
    keys, values = (make({**chosen.pop(part), "width": width}) for part in ("keys", "values"))
    recent = chosen.pop("recent_codec", None)
    if recent is not None:
        chosen["recent_key_codec"] = chosen["recent_value_codec"] = make({**recent, "width": width})
    return TieredKVCache(keys, values, **{"sinks": SINKS, "recent": RECENT, **chosen})


@once
def model(seed: int = 3) -> Any:
    """A llama of two layers, four query heads over two KV heads of width 32, with random float32 weights."""
    mx.random.seed(seed)
    made = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=2 * HEADS,
            num_key_value_heads=HEADS,
            head_dim=WIDTH,
            rms_norm_eps=1e-5,
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
        )
    )
    mx.eval(made.parameters())
    return made


def caches(kind: str = "kivi") -> list[TieredKVCache]:
    """One for each layer of the model."""
    return [fresh(kind) for _ in model().layers]


def tokens(count: int) -> Any:
    """A prompt."""
    return mx.array([(31 * at * at + 7 * at + 3) % VOCABULARY for at in range(count)])


def logits(prompt: Any, held: list[Any], chunk: int) -> Any:
    """The model's logits for a prompt fed in chunks, as mlx-lm's prefill feeds it."""
    found = []
    for start in range(0, prompt.size, chunk):
        found.append(model()(prompt[None, start : start + chunk], cache=held))
        mx.eval(found[-1], [cache.state for cache in held])
    return mx.concatenate(found, axis=1)[0]


def random(count: int, seed: int = 1, width: int = WIDTH) -> tuple[Any, Any]:
    """Keys and values of one sequence."""
    mx.random.seed(seed)
    return mx.random.normal((1, HEADS, count, width)), mx.random.normal((1, HEADS, count, width))


def filled(kind: str, keys: Any, values: Any, chunks: list[int]) -> TieredKVCache:
    """A cache after calls of these lengths."""
    cache, at = fresh(kind, keys.shape[-1]), 0
    for count in chunks:
        cache.update_and_fetch(keys[:, :, at : at + count], values[:, :, at : at + count])
        at += count
        mx.eval(cache.state)
    return cache


def stored(cache: TieredKVCache) -> list[Any]:
    """Every array, in order."""
    return [array for part in (cache.key_part, cache.value_part) for group in part.arrays for array in group]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    """Equal to the bit."""
    return len(ours) == len(theirs) and all(mx.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@ALL
def test_one_call_leaves_what_any_calls_leave(kind: str) -> None:
    """40 tokens, fewer than are ever packed, and 421: every array of every tier, slack too, is equal to the bit."""
    for count, cuts in ((40, ([1] * 40, [3, 1, 36])), (421, ([1] * 421, [7] * 60 + [1], [64] * 6 + [37], [300, 121]))):
        keys, values = random(count)
        whole = filled(kind, keys, values, [count])
        for chunks in cuts:
            assert same(stored(filled(kind, keys, values, chunks)), stored(whole)), chunks[0]


@ALL
def test_tiers_are_by_position(kind: str) -> None:
    """Sinks are the first tokens; the ring has the last, token p in slot (p - S) mod C; what is between is packed.

    After 4 + 64 + 3 x 32 tokens and any of the next 31, three groups are: positions 4 to 99. The ring always has the
    newest token of each residue.
    """
    keys, values = random(200)
    for count in (3, 4, 5, 4 + 64 + 31, 4 + 64 + 32, 4 + 64 + 3 * 32, 4 + 64 + 4 * 32 - 1):
        cache = filled(kind, keys, values, [count])
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
    keys, values = random(300)
    queries = mx.random.normal((1, 2 * HEADS, 300, WIDTH), key=mx.random.key(4))
    cache, found, at = fresh(kind), [], 0
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
    keys, values = random(563)
    cache, at = fresh(kind), 0
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
    keys, values = (x.astype(mx.float16) for x in random(1000))
    cache = filled("kivi", keys, values, [1000])
    packed = (1000 - SINKS - RECENT) // GROUP * GROUP
    assert cache.nbytes == 2 * HEADS * WIDTH * ((SINKS + RING) * 2 + packed * 5 // 8)


@ALL
def test_the_state_lists_every_array(kind: str) -> None:
    """Empty, with nothing packed, or with groups: what a walk finds is what mx.eval is given, and it restores."""
    keys, values = random(200)
    for cache in (fresh(kind), filled(kind, keys, values, [5]), filled(kind, keys, values, [199, 1])):
        mx.eval(cache.state)
        assert {id(array) for array in arrays(cache)} == {id(array) for array in arrays(cache.state)}
        restored = TieredKVCache.from_state(cache.state)
        assert (restored.offset, restored.empty()) == (cache.offset, cache.empty())
        assert same(stored(restored), stored(cache))


@ALL
def test_a_restored_cache_and_a_deep_copy_go_their_own_way(kind: str) -> None:
    """Writing to either leaves the first as it was, and both go on as it would, over a boundary."""
    keys, values = random(230)
    cache = filled(kind, keys[:, :, :130], values[:, :, :130], [130])
    before = [mx.array(array) for array in stored(cache)]
    whole = stored(filled(kind, keys, values, [230]))
    for twin in (copy.deepcopy(cache), TieredKVCache.from_state(cache.state)):
        twin.update_and_fetch(keys[:, :, 130:131], values[:, :, 130:131])
        twin.update_and_fetch(keys[:, :, 131:], values[:, :, 131:])
        assert same(stored(cache), before)
        assert same(stored(twin), whole)


_LOADING = """
import json, sys
from veloxquant.caches.registration import register
register()
import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache
found = {}
for kind in sys.argv[2:]:
    (cache,) = load_prompt_cache(f"{sys.argv[1]}/{kind}.safetensors")
    queries = mx.random.normal((1, 4, 1, 32), key=mx.random.key(9))
    new = mx.random.normal((1, 2, 1, 32), key=mx.random.key(8))
    keys, values = cache.update_and_fetch(new, new)
    found[kind] = [cache.offset, cache.nbytes, keys.attend(queries, values, 0.2).flatten().tolist()]
print(json.dumps(found))
"""


def test_a_cache_saved_here_is_the_same_in_another_process(tmp_path: Path) -> None:
    """Saved by mlx-lm, loaded by mlx-lm where only `register` was called: equal offsets, bytes and attention."""
    keys, values = random(290)
    expected = {}
    for kind in KINDS:
        cache = filled(kind, keys, values, [290])
        save_prompt_cache(str(tmp_path / f"{kind}.safetensors"), [cache])
        queries = mx.random.normal((1, 4, 1, WIDTH), key=mx.random.key(9))
        new = mx.random.normal((1, HEADS, 1, WIDTH), key=mx.random.key(8))
        packed_keys, packed_values = cache.update_and_fetch(new, new)
        out = packed_keys.attend(queries, packed_values, 0.2).flatten().tolist()
        expected[kind] = [cache.offset, cache.nbytes, out]
    command = [sys.executable, "-c", _LOADING, str(tmp_path), *KINDS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize("length", [0, 3, 50, 300])
def test_a_saved_prompt_goes_on_as_the_prompt_would(length: int, tmp_path: Path) -> None:
    """Empty, with sinks alone, with nothing packed, with groups: the logits of the caches that were saved."""
    file = str(tmp_path / "prompt.safetensors")
    held = caches()
    if length:
        logits(tokens(length), held, 128)
    save_prompt_cache(file, held)
    loaded = load_prompt_cache(file)
    assert [type(cache) for cache in loaded] == [TieredKVCache] * 2
    assert held_bytes(loaded) == held_bytes(held)
    assert mx.array_equal(logits(tokens(9), loaded, 9), logits(tokens(9), held, 9))


@ALL
def test_generation_runs_in_mlx_lm(kind: str) -> None:
    """mlx-lm's own loop with chunks of 64 gives the greedy tokens of the model called by hand with the same chunks."""
    prompt = tokens(150)
    made = [
        token
        for token, _ in generate_step(prompt, model(), max_tokens=8, prompt_cache=caches(kind), prefill_step_size=64)
    ]
    by_hand, held = [], caches(kind)
    logits(prompt[:-1], held, 64)
    last = logits(prompt[-1:], held, 1)[-1]
    for _ in range(8):
        by_hand.append(int(last.argmax()))
        last = logits(mx.array(by_hand[-1:]), held, 1)[-1]
    assert made == by_hand


def test_speculative_decoding_is_refused_before_the_first_token() -> None:
    """mlx-lm asks `is_trimmable` and says no; nothing was processed."""
    held = caches()
    run = speculative_generate_step(tokens(40), model(), model(seed=4), prompt_cache=[*held, *caches()])
    with pytest.raises(ValueError, match="requires a trimmable prompt cache"):
        next(run)
    assert [cache.offset for cache in held] == [0, 0]


def test_what_was_packed_cannot_be_undone() -> None:
    """Trimming is a typed refusal, and changes nothing; trimming nothing is nothing."""
    keys, values = random(150)
    cache = filled("kivi", keys, values, [150])
    assert not cache.is_trimmable()
    assert cache.trim(0) == 0
    with pytest.raises(MethodRefused, match="cannot forget its last 3 tokens"):
        cache.trim(3)
    assert cache.offset == 150


def test_layers_that_share_k_and_v_may_ask_after_one_token_only() -> None:
    """`keys_and_values` gives the attention of the last call after one token, and is refused after several."""
    keys, values = random(151)
    cache = filled("kivi", keys[:, :, :150], values[:, :, :150], [150])
    with pytest.raises(MethodRefused, match="several tokens"):
        cache.keys_and_values()
    queries = mx.random.normal((1, 4, 1, WIDTH), key=mx.random.key(9))
    first, second = cache.update_and_fetch(keys[:, :, 150:], values[:, :, 150:])
    again, also = cache.keys_and_values()
    assert mx.array_equal(first.attend(queries, second, 0.2), again.attend(queries, also, 0.2))


def test_masks_are_the_engines() -> None:
    """For one token, for several, as an array and with a window: what a KVCache of the same offset makes."""
    keys, values = random(20)
    ours, theirs = filled("kivi", keys, values, [20]), KVCache()
    theirs.update_and_fetch(keys, values)
    assert ours.make_mask(1, return_array=False, window_size=None) is None
    assert ours.make_mask(4, return_array=False, window_size=None) == "causal"
    for window in (None, 8):
        wanted = {"return_array": True, "window_size": window}
        assert mx.array_equal(ours.make_mask(4, **wanted), theirs.make_mask(4, **wanted))


def test_it_is_never_falsy_and_its_bits_are_no_number() -> None:
    """No length; `bits` and `group_size` are both there."""
    cache = fresh()
    assert not hasattr(cache, "__len__")
    assert bool(cache)
    assert not hasattr(cache, "to_quantized")
    assert cache.bits == cache.group_size
    assert not isinstance(cache.bits, int | float)


def test_arrays_of_other_shapes_are_refused_before_anything_is_written() -> None:
    """Another width, another count of heads, another batch, and no tokens at all."""
    keys, values = random(4)
    cache = filled("kivi", keys, values, [4])
    wrong = [
        (keys[..., :16], values, "keys of width 16 for a cache of width 32"),
        (keys, values[..., :16], "values of width 16 for a cache of width 32"),
        (keys[:, :1], values[:, :1], r"\(1, 1\) for a cache that holds \(1, 2\)"),
        (mx.repeat(keys, 2, axis=0), mx.repeat(values, 2, axis=0), r"\(2, 2\) for a cache that holds \(1, 2\)"),
        (keys[:, :, :0], values[:, :, :0], "without tokens"),
    ]
    before = [mx.array(array) for array in stored(cache)]
    for bad_keys, bad_values, why in wrong:
        with pytest.raises(MethodRefused, match=why):
            cache.update_and_fetch(bad_keys, bad_values)
    assert cache.offset == 4
    assert same(stored(cache), before)


def test_a_state_of_another_layout_or_codec_is_refused() -> None:
    """What a later version may have saved is not read for ours."""
    *rest, text = fresh().state
    codec = {"codec": {"name": "later"}, "recent": {"name": "float", "width": WIDTH}}
    for change in ({"layout": 2}, {"keys": codec}):
        with pytest.raises(VeloxError):
            TieredKVCache.from_state((*rest, json.dumps({**json.loads(text), **change})))


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


def test_several_sequences_of_one_length_are_kept_apart() -> None:
    """A batch of three in two calls: each row's attention is that of the row alone."""
    mx.random.seed(6)
    keys, values = mx.random.normal((3, HEADS, 131, WIDTH)), mx.random.normal((3, HEADS, 131, WIDTH))
    queries = mx.random.normal((3, 2 * HEADS, 1, WIDTH))

    def last(rows: slice) -> Any:
        cache = fresh()
        cache.update_and_fetch(keys[rows, :, :130], values[rows, :, :130])
        packed_keys, packed_values = cache.update_and_fetch(keys[rows, :, 130:], values[rows, :, 130:])
        return packed_keys.attend(queries[rows], packed_values, 0.2)

    together = last(slice(0, 3))
    for row in range(3):
        alone = slice(row, row + 1)
        assert float(mx.abs(last(alone) - together[alone]).max()) < 1e-5


def test_a_number_format_stays_that_of_the_first_token() -> None:
    """Tokens in another 16-bit format do not make 32 bits of the scales."""
    cache, same_format = fresh(), fresh()
    for count, dtype in ((200, mx.float16), (200, mx.bfloat16), (1, mx.float32)):
        x = mx.ones((1, HEADS, count, WIDTH), dtype=dtype)
        cache.update_and_fetch(x, x)
        same_format.update_and_fetch(*[x.astype(mx.float16)] * 2)
    assert cache.nbytes == same_format.nbytes == held_bytes(cache)
