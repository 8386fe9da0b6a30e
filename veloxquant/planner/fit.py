"""The largest context of every variant at 1, 2, 4 and 8 slots: by memory alone, at the best prefill step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.planner import facts
from veloxquant.planner.memory import whole_bytes_per_token
from veloxquant.planner.option import Option, consider
from veloxquant.planner.result import Budget, Note, Rejected
from veloxquant.planner.setting import set_up
from veloxquant.planner.warn import about_the_source, weights_do_not_fit

if TYPE_CHECKING:
    from veloxquant.planner.request import PlanRequest
    from veloxquant.planner.snapshot import Snapshot

SCHEMA = "veloxquant.fit/1"
SLOTS = (1, 2, 4, 8)


class FitCell(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of context that each of `slots` requests can have; 0 when not even one token fits."""

    slots: int
    max_context_tokens: int


class FitRow(msgspec.Struct, frozen=True, kw_only=True):
    """One variant that can run on the model."""

    method: str
    params: Mapping[str, Any]
    label: str
    bytes_per_token: int
    kl_mean: float
    cells: tuple[FitCell, ...]


class FitTable(msgspec.Struct, frozen=True, kw_only=True):
    """One row for each variant, by label, the engine's own caches first; `max_position` is what the model states."""

    schema: str = SCHEMA
    generation: int
    source: str
    rows: tuple[FitRow, ...]
    rejected: tuple[Rejected, ...]
    hardware: Mapping[str, Any]
    model: Mapping[str, Any]
    workload: Mapping[str, Any]
    engine: Mapping[str, Any]
    budget: Budget
    max_position: int | None = None
    warnings: tuple[Note, ...] = ()


def fit(request: PlanRequest, snapshot: Snapshot) -> FitTable:
    """What fits, whatever the context that the request states. Raises what `plan` raises."""
    setting = set_up(request, snapshot)
    found = [consider(setting, offer) for offer in snapshot.offers]
    options = [one for one in found if isinstance(one, Option)]
    refused = [one for one in found if isinstance(one, Rejected)]
    options.sort(key=lambda option: (not option.engine_own, option.label))
    weights = (weights_do_not_fit(setting),) if setting.room.short_without_caches else ()
    return FitTable(
        generation=snapshot.generation_for(request),
        source=snapshot.source,
        rows=tuple(_row(option) for option in options),
        rejected=tuple(sorted(refused, key=lambda one: one.label)),
        hardware=facts.hardware_facts(setting.hardware),
        model=facts.model_facts(setting),
        workload=facts.workload_facts(setting),
        engine=facts.engine_facts(setting),
        budget=setting.room.budget,
        max_position=setting.model.max_position,
        warnings=(*weights, *setting.room.warnings, *about_the_source(setting)),
    )


def _row(option: Option) -> FitRow:
    return FitRow(
        method=option.offer.method.name,
        params=dict(sorted(option.offer.variant.params.items())),
        label=option.label,
        bytes_per_token=whole_bytes_per_token(option.shape, option.measured),
        kl_mean=option.quality.kl_mean,
        cells=tuple(FitCell(slots=slots, max_context_tokens=option.largest_context_of(slots)) for slots in SLOTS),
    )
