"""What caches may take on this machine, before any variant is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from veloxquant.errors import InvalidParams
from veloxquant.planner.result import Budget, Note
from veloxquant.units import format_size

if TYPE_CHECKING:
    from veloxquant.planner.request import PlanRequest
    from veloxquant.profiles import HardwareProfile

FREE_SHARE = 0.1
"""Share of the working set that `balanced` wants left free."""


@dataclass(frozen=True)
class Room:
    """Bytes for caches. `limit` is the smaller of working set and total memory, None when neither is known."""

    budget: Budget
    kv_bytes: int
    """What caches may take, caps included; negative when the rest alone is too much."""
    roomy_bytes: int
    """What caches may take and leave a tenth of the limit free."""
    limit: int | None
    max_buffer_bytes: int | None
    warnings: tuple[Note, ...]

    @property
    def short_without_caches(self) -> int:
        """Bytes by which weights, reserve and other work exceed the limit; 0 when they fit."""
        if self.limit is None:
            return 0
        held = (self.budget.weights_bytes or 0) + self.budget.active_bytes + self.budget.reserve_bytes
        return max(0, held - self.limit)


def room(request: PlanRequest, hardware: HardwareProfile, reserve_bytes: int) -> Room:
    """Bytes for caches: min(working set, total memory) - weights - active - reserve, capped by memory_budget_bytes.

    Raises InvalidParams when no budget can be stated: weights or memory unknown and no memory_budget_bytes given. A
    plan that left the weights out would promise memory that is not there.
    """
    cap, weights = request.memory_budget_bytes, request.model.weights_bytes
    known = [size for size in (hardware.working_set_bytes, hardware.total_memory_bytes) if size is not None]
    limit = min(known) if known else None
    if cap is None:
        _require(request, limit)
    active = hardware.active_bytes or 0
    free = None if limit is None else limit - (weights or 0) - active - reserve_bytes
    kv = min(size for size in (free, cap) if size is not None)
    roomy = kv if limit is None or free is None else min(kv, free - round(FREE_SHARE * limit))
    budget = Budget(
        working_set_bytes=hardware.working_set_bytes,
        weights_bytes=weights,
        active_bytes=active,
        reserve_bytes=reserve_bytes,
        kv_budget_bytes=kv,
    )
    return Room(budget, kv, roomy, limit, hardware.max_buffer_bytes, tuple(_warnings(request, hardware, limit)))


def _require(request: PlanRequest, limit: int | None) -> None:
    if request.model.weights_bytes is None:
        why = f" ({request.model.weights_source})" if request.model.weights_source else ""
        raise InvalidParams(
            f"the weight bytes of {request.model.model_id} are unknown{why}, so what is left for caches is unknown too",
            hint="give weights_bytes with the model, or memory_budget_bytes for caches alone",
            field="model.weights_bytes",
        )
    if limit is None:
        raise InvalidParams(
            "neither the GPU working set nor the total memory of this machine is known",
            hint="give hardware.working_set_bytes or hardware.total_memory_bytes, or memory_budget_bytes",
            field="hardware.total_memory_bytes",
        )


def _warnings(request: PlanRequest, hardware: HardwareProfile, limit: int | None) -> list[Note]:
    notes = []
    if request.model.weights_bytes is None:
        text = "weight bytes are unknown: only memory_budget_bytes was held against the caches"
        notes.append(Note(code="weights_unknown", text=text))
    if limit is None:
        text = "working set and total memory are unknown: only memory_budget_bytes was held against the caches"
        notes.append(Note(code="memory_unknown", text=text))
    elif hardware.working_set_bytes is None and hardware.backend != "cpu":
        why = hardware.sources.get("working_set_bytes", "not reported")
        text = f"the GPU working set is unknown ({why}): planned with the total memory of {format_size(limit)}"
        notes.append(Note(code="working_set_unknown", text=text))
    if hardware.active_bytes is None:
        why = hardware.sources.get("active_bytes", "not reported")
        text = f"memory held by other work is unknown ({why}): taken as 0"
        notes.append(Note(code="active_unknown", text=text))
    return notes
