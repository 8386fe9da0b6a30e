"""Counting what a cache holds by walking it."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import ChainMap, OrderedDict, UserDict, deque
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from veloxquant.caches.held import arrays, held_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def filled(cache: Any, tokens: int = 5, heads: int = 2, width: int = 64) -> Any:
    """The cache after one write of float32 zeros."""
    cache.update_and_fetch(mx.zeros((1, heads, tokens, width)), mx.zeros((1, heads, tokens, width)))
    return cache


def test_an_empty_cache_of_any_class_holds_nothing() -> None:
    """Also the engine's quantized cache, whose own nbytes raises while it is empty."""
    assert held_bytes([KVCache(), QuantizedKVCache(64, 4), RotatingKVCache(8), ArraysCache(2)]) == 0


def test_a_float_cache_holds_256_slots_of_k_and_v() -> None:
    """1 x 2 heads x 256 slots x 64 wide x 4 bytes, twice."""
    assert held_bytes(filled(KVCache())) == 2 * 2 * 256 * 64 * 4


def test_a_packed_cache_holds_words_scales_and_biases() -> None:
    """A row of 64 at 4 bits in groups of 32: 32 bytes of words, 2 x 2 float32 of scales and biases."""
    assert held_bytes(filled(QuantizedKVCache(32, 4))) == 2 * 2 * 256 * (32 + 2 * 2 * 4)


def test_nested_caches_are_walked_and_shared_arrays_count_once() -> None:
    """A CacheList counts its members, and one array under two names is one array."""
    shared = mx.zeros((4, 4))
    nested = CacheList(filled(KVCache()), filled(KVCache()))
    assert held_bytes([nested, {"a": shared, "b": [shared]}]) == 4 * 2 * 256 * 64 * 4 + 64


def test_queues_sets_and_slots_are_walked_and_cycles_end() -> None:
    """Arrays hide in any container an author may use."""

    class Slotted:
        __slots__ = ("held", "me", "never_set")

        def __init__(self, array: Any) -> None:
            self.held, self.me = deque([array]), self

    assert held_bytes(Slotted(mx.zeros(3))) == 12


def test_a_model_a_cache_points_at_is_not_held_by_it() -> None:
    """Weights are counted elsewhere, and once."""

    class Pointing:
        def __init__(self) -> None:
            self.model = nn.Linear(8, 8)
            self.array = mx.zeros(2)

    assert [array.shape for array in arrays(Pointing())] == [(2,)]


class Mangled:
    """Keeps it in a slot of a private name."""

    __slots__ = ("__kept",)

    def __init__(self, array: Any) -> None:
        self.__kept = array


class Called:
    """Could be called; is not."""

    def __init__(self, array: Any) -> None:
        self.kept = array

    def __call__(self) -> None:
        """Never."""
        raise AssertionError


class Listed(list[Any]):
    """A list with attributes."""


class Mapped(dict[str, Any]):
    """A mapping with attributes, whose values() tells nothing."""

    def values(self) -> Any:
        """None of them."""
        return ()


class Whole(int):
    """A number with attributes."""


def with_attribute(holder: Any, array: Any) -> Any:
    """The holder, which has it in its __dict__."""
    holder.kept = array
    return holder


def in_a_cell(array: Any) -> Callable[[], Any]:
    """A function that closes over it."""
    return lambda: array


def in_defaults(array: Any) -> Callable[..., Any]:
    """A function with one default for a positional and one for a named argument."""

    def function(first: Any = array, *, second: Any = (array,)) -> Any:
        return first, second

    return function


def suspended(array: Any) -> Iterator[None]:
    """A generator that waits while it has it in a local name."""
    inner = [array]

    def wait() -> Iterator[None]:
        kept = inner.pop()
        yield
        del kept

    waiting = wait()
    next(waiting)
    return waiting


