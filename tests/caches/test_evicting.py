"""The bounded cache in mlx-lm's place: however a prompt is cut, and what is held is what the rule says."""

from __future__ import annotations

import copy
import io
import json
import re
import subprocess
import sys
from functools import cache as once
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache, trim_prompt_cache

from veloxquant.caches.codecs import make
from veloxquant.caches.evicting import EvictingKVCache
from veloxquant.caches.eviction import HeavyHitters, KeyNorm, SnapKV, Streaming
from veloxquant.caches.held import arrays, held_bytes
from veloxquant.errors import InvalidParams, MethodRefused, VeloxError

if TYPE_CHECKING:
    from pathlib import Path

    from veloxquant.caches.eviction import Policy

VOCABULARY, WIDTH, HEADS, BUDGET, STRIDE = 97, 32, 2, 96, 32
FLOAT = {"name": "float", "width": WIDTH}
FOUR_BITS = {"name": "affine", "width": WIDTH, "bits": 4, "group": 32}
POLICIES: dict[str, Policy] = {
    "streaming": Streaming(sinks=4),
    "knorm": KeyNorm(recent=16),
    "snapkv": SnapKV(recent=16, kernel=5),
    "h2o": HeavyHitters(recent=48),
}
KINDS = {name: (policy, FLOAT) for name, policy in POLICIES.items()} | {
    f"{name}-4bit": (policy, FOUR_BITS) for name, policy in POLICIES.items()
}
ALL = pytest.mark.parametrize("kind", KINDS)
FEW = pytest.mark.parametrize("kind", ["streaming", "snapkv-4bit", "h2o"])


def fresh(kind: str, budget: int = BUDGET) -> EvictingKVCache:
    """An empty cache."""
    policy, codec = KINDS[kind]
    return EvictingKVCache(make(codec), make(codec), policy, budget, STRIDE)


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


def caches(kind: str, budget: int = BUDGET) -> list[EvictingKVCache]:
    """One for each layer of the model."""
    return [fresh(kind, budget) for _ in model().layers]


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


def normal(seed: int, *shape: int) -> Any:
    """Numbers of unit variance."""
    return mx.random.normal(shape, key=mx.random.key(seed))


def attend(cache: Any, count: int, seed: int = 1, rows: int = 1, heads: int = HEADS) -> Any:
    """One call of so many tokens, as a model's layer makes it."""
    keys, values = normal(seed, rows, heads, count, WIDTH), normal(seed + 1, rows, heads, count, WIDTH)
    queries = normal(seed + 2, rows, 2 * heads, count, WIDTH)
    mask = cache.make_mask(count, return_array=False, window_size=None)
    ours = cache.update_and_fetch(keys, values)
    return scaled_dot_product_attention(queries, *ours, cache=cache, scale=0.3, mask=mask)


def filled(kind: str, chunks: list[int], budget: int = BUDGET) -> EvictingKVCache:
    """A cache after calls of these lengths, whatever they bring."""
    cache = fresh(kind, budget)
    for at, count in enumerate(chunks):
        mx.eval(attend(cache, count, seed=10 * at), cache.state)
    return cache


