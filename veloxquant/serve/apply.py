"""Putting planned caches on a loaded mlx-lm model.

mlx-lm asks the model for its cache list in one place: `make_prompt_cache` calls `model.make_cache()` where there is
one. `apply` puts a `make_cache` on the model *instance*, so that generation, speculative decoding and the server get a
fresh planned list for each request. The model's class is never touched, and `restore` takes it off again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from veloxquant.caches.held import held_bytes
from veloxquant.errors import InvalidParams, MethodRefused
from veloxquant.methods.registry import load
from veloxquant.serve import cache_config
from veloxquant.serve.planned import PlannedCaches, engine_caches, set_by_others
from veloxquant.serve.rehearsal import engine_parts, rehearse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from veloxquant.methods import Method, Variant
    from veloxquant.methods.registry import Loaded
    from veloxquant.planner.result import Plan
    from veloxquant.serve.cache_config import CacheConfig

__all__ = ["Applied", "AppliedLayer", "apply", "held_bytes", "restore"]

_ATTRIBUTE = "make_cache"


@dataclass(frozen=True)
class AppliedLayer:
    """One entry of the model's cache list: its class, and the variant's label where it is packed."""

    index: int
    cache_class: str
    label: str | None
    """None: the engine's own cache was kept."""


@dataclass(frozen=True)
class Applied:
    """What each request will get from now on. Pass `prefill_step_size` to the engine: it is part of the plan."""

    method: str
    label: str
    layers: tuple[AppliedLayer, ...]
    prefill_step_size: int

    @property
    def packed(self) -> int:
        """Layers that are packed."""
        return sum(layer.label is not None for layer in self.layers)

    @property
    def kept(self) -> int:
        """Layers that keep the engine's own cache."""
        return len(self.layers) - self.packed


def apply(model: Any, plan: Plan | Mapping[str, Any], *, methods: Loaded | None = None) -> Applied:
    """Make `model` (a loaded mlx-lm model) hand out caches as planned; a second call replaces the first.

    `plan` is a Plan, its chosen cache_config, or either as JSON values. Before anything is changed the planned caches
    are put through the model once without computing anything: MLX is lazy. `methods` is the loaded registry, for tests
    and for callers that have one. A plan that packs nothing restores the engine's own caches.

    Packed caches have no batch twin in the engine: mlx_lm's server takes such a model one request at a time, and
    batch_generate refuses it.

    Raises InvalidParams (the plan is malformed or made for another model), MethodNotFound (not installed or
    quarantined), MethodRefused (the plan chose nothing, or the engine cannot run these caches).
    """
    _check_is_model(model)
    config = cache_config.read(plan)
    loaded = load() if methods is None else methods
    method = loaded.method(config.method)
    variant = _variant(loaded, config)
    own = engine_caches(model)
    if len(own) != config.layer_count:
        raise InvalidParams(
            f"the plan is for {config.layer_count} caches and this model has {len(own)}: it was made for another model",
            hint="plan for this model",
            field="layer_count",
        )
    if not config.packed_layers:
        restore(model)
        return _applied(config, own)
    planned = _planned(model, config, method, variant)
    rehearsed = planned()
    rehearse(model, rehearsed, variant.label)
    setattr(model, _ATTRIBUTE, planned)
    return _applied(config, rehearsed)


def restore(model: Any) -> bool:
    """Give the model its engine's own caches again; False when no plan was applied to it."""
    _check_is_model(model)
    planned = vars(model).get(_ATTRIBUTE)
    if not isinstance(planned, PlannedCaches):
        return False
    if planned.previous is None:
        delattr(model, _ATTRIBUTE)
    else:
        setattr(model, _ATTRIBUTE, planned.previous)
    return True


def _check_is_model(model: Any) -> None:
    from mlx import nn

    if not isinstance(model, nn.Module):
        raise InvalidParams(
            f"a loaded mlx-lm model is needed, not an object of type {type(model).__name__}",
            hint="mlx_lm.load returns (model, tokenizer): pass the model",
            field="model",
        )


def _variant(loaded: Loaded, config: CacheConfig) -> Variant:
    """The registry's variant of the plan's label, with the same parameters."""
    known = {variant.label: variant for method, variant in loaded.variants if method.name == config.method}
    variant = known.get(config.label)
    if variant is None:
        raise InvalidParams(
            f"method {config.method} has no variant {config.label!r}",
            hint=f"known: {', '.join(sorted(known))}",
            field="label",
        )
    if dict(variant.params) != config.params:
        raise InvalidParams(
            f"{config.label} means {dict(variant.params)} here and {config.params} in the plan",
            hint="make the plan again with the methods that are installed here",
            field="params",
        )
    return variant


def _planned(model: Any, config: CacheConfig, method: Method, variant: Variant) -> PlannedCaches:
    """Where each packed layer is, in this model, what the plan takes it for."""
    parts = engine_parts(model, config.packed_layers)
    for position, (index, part) in enumerate(parts.items()):
        shape = (part.heads, part.key_width, part.value_width)
        if config.shape_of(position) not in (None, shape):
            raise InvalidParams(
                f"layer {index} has (KV heads, key width, value width) = {shape} and the plan was made for "
                f"{config.shape_of(position)}: it was made for another model",
                hint="plan for this model",
                field="packed_shapes",
            )
        refused = method.refuses(variant, part)
        if refused is not None:
            raise MethodRefused(f"{variant.label} cannot keep layer {index}: {refused[1]}", hint="plan for this model")
    return PlannedCaches(model, method, variant, parts, set_by_others(model))


def _applied(config: CacheConfig, caches: list[Any]) -> Applied:
    packed = set(config.packed_layers)
    layers = (
        AppliedLayer(index, type(cache).__name__, config.label if index in packed else None)
        for index, cache in enumerate(caches)
    )
    return Applied(config.method, config.label, tuple(layers), config.prefill_step_size)
