"""The engine's cache objects after a trace, read as values and checked against the slot rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.caches.held import held_bytes
from veloxquant.models import fields
from veloxquant.models.exchange import TRACE_RUNS
from veloxquant.models.trace_worker.engine import EngineRefused
from veloxquant.profiles.model import CacheLayer, CachePart, PartKind
from veloxquant.profiles.slots import part_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KINDS: Mapping[str, PartKind] = {
    "KVCache": "kv",
    "RotatingKVCache": "window",
    "ChunkedKVCache": "chunked",
    "ConcatenateKVCache": "concat",
}
_ENGINE_MODULE = "mlx_lm.models.cache"


def read(
    caches: Sequence[Any], after_prefill: Sequence[int], config: Mapping[str, Any], heads: Mapping[int, int]
) -> tuple[CacheLayer, ...]:
    """One CacheLayer for each entry of the engine's cache list, after the calls of a trace.

    `after_prefill` is what `state_bytes` gave before the single-token calls, `heads` what `heads.noting` did. Raises
    EngineRefused naming a cache class whose growth is not known, one that does not grow by its rule, or a state that
    grows at all.
    """
    grown = [
        index for index, (was, now) in enumerate(zip(after_prefill, state_bytes(caches), strict=True)) if was != now
    ]
    if grown:
        raise EngineRefused(
            "not_supported",
            f"the recurrent state of layer {grown[0]} changes its size with each token",
            "choose another model: no size for this one would be honest",
        )
    if not caches:
        raise EngineRefused(
            "config_invalid",
            "the config describes a model without layers",
            "give the complete config.json of the checkpoint",
        )
    rank = fields.whole(config, ("kv_lora_rank",))
    return tuple(_layer(index, cache, rank, heads) for index, cache in enumerate(caches))


def state_bytes(caches: Sequence[Any]) -> list[int]:
    """Bytes of the recurrent states in each entry of the cache list."""
    return [
        sum(held_bytes(inner) for inner in _flat(cache) if type(inner).__name__ == "ArraysCache") for cache in caches
    ]


def _layer(index: int, cache: Any, rank: int | None, heads: Mapping[int, int]) -> CacheLayer:
    parts = tuple(part for inner in _flat(cache) for part in _parts(inner, rank, heads.get(id(inner), 0)))
    ruled = sum(part_bytes(part, TRACE_RUNS) for part in parts)
    held = held_bytes(cache)
    if ruled != held:
        raise EngineRefused(
            "not_supported",
            f"the {type(cache).__name__} of layer {index} holds {held} bytes where its rule gives {ruled}: "
            "the caches of this mlx-lm grow by other rules than the known ones",
            "`veloxquantctl doctor` names the mlx-lm version that was tested: install that one",
        )
    return CacheLayer(index=index, engine_class=type(cache).__name__, parts=parts)


def _flat(cache: Any) -> list[Any]:
    if type(cache).__name__ != "CacheList":
        return [cache]
    return [leaf for inner in cache.caches for leaf in _flat(inner)]


def _parts(cache: Any, rank: int | None, query_heads: int) -> list[CachePart]:
    name = type(cache).__name__
    if type(cache).__module__ != _ENGINE_MODULE or (name not in _KINDS and name != "ArraysCache"):
        raise EngineRefused(
            "not_supported",
            f"the model keeps its context in a cache class of its own ({type(cache).__module__}.{name}), whose growth "
            "a short trace cannot tell",
            "choose another model: no size for this one would be honest",
        )
    if name == "ArraysCache":
        return [CachePart(kind="state", engine_class=name, state_bytes=held_bytes(cache))]
    if cache.keys is None:
        return []  # the model never writes to it
    return [_kv_part(cache, _KINDS[name], rank, query_heads)]


def _kv_part(cache: Any, kind: PartKind, rank: int | None, query_heads: int) -> CachePart:
    keys, values = cache.keys, cache.values
    heads, key_width = keys.shape[1], keys.shape[3]
    return CachePart(
        kind=kind,
        engine_class=type(cache).__name__,
        heads=heads,
        query_heads=query_heads,
        key_width=key_width,
        value_width=values.shape[3],
        key_itemsize=keys.itemsize,
        value_itemsize=values.itemsize,
        dtype=str(keys.dtype).removeprefix("mlx.core."),
        window=getattr(cache, "max_size", 0) or getattr(cache, "chunk_size", 0),
        keep=getattr(cache, "keep", 0),
        step=getattr(cache, "step", 256),
        latent=rank is not None and heads == 1 and key_width == rank,
    )
