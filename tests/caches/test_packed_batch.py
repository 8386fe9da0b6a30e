"""The batch of packed caches: every row stores what its own single run does, to the bit, and answers what it does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from batch_kit import PLANS, Drive, Request, agree, alone, played, serve
from cache_kit import HEADS, PACKED, WIDTH, model, operations, prompt, stored
from hypothesis import given, settings
from mlx_lm.models.cache import BatchKVCache, KVCache, load_prompt_cache, save_prompt_cache

from veloxquant.caches.codecs import make
from veloxquant.caches.held import arrays, held_bytes
from veloxquant.caches.packed import PackedKVCache
from veloxquant.caches.packed_batch import BatchPackedKVCache
from veloxquant.errors import MethodRefused, VeloxError
from veloxquant.models.trace_worker import engine

if TYPE_CHECKING:
    from collections.abc import Callable

CODECS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "affine": ({"name": "affine", "bits": 5, "group": 32}, {"name": "affine", "bits": 3, "group": 32}),
    **{kind: PACKED[kind] for kind in ("float", "prod", "outliers")},
}
ALL = pytest.mark.parametrize("kind", CODECS)
SAME_BITS = 0.0 if sys.platform == "linux" else 2e-5
"""How near a row's attention is to its single run's: MLX's CPU backend on Linux gives a row's products the same bits
whatever the number of rows."""
NEAR = {"float": 2e-5, "affine": 2e-5}
"""Of codecs whose products read what is stored, one query takes all places at once: sums of more zeros may round
otherwise."""


def fresh(kind: str, step: int = 256, width: int = WIDTH) -> PackedKVCache:
    """An empty single cache."""
    keys, values = CODECS[kind]
    return PackedKVCache(make({**keys, "width": width}), make({**values, "width": width}), step)


def drive(kind: str, step: int = 256) -> Drive:
    """Batch and single runs beside each other."""
    return Drive(lambda: fresh(kind, step), stored, near=NEAR.get(kind, SAME_BITS))


@ALL
@given(plan=PLANS)
@settings(max_examples=8, deadline=None)
def test_whatever_a_batch_goes_through_its_rows_are_their_single_runs(kind: str, plan: list[Any]) -> None:
    """Prompts with padding, steps, rows that leave, join, are copied, saved and taken out: codes and attention."""
    played(drive(kind, step=64), plan)


@ALL
def test_rows_of_unlike_lengths_and_histories(kind: str) -> None:
    """Three rows of 0, 300 and 7 tokens; a prompt of 90, 5 and 260 in calls of 64; steps, two more rows, one less."""
    rows = drive(kind)
    rows.start([0, 300, 7])
    rows.prompt([90, 5, 260], step=64)
    rows.decode(3)
    rows.start([0, 12])
    rows.prompt([1, 2, 3, 70, 4])
    rows.filter([0, 2, 3])
    rows.decode(2)
    rows.extract(1)


@ALL
def test_an_empty_batch_takes_in_a_filled_one_and_the_reverse(kind: str) -> None:
    """Whichever comes first, the rows without tokens start later."""
    for first, second in (([0, 0], [5, 40]), ([5, 40], [0, 0])):
        rows = drive(kind)
        rows.start(first)
        rows.start(second)
        rows.prompt([3, 9, 1, 30])
        rows.decode(2)


def test_after_the_longest_row_has_left_its_slots_are_given_back() -> None:
    """Rows of 700 and 20 tokens hold 2 x 768 slots; the second alone holds 256, and nothing when it is gone."""
    rows = drive("affine")
    rows.start([700, 20])
    assert {array.shape[:3] for array in arrays(rows.twin)} == {(2, HEADS, 768)}
    rows.filter([1])
    assert {array.shape[:3] for array in arrays(rows.twin)} == {(1, HEADS, 256)}
    rows.twin.filter([])
    assert rows.twin.nbytes == held_bytes(rows.twin) == 0


def test_bytes_are_those_of_the_longest_row_that_grew_by_single_tokens() -> None:
    """A single cache that took 300 tokens and then 300 more holds 812 slots by the engine's rule; a row of it 768."""
    single, plain = fresh("affine"), fresh("affine")
    zeros = mx.zeros((1, HEADS, 300, WIDTH))
    for _ in range(2):
        single.update_and_fetch(zeros, zeros)
    for _ in range(600):
        plain.update_and_fetch(zeros[:, :, :1], zeros[:, :, :1])
    assert single.keys[0].shape[2] == 812
    batch = PackedKVCache.merge([single, fresh("affine")])
    assert batch.nbytes == held_bytes(batch) == 2 * plain.nbytes


