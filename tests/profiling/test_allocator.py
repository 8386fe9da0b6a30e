"""Walked bytes against MLX's own allocator, for every class of cache that mlx-lm has; and caches that hide arrays."""

from __future__ import annotations

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

from veloxquant.caches.standalone import StandaloneCache
from veloxquant.profiling import AllocatorCheck, KVCacheProfiler, MLXCacheProfiler, allocator_check

if TYPE_CHECKING:
    from collections.abc import Callable

MAKERS: dict[str, tuple[Callable[[], Any], int]] = {
    "plain": (KVCache, 1),
    "concatenated": (ConcatenateKVCache, 1),
    "window": (lambda: RotatingKVCache(64), 1),
    "packed": (lambda: QuantizedKVCache(64, 4), 1),
    "chunked": (lambda: ChunkedKVCache(64), 1),
    "batch": (lambda: BatchKVCache([0, 3]), 2),
}


def use(rows: int, *lengths: int) -> Callable[[Any], None]:
    """Updates of these lengths with arrays that are gone afterwards; 8 heads, width 128, float32."""

    def run(cache: Any) -> None:
        for number, tokens in enumerate(lengths):
            keys, values = mx.random.normal((2, rows, 8, tokens, 128), key=mx.random.key(number))
            mx.eval(keys, values)
            # the engine's caches may keep what they are given: a copy is theirs alone
            mx.eval(cache.update_and_fetch(keys + 0, values + 0))

    return run


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_what_is_walked_is_what_the_allocator_gave(maker: str, wrap: bool) -> None:
    """A prompt, steps, and growth: both counts grow alike, up to the allocator's own rounding."""
    make, rows = MAKERS[maker]
    cache = MLXCacheProfiler(make()) if wrap else make()
    for lengths in ((300,), (1, 1), (200,), (1,)):
        check = allocator_check(cache, use(rows, *lengths))
        assert check.agrees, (lengths, check)


def test_states_and_composites_are_walked_too() -> None:
    """Entries that are replaced free the old ones."""

    def states(cache: Any) -> None:
        cache[0][0] = mx.random.normal((4, 1000), key=mx.random.key(1))
        cache[1].update_and_fetch(*mx.random.normal((2, 1, 8, 300, 128), key=mx.random.key(2)))

    def fresh() -> Any:
        return MLXCacheProfiler(CacheList(ArraysCache(1), KVCache()))

    allocator_check(fresh(), states)  # what is made, or let go, once a process is then behind us
    cache = fresh()
    first = allocator_check(cache, states)
    assert first.agrees
    assert first.resident_bytes == 4 * 1000 * 4 + 2 * 8 * 512 * 128 * 4
    again = allocator_check(cache, lambda cache: cache[0].__setitem__(0, mx.zeros((4, 1000))))
    assert again.agrees
    assert again.resident_bytes == 0


def test_arrays_out_of_sight_are_found_by_the_allocator() -> None:
    """A class with float copies in a closure of its methods looks packed to any walk, and not to the allocator."""
    hidden: list[Any] = []

    class Hiding(QuantizedKVCache):  # type: ignore[misc]
        def update_and_fetch(self, keys: Any, values: Any) -> Any:
            hidden.append((keys, values))
            return super().update_and_fetch(keys, values)

    cache = MLXCacheProfiler(Hiding(64, 4))
    check = allocator_check(cache, use(1, 300))
    assert not check.agrees
    assert check.allocated_bytes - check.resident_bytes >= 2 * 8 * 300 * 128 * 4
    assert not cache.profile().is_lying  # its nbytes names all that a walk can see


@pytest.mark.parametrize("twice", [False, True])
def test_buffers_behind_views_are_found_by_the_allocator(twice: bool) -> None:
    """A slice of 4 bytes that keeps 1 MiB, and two views of 1 MiB: the walk counts 4 bytes and 2 MiB."""
    kept: list[mx.array] = []

    def keep(views: list[mx.array]) -> None:
        base = mx.zeros((4, 65536)) + 1
        mx.eval(base)
        views += [base, base.reshape(-1)] if twice else [base[:1, :1]]

    for _ in range(2):
        check = allocator_check(kept, keep)
        assert not check.agrees
        assert check.resident_bytes == (2 * 2**20 if twice else 4)
        assert check.allocated_bytes >= 2**20


def test_a_standalone_cache_of_ours_holds_what_it_reports() -> None:
    """memory_bytes, the walk and the allocator say the same, second use and later."""
    codecs = pytest.importorskip("veloxquant.caches.codecs")
    codec = codecs.make({"name": "affine", "width": 128, "bits": 4, "group": 64})
    profiled = KVCacheProfiler(StandaloneCache(codec, codec), head_dim=128)

    def append(cache: Any) -> None:
        for number in range(200):
            cache.append(mx.full((128,), number / 7), mx.full((128,), number / 3))

    for _ in range(3):
        assert allocator_check(profiled, append).agrees
    profile = profiled.profile()
    assert profile.reported_bytes == profile.resident_bytes > 0
    assert (profile.sequence_tokens, profile.is_lying) == (600, False)


@pytest.mark.parametrize(
    ("resident", "allocated", "agrees"),
    [(100, 100, True), (100, 150, True), (100, 151, False), (100, 80, True), (100, 79, False), (-10, -10, True)],
)
def test_agreement_is_within_what_the_allocator_rounds(resident: int, allocated: int, agrees: bool) -> None:
    """A walk that counts what was never given out is as wrong as one that misses something."""
    assert AllocatorCheck(resident, allocated, more_bytes=50, less_bytes=20).agrees is agrees


def test_the_allocators_pool_is_as_before_after_a_check() -> None:
    """Also when the use fails."""

    def failing(cache: Any) -> None:
        raise RuntimeError("no")

    limit = mx.set_cache_limit(12345)
    try:
        with pytest.raises(RuntimeError, match="no"):
            allocator_check(KVCache(), failing)
        assert mx.set_cache_limit(limit) == 12345
    finally:
        mx.set_cache_limit(limit)
