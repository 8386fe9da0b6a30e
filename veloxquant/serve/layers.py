"""Which layers of a loaded model get a method's caches, seen by calling the model with them.

A plan lists its layers, and every one of them must take its cache. A config may leave the choice to the model: then a
layer whose cache its engine cannot use keeps the engine's own, as in a trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.errors import InvalidParams, MethodRefused, VeloxError
from veloxquant.methods import LayerSpec
from veloxquant.methods.parameters import variant_for
from veloxquant.methods.per_layer import check_layer_params, for_layer, layer_params, places_of
from veloxquant.profiles.model import ENGINE_OWN
from veloxquant.serve.planned import PlannedCaches, engine_caches, set_by_others
from veloxquant.serve.rehearsal import engine_parts, plain_parts, rehearse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from veloxquant.methods import CachePart, Calibration, Method, Param, Variant
    from veloxquant.methods.registry import Loaded
    from veloxquant.serve.cache_config import CacheConfig
    from veloxquant.serve.kv_config import KVCacheConfig


class Packing(NamedTuple):
    """A method's variant for layers of a model, and where their own parameters come from when layers differ."""

    method: Method
    variant: Variant
    calibration: Calibration | None = None
    given: Mapping[int, Mapping[str, Param]] | None = None
    """Each layer's own as a plan or a config has them; None: the method chooses."""

    def by_layer(self, parts: Mapping[int, CachePart]) -> dict[int, Variant]:
        """The variant that each of these layers is asked and built with. Raises MethodRefused."""
        if self.given is not None:
            return {index: for_layer(self.variant, self.given[index]) for index in parts}
        chosen = layer_params(self.method, self.variant, parts, self.calibration)
        return {
            index: for_layer(self.variant, chosen[order] if chosen else {}) for order, index in enumerate(sorted(parts))
        }


def by_plan(model: Any, config: CacheConfig, loaded: Loaded) -> PlannedCaches | None:
    """The caches of a plan, rehearsed on this model; None when it packs nothing.

    Raises InvalidParams (made for another model or other methods), MethodNotFound, MethodRefused.
    """
    method = loaded.method(config.method)
    variant = _planned_variant(loaded, config)
    _check_count(model, config.layer_count)
    if not config.packed_layers:
        return None
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
    given = config.own_params()
    if given is None and layer_params(method, variant, parts, None):
        raise InvalidParams(
            f"{variant.label} has other parameters on each layer, and the plan names none",
            hint="make the plan again with the methods that are installed here",
            field="layer_params",
        )
    return _on_all(model, Packing(method, variant, given=_checked(method, variant, parts, given)), parts)


def by_config(
    model: Any, config: KVCacheConfig, loaded: Loaded, calibration: Calibration | None = None
) -> PlannedCaches | None:
    """The caches of a config, rehearsed on this model; None where the engine keeps its own on every layer.

    Raises InvalidParams, MethodNotFound, MethodRefused with the first layer's reason when none can be packed, or where
    the method chooses parameters by layer and lacks a calibration.
    """
    method = loaded.method(config.method)
    variant = variant_for(method, config.params)
    _check_layers(model, config)
    if method.name == ENGINE_OWN or config.layers == ():
        return None
    if config.layers is None:
        parts = plain_parts(model)
        _check_widths(parts, config.head_dim)
        return _on_those_that_can(model, Packing(method, variant, calibration), parts)
    parts = engine_parts(model, config.layers)
    _check_widths(parts, config.head_dim)
    given = _checked(method, variant, parts, config.own_params())
    return _on_all(model, Packing(method, variant, calibration, given), parts)


def _checked(
    method: Method,
    variant: Variant,
    parts: Mapping[int, CachePart],
    given: Mapping[int, Mapping[str, Param]] | None,
) -> Mapping[int, Mapping[str, Param]] | None:
    """Each layer's own parameters, if the method takes them. Raises InvalidParams."""
    if given is None:
        return None
    places = places_of(parts)
    try:
        check_layer_params(method, variant, places, [given[place.index] for place in places])
    except MethodRefused as error:
        raise InvalidParams(
            error.message,
            hint="make the plan again with the methods that are installed here",
            field="layer_params",
        ) from error
    return given


def _on_all(model: Any, packing: Packing, parts: Mapping[int, CachePart]) -> PlannedCaches:
    label, own = packing.variant.label, packing.by_layer(parts)
    for index, part in parts.items():
        refused = packing.method.refuses(own[index], part)
        if refused is not None:
            raise MethodRefused(f"{label} cannot keep layer {index}: {refused[1]}", hint="plan for this model")
    caches = PlannedCaches(model, packing.method, own, parts, set_by_others(model))
    rehearse(model, caches(), label)
    return caches


