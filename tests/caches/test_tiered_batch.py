"""Caches in tiers, batched: every row is its single run, whatever the others do, and no byte is held besides."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import cache as once
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from batch_kit import Drive, Request, Shape, agree, alone, played, serve
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import llama
from mlx_lm.models.cache import BatchKVCache, KVCache, save_prompt_cache
from veloxquant_plugins.kivi import Kivi

from veloxquant.caches.channel_classes import written
from veloxquant.caches.codecs import make
from veloxquant.caches.held import arrays, held_bytes
from veloxquant.caches.per_channel import PerChannelCodec
from veloxquant.caches.tiered import TieredKVCache
from veloxquant.caches.tiered_batch import BatchTieredKVCache
from veloxquant.errors import MethodRefused
from veloxquant.methods import LayerSpec
from veloxquant.methods.checks import sample_part
from veloxquant.methods.worker import declared_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WIDTH, VOCABULARY = 32, 97

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "kivi": (
        {"name": "per_channel", "bits": 4, "group": 32},
        {"name": "affine", "bits": 3, "group": 32},
        {"sinks": 4, "recent": 32},
    ),
    "nothing kept": (
        {"name": "per_channel", "bits": 2, "group": 32},
        {"name": "affine", "bits": 2, "group": 32},
        {"sinks": 0, "recent": 0},
    ),
    "recent packed": (
        {"name": "per_channel", "bits": 4, "group": 32},
        {"name": "affine", "bits": 4, "group": 32},
        {"sinks": 4, "recent": 64, "recent_bits": 8, "step": 96},
    ),
    "unlike groups": (
        {"name": "per_channel", "bits": 3, "group": 64},
        {"name": "per_channel", "bits": 4, "group": 32},
        {"sinks": 1, "recent": 64},
    ),
    "chosen channels": (
        {"name": "turboquant_mse", "bits": 2, "outlier_bits": 6, "outlier_channels": 5},
        {"name": "turboquant_mse", "bits": 3},
        {"sinks": 70, "recent": 64},
    ),
    "classes of channels": (
        {
            "name": "channel_classes",
            "classes": "6,4,2,2",
            "order": written([[*range(WIDTH)], [*reversed(range(WIDTH))]], 4),
            "group": 32,
        },
        {"name": "symmetric", "bits": 3, "group": 32},
        {"sinks": 4, "recent": 32},
    ),
}
"""K, V and tiers. Each row of the last two holds the order of its channels, in one of them by its first token."""

EVERY = pytest.mark.parametrize("kind", KINDS)


def fresh(kind: str = "kivi") -> TieredKVCache:
    """An empty single cache."""
    keys, values, tiers = KINDS[kind]
    tiers = dict(tiers)
    bits = tiers.pop("recent_bits", None)
    recent = make({"name": "affine", "width": WIDTH, "bits": bits, "group": 32}) if bits else None
    made = (make({**codec, "width": WIDTH}) for codec in (keys, values))
    return TieredKVCache(*made, recent_key_codec=recent, recent_value_codec=recent, **tiers)


def held(cache: TieredKVCache) -> list[Any]:
    """All arrays of a single cache, in order; it has no slack but zeros."""
    return [one for group in cache.state[:10] for one in group]


def drive(kind: str = "kivi", **options: Any) -> Drive:
    """A driver without rows."""
    return Drive(lambda: fresh(kind), held, **options)


# One layer, by the calls that mlx-lm makes.


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


PLANS = st.lists(
    st.tuples(
        st.sampled_from(("start", "prompt", "left", "decode", "filter", "split", "copy", "restore", "extract")),
        st.lists(st.integers(0, 10_000), min_size=3, max_size=3),
    ),
    min_size=2,
    max_size=7,
)


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


# What a step costs.


def filled(lengths: list[int], kind: str = "kivi") -> BatchTieredKVCache:
    """A twin of rows of these lengths."""
    rows = drive(kind)
    rows.start(lengths)
    return rows.twin  # type: ignore[no-any-return]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts calls of MLX's functions and of its arrays' methods and operators."""
    counted: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            counted[name] += 1
            return function(*args, **options)

        return called

    inner = {"__new__", "__init__", "__getattribute__", "__setattr__", "__class__", "__hash__", "__dir__", "__repr__"}
    for name, function in list(vars(mx.array).items()):
        if callable(function) and name not in inner:
            monkeypatch.setattr(mx.array, name, counting(f"array.{name}", function))
    for name, function in list(vars(mx).items()):
        if callable(function) and not isinstance(function, type) and not name.startswith("_"):
            monkeypatch.setattr(mx, name, counting(name, function))
    return counted


