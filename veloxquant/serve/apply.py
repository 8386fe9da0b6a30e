"""Putting planned caches on a loaded mlx-lm model.

mlx-lm asks the model for its cache list in one place: `make_prompt_cache` calls `model.make_cache()` where there is
one. `apply` puts a `make_cache` on the model *instance*, so that generation, speculative decoding and the server get a
fresh planned list for each request. The model's class is never touched, and `restore` takes it off again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from veloxquant.caches.held import held_bytes
from veloxquant.methods.registry import load
from veloxquant.serve import cache_config
from veloxquant.serve.layers import by_plan
from veloxquant.serve.planned import PlannedCaches, check_is_model, engine_caches

if TYPE_CHECKING:
    from collections.abc import Mapping

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

    Lists of a batchable method (Method.batchable) are served in batches and stay packed there: their caches have twins
    that mlx_lm's server and batch_generate merge them into. With the lists of other methods the server takes one
    request at a time, and batch_generate refuses the model.

    Raises InvalidParams (the plan is malformed or made for another model), MethodNotFound (not installed or
    quarantined), MethodRefused (the plan chose nothing, or the engine cannot run these caches).
    """
    check_is_model(model)
    config = cache_config.read(plan)
    loaded = load() if methods is None else methods
    planned = by_plan(model, config, loaded)
    if planned is None:
        restore(model)
        return _applied(config, engine_caches(model))
    setattr(model, _ATTRIBUTE, planned)
    return _applied(config, planned())


def restore(model: Any) -> bool:
    """Give the model its engine's own caches again; False when no plan was applied to it."""
    check_is_model(model)
    planned = vars(model).get(_ATTRIBUTE)
    if not isinstance(planned, PlannedCaches):
        return False
    if planned.previous is None:
        delattr(model, _ATTRIBUTE)
    else:
        setattr(model, _ATTRIBUTE, planned.previous)
    return True


def _applied(config: CacheConfig, caches: list[Any]) -> Applied:
    packed = set(config.packed_layers)
    layers = (
        AppliedLayer(index, type(cache).__name__, config.label if index in packed else None)
        for index, cache in enumerate(caches)
    )
    return Applied(config.method, config.label, tuple(layers), config.prefill_step_size)
