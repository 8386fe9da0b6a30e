"""What all caches are in mlx-lm's place, whatever they do with tokens: saved, copied, generated with, refused."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import cache_kit
import mlx.core as mx
import pytest
import saved_kit
from cache_kit import HEADS, WIDTH, attend, attended, drawn, fed, filled, logits, model, normal, same, stored, tokens
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

from veloxquant.caches.held import arrays, held_bytes
from veloxquant.errors import MethodRefused, VeloxError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

FRESH: dict[str, Callable[[str], Any]] = {
    "packed": cache_kit.packed,
    "tiered": cache_kit.tiered,
    "evicting": cache_kit.evicting,
}
KINDS: dict[str, Iterable[str]] = {
    "packed": cache_kit.PACKED,
    "tiered": cache_kit.TIERED,
    "evicting": cache_kit.EVICTING,
}
ALL = pytest.mark.parametrize(("family", "kind"), [(family, kind) for family in KINDS for kind in KINDS[family]])
FEW = [
    ("packed", "mse"),
    ("tiered", "kivi"),
    ("evicting", "streaming"),
    ("evicting", "snapkv-4bit"),
    ("evicting", "h2o"),
]
ONE_EACH = pytest.mark.parametrize(("family", "kind"), [("packed", "mse"), ("tiered", "kivi"), ("evicting", "h2o")])
NO_EVICTION = pytest.mark.parametrize(("family", "kind"), [("packed", "outliers"), ("tiered", "kivi")])


def fresh(family: str, kind: str) -> Any:
    """An empty cache."""
    return FRESH[family](kind)


def caches(family: str, kind: str) -> list[Any]:
    """One for each layer of the model."""
    return [fresh(family, kind) for _ in model().layers]


@ALL
def test_the_state_lists_every_array(family: str, kind: str) -> None:
    """Empty, with a few tokens, with many: what a walk finds is what mx.eval is given, and it restores."""
    for chunks in ([], [5], [199, 1]):
        cache = fed(fresh(family, kind), chunks)
        mx.eval(cache.state)
        assert {id(array) for array in arrays(cache)} == {id(array) for array in arrays(cache.state)}
        restored = type(cache).from_state(cache.state)
        assert (restored.offset, restored.empty()) == (cache.offset, cache.empty())
        assert same(stored(restored), stored(cache))


@ALL
def test_a_restored_cache_and_a_deep_copy_go_their_own_way(family: str, kind: str) -> None:
    """Writing to either leaves the first as it was, and both go on as it would, over a boundary of groups."""
    cache = fed(fresh(family, kind), [130])
    before = [mx.array(array) for array in stored(cache)]
    twins = [copy.deepcopy(cache), type(cache).from_state(cache.state)]
    for twin in twins:
        fed(twin, [1, 99])
        assert same(stored(cache), before)
    fed(cache, [1, 99])
    for twin in twins:
        assert twin.offset == cache.offset == 230
        assert same(stored(twin), stored(cache))
        assert mx.array_equal(attend(twin, 30), attend(copy.deepcopy(cache), 30))


@pytest.mark.parametrize("family", KINDS)
def test_a_cache_saved_here_is_the_same_in_another_process(family: str, tmp_path: Path) -> None:
    """Saved by mlx-lm, loaded by mlx-lm where only `register` was called: equal offsets, bytes and attention."""
    made = {kind: fed(fresh(family, kind), [290]) for kind in KINDS[family]}
    saved_kit.survives(tmp_path, made, tokens=60 if family == "evicting" else 1)


@pytest.mark.parametrize(("family", "kind"), [*FEW, *(("packed", kind) for kind in ("float", "prod", "outliers"))])
@pytest.mark.parametrize("length", [0, 3, 50, 300])
def test_a_saved_prompt_goes_on_as_the_prompt_would(family: str, kind: str, length: int, tmp_path: Path) -> None:
    """Empty, with sinks alone, with nothing packed or dropped, with both: the logits of the caches that were saved."""
    file = str(tmp_path / "prompt.safetensors")
    held = caches(family, kind)
    if length:
        logits(tokens(length), held, 128)
    save_prompt_cache(file, held)
    loaded = load_prompt_cache(file)
    assert [type(cache) for cache in loaded] == [type(cache) for cache in held]
    assert [(cache.offset, cache.empty()) for cache in loaded] == [(length, not length)] * 2
    assert held_bytes(loaded) == held_bytes(held)
    assert mx.array_equal(logits(tokens(70), loaded, 70), logits(tokens(70), held, 70))


@ALL
def test_generation_runs_in_mlx_lm(family: str, kind: str) -> None:
    """mlx-lm's own loop with chunks of 64 gives the greedy tokens of the model called by hand, over an eviction.

    By hand the prompt is one call, but for tiers, where the chunks decide when a token is packed.
    """
    prompt, steps = tokens(150), 20 if family == "evicting" else 8
    loop = generate_step(prompt, model(), max_tokens=steps, prompt_cache=caches(family, kind), prefill_step_size=64)
    by_hand, held = [], caches(family, kind)
    logits(prompt[:-1], held, 64 if family == "tiered" else prompt.size)
    last = logits(prompt[-1:], held, 1)[-1]
    for _ in range(steps):
        by_hand.append(int(last.argmax()))
        last = logits(mx.array(by_hand[-1:]), held, 1)[-1]
    assert [token for token, _ in loop] == by_hand


@NO_EVICTION
def test_masks_are_the_engines(family: str, kind: str) -> None:
    """For one token, for several, as an array and with a window: what a KVCache of the same offset makes."""
    keys, values = drawn(20)
    ours, theirs = filled(fresh(family, kind), keys, values, [20]), KVCache()
    theirs.update_and_fetch(keys, values)
    assert ours.make_mask(1, return_array=False, window_size=None) is None
    assert ours.make_mask(4, return_array=False, window_size=None) == "causal"
    for window in (None, 8):
        wanted = {"return_array": True, "window_size": window}
        assert mx.array_equal(ours.make_mask(4, **wanted), theirs.make_mask(4, **wanted))


@ONE_EACH
def test_it_is_never_falsy_and_no_number_says_how_it_is_packed(family: str, kind: str) -> None:
    """No length; `bits` and `group_size` are both there and are no numbers; nothing that quantizes it once more."""
    cache = fresh(family, kind)
    assert not hasattr(cache, "__len__")
    assert bool(cache)
    assert not hasattr(cache, "to_quantized")
    assert cache.bits == cache.group_size
    assert not isinstance(cache.bits, int | float)


@ONE_EACH
def test_arrays_of_other_shapes_are_refused_before_anything_is_written(family: str, kind: str) -> None:
    """Another width, another count of heads, another batch, and no tokens at all."""
    cache = fed(fresh(family, kind), [150])
    keys, values = drawn(4)
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
    assert cache.offset == 150
    assert same(stored(cache), before)


@pytest.mark.parametrize(
    ("family", "kind", "later"),
    [
        ("packed", "mse", {"keys": {"name": "later"}}),
        ("tiered", "kivi", {"keys": {"codec": {"name": "later"}, "recent": {"name": "float", "width": WIDTH}}}),
        ("evicting", "h2o", {"keys": {"name": "later"}}),
        ("evicting", "h2o", {"policy": {"name": "later"}}),
    ],
)
def test_a_state_of_another_layout_codec_or_policy_is_refused(family: str, kind: str, later: dict[str, Any]) -> None:
    """What a later version may have saved is not read for ours."""
    cache = fresh(family, kind)
    *rest, text = cache.state
    for change in ({"layout": 2}, later):
        with pytest.raises(VeloxError):
            type(cache).from_state((*rest, json.dumps({**json.loads(text), **change})))


@NO_EVICTION
def test_several_sequences_of_one_length_are_kept_apart(family: str, kind: str) -> None:
    """A batch of three in two calls: each row's attention is that of the row alone."""
    keys, values = normal(1, 3, HEADS, 131, WIDTH), normal(2, 3, HEADS, 131, WIDTH)
    queries = normal(3, 3, 2 * HEADS, 1, WIDTH)

    def last(rows: slice) -> Any:
        cache = fresh(family, kind)
        cache.update_and_fetch(keys[rows, :, :130], values[rows, :, :130])
        return attended(cache, keys[rows, :, 130:], values[rows, :, 130:], queries[rows])

    together = last(slice(0, 3))
    for row in range(3):
        alone = slice(row, row + 1)
        assert float(mx.abs(last(alone) - together[alone]).max()) < 1e-5