@pytest.mark.parametrize("length", [120, 99, 3])
def test_a_decode_step_makes_as_many_calls_for_eight_rows_as_for_one(length: int, calls: Counter[str]) -> None:
    """With no group to pack, with one in every row, and with sinks to fill."""
    found = []
    for count in (1, 2, 8):
        twin = filled([length] * count)
        keys, values, queries = (mx.random.normal((count, heads, 1, WIDTH)) for heads in (2, 2, 4))
        calls.clear()
        mask = twin.make_mask(1, return_array=False, window_size=None)
        packed_keys, packed_values = twin.update_and_fetch(keys, values)
        packed_keys.attend(queries, packed_values, 0.2, mask)
        found.append(dict(calls))
    assert found[0] == found[1] == found[2]
    assert 20 < sum(found[0].values()) < 200


def test_rows_pack_at_their_own_time_and_together_when_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 68 + 0, 5 and 5 tokens: a group each 32 steps, encoded at these steps alone, two rows in one call."""
    twin = filled([68, 73, 73])
    encoded: list[tuple[int, ...]] = []
    plain = PerChannelCodec.encode
    monkeypatch.setattr(
        PerChannelCodec, "encode", lambda codec, x, fixed: encoded.append(x.shape) or plain(codec, x, fixed)
    )
    steps = []
    for step in range(1, 65):
        new = mx.random.normal((3, 2, 1, WIDTH))
        before = len(encoded)
        twin.update_and_fetch(new, new)
        steps += [(step, *encoded[at]) for at in range(before, len(encoded))]
    assert steps == [
        (27, 2, 2, 32, WIDTH),  # 73 + 27 = 4 + 32 + 2 x 32
        (32, 1, 2, 32, WIDTH),
        (59, 2, 2, 32, WIDTH),
        (64, 1, 2, 32, WIDTH),
    ]


def test_a_prompt_of_many_groups_is_encoded_for_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of 300, 200 and 100 tokens complete 8, 5 and 2 groups: one call."""
    twin = filled([0, 0, 0])
    encoded: list[tuple[int, ...]] = []
    plain = PerChannelCodec.encode
    monkeypatch.setattr(
        PerChannelCodec, "encode", lambda codec, x, fixed: encoded.append(x.shape) or plain(codec, x, fixed)
    )
    twin.prepare(lengths=[300, 200, 100], right_padding=[0, 100, 200])
    new = mx.random.normal((3, 2, 300, WIDTH))
    twin.update_and_fetch(new, new)
    assert encoded == [(8 + 5 + 2, 2, 32, WIDTH)]


# Bytes.


@EVERY
def test_bytes_are_rows_times_a_single_cache_of_the_longest(kind: str) -> None:
    """As rows grow, leave and join; a twin without rows or without tokens holds nothing."""
    rows = drive(kind)
    rows.start([0, 0])
    assert rows.twin.nbytes == 0
    rows.start([10, 200])
    assert rows.twin.nbytes == 4 * held_bytes(_single(kind, 200))
    rows.filter([0, 2])
    assert rows.twin.nbytes == 2 * held_bytes(_single(kind, 10))
    rows.filter([0])
    assert rows.twin.nbytes == 0
    rows.filter([])
    assert rows.twin.nbytes == held_bytes(rows.twin) == 0
    rows.start([150])
    assert rows.twin.nbytes == held_bytes(_single(kind, 150))


def _single(kind: str, tokens: int) -> TieredKVCache:
    cache = fresh(kind)
    cache.update_and_fetch(mx.zeros((1, 2, tokens, WIDTH)), mx.zeros((1, 2, tokens, WIDTH)))
    return cache


def test_bytes_are_those_of_the_arithmetic() -> None:
    """kivi, float32, two heads of width 32, 4 sinks, a ring of 64, 4-bit keys and 3-bit values in groups of 32."""
    twin = filled([20, 141])
    packed = (141 - 4 - 32) // 32 * 32
    bits = (4 + 64 / 32) + (3 + 64 / 32)  # a float32 scale and bias for 32 numbers
    assert twin.nbytes == 2 * (2 * WIDTH * (packed * bits / 8 + 2 * 4 * (4 + 64)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_bytes_are_what_the_method_plans(dtype: Any) -> None:
    """Every variant of kivi, merged at 1, 3 and 131 tokens and after a step, which completes a group of the longest."""
    part = sample_part(64, dtype.size, heads=2)
    for variant in Kivi().variants():
        singles = [Kivi().build(LayerSpec(index=0, part=part), variant) for _ in range(3)]
        for cache, tokens in zip(singles, (1, 3, 131), strict=True):
            new = mx.zeros((1, 2, tokens, 64), dtype)
            cache.update_and_fetch(new, new)
        twin = TieredKVCache.merge(singles)
        for longest in (131, 132):
            assert twin.nbytes == held_bytes(twin) == 3 * declared_bytes(Kivi(), variant, part, [(longest, 1)])
            new = mx.zeros((3, 2, 1, 64), dtype)
            twin.update_and_fetch(new, new)


# A model, mlx-lm's own BatchGenerator.


@once
def model() -> Any:
    """A llama of three layers, four query heads over two KV heads of width 32, random float32 weights."""
    mx.random.seed(3)
    made = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=3,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=WIDTH,
            rms_norm_eps=1e-5,
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
        )
    )
    mx.eval(made.parameters())
    return made


