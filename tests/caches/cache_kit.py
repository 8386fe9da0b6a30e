"""What the tests of caches share: caches of every kind, a tiny llama that they serve, and how two are compared."""

from __future__ import annotations

import io
import re
from functools import cache as once
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention

from veloxquant.caches.codecs import make
from veloxquant.caches.evicting import EvictingKVCache
from veloxquant.caches.eviction import HeavyHitters, KeyNorm, SnapKV, Streaming
from veloxquant.caches.packed import PackedKVCache
from veloxquant.caches.tiered import TieredKVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.eviction import Policy

VOCABULARY, WIDTH, HEADS = 97, 32, 2

# Caches of every kind.

_OUTLIERS = {"name": "turboquant_mse", "bits": 2, "outlier_bits": 6, "outlier_channels": 5}
PACKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float": ({"name": "float"}, {"name": "float"}),
    "mse": ({"name": "turboquant_mse", "bits": 3}, {"name": "turboquant_mse", "bits": 2}),
    "prod": ({"name": "turboquant_prod", "bits": 3}, {"name": "turboquant_mse", "bits": 5}),
    "outliers": (_OUTLIERS, _OUTLIERS),
}
"""Codecs of K and V."""

GROUP, SINKS, RECENT = 32, 4, 64
CHANNELS = {"name": "per_channel", "bits": 4, "group": GROUP}
AFFINE = {"name": "affine", "bits": 4, "group": 32}
TIERED: dict[str, dict[str, Any]] = {
    "kivi": {"keys": CHANNELS, "values": AFFINE},
    "3 and 2 bits": {"keys": {**CHANNELS, "bits": 3}, "values": {**AFFINE, "bits": 2}},
    "no sinks, nothing recent": {"keys": CHANNELS, "values": AFFINE, "sinks": 0, "recent": 0},
    "recent in 8 bits": {"keys": CHANNELS, "values": AFFINE, "recent_codec": {**AFFINE, "bits": 8}},
    "a token a slot, steps": {"keys": {"name": "turboquant_mse", "bits": 4}, "values": AFFINE, "step": 256},
    "fewer recent than a group": {"keys": {**CHANNELS, "group": 128}, "values": AFFINE, "recent": 96},
    "outliers": {"keys": CHANNELS, "values": _OUTLIERS},
}
"""Codecs of K and V, and tiers where they are not the usual ones."""

BUDGET, STRIDE = 96, 32
FLOAT = {"name": "float", "width": WIDTH}
FOUR_BITS = {**AFFINE, "width": WIDTH}
POLICIES: dict[str, Policy] = {
    "streaming": Streaming(sinks=4),
    "knorm": KeyNorm(recent=16),
    "snapkv": SnapKV(recent=16, kernel=5),
    "h2o": HeavyHitters(recent=48),
}
EVICTING = {name: (policy, FLOAT) for name, policy in POLICIES.items()} | {
    f"{name}-4bit": (policy, FOUR_BITS) for name, policy in POLICIES.items()
}
"""Policy and codec."""


def packed(kind: str, width: int = WIDTH, step: int = 256) -> PackedKVCache:
    """An empty cache that packs every token."""
    keys, values = PACKED[kind]
    return PackedKVCache(make({**keys, "width": width}), make({**values, "width": width}), step)


def tiered(kind: str = "kivi", width: int = WIDTH) -> TieredKVCache:
    """An empty cache in tiers."""
    chosen = dict(TIERED[kind])
    keys, values = (make({**chosen.pop(part), "width": width}) for part in ("keys", "values"))
    recent = chosen.pop("recent_codec", None)
    if recent is not None:
        chosen["recent_key_codec"] = chosen["recent_value_codec"] = make({**recent, "width": width})
    return TieredKVCache(keys, values, **{"sinks": SINKS, "recent": RECENT, **chosen})


def evicting(kind: str, budget: int = BUDGET) -> EvictingKVCache:
    """An empty cache that holds so many tokens and a stride more at most."""
    policy, codec = EVICTING[kind]
    return EvictingKVCache(make(codec), make(codec), policy, budget, STRIDE)


