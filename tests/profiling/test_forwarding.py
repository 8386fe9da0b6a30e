"""A wrapper is taken for the cache it wraps, by readers, writers, `hasattr`, `isinstance` and copies."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from veloxquant.caches.held import held_bytes
from veloxquant.errors import InvalidParams
from veloxquant.profiling import KVCacheProfiler, MLXCacheProfiler, unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable

MAKERS: dict[str, Callable[[], Any]] = {
    "plain": KVCache,
    "window": lambda: RotatingKVCache(8, keep=2),
    "packed": lambda: QuantizedKVCache(64, 4),
    "chunked": lambda: ChunkedKVCache(8),
    "concatenated": ConcatenateKVCache,
    "states": lambda: ArraysCache(2),
    "composite": lambda: CacheList(KVCache(), ArraysCache(1)),
    "batch": lambda: BatchKVCache([0, 2]),
}
ASKED = (
    *("bits", "group_size", "merge", "extend", "extract", "filter", "prepare", "finalize", "to_quantized"),
    *("make_mask", "nbytes", "keys", "step", "offset", "keep", "max_size", "cache", "caches", "lengths"),
    *("update_and_fetch", "state", "trim", "is_trimmable", "size", "empty", "advance", "keys_and_values"),
    *("meta_state", "maybe_trim_front", "from_state", "__len__", "__getitem__", "__setitem__", "__iter__", "__call__"),
)


def has(value: Any, name: str) -> bool:
    """`hasattr`, also where a property raises something else."""
    try:
        return hasattr(value, name)
    except (NotImplementedError, TypeError):
        return True


@pytest.mark.parametrize("maker", MAKERS)
def test_hasattr_tells_of_the_cache(maker: str) -> None:
    """mlx-lm picks its path by what a cache has: a wrapper has it exactly where the cache has."""
    cache = MAKERS[maker]()
    profiled = MLXCacheProfiler(cache)
    assert {name: has(profiled, name) for name in ASKED} == {name: has(cache, name) for name in ASKED}
    assert callable(profiled) == callable(cache)


@pytest.mark.parametrize("maker", MAKERS)
def test_public_names_of_the_cache_are_listed_and_read(maker: str) -> None:
    """`dir` lists them all beside the wrapper's own, and `vars` is the cache's."""
    cache = MAKERS[maker]()
    profiled = MLXCacheProfiler(cache)
    assert set(dir(cache)) | {"profile", "reset"} <= set(dir(profiled))
    assert vars(profiled) is vars(cache)


def test_setting_and_deleting_reach_the_cache() -> None:
    """Attributes, properties with a setter, and what neither side had before."""
    cache = RotatingKVCache(8)
    profiled = MLXCacheProfiler(cache)
    profiled.offset = 5
    profiled.note = "new"
    assert (cache.offset, cache.note) == (5, "new")
    del profiled.note
    assert not hasattr(cache, "note")
    profiled.state = (mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)), 3, 1, 7, 3)
    assert (cache.offset, cache.keep, cache.max_size) == (3, 1, 7)
    with pytest.raises(AttributeError, match="KVCache"):
        _ = profiled.no_such_thing
    with pytest.raises(AttributeError):
        profiled.nbytes = 3


def test_a_wrapper_is_of_both_classes_and_of_no_other() -> None:
    """Checks by class pass as for the cache, and the saved class name is the cache's."""
    profiled = MLXCacheProfiler(QuantizedKVCache(64, 8))
    assert isinstance(profiled, QuantizedKVCache)
    assert isinstance(profiled, MLXCacheProfiler)
    assert not isinstance(profiled, KVCache | KVCacheProfiler)
    assert type(profiled).__name__ == "QuantizedKVCache"
    assert type(profiled) is type(MLXCacheProfiler(QuantizedKVCache(32, 4)))


@pytest.mark.parametrize("maker", MAKERS)
def test_a_wrapper_is_never_falsy(maker: str) -> None:
    """A falsy cache is ignored by models."""
    assert bool(MLXCacheProfiler(MAKERS[maker]()))


def test_an_empty_or_falsy_cache_still_counts_as_one() -> None:
    """Length 0 and a __bool__ that says no do not make a wrapper falsy."""

    class Falsy(KVCache):
        def __len__(self) -> int:
            return self.offset

        def __bool__(self) -> bool:
            return False

    profiled = MLXCacheProfiler(Falsy())
    assert bool(profiled)
    assert len(profiled) == 0


def test_len_is_there_only_where_the_cache_has_it() -> None:
    """The error is the cache's own, by its own name."""
    with pytest.raises(TypeError, match="object of type 'KVCache' has no len"):
        len(MLXCacheProfiler(KVCache()))


def test_items_of_states_are_read_and_set() -> None:
    """`cache[0] = x`, also from the end, and iteration over the entries."""
    cache = ArraysCache(2)
    profiled = MLXCacheProfiler(cache)
    state = mx.ones((2, 3))
    profiled[0] = state
    assert cache[0] is state
    assert profiled[0] is state
    assert profiled[-1] is None
    assert list(profiled) == [state, None]
    with pytest.raises(IndexError):
        _ = profiled[2]