def prompt(tokens: int) -> list[int]:
    """Differs for each length."""
    return [(31 * at * at + 7 * at + tokens) % VOCABULARY for at in range(tokens)]


LAYERS: dict[str, tuple[str, ...]] = {
    "kivi": ("kivi",) * 3,
    "recent packed": ("recent packed",) * 3,
    "chosen channels": ("chosen channels",) * 3,
    "engine first": ("engine", "kivi", "kivi"),
    "engine between": ("kivi", "engine", "recent packed"),
}
"""The engine's own cache in a layer: all layers share the mask that the first one's cache makes."""


def layers(name: str) -> list[Any]:
    """Fresh caches."""
    return [KVCache() if kind == "engine" else fresh(kind) for kind in LAYERS[name]]


REQUESTS = [
    Request(prompt(tokens), leaves, arrives)
    for tokens, leaves, arrives in (
        (1, 40, 0),
        (3, 5, 0),
        (69, 3, 0),
        (68, 45, 1),
        (150, 4, 2),
        (5, 60, 2),
        (37, 20, 4),
        (129, 12, 9),
    )
]


@pytest.mark.parametrize("name", LAYERS)
def test_eight_requests_that_come_and_go_get_their_own_tokens(name: str) -> None:
    """Of 1 to 150 tokens: the tokens and logprobs of each alone, and its cache, extracted when it ends."""
    together = serve(model(), lambda: layers(name), REQUESTS, completion_batch_size=6, prefill_batch_size=3)
    for request, got in zip(REQUESTS, together, strict=True):
        single = alone(model(), layers(name), request)
        agree(got, single, 1e-4)
        assert [cache.offset for cache in got.caches] == [cache.offset for cache in single.caches]
        more = mx.array([prompt(9)])
        own = model()(more, cache=single.caches)
        assert float(mx.abs(model()(more, cache=got.caches) - own).max()) < 1e-4


def test_prompt_caches_are_used_again_in_a_batch() -> None:
    """Caches of 0, 30, 68 and 200 tokens go on together, with prompts of 1 to 90 more; their owners' copies do not."""

    def earlier(tokens: int) -> list[Any]:
        caches = layers("kivi")
        if tokens:
            mx.eval(model()(mx.array([prompt(tokens)]), cache=caches))
        return caches

    before, more = (0, 30, 68, 200), (90, 1, 40, 3)
    kept = [earlier(tokens) for tokens in before]
    requests = [Request(prompt(tokens), 12, 0, caches) for tokens, caches in zip(more, kept, strict=True)]
    together = serve(model(), list, requests)
    for tokens, request, got in zip(before, requests, together, strict=True):
        agree(got, alone(model(), earlier(tokens), request), 1e-4)
    assert [[cache.offset for cache in caches] for caches in kept] == [[tokens] * 3 for tokens in before]


def test_while_it_serves_a_batch_holds_rows_times_the_longest() -> None:
    """After every round, in every layer: the bytes of the arithmetic and no array besides."""
    seen = []

    def weigh(caches: list[Any]) -> None:
        for cache in caches:
            lengths = cache.offset.tolist()
            assert cache.nbytes == held_bytes(cache) == len(lengths) * held_bytes(_single("kivi", max(lengths)))
            seen.append(len(lengths))

    serve(model(), lambda: layers("kivi"), REQUESTS[:5], weigh)
    assert {1, 2, 3, 4} <= set(seen)


# Copies, saving, and what is refused.

_LOADING = """
import json, sys
from veloxquant.caches.registration import register
register()
import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache
found = []
for cache in load_prompt_cache(sys.argv[1]):
    queries, new = (mx.random.normal((3, heads, 1, 32), key=mx.random.key(heads)) for heads in (4, 2))
    keys, values = cache.update_and_fetch(new, new)
    out = keys.attend(queries, values, 0.2).flatten().tolist()
    found.append([cache.offset.tolist(), cache.nbytes, cache.extract(1).offset, out])
print(json.dumps(found))
"""


