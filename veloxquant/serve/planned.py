"""The `make_cache` that a planned model carries, and the cache list the engine itself would give."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

from veloxquant.caches.engine import cache_module
from veloxquant.errors import InvalidParams, MethodRefused
from veloxquant.methods import LayerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from veloxquant.methods import CachePart, Method, Variant


class PlannedCaches:
    """Called with no argument: a fresh list, packed where planned and the engine's own elsewhere.

    `variants` are those that each packed layer is built with; layers may differ in parameters. Whether such lists
    merge into a batch is the caches' own matter: those of a batchable method have a twin that stays packed.

    Knows its model by a weak reference: a strong one would be a cycle, and would keep the weights of a dropped model
    in memory until the next garbage collection. A deep copy belongs to the copied model.
    """

    def __init__(
        self,
        model: Any,
        method: Method,
        variants: Mapping[int, Variant],
        parts: Mapping[int, CachePart],
        previous: Any,
    ) -> None:
        self.previous = previous
        """A make_cache that somebody else had put on the instance, None where there was none."""
        self._model = weakref.ref(model)
        self._method, self._variants, self._parts = method, dict(variants), dict(parts)

    def __call__(self) -> list[Any]:
        """One fresh cache for each entry of the engine's list. Raises MethodRefused."""
        model = self._model()
        if model is None:
            raise MethodRefused(
                "the model this plan was applied to is gone; a shallow copy of it cannot make caches",
                hint="apply the plan to the copy",
            )
        caches = _own(model, self.previous)
        for index, part in self._parts.items():
            caches[index] = self._method.build(LayerSpec(index=index, part=part), self._variants[index])
        return caches

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedCaches:
        """The same plan for the copy of the model that is being made, or for the same model when only this is."""
        model = self._model()
        if model is None:
            return self
        previous = copy.deepcopy(self.previous, memo)
        return PlannedCaches(memo.get(id(model), model), self._method, self._variants, self._parts, previous)


def check_is_model(model: Any) -> None:
    """A loaded mlx-lm model, nothing else. Raises InvalidParams."""
    from mlx import nn

    if not isinstance(model, nn.Module):
        raise InvalidParams(
            f"a loaded mlx-lm model is needed, not an object of type {type(model).__name__}",
            hint="mlx_lm.load returns (model, tokenizer): pass the model",
            field="model",
        )


def engine_caches(model: Any) -> list[Any]:
    """A fresh list of what the engine gives this model without a plan: windows, states and all."""
    return _own(model, set_by_others(model))


def _own(model: Any, previous: Callable[[], list[Any]] | None) -> list[Any]:
    if previous is not None:
        return list(previous())
    if hasattr(type(model), "make_cache"):
        return list(type(model).make_cache(model))
    return [cache_module().KVCache() for _ in model.layers]  # as mlx_lm's make_prompt_cache does


def set_by_others(model: Any) -> Any:
    """A make_cache that somebody else has put on the instance: it stands for the engine's own."""
    present = vars(model).get("make_cache")
    return present.previous if isinstance(present, PlannedCaches) else present
