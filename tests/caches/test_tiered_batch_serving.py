"""Batches of caches in tiers in mlx-lm's BatchGenerator, saved and loaded, and what they refuse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
import saved_kit
from batch_kit import Request, agree, alone, serve
from cache_kit import WIDTH, model, prompt
from mlx_lm.models.cache import BatchKVCache, KVCache
from tiered_batch_kit import KINDS, filled, fresh, single

from veloxquant.caches.held import arrays, held_bytes
from veloxquant.caches.tiered import TieredKVCache
from veloxquant.caches.tiered_batch import BatchTieredKVCache
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from pathlib import Path

EVERY = pytest.mark.parametrize("kind", KINDS)

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
    Request(prompt(tokens, tokens), leaves, arrives)
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
    together = serve(model(3), lambda: layers(name), REQUESTS, completion_batch_size=6, prefill_batch_size=3)
    for request, got in zip(REQUESTS, together, strict=True):
        single = alone(model(3), layers(name), request)
        agree(got, single, 1e-4)
        assert [cache.offset for cache in got.caches] == [cache.offset for cache in single.caches]
        more = mx.array([prompt(9, 9)])
        own = model(3)(more, cache=single.caches)
        assert float(mx.abs(model(3)(more, cache=got.caches) - own).max()) < 1e-4


def test_prompt_caches_are_used_again_in_a_batch() -> None:
    """Caches of 0, 30, 68 and 200 tokens go on together, with prompts of 1 to 90 more; their owners' copies do not."""

    def earlier(tokens: int) -> list[Any]:
        caches = layers("kivi")
        if tokens:
            mx.eval(model(3)(mx.array([prompt(tokens, tokens)]), cache=caches))
        return caches

    before, more = (0, 30, 68, 200), (90, 1, 40, 3)
    kept = [earlier(tokens) for tokens in before]
    requests = [Request(prompt(tokens, tokens), 12, 0, caches) for tokens, caches in zip(more, kept, strict=True)]
    together = serve(model(3), list, requests)
    for tokens, request, got in zip(before, requests, together, strict=True):
        agree(got, alone(model(3), earlier(tokens), request), 1e-4)
    assert [[cache.offset for cache in caches] for caches in kept] == [[tokens] * 3 for tokens in before]


def test_while_it_serves_a_batch_holds_rows_times_the_longest() -> None:
    """After every round, in every layer: the bytes of the arithmetic and no array besides."""
    seen = []

    def weigh(caches: list[Any]) -> None:
        for cache in caches:
            lengths = cache.offset.tolist()
            assert cache.nbytes == held_bytes(cache) == len(lengths) * held_bytes(single("kivi", max(lengths)))
            seen.append(len(lengths))

    serve(model(3), lambda: layers("kivi"), REQUESTS[:5], weigh)
    assert {1, 2, 3, 4} <= set(seen)


def test_a_batch_saved_here_is_the_same_in_another_process(tmp_path: Path) -> None:
    """By mlx-lm's own functions, empty rows and all: equal offsets, bytes and attention."""
    saved_kit.survives(tmp_path, {kind: filled([0, 70, 211], kind) for kind in KINDS}, rows=3)


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
    plain = single("kivi", 9)
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