def stored(cache: Any) -> list[Any]:
    """Everything that is stored for the tokens held; the slack of packed and bounded caches left out."""
    if isinstance(cache, PackedKVCache):
        cut = [array[..., : cache.offset, :] for array in (*cache.keys, *cache.values)]
        return [*cut, *cache.key_fixed, *cache.value_fixed]
    if isinstance(cache, EvictingKVCache):
        return [array[:, :, : cache.rule.held(cache.offset)] for array in cache.slots.arrays]
    return [array for part in (cache.key_part, cache.value_part) for group in part.arrays for array in group]


# A model.


@once
def model(layers: int = 2, seed: int = 3) -> Any:
    """A llama of so many layers, four query heads over two KV heads of width 32, with random float32 weights."""
    mx.random.seed(seed)
    made = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=layers,
            intermediate_size=64,
            num_attention_heads=2 * HEADS,
            num_key_value_heads=HEADS,
            head_dim=WIDTH,
            rms_norm_eps=1e-5,
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
        )
    )
    mx.eval(made.parameters())
    return made


def prompt(count: int, seed: int = 3) -> list[int]:
    """Tokens by arithmetic."""
    return [(31 * at * at + 7 * at + seed) % VOCABULARY for at in range(count)]


def tokens(count: int) -> Any:
    """The same as an array."""
    return mx.array(prompt(count))


def logits(fed: Any, caches: list[Any], chunk: int) -> Any:
    """The logits of the model of two layers for a prompt fed in chunks, as mlx-lm's prefill feeds it."""
    found = []
    for start in range(0, fed.size, chunk):
        found.append(model()(fed[None, start : start + chunk], cache=caches))
        mx.eval(found[-1], [cache.state for cache in caches])
    return mx.concatenate(found, axis=1)[0]


# One layer.


def normal(seed: int, *shape: int) -> Any:
    """Numbers of unit variance."""
    return mx.random.normal(shape, key=mx.random.key(seed))


def drawn(count: int, seed: int = 1, width: int = WIDTH) -> tuple[Any, Any]:
    """Keys and values of one sequence."""
    return normal(2 * seed, 1, HEADS, count, width), normal(2 * seed + 1, 1, HEADS, count, width)


def attended(cache: Any, keys: Any, values: Any, queries: Any) -> Any:
    """One call, as a model's layer makes it."""
    mask = cache.make_mask(keys.shape[2], return_array=False, window_size=None)
    ours = cache.update_and_fetch(keys, values)
    return scaled_dot_product_attention(queries, *ours, cache=cache, scale=0.3, mask=mask)


def attend(cache: Any, count: int, seed: int = 1, rows: int = 1, heads: int = HEADS) -> Any:
    """One call of so many tokens."""
    shapes = ((rows, heads, count, WIDTH), (rows, heads, count, WIDTH), (rows, 2 * heads, count, WIDTH))
    return attended(cache, *(normal(seed + at, *shape) for at, shape in enumerate(shapes)))


def fed(cache: Any, chunks: Sequence[int]) -> Any:
    """The cache after calls of these lengths, whatever they bring."""
    for at, count in enumerate(chunks):
        mx.eval(attend(cache, count, seed=10 * at), cache.state)
    return cache


def filled(cache: Any, keys: Any, values: Any, chunks: Sequence[int]) -> Any:
    """The cache after these K and V in calls of these lengths, attention left out."""
    at = 0
    for count in chunks:
        cache.update_and_fetch(keys[:, :, at : at + count], values[:, :, at : at + count])
        at += count
        mx.eval(cache.state)
    return cache


# Comparing.


def same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Equal to the bit."""
    return len(ours) == len(theirs) and all(mx.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def operations(*outputs: Any) -> int:
    """MLX operations that lead to these arrays from others that are evaluated: the nodes of their graph."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *outputs)
    return len(re.findall(r"shape=rectangle", graph.getvalue()))
