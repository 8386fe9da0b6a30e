"""Caches in tiers of many kinds, and batches of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from batch_kit import Drive
from cache_kit import WIDTH

from veloxquant.caches.channel_classes import written
from veloxquant.caches.codecs import make
from veloxquant.caches.tiered import TieredKVCache

if TYPE_CHECKING:
    from veloxquant.caches.tiered_batch import BatchTieredKVCache

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


def filled(lengths: list[int], kind: str = "kivi") -> BatchTieredKVCache:
    """A twin of rows of these lengths."""
    rows = drive(kind)
    rows.start(lengths)
    return rows.twin  # type: ignore[no-any-return]


def single(kind: str, tokens: int) -> TieredKVCache:
    """A single cache after one call of so many tokens."""
    cache = fresh(kind)
    cache.update_and_fetch(mx.zeros((1, 2, tokens, WIDTH)), mx.zeros((1, 2, tokens, WIDTH)))
    return cache
