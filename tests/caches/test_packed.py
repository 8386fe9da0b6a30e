"""The packed cache in mlx-lm's place: a chunk is a chunk whatever its size, and what is saved is what was held."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from functools import cache as once
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache, trim_prompt_cache

from veloxquant.caches import packed
from veloxquant.caches.affine_codec import AffineCodec
from veloxquant.caches.by_head import ByHeadCodec
from veloxquant.caches.codecs import make
from veloxquant.caches.held import arrays, held_bytes
from veloxquant.caches.packed import ENCODE_NUMBERS, PackedKVCache
from veloxquant.caches.rotated import RotatedCodec
from veloxquant.caches.symmetric import SymmetricCodec
from veloxquant.errors import MethodRefused, VeloxError
from veloxquant.profiles.slots import kv_slots

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY, WIDTH, HEADS = 97, 32, 2
CODECS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float": ({"name": "float"}, {"name": "float"}),
    "mse": ({"name": "turboquant_mse", "bits": 3}, {"name": "turboquant_mse", "bits": 2}),
    "prod": ({"name": "turboquant_prod", "bits": 3}, {"name": "turboquant_mse", "bits": 5}),
    "outliers": ({"name": "turboquant_mse", "bits": 2, "outlier_bits": 6, "outlier_channels": 5},) * 2,
}
AFFINE = AffineCodec(64, 4)
ROTATED = RotatedCodec(64, SymmetricCodec(64, 4))
ALL = pytest.mark.parametrize("kind", CODECS)


def fresh(kind: str, width: int = WIDTH, step: int = 256) -> PackedKVCache:
    """An empty cache."""
    keys, values = CODECS[kind]
    return PackedKVCache(make({**keys, "width": width}), make({**values, "width": width}), step)


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


def caches(kind: str) -> list[PackedKVCache]:
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


def random(count: int, seed: int = 1) -> tuple[Any, Any]:
    """Keys and values of one sequence."""
    mx.random.seed(seed)
    return mx.random.normal((1, HEADS, count, WIDTH)), mx.random.normal((1, HEADS, count, WIDTH))


def filled(kind: str, keys: Any, values: Any, chunks: list[int]) -> PackedKVCache:
    """A cache after calls of these lengths."""
    cache, at = fresh(kind), 0
    for count in chunks:
        cache.update_and_fetch(keys[:, :, at : at + count], values[:, :, at : at + count])
        at += count
    mx.eval(cache.state)
    return cache


def held_tokens(cache: PackedKVCache) -> list[Any]:
    """Everything stored for the tokens held, slack left out."""
    cut = [array[..., : cache.offset, :] for array in (*cache.keys, *cache.values)]
    return [*cut, *cache.key_fixed, *cache.value_fixed]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    """Equal to the bit."""
    return len(ours) == len(theirs) and all(mx.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_packed_as_floats_the_model_says_what_it_says_without() -> None:
    """The same logits as with mlx-lm's own cache, to 1e-4."""
    prompt = tokens(300)
    own = logits(prompt, [KVCache() for _ in model().layers], 300)
    assert float(mx.abs(logits(prompt, caches("float"), 300) - own).max()) < 1e-4


@ALL
@pytest.mark.parametrize("chunk", [1, 7, 64, 513])
def test_how_a_prompt_is_cut_changes_no_logits(kind: str, chunk: int) -> None:
    """530 tokens in chunks of any size: the logits of one chunk to 1e-4, and the same token."""
    prompt = tokens(530 if chunk > 1 else 60)
    whole, cut = logits(prompt, caches(kind), prompt.size), logits(prompt, caches(kind), chunk)
    assert float(mx.abs(whole - cut).max()) < 1e-4
    assert mx.array_equal(whole.argmax(-1), cut.argmax(-1))