def _on_those_that_can(model: Any, packing: Packing, parts: Mapping[int, CachePart]) -> PlannedCaches:
    method, variant = packing.method, packing.variant
    reasons = {index: _why_never(method, variant, part) for index, part in parts.items()}
    willing = {index: part for index, part in parts.items() if reasons[index] is None}
    own = packing.by_layer(willing)
    while refused := {
        index: why for index, part in willing.items() if (why := _why_not(method, own[index], index, part))
    }:
        reasons |= refused
        willing = {index: part for index, part in willing.items() if index not in refused}
        own = packing.by_layer(willing)
    taken, errors = _taken(model, packing, own, willing)
    if taken:
        caches = PlannedCaches(model, method, packing.by_layer(taken), taken, set_by_others(model))
        if errors:  # those that run by halves have not run together yet, nor with the parameters that are left to them
            rehearse(model, caches(), variant.label)
        return caches
    told = {index: reason for index, reason in sorted({**reasons, **errors}.items()) if reason is not None}
    why = next((f"layer {index}: {reason}" for index, reason in told.items()), None)
    raise MethodRefused(
        f"no layer of this model can keep {variant.label} caches: {why or _none_plain(model)}",
        hint="choose other parameters or another method; fp16 is the engine's own",
    )


def _taken(
    model: Any, packing: Packing, own: Mapping[int, Variant], parts: Mapping[int, CachePart]
) -> tuple[dict[int, CachePart], dict[int, str]]:
    """The layers with which the model runs, and the engine's error for each of the others.

    What fails is halved, so that one layer among many costs a few calls: a layer fails by itself when the model's code
    reads what it stores, there or in another layer.
    """
    error = _engine_error(model, packing, own, parts) if parts else None
    if error is None:
        return dict(parts), {}
    if len(parts) == 1:
        return {}, dict.fromkeys(parts, error)
    layers = list(parts.items())
    halves = layers[: len(layers) // 2], layers[len(layers) // 2 :]
    (left, left_errors), (right, right_errors) = (_taken(model, packing, own, dict(half)) for half in halves)
    return left | right, left_errors | right_errors


def _engine_error(
    model: Any, packing: Packing, own: Mapping[int, Variant], parts: Mapping[int, CachePart]
) -> str | None:
    caches = PlannedCaches(model, packing.method, own, parts, set_by_others(model))
    try:
        rehearse(model, caches(), packing.variant.label)
    except VeloxError as error:
        cause = error.__cause__
        return error.message if cause is None else f"{type(cause).__name__}: {cause}"
    return None


def _why_never(method: Method, variant: Variant, part: CachePart) -> str | None:
    """Why this layer is not packed whatever its own parameters would be."""
    if part.latent:
        return "a latent cache, which attention reads directly"
    refused = method.refuses(variant, part)
    return None if refused is None else refused[1]


def _why_not(method: Method, variant: Variant, index: int, part: CachePart) -> str | None:
    refused = method.refuses(variant, part)
    if refused is not None:
        return refused[1]
    try:
        method.build(LayerSpec(index=index, part=part), variant)
    except MethodRefused as error:
        return error.message
    return None


def _none_plain(model: Any) -> str:
    kinds = dict.fromkeys(type(cache).__name__ for cache in engine_caches(model))
    return f"none is a plain growing KVCache; it keeps {', '.join(kinds) or 'no caches'}"


def _planned_variant(loaded: Loaded, config: CacheConfig) -> Variant:
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


def _check_layers(model: Any, config: KVCacheConfig) -> None:
    if config.layer_count is not None:
        _check_count(model, config.layer_count)
    count = len(engine_caches(model))
    if config.layers and config.layers[-1] >= count:
        raise InvalidParams(
            f"layer {config.layers[-1]} is to be packed and this model has {count} caches",
            hint="leave layers out: every layer that can take the method's cache gets one",
            field="layers",
        )


def _check_count(model: Any, planned: int) -> None:
    count = len(engine_caches(model))
    if count != planned:
        raise InvalidParams(
            f"the plan is for {planned} caches and this model has {count}: it was made for another model",
            hint="plan for this model",
            field="layer_count",
        )


def _check_widths(parts: Mapping[int, CachePart], head_dim: int | None) -> None:
    for index, part in parts.items():
        if head_dim is not None and (part.key_width, part.value_width) != (head_dim, head_dim):
            raise InvalidParams(
                f"layer {index} has K {part.key_width} and V {part.value_width} wide, and head_dim is {head_dim}",
                hint="leave head_dim out: a model's own widths count",
                field="head_dim",
            )
