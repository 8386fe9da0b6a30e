"""Calling a loaded model without computing anything: MLX builds the graph, checks every shape, and allocates nothing.

The first call tells what K and V each layer stores; the second shows that the model's own code takes the planned
caches. Both fail in milliseconds where a real request would fail after the model has worked on the prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.caches.engine import cache_module
from veloxquant.errors import MethodRefused, VeloxError
from veloxquant.profiles.model import CachePart
from veloxquant.serve.planned import engine_caches

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS = 8
_PLAN_AGAIN = "plan for this model: the plan was made for another one, or for another version of mlx-lm"


def engine_parts(model: Any, indices: Sequence[int]) -> dict[int, CachePart]:
    """What the model stores in these layers in its engine's own caches.

    Raises MethodRefused for a layer that is no plain KVCache: windows, states and latents are never packed.
    """
    caches = engine_caches(model)
    kind = cache_module().KVCache
    for index in indices:
        if type(caches[index]) is not kind:
            raise MethodRefused(
                f"layer {index} keeps a {type(caches[index]).__name__} in this model, and the plan packs it",
                hint=_PLAN_AGAIN,
            )
    _call(model, caches, "its own caches")
    return {index: _part(index, caches[index]) for index in indices}


def plain_parts(model: Any) -> dict[int, CachePart]:
    """What the model stores in every layer whose own cache is a plain KVCache and is written to.

    Raises MethodRefused for a model that cannot be called.
    """
    caches = engine_caches(model)
    kind = cache_module().KVCache
    _call(model, caches, "its own caches")
    plain = (index for index, cache in enumerate(caches) if type(cache) is kind and cache.keys is not None)
    rank = getattr(getattr(model, "args", None), "kv_lora_rank", None)
    return {index: _marked(_part(index, caches[index]), rank) for index in plain}


def _marked(part: CachePart, rank: int | None) -> CachePart:
    """Whether keys are the latent of multi-head latent attention, as a trace tells: one head as wide as its rank."""
    latent = rank is not None and part.heads == 1 and part.key_width == rank
    return msgspec.structs.replace(part, latent=latent)


def rehearse(model: Any, caches: list[Any], label: str) -> None:
    """One call for a chunk and one for a single token, nothing evaluated.

    Raises MethodRefused with the engine's own error.
    """
    _call(model, caches, f"{label} caches")


def _call(model: Any, caches: list[Any], what: str) -> None:
    import mlx.core as mx

    try:
        for length in (TOKENS, 1):
            model(mx.zeros((1, length), dtype=mx.int32), cache=caches)
    except VeloxError:
        raise
    except Exception as error:
        raise MethodRefused(
            f"this model cannot run with {what}: {type(error).__name__}: {error}", hint=_PLAN_AGAIN
        ) from error


def _part(index: int, cache: Any) -> CachePart:
    if cache.keys is None:
        raise MethodRefused(f"layer {index} stored nothing when the model was called", hint=_PLAN_AGAIN)
    _, heads, _, key_width = cache.keys.shape
    return CachePart(
        kind="kv",
        engine_class=type(cache).__name__,
        heads=heads,
        key_width=key_width,
        value_width=cache.values.shape[-1],
        key_itemsize=cache.keys.dtype.size,
        value_itemsize=cache.values.dtype.size,
        dtype=str(cache.keys.dtype).removeprefix("mlx.core."),
        step=cache.step,
    )