def test_a_row_taken_out_holds_no_more_than_its_own() -> None:
    """Bytes of 20 tokens, also beside a row of 700; and the batch's arrays are not kept alive by it."""
    rows = drive("affine")
    rows.start([700, 20, 256])
    short, full = rows.twin.extract(1), rows.twin.extract(2)
    mx.eval(short.state, full.state)
    token = HEADS * (WIDTH * 5 // 8 + WIDTH * 3 // 8 + 4 * 4)
    assert short.nbytes == held_bytes(short) == 20 * token
    assert full.nbytes == 256 * token
    before = mx.get_active_memory()
    del rows
    assert before - mx.get_active_memory() >= 3 * 768 * token


@ALL
def test_trimming_a_batch_is_trimming_its_rows(kind: str) -> None:
    """Five tokens less of each row, and on: as single caches that forgot them too."""
    rows = drive(kind)
    rows.start([40, 9])
    assert rows.twin.is_trimmable()
    assert rows.twin.trim(5) == 5
    for row in rows.rows:
        row.cache.trim(5)
    rows.check()
    rows.decode(3)
    rows.prompt([2, 30])


@ALL
def test_the_state_lists_every_array(kind: str) -> None:
    """Empty or filled: what a walk over the batch finds is what mx.eval is given."""
    empty = PackedKVCache.merge([fresh(kind), fresh(kind)])
    filled = drive(kind)
    filled.start([3, 70])
    for batch in (empty, filled.twin):
        assert {id(array) for array in arrays(batch)} == {id(array) for array in arrays(batch.state)}
        assert batch.nbytes == held_bytes(batch)


def test_a_saved_batch_goes_on(tmp_path: Path) -> None:
    """Saved and loaded by mlx-lm, in the middle of a padded prompt too."""
    file = str(tmp_path / "batch.safetensors")
    for start in ([0, 0], [5, 80]):
        rows = drive("outliers")
        rows.start(start)
        save_prompt_cache(file, [rows.twin])
        (rows.twin,) = load_prompt_cache(file)
        assert type(rows.twin) is BatchPackedKVCache
        rows.prompt([7, 2])
        rows.decode(1)
    batch = PackedKVCache.merge([fresh("affine"), fresh("affine")])
    batch.prepare(lengths=[4, 2], right_padding=[0, 2])
    batch.update_and_fetch(mx.ones((2, HEADS, 3, WIDTH)), mx.ones((2, HEADS, 3, WIDTH)))
    save_prompt_cache(file, [batch])
    (loaded,) = load_prompt_cache(file)
    loaded.update_and_fetch(mx.ones((2, HEADS, 1, WIDTH)), mx.ones((2, HEADS, 1, WIDTH)))
    loaded.finalize()
    assert loaded.offset.tolist() == [4, 2]


def test_a_state_of_another_layout_or_codec_is_refused() -> None:
    """What a later version may have saved is not read for ours."""
    *rest, text = PackedKVCache.merge([fresh("affine")]).state
    for change in ({"layout": 2}, {"keys": {"name": "later"}}):
        with pytest.raises(VeloxError):
            BatchPackedKVCache.from_state((*rest, json.dumps({**json.loads(text), **change})))


def test_what_cannot_be_one_batch_is_refused() -> None:
    """Other codecs, another step, another count of heads, a cache that is itself of two sequences; then arrays."""
    one, two = fresh("affine"), fresh("affine")
    one.update_and_fetch(mx.ones((1, 4, 3, WIDTH)), mx.ones((1, 4, 3, WIDTH)))
    two.update_and_fetch(mx.ones((2, HEADS, 3, WIDTH)), mx.ones((2, HEADS, 3, WIDTH)))
    three = fresh("affine")
    three.update_and_fetch(mx.ones((1, HEADS, 3, WIDTH)), mx.ones((1, HEADS, 3, WIDTH)))
    for others, why in (
        ([fresh("float")], "keys, values differ"),
        ([fresh("affine", step=64)], "step differ"),
        ([one], "KV heads"),
        ([two], "2 sequences"),
        ([KVCache()], "a KVCache cannot be a row"),
    ):
        with pytest.raises(MethodRefused, match=why):
            PackedKVCache.merge([three, *others])
    batch = PackedKVCache.merge([three, fresh("affine")])
    for shape, why in (
        ((3, HEADS, 1, WIDTH), r"\(3, 2\)"),
        ((2, 3, 1, WIDTH), r"\(2, 3\)"),
        ((2, HEADS, 1, 8), "width 8"),
    ):
        with pytest.raises(MethodRefused, match=why):
            batch.update_and_fetch(mx.ones(shape), mx.ones(shape))
    for other, why in ((PackedKVCache.merge([fresh("float")]), "differ"), (BatchKVCache([0]), "a BatchKVCache cannot")):
        with pytest.raises(MethodRefused, match=why):
            batch.extend(other)
    assert batch.offset.tolist() == [3, 0]


def test_masks_are_those_of_the_engines_own_batch() -> None:
    """After a padded prompt and before it, for one token and several, with a window and without."""
    ours = PackedKVCache.merge([fresh("affine"), fresh("affine")])
    theirs = BatchKVCache([0, 0])
    for counts in ((5, 2), (1, 1), (3, 8)):
        padding = [max(counts) - count for count in counts]
        for each in (ours, theirs):
            if any(padding):
                each.prepare(lengths=list(counts), right_padding=padding)
        for window in (None, 3):
            wanted = {"return_array": False, "window_size": window}
            mask = theirs.make_mask(max(counts), **wanted)
            assert mx.array_equal(ours.make_mask(max(counts), **wanted), mask)
        for each in (ours, theirs):
            each.update_and_fetch(*[mx.ones((2, HEADS, max(counts), WIDTH))] * 2)
            each.finalize()


@pytest.mark.parametrize("window", [None, 6])
def test_an_engines_mask_hides_what_ours_hides(window: int | None) -> None:
    """The array that a float layer's cache made, with a bias added or as it is: the attention of our own mask."""
    ours, theirs = PackedKVCache.merge([fresh("float"), fresh("float")]), BatchKVCache([0, 0])
    mx.random.seed(2)
    for counts in ((9, 4), (1, 1), (2, 7)):
        most = max(counts)
        for each in (ours, theirs):
            each.prepare(lengths=list(counts), right_padding=[most - count for count in counts])
        keys, values, queries = (mx.random.normal((2, heads, most, WIDTH)) for heads in (HEADS, HEADS, 2 * HEADS))
        made, given = (each.make_mask(most, return_array=True, window_size=window) for each in (ours, theirs))
        packed_keys, packed_values = ours.update_and_fetch(keys, values)
        theirs.update_and_fetch(keys, values)
        expected = packed_keys.attend(queries, packed_values, 0.2, made)
        added = mx.where(given, 0.0, -1e9)
        for mask in (given, added):
            out = packed_keys.attend(queries, packed_values, 0.2, mask)
            for row, count in enumerate(counts):
                assert mx.allclose(out[row, :, :count], expected[row, :, :count], atol=1e-6)
        for each in (ours, theirs):
            each.finalize()
    with pytest.raises(ValueError, match="columns of a batch"):
        packed_keys.attend(queries, packed_values, 0.2, given[..., 1:])


def steps(kind: str, rows: int, heads: int) -> int:
    """Operations in the graph of one decode step over rows of unlike lengths."""
    singles = []
    for row in range(rows):
        single = fresh(kind)
        single.update_and_fetch(*[mx.ones((1, heads, 5 + 3 * row, WIDTH))] * 2)
        singles.append(single)
    batch = PackedKVCache.merge(singles)
    mx.eval(batch.state)
    new, queries = mx.ones((rows, heads, 1, WIDTH)), mx.ones((rows, 2 * heads, 1, WIDTH))
    keys, values = batch.update_and_fetch(new, new)
    out = keys.attend(queries, values, 0.2, batch.make_mask(1))
    return operations(out, *arrays(batch))


@ALL
def test_a_step_costs_the_same_calls_for_eight_rows_as_for_two(kind: str) -> None:
    """And for eight heads as for two: nothing loops over rows or heads."""
    assert steps(kind, 2, 2) == steps(kind, 8, 2) == steps(kind, 2, 8)


# In mlx-lm's own BatchGenerator.

PLAIN = {"exaone4": (2, 32), "gemma3n": (1, 32), "qwen3_next": (3, 64)}
"""The one layer of each that grows plainly, and its width."""
_ARCHS = json.loads((Path(__file__).parents[1] / "data" / "mlx_lm_archs.json").read_text())["archs"]


def mixed(packed: str, kind: str) -> Callable[[], list[Any]]:
    """Caches of the llama's three layers: P for packed, E for the engine's own."""
    return lambda: [fresh(kind) if layer == "P" else KVCache() for layer in packed]


@ALL
@pytest.mark.parametrize("count", [2, 8])
def test_unequal_prompts_together_are_the_prompts_alone(kind: str, count: int) -> None:
    """Two, and eight that come and go: tokens and logprobs of each alone; live caches are packed, at their bytes."""
    lengths, leaves = (150, 3, 64, 65, 1, 90, 30, 7), (9, 5, 12, 1, 8, 3, 6, 10)
    requests = [Request(prompt(lengths[at], at), leaves[at], arrives=at // 3) for at in range(count)]

    def look(caches: list[Any]) -> None:
        for cache in caches:
            assert type(cache) is BatchPackedKVCache
            slots = 256 * -(-cache.size() // 256)
            one = fresh(kind)
            one.update_and_fetch(*[mx.zeros((1, HEADS, max(1, cache.size()), WIDTH))] * 2)
            assert one.keys[0].shape[2] == slots
            assert cache.nbytes == held_bytes(cache) == cache.rows.count * one.nbytes

    make = mixed("PPP", kind)
    for request, together in zip(requests, serve(model(3), make, requests, look), strict=True):
        agree(together, alone(model(3), make(), request), 1e-4)


@pytest.mark.parametrize("packed", ["EPP", "PEP", "PPE"])
def test_layers_that_keep_the_engines_cache_share_their_masks_with_packed_ones(packed: str) -> None:
    """The model makes one mask from the first layer's cache and gives it to all: rows are padded apart, seen alike."""
    requests = [Request(prompt((100, 2, 40)[at], at), 8, arrives=(0, 0, 3)[at]) for at in range(3)]
    make = mixed(packed, "affine")
    for request, together in zip(requests, serve(model(3), make, requests), strict=True):
        agree(together, alone(model(3), make(), request), 1e-4)


@pytest.mark.parametrize("name", PLAIN)
def test_real_architectures_that_pack_some_layers(name: str) -> None:
    """Windows between, layers that share K and V, recurrent layers between: each sequence as alone."""
    model = engine.build(_ARCHS[name]["runs"][0]["config"], "float32")
    mx.random.seed(7)
    mx.eval(model.parameters())

    def make() -> list[Any]:
        made = engine.fresh_caches(model)
        index, width = PLAIN[name]
        assert type(made[index]) is KVCache
        made[index] = fresh("outliers", width=width)
        return made

    requests = [Request(prompt((70, 5, 33)[at], at), 6, arrives=(0, 0, 2)[at]) for at in range(3)]
    for request, together in zip(requests, serve(model, make, requests), strict=True):
        agree(together, alone(model, make(), request), 1e-4)


def test_a_sequence_taken_away_in_the_middle_goes_on_alone(tmp_path: Path) -> None:
    """mlx-lm's `remove` gives its caches; alone, also saved and loaded, it ends as its single run; so do the others."""
    from mlx_lm.generate import BatchGenerator, generate_step

    make = mixed("PPP", "outliers")
    prompts = [prompt(count, at) for at, count in enumerate((80, 11, 40))]
    single = [alone(model(3), make(), Request(one, 12)).tokens for one in prompts]
    generator = BatchGenerator(model(3), prefill_step_size=64)
    uids = generator.insert(prompts, max_tokens=[12] * 3, caches=[make() for _ in prompts])
    made: dict[int, list[int]] = {uid: [] for uid in uids}
    while len(made[uids[0]]) < 5:
        for answer in generator.next()[1]:
            made[answer.uid].append(answer.token)
    caches, fed = generator.remove([uids[1]], return_prompt_caches=True)[uids[1]]
    assert all(type(cache) is PackedKVCache for cache in caches)
    assert [cache.offset for cache in caches] == [len(fed)] * 3
    save_prompt_cache(str(tmp_path / "taken.safetensors"), caches)
    rest = single[1][len(fed) - len(prompts[1]) :]
    for held_caches in (caches, load_prompt_cache(str(tmp_path / "taken.safetensors"))):
        last = mx.array(rest[:1])
        went_on = generate_step(last, model(3), max_tokens=len(rest) - 1, prompt_cache=held_caches)
        assert [int(token) for token, _ in went_on] == rest[1:]
    while any(len(made[uid]) < 12 for uid in (uids[0], uids[2])):
        for answer in generator.next()[1]:
            made[answer.uid].append(answer.token)
    generator.close()
    assert [made[uids[0]], made[uids[2]]] == [single[0], single[2]]


def test_a_prompt_cache_used_again_joins_a_batch() -> None:
    """The caches of a sequence that ended, with more to read, beside a new one: as if it had never stopped."""
    make = mixed("PPP", "affine")
    (ended,) = serve(model(3), make, [Request(prompt(50, 1), 6)])
    more = prompt(20, 2)
    before = [stored(cache) for cache in ended.caches]
    requests = [Request(more, 7, caches=ended.caches), Request(prompt(90, 3), 5)]
    together = serve(model(3), make, requests)
    whole = [*prompt(50, 1), *ended.tokens, *more]
    agree(together[0], alone(model(3), make(), Request(whole, 7)), 1e-4)
    agree(together[1], alone(model(3), make(), requests[1]), 1e-4)
    for cache, arrays_before in zip(ended.caches, before, strict=True):
        assert all(mx.array_equal(a, b) for a, b in zip(stored(cache), arrays_before, strict=True))