def test_comparisons_and_hashes_are_the_caches() -> None:
    """A cache class with equality of its own keeps it, on either side; others compare by identity."""

    @dataclass
    class Equal:
        state: int = 0

    left, right = MLXCacheProfiler(Equal(1)), MLXCacheProfiler(Equal(1))
    assert left == right
    assert left == Equal(1)
    assert left != Equal(2)
    with pytest.raises(TypeError, match="unhashable"):
        hash(left)
    plain = MLXCacheProfiler(KVCache())
    assert plain != MLXCacheProfiler(unwrapped(plain))
    assert {plain: 1}[plain] == 1


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy])
def test_a_copy_wraps_a_copied_cache_with_copied_counts(how: Any, kv: Any) -> None:
    """Both go their own way afterwards."""
    first = MLXCacheProfiler(KVCache(), "a")
    first.update_and_fetch(*kv(tokens=3))
    second = how(first)
    assert isinstance(second, MLXCacheProfiler)
    assert unwrapped(second) is not unwrapped(first)
    assert second.profile() == first.profile()
    second.update_and_fetch(*kv())
    assert (first.offset, first.profile().n_quantize_calls) == (3, 1)
    assert (second.offset, second.profile().n_quantize_calls) == (4, 2)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_wrapper_wraps_a_pickled_cache_with_its_counts(protocol: int, kv: Any) -> None:
    """In every protocol that takes arrays; a part still counts for its layer."""
    first = MLXCacheProfiler(CacheList(KVCache(), KVCache()), "a")
    first[0].update_and_fetch(*kv(tokens=3))
    second, part = pickle.loads(pickle.dumps((first, first[0]), protocol))  # noqa: S301 -- made here
    assert isinstance(second, MLXCacheProfiler)
    assert type(second) is type(first)
    assert second.profile() == part.profile() == first.profile()
    assert mx.array_equal(unwrapped(part).keys, first.caches[0].keys)
    part.update_and_fetch(*kv())
    assert (second[0].offset, second.profile().n_quantize_calls) == (4, 2)
    assert (first[0].offset, first.profile().n_quantize_calls) == (3, 1)


class Keyed:
    """The smallest standalone cache."""

    def append_key(self, k: Any) -> None:
        """Forget it."""


def test_a_pickled_standalone_wrapper_counts_on() -> None:
    """Its width comes along, also inside another wrapper."""
    inner = KVCacheProfiler(Keyed(), head_dim=8)
    inner.append_key([1.0])
    outer = pickle.loads(pickle.dumps(KVCacheProfiler(inner, head_dim=2)))  # noqa: S301 -- made here
    outer.append_key([1.0])
    assert isinstance(unwrapped(outer), KVCacheProfiler)
    figures = [one.profile().fp16_baseline_bytes for one in (inner, unwrapped(outer), outer)]
    assert figures == [16, 32, 4]


def test_a_cache_that_cannot_be_pickled_says_so_itself() -> None:
    """The error is the cache's own."""

    class Local(Keyed):
        """Of a class that pickle cannot find."""

    with pytest.raises((AttributeError, pickle.PicklingError), match="Local"):
        pickle.dumps(KVCacheProfiler(Local()))


def test_a_deep_copied_list_keeps_what_its_caches_share() -> None:
    """One deep copy of a list copies a shared cache once."""
    cache = KVCache()
    first, second = copy.deepcopy([MLXCacheProfiler(cache), MLXCacheProfiler(cache)])
    assert unwrapped(first) is unwrapped(second)
    assert unwrapped(first) is not cache


def test_the_wrapper_itself_holds_nothing(kv: Any) -> None:
    """A walk over a wrapper finds the arrays of the cache, each once."""
    profiled = MLXCacheProfiler(KVCache())
    profiled.update_and_fetch(*kv(tokens=3))
    assert held_bytes(profiled) == held_bytes(unwrapped(profiled)) == 2 * 2 * 256 * 64 * 2


def test_its_text_names_wrapper_cache_and_layer() -> None:
    """What a person sees in a list of caches."""
    assert repr(MLXCacheProfiler(KVCache(), 7)).startswith("MLXCacheProfiler(<mlx_lm.models.cache.KVCache object")
    assert repr(MLXCacheProfiler(KVCache(), 7)).endswith(", layer_id=7)")


def test_a_class_made_of_the_wrapper_keeps_its_ways() -> None:
    """A subclass wraps, copies and is recognised like the class it was made of."""

    class Counting(MLXCacheProfiler):
        def double(self) -> int:
            return 2 * self.profile().n_quantize_calls

    twin = copy.deepcopy(Counting(KVCache()))
    assert isinstance(twin, Counting)
    assert isinstance(twin, KVCache)
    assert twin.double() == 0


def test_wrapping_a_wrapper_counts_in_both(kv: Any) -> None:
    """The inner one goes on counting."""
    inner = MLXCacheProfiler(KVCache(), "inner")
    outer = MLXCacheProfiler(inner, "outer")
    outer.update_and_fetch(*kv())
    assert (inner.profile().n_quantize_calls, outer.profile().n_quantize_calls) == (1, 1)
    assert outer.profile().layer_id == "outer"


@pytest.mark.parametrize("wrong", [None, 3, "cache", object(), KVCache, [KVCache()]])
def test_what_is_no_cache_is_refused(wrong: Any) -> None:
    """With the field, and what to give instead."""
    for wrapper in (MLXCacheProfiler, KVCacheProfiler):
        with pytest.raises(InvalidParams) as caught:
            wrapper(wrong)
        assert caught.value.field == "cache"
        assert caught.value.hint
