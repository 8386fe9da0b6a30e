"""Saved states that are cut short, forged or mixed up are refused by a typed error, before anything is computed."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from veloxquant.caches.affine_codec import AffineCodec
from veloxquant.caches.by_head import ByHeadCodec
from veloxquant.caches.channel_classes import ChannelClassesCodec, written
from veloxquant.caches.evicting import EvictingKVCache
from veloxquant.caches.eviction import SnapKV
from veloxquant.caches.packed import PackedKVCache
from veloxquant.caches.per_channel import PerChannelCodec
from veloxquant.caches.tiered import TieredKVCache
from veloxquant.caches.turboquant import TurboQuantMSE
from veloxquant.errors import InvalidParams, MethodRefused, VeloxError

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH, TOKENS = 64, 150
AFFINE = AffineCodec(WIDTH, 4)
LOUD = TurboQuantMSE(WIDTH, 3, outlier_bits=4, outlier_channels=8)
CLASSES = ChannelClassesCodec(WIDTH, "6,4,3,3", written([list(range(WIDTH)), list(range(WIDTH))[::-1]], 4))
BY_HEAD = ByHeadCodec((AFFINE, AffineCodec(WIDTH, 2)), (1, 0))

KINDS = {
    "packed": lambda: PackedKVCache(AFFINE, AFFINE),
    "outliers": lambda: PackedKVCache(LOUD, AFFINE),
    "evicting": lambda: EvictingKVCache(AFFINE, AFFINE, SnapKV(), 200),
    "classes": lambda: TieredKVCache(CLASSES, BY_HEAD),
    "tiered": lambda: TieredKVCache(PerChannelCodec(WIDTH, 4, 32), AFFINE, recent=32),
}
ALL = pytest.mark.parametrize("kind", [*KINDS, *(f"batch of {kind}" for kind in KINDS)])


def made(kind: str, tokens: int = TOKENS) -> Any:
    """A single cache, or a batch of two that are one token apart."""
    name = kind.removeprefix("batch of ")
    counts = (tokens,) if name == kind else (tokens, max(tokens - 1, 0))
    caches = [KINDS[name]() for _ in counts]
    for cache, count in zip(caches, counts, strict=True):
        if count:
            x = mx.random.normal((1, 2, count, WIDTH), key=mx.random.key(count))
            keys, values = cache.update_and_fetch(x, x)
            keys.attend(x, values, 1.0, "causal")
    return caches[0] if name == kind else caches[0].merge(caches)


def refused(kind: str, state: Any) -> None:
    """By an error of ours, and a cache that the state is given to stays as it was."""
    with pytest.raises(VeloxError):
        type(made(kind, 0)).from_state(state)
    cache = made(kind, 5)
    before = cache.state
    with pytest.raises(VeloxError):
        cache.state = state
    assert cache.state[-1] == before[-1]
    assert cache.nbytes == made(kind, 5).nbytes


def places(text: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to everything in a text's tree."""
    inner = text.items() if isinstance(text, dict) else enumerate(text) if isinstance(text, list) else ()
    for name, value in inner:
        yield (*path, name)
        yield from places(value, (*path, name))


def changed(text: str, path: tuple[Any, ...], value: Any) -> str:
    """The text with another value at a place."""
    tree = json.loads(text)
    inner = tree
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return json.dumps(tree)


@ALL
def test_a_state_of_another_count_of_parts_is_refused(kind: str) -> None:
    """One missing at each place, one too many, none, and what is no sequence."""
    state = tuple(made(kind).state)
    for at in range(len(state)):
        refused(kind, state[:at] + state[at + 1 :])
    for other in ((*state[:1], *state), (), None, 7):
        refused(kind, other)


@ALL
@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "{}", "[" * 100_000, '{"layout": 1}', 7, None])
def test_a_text_that_is_no_description_is_refused(kind: str, text: Any) -> None:
    """No JSON, JSON of another kind, and JSON that lacks what is needed."""
    refused(kind, (*made(kind).state[:-1], text))


@ALL
@pytest.mark.parametrize("value", ["x", -1, 1.5, 2**70, 1e308, [[1]], {"a": 1}])
def test_no_place_of_the_text_takes_what_does_not_belong_there(kind: str, value: Any) -> None:
    """Words, numbers below zero and beyond all bounds, and trees, at every place in turn."""
    *rest, text = made(kind).state
    for path in places(json.loads(text)):
        if path[-1] == "coming" and value == -1:
            continue  # a prompt that has come wholly
        refused(kind, (*rest, changed(text, path, value)))


@ALL
def test_arrays_that_the_codecs_would_not_store_are_refused(kind: str) -> None:
    """Of each group: one missing, one cut narrow, one of other rows, one of other axes, words that are floats."""
    state = tuple(made(kind).state)
    for at, group in enumerate(state):
        if not isinstance(group, tuple) or not group:
            continue
        first, *others = group
        wrong = [others, [first[..., :1], *others], [mx.concatenate([first, first]), *others]]
        wrong += [[first[0], *others], ["an array", *others], [None, *others]]
        if first.dtype in {mx.uint32, mx.int32}:
            wrong.append([first.astype(mx.float32), *others])
        for changes in wrong:
            refused(kind, (*state[:at], tuple(changes), *state[at + 1 :]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [-1, TOKENS * 3, 2**70, 1.5, True, None, "7"])
def test_a_count_of_tokens_that_arrays_do_not_hold_is_refused(kind: str, value: Any) -> None:
    """Below zero, above what there is room for, beyond all bounds, and what is no whole number."""
    state = list(made(kind).state)
    state[next(at for at, part in enumerate(state) if isinstance(part, int))] = value
    refused(kind, state)


@ALL
def test_a_saved_file_may_have_a_mapping_in_the_place_of_an_empty_group(kind: str) -> None:
    """As mlx-lm loads it: an empty cache comes back empty, and takes tokens."""
    state = [{} if group == () else group for group in made(kind, 0).state]
    cache = type(made(kind, 0)).from_state(state)
    assert cache.empty()
    assert cache.nbytes == 0
    x = mx.ones((1 if kind in KINDS else 2, 2, 3, WIDTH))
    cache.update_and_fetch(x, x)
    assert cache.size() == 3


@ALL
def test_the_state_of_a_copy_goes_on_alone(kind: str) -> None:
    """From a deep copy's state: writing to the restored one changes neither the copy nor the first."""
    cache = made(kind)
    other = copy.deepcopy(cache)
    restored = type(other).from_state(other.state)
    x = mx.ones((1 if kind in KINDS else 2, 2, 1, WIDTH))
    restored.update_and_fetch(x, x)
    mx.eval(restored.state)
    for left in (cache, other):
        same = zip(left.state, made(kind).state, strict=True)
        assert all(
            all(bool(mx.array_equal(a, b)) for a, b in zip(one, two, strict=True))
            if isinstance(one, tuple)
            else one == two
            for one, two in same
        )


def test_a_step_that_no_buffer_grows_by_is_refused() -> None:
    """Zero, below zero, and no whole number."""
    for step in (0, -256, 1.5, True):
        with pytest.raises(InvalidParams, match="step"):
            PackedKVCache(AFFINE, AFFINE, step)  # type: ignore[arg-type]


def test_another_layout_is_named_before_anything_else_is_looked_at() -> None:
    """What a later version saves may have other parts."""
    with pytest.raises(MethodRefused, match="layout 2 and this version reads 1"):
        PackedKVCache.from_state(((), json.dumps({"layout": 2})))
