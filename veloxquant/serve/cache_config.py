"""Reading what a plan says to apply: a Plan, its chosen candidate's cache_config, or either as plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from veloxquant.errors import InvalidParams, MethodRefused
from veloxquant.planner.result import CACHE_CONFIG_SCHEMA, Plan
from veloxquant.planner.result import SCHEMA as PLAN_SCHEMA

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Width = Annotated[int, msgspec.Meta(ge=1)]


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One variant laid over one model's cache list. Unknown keys of a newer planner are ignored."""

    schema: str
    method: str
    label: str
    params: dict[str, int | float | str | bool] = {}
    packed_layers: tuple[_Count, ...]
    layer_count: _Count
    prefill_step_size: _Width
    packed_shapes: tuple[tuple[_Width, _Width, _Width], ...] | None = None
    """(KV heads, key width, value width): one for all packed layers, or one for each in order; None: not checked."""

    layer_params: tuple[dict[str, int | float | str | bool], ...] | None = None
    """The method's parameters on each packed layer, beside the variant's; None: all are alike."""

    def own_params(self) -> dict[int, dict[str, int | float | str | bool]] | None:
        """Each packed layer's own parameters, None where all are alike."""
        if self.layer_params is None:
            return None
        return dict(zip(self.packed_layers, self.layer_params, strict=True))

    def shape_of(self, position: int) -> tuple[int, int, int] | None:
        """What the planner took the packed layer at this position for; None where it did not say."""
        if not self.packed_shapes:
            return None
        return self.packed_shapes[0 if len(self.packed_shapes) == 1 else position]


def read(plan: Plan | Mapping[str, Any]) -> CacheConfig:
    """The checked cache_config of a plan.

    Raises InvalidParams naming the field; MethodRefused, with the plan's suggestions, for a plan that chose nothing.
    """
    if isinstance(plan, Plan):
        plan = msgspec.to_builtins(plan)
    if not isinstance(plan, Mapping):
        raise InvalidParams(
            f"a plan or its cache_config is needed, not an object of type {type(plan).__name__}",
            hint="pass what Client().plan(...) returned",
            field="plan",
        )
    if plan.get("schema") == PLAN_SCHEMA:
        plan = _chosen(plan)
    if plan.get("schema") != CACHE_CONFIG_SCHEMA:
        raise InvalidParams(
            f"schema is {plan.get('schema')!r}; {CACHE_CONFIG_SCHEMA!r} and {PLAN_SCHEMA!r} are understood",
            hint="make the plan again with this version of veloxquant",
            field="schema",
        )
    try:
        config = msgspec.convert(plan, CacheConfig)
    except msgspec.ValidationError as error:
        raise InvalidParams(
            f"the cache_config is not valid: {error}", hint="make the plan again", field="plan"
        ) from error
    return _checked(config)


def _chosen(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    chosen = plan.get("chosen")
    if isinstance(chosen, Mapping):
        config: Mapping[str, Any] = chosen.get("cache_config") or {}
        return config
    if plan.get("decision") in ("keep_fp16", "nothing_to_quantize"):
        raise MethodRefused(
            f"the plan's decision is {plan['decision']!r} and it names no candidate to apply",
            hint="leave the model as it is: the engine's own caches are what was planned",
        )
    told = "; ".join(str(note.get("text")) for note in plan.get("suggestions") or () if isinstance(note, Mapping))
    raise MethodRefused(
        f"the plan has nothing to apply: its decision is {plan.get('decision')!r}",
        hint=told or "plan again with a shorter context, fewer slots or smaller weights",
    )


def _checked(config: CacheConfig) -> CacheConfig:
    packed = config.packed_layers
    if len(set(packed)) != len(packed) or any(index >= config.layer_count for index in packed):
        raise InvalidParams(
            f"packed_layers must be unlike indices below layer_count = {config.layer_count}, got {list(packed)}",
            hint="make the plan again",
            field="packed_layers",
        )
    if config.packed_shapes and len(config.packed_shapes) not in (1, len(packed)):
        raise InvalidParams(
            f"{len(config.packed_shapes)} packed_shapes for {len(packed)} packed_layers",
            hint="make the plan again",
            field="packed_shapes",
        )
    if config.layer_params is not None and len(config.layer_params) != len(packed):
        raise InvalidParams(
            f"{len(config.layer_params)} layer_params for {len(packed)} packed_layers",
            hint="make the plan again",
            field="layer_params",
        )
    return config