def test_a_batch_saved_here_is_the_same_in_another_process(tmp_path: Path) -> None:
    """By mlx-lm's own functions, empty rows and all: equal offsets, bytes and attention."""
    twins = [filled([0, 70, 211], kind) for kind in KINDS]
    save_prompt_cache(str(tmp_path / "batch.safetensors"), twins)
    command = [sys.executable, "-c", _LOADING, str(tmp_path / "batch.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = []
    for twin in twins:
        queries, new = (mx.random.normal((3, heads, 1, WIDTH), key=mx.random.key(heads)) for heads in (4, 2))
        keys, values = twin.update_and_fetch(new, new)
        out = keys.attend(queries, values, 0.2).flatten().tolist()
        expected.append([twin.offset.tolist(), twin.nbytes, 71, out])
    assert json.loads(done.stdout) == expected


@EVERY
def test_the_state_lists_every_array(kind: str) -> None:
    """Without rows, without tokens, filled: what a walk finds is what mx.eval is given."""
    empty = filled([0, 0], kind)
    for twin in (empty, filled([3, 100], kind)):
        mx.eval(twin.state)
        assert {id(array) for array in arrays(twin)} == {id(array) for array in arrays(twin.state)}
        assert BatchTieredKVCache.from_state(twin.state).state[-1] == twin.state[-1]
    empty.filter([])
    assert empty.offset.tolist() == []
    empty.extend(filled([0, 7], kind))
    assert empty.offset.tolist() == [0, 7]


def test_caches_of_unlike_methods_make_no_batch() -> None:
    """Other bits, tiers, heads or formats, several sequences, the engine's own: refused, and nothing has changed."""
    plain = _single("kivi", 9)
    wide, half, several = fresh(), fresh(), fresh()
    wide.update_and_fetch(mx.zeros((1, 3, 9, WIDTH)), mx.zeros((1, 3, 9, WIDTH)))
    half.update_and_fetch(mx.zeros((1, 2, 9, WIDTH), mx.float16), mx.zeros((1, 2, 9, WIDTH), mx.float16))
    several.update_and_fetch(mx.zeros((2, 2, 9, WIDTH)), mx.zeros((2, 2, 9, WIDTH)))
    for other in (fresh("recent packed"), fresh("nothing kept"), wide, half, several, KVCache()):
        with pytest.raises(MethodRefused):
            TieredKVCache.merge([plain, other])
    twin = filled([9])
    merged = [TieredKVCache.merge([one]) for one in (wide, half)]
    for other in (filled([9], "nothing kept"), *merged, BatchKVCache([0])):
        with pytest.raises(MethodRefused):
            twin.extend(other)
        assert twin.offset.tolist() == [9]
        assert twin.extract(0).offset == 9


def test_calls_that_fit_no_row_are_refused_before_anything_is_written() -> None:
    """Other widths, rows or heads, no tokens, padding on the left of tokens, a rewind, a mask of other columns."""
    twin = filled([9, 50])
    new = mx.zeros((2, 2, 1, WIDTH))
    for keys, values in (
        (new[..., :16], new),
        (new, new[..., :16]),
        (new[:1], new[:1]),
        (new[:, :1], new[:, :1]),
        (new[:, :, :0], new[:, :, :0]),
    ):
        with pytest.raises(MethodRefused):
            twin.update_and_fetch(keys, values)
    with pytest.raises(MethodRefused, match="on the left"):
        twin.prepare(left_padding=[1, 0])
    assert not twin.is_trimmable()
    assert twin.trim(0) == 0
    with pytest.raises(MethodRefused):
        twin.trim(1)
    assert twin.offset.tolist() == [9, 50]
    keys, values = twin.update_and_fetch(new, new)
    for columns in (50, 52):
        with pytest.raises(ValueError, match="51 columns"):
            keys.attend(mx.zeros((2, 4, 1, WIDTH)), values, 0.2, mx.ones((2, 1, 1, columns), mx.bool_))


def test_layers_that_share_k_and_v_get_them_after_one_token_alone() -> None:
    """What the layer itself attended over; after a call of several tokens it is refused."""
    twin = filled([9, 100])
    new, queries = mx.random.normal((2, 2, 1, WIDTH)), mx.random.normal((2, 4, 1, WIDTH))
    keys, values = twin.update_and_fetch(new, new)
    again, held_values = twin.keys_and_values()
    assert mx.array_equal(keys.attend(queries, values, 0.2), again.attend(queries, held_values, 0.2))
    twin.update_and_fetch(mx.zeros((2, 2, 3, WIDTH)), mx.zeros((2, 2, 3, WIDTH)))
    with pytest.raises(MethodRefused):
        twin.keys_and_values()


def test_a_state_of_another_layout_is_refused() -> None:
    """What a later version may have saved is not read for ours."""
    *rest, text = filled([9]).state
    with pytest.raises(MethodRefused):
        BatchTieredKVCache.from_state((*rest, json.dumps({**json.loads(text), "layout": 99})))
