"""What is kept is bounded by bytes, and what was dropped comes back the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from veloxquant.caches import rotation as matrices
from veloxquant.caches.kept import Kept

if TYPE_CHECKING:
    import pytest


def counting(kept: Kept) -> tuple[Any, list[tuple[int, int]]]:
    """A function that makes an array of 4 x `size` bytes, and what it was asked to make."""
    made: list[tuple[int, int]] = []

    @kept
    def zeros(size: int, seed: int) -> mx.array:
        made.append((size, seed))
        return mx.full((size,), seed, dtype=mx.float32)

    return zeros, made


def test_the_least_recently_used_is_dropped_first() -> None:
    """Three of 400 bytes in 1,000: the one asked for again stays, the other is made again."""
    kept = Kept(most_bytes=1000, least=1)
    zeros, made = counting(kept)
    for seed in (1, 2, 1, 3, 1, 2):
        assert zeros(100, seed)[0] == seed
        assert kept.nbytes() <= 1000
    assert made == [(100, 1), (100, 2), (100, 3), (100, 2)]


def test_the_last_used_stay_however_large() -> None:
    """Two of 4,000 bytes in 1,000 with two that stay: asked for in turns, each is made once."""
    kept = Kept(most_bytes=1000, least=2)
    zeros, made = counting(kept)
    for seed in (1, 2, 1, 2):
        zeros(1000, seed)
    assert made == [(1000, 1), (1000, 2)]
    zeros(1000, 3)
    assert kept.nbytes() == 8000


def test_functions_share_the_bytes_and_tuples_count() -> None:
    """A pair of 400 bytes each and one of 400 do not fit 1,000; equal arguments of two functions are two results."""
    kept = Kept(most_bytes=1000, least=1)
    zeros, made = counting(kept)
    pair = kept(lambda size, seed: (mx.full((size,), seed), mx.ones((size,))))
    zeros(100, 1)
    assert len(pair(100, 1)) == 2
    assert kept.nbytes() == 800
    zeros(100, 1)
    assert made == [(100, 1), (100, 1)]


def test_matrices_of_a_process_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotations of 30 seeds: no more than the limit or the 12 last stay, and one that was dropped comes back equal."""
    monkeypatch.setattr(matrices._kept, "_most_bytes", 13 * 4 * 40**2)
    first = matrices.rotation(40, 1000)
    copied = mx.array(first)
    for seed in range(1001, 1030):
        matrices.rotation(40, seed)
    assert matrices._kept.nbytes() <= 13 * 4 * 40**2
    again = matrices.rotation(40, 1000)
    assert again is not first
    assert mx.array_equal(again, copied)
