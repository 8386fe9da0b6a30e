"""What the trace worker calls: methods by plain values, so that the room that traces models need not know methods."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from veloxquant.methods.method import LayerSpec, Method, Param, Variant
from veloxquant.methods.per_layer import layer_params
from veloxquant.methods.registry import Loaded
from veloxquant.methods.registry import load as load_registry
from veloxquant.profiles.slots import Run, kv_slots
from veloxquant.profiles.workload import MAX_CONTEXT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from veloxquant.profiles.calibration import Calibration
    from veloxquant.profiles.model import CachePart


@dataclass(frozen=True)
class Factory:
    """Answers for every ready method. Each call raises MethodNotFound for a name that is not ready."""

    loaded: Loaded

    def refuses(self, method: str, label: str, params: Mapping[str, Param], part: CachePart) -> tuple[str, str] | None:
        """(reason code, sentence) when the method cannot keep this part, else None."""
        found, variant = self._find(method, label, params)
        return found.refuses(variant, part)

    def build(self, method: str, label: str, params: Mapping[str, Param], index: int, part: CachePart) -> Any:
        """A fresh cache for one layer. Raises MethodRefused."""
        found, variant = self._find(method, label, params)
        return found.build(LayerSpec(index=index, part=part), variant)

    def declared_bytes(
        self, method: str, label: str, params: Mapping[str, Param], part: CachePart, runs: Iterable[Run]
    ) -> int:
        """Bytes the method says it holds for one sequence after `runs`."""
        found, variant = self._find(method, label, params)
        return declared_bytes(found, variant, part, runs)

    def layer_params(
        self,
        method: str,
        label: str,
        params: Mapping[str, Param],
        parts: Mapping[int, CachePart],
        calibration: Calibration | None,
    ) -> Sequence[Mapping[str, Param]]:
        """Each packed layer's own parameters in order, () where all are alike. Raises MethodRefused."""
        found, variant = self._find(method, label, params)
        return layer_params(found, variant, parts, calibration)

    def first_slot(self, method: str, label: str, params: Mapping[str, Param], part: CachePart) -> int | None:
        """The least number of tokens with a slot that counts; None where the method does not count its slots."""
        found, variant = self._find(method, label, params)
        if not found.slots(variant, part, MAX_CONTEXT_TOKENS):
            return None
        return bisect_left(range(MAX_CONTEXT_TOKENS), 1, key=lambda tokens: found.slots(variant, part, tokens) or 0)

    def _find(self, method: str, label: str, params: Mapping[str, Param]) -> tuple[Method, Variant]:
        return self.loaded.method(method), Variant(method=method, label=label, params=params)


def load(tried: Mapping[str, str] | None = None) -> Factory:
    """Load every plugin in this process, with the fences of `registry.load`; those `tried` elsewhere as they are."""
    return Factory(load_registry(tried=tried))


def declared_bytes(method: Method, variant: Variant, part: CachePart, runs: Iterable[Run]) -> int:
    """Slots x heads x (key_bits x key_width + value_bits x value_width) / 8 + fixed bytes, for one sequence.

    Slots by the method's own count, else by the engine's rule.

    A slot of whole bytes is counted in whole bytes, so that bits with no exact binary form (4.2) cost no rounding.
    """
    calls = tuple(runs)
    counted = method.slots(variant, part, sum(tokens * count for tokens, count in calls))
    slots = kv_slots(calls, method.slot_step(variant, part)) if counted is None else counted
    bits = method.key_bits(variant, part) * part.key_width + method.value_bits(variant, part) * part.value_width
    slot_bytes = part.heads * bits / 8
    whole = round(slot_bytes)
    exact = slots * whole if math.isclose(slot_bytes, whole, rel_tol=1e-9) else math.ceil(slots * slot_bytes)
    return exact + method.fixed_bytes(variant, part)