def meant(cache: EvictingKVCache) -> list[Any]:
    """Everything stored for the tokens held, slack left out."""
    return [array[:, :, : cache.rule.held(cache.offset)] for array in cache.slots.arrays]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    """Equal to the bit."""
    return len(ours) == len(theirs) and all(mx.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


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
    cache = fresh("streaming")
    ours = cache.update_and_fetch(keys, values)
    out = ours[0].attend(queries, ours[1], 0.3, "causal")
    engine = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
    assert float(mx.abs(out - engine).max()) < 1e-5


@ALL
def test_bytes_follow_from_the_length_alone_and_are_bounded(kind: str) -> None:
    """Calls of 40, 1, 200, 7: slots by the rule, nbytes what a walk finds, no more at 2,000 tokens than at 128."""
    policy, codec = KINDS[kind]
    number = 32 if codec is FLOAT else 4 + 2 * 32 / 32
    row = 2 * WIDTH * number / 8 + 4 + (4 if policy.watches else 0)
    cache, seen = fresh(kind), 0
    assert cache.nbytes == held_bytes(cache) == 0
    for count, slots in ((40, 64), (1, 64), (200, 128), (7, 128), (1752, 128)):
        mx.eval(attend(cache, count), cache.state)
        seen += count
        assert cache.offset == cache.size() == seen
        assert cache.nbytes == held_bytes(cache) == slots * HEADS * row


def test_a_prefill_holds_no_scores_of_the_whole_prompt() -> None:
    """4,096 queries of 8 heads over as many tokens make 512 MiB of scores; the call takes less than 64 MiB."""
    cache = fresh("h2o", budget=512)
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
    cache = fresh(kind)
    new, queries = normal(3, 1, HEADS, 1, WIDTH), normal(4, 1, 2 * HEADS, 1, WIDTH)
    mx.eval(new, queries)
    before = mx.get_active_memory()
    for _ in range(200):
        keys, values = cache.update_and_fetch(new, new)
        mx.eval(keys.attend(queries, values, 0.3))
        assert mx.get_active_memory() - before < cache.nbytes + 2**16


def step_calls(kind: str, rows: int, heads: int, count: int) -> int:
    """MLX operations of a decode step, cache and attention: the nodes of its graph, nothing else being unevaluated."""
    cache = fresh(kind)
    mx.eval(attend(cache, count, rows=rows, heads=heads), cache.state)
    new, queries = normal(3, rows, heads, 1, WIDTH), normal(4, rows, 2 * heads, 1, WIDTH)
    mx.eval(new, queries)
    keys, values = cache.update_and_fetch(new, new)
    graph = io.StringIO()
    mx.export_to_dot(graph, keys.attend(queries, values, 0.3), *cache.slots.arrays)
    return len(re.findall(r"shape=rectangle", graph.getvalue()))


@ALL
@pytest.mark.parametrize("seen", [150, 159])
def test_a_step_makes_as_many_calls_for_any_rows_heads_and_tokens(kind: str, seen: int) -> None:
    """8 rows as 1, 8 heads as 2, ten strides more; between evictions, and with one (after 159 tokens of 160)."""
    base = step_calls(kind, 1, 2, seen)
    assert 15 < base < (70 if seen == 150 else 180)
    assert step_calls(kind, 8, 2, seen) == step_calls(kind, 1, 8, seen) == step_calls(kind, 1, 2, seen + 320) == base


@ALL
def test_the_state_lists_every_array_and_restores(kind: str) -> None:
    """Empty or filled: what a walk over the cache finds is what mx.eval is given, and what goes on is the same."""
    for cache in (fresh(kind), filled(kind, [150])):
        mx.eval(cache.state)
        assert {id(array) for array in arrays(cache)} == {id(array) for array in arrays(cache.state)}
        before = [mx.array(array) for array in meant(cache)]
        for twin in (copy.deepcopy(cache), EvictingKVCache.from_state(cache.state)):
            assert twin.offset == cache.offset
            assert twin.empty() == cache.empty()
            assert same(meant(twin), before)
            mx.eval(attend(twin, 50), twin.state)
            assert same(meant(cache), before)
        again = EvictingKVCache.from_state(cache.state)
        assert mx.array_equal(attend(again, 30), attend(cache, 30))


_LOADING = """
import json, sys
from veloxquant.caches.registration import register
register()
import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache
found = {}
for kind in sys.argv[2:]:
    (cache,) = load_prompt_cache(f"{sys.argv[1]}/{kind}.safetensors")
    queries = mx.random.normal((1, 4, 60, 32), key=mx.random.key(9))
    new = mx.random.normal((1, 2, 60, 32), key=mx.random.key(8))
    keys, values = cache.update_and_fetch(new, new)
    found[kind] = [cache.offset, cache.nbytes, keys.attend(queries, values, 0.2).sum(axis=2).flatten().tolist()]
print(json.dumps(found))
"""


def test_a_cache_saved_here_is_the_same_in_another_process(tmp_path: Path) -> None:
    """Saved by mlx-lm, loaded by mlx-lm where only `register` was called: equal offsets, bytes and attention."""
    expected = {}
    for kind in KINDS:
        cache = filled(kind, [290])
        save_prompt_cache(str(tmp_path / f"{kind}.safetensors"), [cache])
        queries, new = normal(9, 1, 4, 60, WIDTH), normal(8, 1, HEADS, 60, WIDTH)
        keys, values = cache.update_and_fetch(new, new)
        out = keys.attend(queries, values, 0.2).sum(axis=2).flatten().tolist()
        expected[kind] = [cache.offset, cache.nbytes, out]
    command = [sys.executable, "-c", _LOADING, str(tmp_path), *KINDS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected


@FEW
def test_a_saved_prompt_goes_on_as_the_prompt_would(kind: str, tmp_path: Path) -> None:
    """An empty list of caches, and one of 300 tokens: loaded, both give the logits of those that were saved."""
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, caches(kind))
    assert all(cache.empty() and cache.offset == 0 for cache in load_prompt_cache(file))
    held = caches(kind)
    logits(tokens(300), held, 128)
    save_prompt_cache(file, held)
    loaded = load_prompt_cache(file)
    assert [type(cache) for cache in loaded] == [EvictingKVCache] * 2
    assert held_bytes(loaded) == held_bytes(held)
    assert mx.array_equal(logits(tokens(70), loaded, 70), logits(tokens(70), held, 70))


@FEW
def test_generation_runs_in_mlx_lm(kind: str) -> None:
    """mlx-lm's own loop with chunks of 64 gives the greedy tokens of the model called by hand, over an eviction."""
    prompt = tokens(150)
    loop = generate_step(prompt, model(), max_tokens=20, prompt_cache=caches(kind), prefill_step_size=64)
    by_hand, held = [], caches(kind)
    last = logits(prompt, held, prompt.size)[-1]
    for _ in range(20):
        by_hand.append(int(last.argmax()))
        last = logits(mx.array(by_hand[-1:]), held, 1)[-1]
    assert [token for token, _ in loop] == by_hand


@ALL
def test_it_says_from_the_start_that_it_cannot_be_trimmed(kind: str) -> None:
    """Empty, short or long: never; mlx-lm's own function then takes nothing, and a direct call is refused, typed."""
    for chunks in ([], [20], [300]):
        cache = filled(kind, chunks)
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
    cache = filled(kind, [150])
    new, queries = normal(1, 1, HEADS, 3, WIDTH), normal(2, 1, 4, 3, WIDTH)
    keys, values = cache.update_and_fetch(new, new)
    with pytest.raises(MethodRefused, match="never attended"):
        cache.update_and_fetch(new, new)
    other = fresh(kind).update_and_fetch(new, new)
    with pytest.raises(MethodRefused, match="not of the same call"):
        keys.attend(queries, other[1], 0.3)
    mx.eval(keys.attend(queries, values, 0.3))
    with pytest.raises(MethodRefused, match="second attention"):
        keys.attend(queries, values, 0.3)
    with pytest.raises(AttributeError, match="no 'shape'"):
        _ = keys.shape
    with pytest.raises(MethodRefused, match="other layers"):
        cache.keys_and_values()


def test_arrays_of_other_shapes_are_refused_before_anything_is_written() -> None:
    """Another width, another count of heads, another batch, and no tokens at all."""
    cache = filled("h2o", [150])
    keys = values = normal(1, 1, HEADS, 4, WIDTH)
    wrong = [
        (keys[..., :16], values, "keys of width 16 for a cache of width 32"),
        (keys, values[..., :16], "values of width 16 for a cache of width 32"),
        (keys[:, :1], values[:, :1], r"\(1, 1\) for a cache that holds \(1, 2\)"),
        (mx.repeat(keys, 2, axis=0), mx.repeat(values, 2, axis=0), r"\(2, 2\) for a cache that holds \(1, 2\)"),
        (keys[:, :, :0], values[:, :, :0], "without tokens"),
    ]
    before = [mx.array(array) for array in meant(cache)]
    for bad_keys, bad_values, why in wrong:
        with pytest.raises(MethodRefused, match=why):
            cache.update_and_fetch(bad_keys, bad_values)
    assert cache.offset == 150
    assert same(meant(cache), before)


def test_masks_and_heads_that_make_no_sense_are_refused() -> None:
    """As in attention over any packed cache."""
    new = normal(1, 1, HEADS, 3, WIDTH)
    for queries, mask, why in (
        (normal(2, 1, 3, 3, WIDTH), "causal", "not a multiple"),
        (normal(2, 1, 4, 3, WIDTH), "banded", "not known"),
        (normal(2, 1, 4, 3, WIDTH), mx.ones((1, 3, 3, 3)), "a mask of shape"),
    ):
        keys, values = fresh("h2o").update_and_fetch(new, new)
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


def test_a_state_of_another_layout_or_policy_is_refused() -> None:
    """What a later version may have saved is not read for ours."""
    *rest, text = fresh("h2o").state
    for change in ({"layout": 2}, {"policy": {"name": "later"}}, {"keys": {"name": "later"}}):
        with pytest.raises(VeloxError):
            EvictingKVCache.from_state((*rest, json.dumps({**json.loads(text), **change})))


def test_a_state_that_does_not_hang_together_is_refused() -> None:
    """No JSON, parts that are missing, arrays too few or too short for the tokens, a length below 0."""
    held, offset, text = filled("h2o", [150]).state
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


def test_it_is_never_falsy_and_its_bits_are_no_numbers() -> None:
    """`bits` and `group_size` are both there, no length, no conversion of the engine's."""
    cache = fresh("h2o")
    assert bool(cache)
    assert not hasattr(cache, "__len__")
    assert not hasattr(cache, "to_quantized")
    assert cache.bits == cache.group_size
    assert not isinstance(cache.bits, int | float)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_sixteen_bits_stay_sixteen_bits(dtype: Any) -> None:
    """K and V of a 16-bit model are stored in its format, and attention answers in it, near the 32-bit answer."""
    cache, wide = fresh("h2o"), fresh("h2o")
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
