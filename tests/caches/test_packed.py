"""The packed cache: a chunk is a chunk whatever its size, and what was trimmed was never there."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import pytest
from cache_kit import HEADS, PACKED, WIDTH, drawn, filled, logits, model, packed, same, stored, tokens
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import KVCache, trim_prompt_cache

from veloxquant.caches import packed as module
from veloxquant.caches.affine_codec import AffineCodec
from veloxquant.caches.by_head import ByHeadCodec
from veloxquant.caches.codecs import make
from veloxquant.caches.held import arrays, held_bytes
from veloxquant.caches.packed import ENCODE_NUMBERS, PackedKVCache
from veloxquant.caches.rotated import RotatedCodec
from veloxquant.caches.symmetric import SymmetricCodec
from veloxquant.errors import MethodRefused
from veloxquant.profiles.slots import kv_slots

AFFINE = AffineCodec(64, 4)
ROTATED = RotatedCodec(64, SymmetricCodec(64, 4))
ALL = pytest.mark.parametrize("kind", PACKED)


def caches(kind: str) -> list[PackedKVCache]:
    """One for each layer of the model."""
    return [packed(kind) for _ in model().layers]


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
                assert same(stored(ours), stored(theirs))


@ALL
def test_forty_tokens_in_one_call_are_forty_calls(kind: str) -> None:
    """The stored arrays are equal, every bit of them."""
    keys, values = drawn(40)
    one, many = filled(packed(kind), keys, values, [40]), filled(packed(kind), keys, values, [1] * 40)
    assert same(stored(one), stored(many))


def test_a_chunk_too_long_to_pack_at_once_is_packed_in_pieces() -> None:
    """10,000 tokens of 64 numbers are more than one piece, and equal calls of 256."""
    count = ENCODE_NUMBERS // (HEADS * WIDTH) + 1808
    keys, values = drawn(count)
    whole = filled(packed("mse"), keys, values, [count])
    cut = filled(packed("mse"), keys, values, [256] * (count // 256) + [count % 256])
    assert same(stored(whole), stored(cut))


def test_pieces_are_counted_in_the_space_of_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 x 2 keys against 8,192 signs make 8 MiB an array; in pieces of 2**16 numbers the peak is below 8 MiB."""
    monkeypatch.setattr(module, "ENCODE_NUMBERS", 2**16)
    wide = make({"name": "turboquant_prod", "bits": 2, "width": WIDTH, "jl_dim": 8192})
    cache = PackedKVCache(wide, make({"name": "float", "width": WIDTH}))
    keys, values = drawn(128)
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
    keys, values = drawn(40)
    other_keys, other_values = drawn(30, seed=2)
    cache = filled(packed(kind), keys, values, [40])
    assert cache.is_trimmable()
    assert cache.trim(-1) == cache.trim(0) == 0
    assert cache.trim(forgotten) == forgotten
    cache.update_and_fetch(other_keys, other_values)
    kept = 40 - forgotten
    plain = filled(
        packed(kind),
        mx.concatenate([keys[:, :, :kept], other_keys], axis=2),
        mx.concatenate([values[:, :, :kept], other_values], axis=2),
        [kept, 30] if kept else [30],
    )
    assert same(stored(cache), stored(plain))
    assert cache.trim(1000) == kept + 30
    assert cache.offset == 0


@ALL
def test_what_was_restored_forgets_as_the_first_one(kind: str) -> None:
    """Three tokens more and three less: the bits that were saved."""
    cache = filled(packed(kind), *drawn(40), [40])
    restored = PackedKVCache.from_state(cache.state)
    filled(restored, *drawn(3, seed=5), [3])
    assert restored.offset == 43
    assert restored.trim(3) == 3
    assert same(stored(restored), stored(cache))


@ALL
def test_bytes_are_those_of_the_arrays_and_slots_those_of_the_rule(kind: str) -> None:
    """After each of 300, 300, 1, 1, 200 tokens: nbytes is what a walk finds, slots are the engine's."""
    keys, values = drawn(802)
    cache = packed(kind)
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
