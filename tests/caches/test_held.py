"""Counting what a cache holds by walking it."""

from __future__ import annotations

from collections import deque
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from veloxquant.caches.held import arrays, held_bytes


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