PLACES: dict[str, Callable[[Any], Any]] = {
    "private slot": Mangled,
    "callable": Called,
    "bound method": lambda array: Called(array).__call__,
    "built-in method": lambda array: array.sum,
    "attribute of a list": lambda array: with_attribute(Listed(), array),
    "item of a mapping that denies it": lambda array: Mapped(k=array),
    "attribute of a mapping": lambda array: with_attribute(Mapped(), array),
    "attribute of a number": lambda array: with_attribute(Whole(7), array),
    "attribute of a function": lambda array: with_attribute(lambda: None, array),
    "key": lambda array: {array: 1},
    "closure": in_a_cell,
    "closure of a closure": lambda array: in_a_cell(in_a_cell(array)),
    "defaults": in_defaults,
    "partial": lambda array: functools.partial(print, array),
    "partial of a named argument": lambda array: functools.partial(print, end=array),
    "partial of a closure": lambda array: functools.partial(in_a_cell(array)),
    "cached function": lambda array: functools.lru_cache(in_a_cell(array)),
    "generator": suspended,
    "iterator": lambda array: iter([array]),
    "chained iterator": lambda array: itertools.chain([array]),
    "view": lambda array: {1: array}.values(),
    "proxy": lambda array: MappingProxyType({1: array}),
    "namespace": lambda array: SimpleNamespace(kept=array),
    "user's mapping": lambda array: UserDict(kept=array),
    "chain of mappings": lambda array: ChainMap({1: array}),
    "ordered mapping": lambda array: OrderedDict(kept=array),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_array_is_found_wherever_a_cache_keeps_it(place: str) -> None:
    """12 bytes, once, as an attribute of a plain object beside the array of another."""
    holder = SimpleNamespace(hidden=PLACES[place](mx.zeros(3)), seen=mx.zeros(2))
    assert sorted(array.nbytes for array in arrays(holder)) == [8, 12]


def test_a_cache_that_can_be_called_is_walked() -> None:
    """256 slots x 2 heads x 64 wide x 4 bytes, K and V."""

    class CalledCache(KVCache):  # type: ignore[misc]
        def __call__(self) -> None:
            """Nothing."""

    assert held_bytes(filled(CalledCache())) == held_bytes([filled(CalledCache())]) == 2 * 2 * 256 * 64 * 4


@pytest.mark.parametrize("function", ["update_and_fetch", "append_key"])
def test_a_cache_that_is_a_module_is_walked_and_its_layers_are_not(function: str) -> None:
    """At the root, in a list and inside another object; the projection that it learned is weights."""

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.stored = nn.Linear(8, 8), mx.zeros(5)

    setattr(Learned, function, lambda _self, keys: keys)
    for held in (Learned(), [Learned()], SimpleNamespace(inner=Learned())):
        assert held_bytes(held) == 20


def test_a_module_that_is_asked_for_is_looked_into_and_not_its_layers() -> None:
    """What is given is the root, whatever it is: 8 x 8 weights and 8 of bias, float32."""
    assert held_bytes(nn.Linear(8, 8)) == 4 * (64 + 8)
    assert held_bytes(nn.Sequential(nn.Linear(8, 8))) == 0


KEPT_BY_ALL = mx.zeros(100)


def reads_a_global() -> Any:
    """Refers to it by name alone."""
    return KEPT_BY_ALL


def test_what_is_everyones_or_no_ones_is_not_held() -> None:
    """Globals of a function, its module, attributes of a class, and what a weak reference points at."""

    class Sharing:
        shared = mx.zeros(100)

    other = Called(mx.zeros(100))
    holder = SimpleNamespace(
        function=reads_a_global, module=mx, kind=Sharing, one=Sharing(), weak=weakref.ref(other), own=mx.zeros(1)
    )
    assert held_bytes(holder) == 4


def test_the_walk_runs_no_code_of_what_it_looks_into() -> None:
    """Properties, __getattr__, iteration, comparison and hashing that fail or never end do neither."""

    class Hostile:
        def __init__(self) -> None:
            self.kept = mx.zeros(3)

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

        def __iter__(self) -> Any:
            return itertools.count()

        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise AssertionError

    assert held_bytes([Hostile(), itertools.count(), itertools.repeat(Hostile())]) == 24


def test_what_is_given_twice_is_counted_once() -> None:
    """As several roots, and inside one another."""
    cache = filled(KVCache())
    array = mx.zeros(3)
    assert len(list(arrays(cache, [cache], cache))) == 2
    assert [one.shape for one in arrays(array, array, [array])] == [(3,)]


def test_views_count_with_their_own_size() -> None:
    """What the walk cannot know: two names of one buffer are two, and a slice of 1 MiB is 4 bytes."""
    base = mx.zeros((256, 1024))
    whole, small = base.reshape(-1), base[:1, :1]
    mx.eval(whole, small)
    assert held_bytes([base, whole]) == 2 * 2**20
    del base, whole
    assert held_bytes([small]) == 4