@pytest.mark.skipif(sys.platform != "linux", reason="only there are a row's products known to be the same bits")
@pytest.mark.parametrize("kind", ["mse", "outliers"])
def test_over_several_blocks_every_layer_stores_the_same(kind: str) -> None:
    """1,100 tokens, five blocks, in chunks of 64, 260 and 513, and 300 one by one: the codes of one chunk, all layers.

    A last bit of the first layer's attention would flip codes of the second.
    """
    for count, chunks in ((1100, (64, 260, 513)), (300, (1, 7))):
        whole = caches(kind)
        expected = logits(tokens(count), whole, count)
        for chunk in chunks:
            cut = caches(kind)
            assert mx.array_equal(logits(tokens(count), cut, chunk), expected)
            for ours, theirs in zip(cut, whole, strict=True):
                assert same(held_tokens(ours), held_tokens(theirs))


@ALL
def test_forty_tokens_in_one_call_are_forty_calls(kind: str) -> None:
    """The stored arrays are equal, every bit of them."""
    keys, values = random(40)
    one, many = filled(kind, keys, values, [40]), filled(kind, keys, values, [1] * 40)
    assert same(held_tokens(one), held_tokens(many))


def test_a_chunk_too_long_to_pack_at_once_is_packed_in_pieces() -> None:
    """10,000 tokens of 64 numbers are more than one piece, and equal calls of 256."""
    count = ENCODE_NUMBERS // (HEADS * WIDTH) + 1808
    keys, values = random(count)
    whole = filled("mse", keys, values, [count])
    cut = filled("mse", keys, values, [256] * (count // 256) + [count % 256])
    assert same(held_tokens(whole), held_tokens(cut))


def test_pieces_are_counted_in_the_space_of_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 x 2 keys against 8,192 signs make 8 MiB an array; in pieces of 2**16 numbers the peak is below 8 MiB."""
    monkeypatch.setattr(packed, "ENCODE_NUMBERS", 2**16)
    wide = make({"name": "turboquant_prod", "bits": 2, "width": WIDTH, "jl_dim": 8192})
    cache = PackedKVCache(wide, make({"name": "float", "width": WIDTH}))
    keys, values = random(128)
    cache.update_and_fetch(keys[:, :, :1], values[:, :, :1])
    mx.eval(cache.state, keys, values)
    cache.update_and_fetch(keys, values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(cache.state)
    assert mx.get_peak_memory() - before < 2**23


@ALL
@pytest.mark.parametrize("forgotten", [1, 13, 40])
def test_trimming_is_never_having_added(kind: str, forgotten: int) -> None:
    """Forget the last tokens, all of them too, and go on: as a cache that never saw them."""
    keys, values = random(40)
    other_keys, other_values = random(30, seed=2)
    cache = filled(kind, keys, values, [40])
    assert cache.is_trimmable()
    assert cache.trim(-1) == cache.trim(0) == 0
    assert cache.trim(forgotten) == forgotten
    cache.update_and_fetch(other_keys, other_values)
    kept = 40 - forgotten
    plain = filled(
        kind,
        mx.concatenate([keys[:, :, :kept], other_keys], axis=2),
        mx.concatenate([values[:, :, :kept], other_values], axis=2),
        [kept, 30] if kept else [30],
    )
    assert same(held_tokens(cache), held_tokens(plain))
    assert cache.trim(1000) == kept + 30
    assert cache.offset == 0


@ALL
def test_bytes_are_those_of_the_arrays_and_slots_those_of_the_rule(kind: str) -> None:
    """After each of 300, 300, 1, 1, 200 tokens: nbytes is what a walk finds, slots are the engine's."""
    keys, values = random(802)
    cache = fresh(kind)
    assert cache.nbytes == held_bytes(cache) == 0
    engine, runs, at = KVCache(), [], 0
    for count in (300, 300, 1, 1, 200):
        engine.update_and_fetch(keys[:, :, at : at + count], values[:, :, at : at + count])
        cache.update_and_fetch(keys[:, :, at : at + count], values[:, :, at : at + count])
        at += count
        runs.append((count, 1))
        slots = {array.shape[2] for array in (*cache.keys, *cache.values)}
        assert slots == {kv_slots(runs)} == {engine.keys.shape[2]}
        assert cache.nbytes == held_bytes(cache)
        assert cache.offset == cache.size() == engine.offset


@ALL
def test_the_state_lists_every_array(kind: str) -> None:
    """Empty or filled: what a walk over the cache finds is what mx.eval is given."""
    keys, values = random(5)
    for cache in (fresh(kind), filled(kind, keys, values, [5])):
        mx.eval(cache.state)
        assert {id(array) for array in arrays(cache)} == {id(array) for array in arrays(cache.state)}
        restored = PackedKVCache.from_state(cache.state)
        assert restored.offset == cache.offset
        assert restored.empty() == cache.empty()
        assert same(held_tokens(restored), held_tokens(cache))


@ALL
def test_a_restored_cache_and_a_deep_copy_go_their_own_way(kind: str) -> None:
    """Writing to either leaves the first as it was, and both go on as it would."""
    keys, values = random(40)
    more_keys, more_values = random(3, seed=5)
    cache = filled(kind, keys, values, [40])
    before = [mx.array(array) for array in held_tokens(cache)]
    for twin in (copy.deepcopy(cache), PackedKVCache.from_state(cache.state)):
        twin.update_and_fetch(more_keys, more_values)
        assert same(held_tokens(cache), before)
        assert twin.offset == 43
        twin.trim(3)
        assert same(held_tokens(twin), before)


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
    for kind in CODECS:
        cache = filled(kind, keys, values, [290])
        save_prompt_cache(str(tmp_path / f"{kind}.safetensors"), [cache])
        queries = mx.random.normal((1, 4, 1, WIDTH), key=mx.random.key(9))
        new = mx.random.normal((1, HEADS, 1, WIDTH), key=mx.random.key(8))
        packed_keys, packed_values = cache.update_and_fetch(new, new)
        out = packed_keys.attend(queries, packed_values, 0.2).flatten().tolist()
        expected[kind] = [cache.offset, cache.nbytes, out]
    command = [sys.executable, "-c", _LOADING, str(tmp_path), *CODECS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected


@ALL
def test_a_saved_prompt_goes_on_as_the_prompt_would(kind: str, tmp_path: Path) -> None:
    """An empty list of caches, and one of 300 tokens: loaded, both give the logits of those that were saved."""
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, caches(kind))
    assert all(cache.empty() and cache.offset == 0 for cache in load_prompt_cache(file))
    held = caches(kind)
    logits(tokens(300), held, 128)
    save_prompt_cache(file, held)
    loaded = load_prompt_cache(file)
    assert [type(cache) for cache in loaded] == [PackedKVCache] * 2
    assert held_bytes(loaded) == held_bytes(held)
    assert mx.array_equal(logits(tokens(9), loaded, 9), logits(tokens(9), held, 9))


@ALL
def test_generation_runs_in_mlx_lm(kind: str) -> None:
    """mlx-lm's own loop with chunks of 64 gives the greedy tokens of the model called by hand."""
    prompt = tokens(150)
    made = [
        token
        for token, _ in generate_step(prompt, model(), max_tokens=8, prompt_cache=caches(kind), prefill_step_size=64)
    ]
    by_hand, held = [], caches(kind)
    last = logits(prompt, held, prompt.size)[-1]
    for _ in range(8):
        by_hand.append(int(last.argmax()))
        last = logits(mx.array(by_hand[-1:]), held, 1)[-1]
    assert made == by_hand


@ALL
def test_speculative_decoding_rewinds(kind: str) -> None:
    """With a draft model that is often wrong: the greedy tokens of plain generation."""
    prompt = tokens(40)
    plain = [token for token, _ in generate_step(prompt, model(), max_tokens=20, prompt_cache=caches(kind))]
    draft = model(seed=4)
    both = [*caches(kind), *caches(kind)]
    made = list(speculative_generate_step(prompt, model(), draft, max_tokens=20, prompt_cache=both, num_draft_tokens=3))
    assert [int(token) for token, _, _ in made] == plain
    assert not all(accepted for _, _, accepted in made)


def test_trimming_a_list_is_the_engines_own_function() -> None:
    """mlx-lm's trim_prompt_cache takes it, and says how many tokens went."""
    held = caches("mse")
    logits(tokens(30), held, 30)
    assert trim_prompt_cache(held, 12) == 12
    assert [cache.offset for cache in held] == [18, 18]


def test_masks_are_the_engines() -> None:
    """For one token, for several, as an array and with a window: what a KVCache of the same offset makes."""
    keys, values = random(20)
    ours, theirs = filled("mse", keys, values, [20]), KVCache()
    theirs.update_and_fetch(keys, values)
    assert ours.make_mask(1, return_array=False, window_size=None) is None
    assert ours.make_mask(4, return_array=False, window_size=None) == "causal"
    for window in (None, 8):
        wanted = {"return_array": True, "window_size": window}
        assert mx.array_equal(ours.make_mask(4, **wanted), theirs.make_mask(4, **wanted))


def test_it_is_never_falsy_and_no_number_says_how_it_is_packed() -> None:
    """No length; `bits` and `group_size` are both there and are no numbers; nothing that quantizes it once more."""
    cache = fresh("mse")
    assert not hasattr(cache, "__len__")
    assert bool(cache)
    assert not hasattr(cache, "to_quantized")
    assert cache.bits == cache.group_size
    assert not isinstance(cache.bits, int | float)


def test_a_codec_of_groups_is_refused() -> None:
    """Per-channel keys pack 64 tokens at a time, and this cache takes them one by one."""
    groups = make({"name": "per_channel", "width": WIDTH, "bits": 4, "group": 64})
    for codecs in (
        (groups, make({"name": "float", "width": WIDTH})),
        (make({"name": "float", "width": WIDTH}), groups),
    ):
        with pytest.raises(MethodRefused, match="64 tokens at a time") as caught:
            PackedKVCache(*codecs)
        assert "TieredKVCache" in caught.value.hint


def test_arrays_of_other_shapes_are_refused_before_anything_is_written() -> None:
    """Another width, another count of heads, another batch, and no tokens at all."""
    keys, values = random(4)
    cache = filled("mse", keys, values, [4])
    wrong = [
        (keys[..., :16], values, "keys of width 16 for a cache of width 32"),
        (keys, values[..., :16], "values of width 16 for a cache of width 32"),
        (keys[:, :1], values[:, :1], r"\(1, 1\) for a cache that holds \(1, 2\)"),
        (mx.repeat(keys, 2, axis=0), mx.repeat(values, 2, axis=0), r"\(2, 2\) for a cache that holds \(1, 2\)"),
        (keys[:, :, :0], values[:, :, :0], "without tokens"),
    ]
    before = [mx.array(array) for array in held_tokens(cache)]
    for bad_keys, bad_values, why in wrong:
        with pytest.raises(MethodRefused, match=why):
            cache.update_and_fetch(bad_keys, bad_values)
    assert cache.offset == 4
    assert same(held_tokens(cache), before)


def test_a_state_of_another_layout_or_codec_is_refused() -> None:
    """What a later version may have saved is not read for ours."""
    *rest, text = fresh("mse").state
    for change in ({"layout": 2}, {"keys": {"name": "later"}}):
        with pytest.raises(VeloxError):
            PackedKVCache.from_state((*rest, json.dumps({**json.loads(text), **change})))


def test_several_sequences_of_one_length_are_kept_apart() -> None:
    """A batch of three in one call: each row's attention is that of the row alone."""
    mx.random.seed(6)
    keys, values = mx.random.normal((3, HEADS, 9, WIDTH)), mx.random.normal((3, HEADS, 9, WIDTH))
    queries = mx.random.normal((3, 2 * HEADS, 1, WIDTH))
    packed_keys, packed_values = fresh("outliers").update_and_fetch(keys, values)
    together = packed_keys.attend(queries, packed_values, 0.2)
    for row in range(3):
        alone = slice(row, row + 1)
        row_keys, row_values = fresh("outliers").update_and_fetch(keys[alone], values[alone])
        out = row_keys.attend(queries[alone], row_values, 0.2)
        assert float(mx.abs(out - together[alone]).max()) < 1e-5


@pytest.mark.parametrize("codec", [AFFINE, ROTATED])
@pytest.mark.parametrize("rows", [1, 2])
def test_what_was_trimmed_away_has_no_part_in_attention(codec: Any, rows: int) -> None:
    """Not even where it was NaN: a single query multiplies slots behind the last token too."""
    mx.random.seed(11)
    first, bad, last = (
        mx.random.normal((1, HEADS, 9, 64)),
        mx.full((1, HEADS, 7, 64), mx.nan),
        mx.ones((1, HEADS, 1, 64)),
    )
    caches = []
    for lost in (True, False):
        cache: Any = PackedKVCache(codec, codec)
        cache.update_and_fetch(first, first)
        cache = cache if rows == 1 else cache.merge([cache] * rows)
        if lost:
            cache.update_and_fetch(*[mx.repeat(bad, rows, axis=0)] * 2)
            assert cache.trim(7) == 7
        caches.append(cache)
    queries = mx.random.normal((rows, 2 * HEADS, 1, 64))
    ours, expected = (
        keys.attend(queries, values, 0.2)
        for keys, values in (cache.update_and_fetch(*[mx.repeat(last, rows, axis=0)] * 2) for cache in caches)
    )
    assert bool(mx.array_equal(ours, expected))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_queries_of_16_bits_are_scaled_in_32(dtype: Any) -> None:
    """Attention of several queries is that of the same numbers in float32, rounded once."""
    mx.random.seed(12)
    x = mx.random.normal((1, HEADS, 40, 64))
    keys, values = PackedKVCache(AFFINE, AFFINE).update_and_fetch(x, x)
    queries = (3 * mx.random.normal((1, 2 * HEADS, 5, 64))).astype(dtype)
    ours = keys.attend(queries, values, 0.3)
    expected = keys.attend(queries.astype(mx.float32), values, 0.3)
    assert ours.dtype == dtype
    assert bool(mx.array_equal(ours, expected.astype(dtype)))


def test_a_codec_that_has_heads_in_arrays_apart_is_refused() -> None:
    """Heads are counted by one array here; tiers have them together among the recent tokens."""
    apart = ByHeadCodec((AffineCodec(64, 4), AffineCodec(64, 2)), (0, 1, 0))
    for codecs in ((apart, AFFINE), (AFFINE, RotatedCodec(64, apart))):
        with pytest.raises(MethodRefused, match="heads in arrays apart"):
            PackedKVCache(*codecs)


def test_a_number_format_stays_that_of_the_first_token() -> None:
    """Tokens in another 16-bit format do not make 32 bits of the scales, as the engine's concatenation would."""
    cache, same_format = PackedKVCache(AFFINE, AFFINE), PackedKVCache(AFFINE, AFFINE)
    for count, dtype in ((200, mx.float16), (200, mx.bfloat16), (1, mx.float32)):
        x = mx.ones((1, HEADS, count, 64), dtype=dtype)
        cache.update_and_fetch(x, x)
        same_format.update_and_fetch(*[x.astype(mx.float16)] * 2)
    assert {array.dtype for array in arrays(cache)} == {mx.uint32, mx.float16}
    assert cache.nbytes == same_format.nbytes
