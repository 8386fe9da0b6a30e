"""The straight line from a question to an answer. Pure: same request and snapshot, same bytes; no I/O, no clock.

for each variant on offer: layout -> memory -> speed -> quality    (option.consider)
decide: constraints first, then the objective                       (decide.decide)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.planner import facts, suggest
from veloxquant.planner.candidate import candidate
from veloxquant.planner.decide import decide
from veloxquant.planner.option import Option, consider
from veloxquant.planner.rejection import too_large
from veloxquant.planner.result import Plan, Rejected
from veloxquant.planner.setting import set_up
from veloxquant.planner.warn import warnings, weights_do_not_fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.planner.request import PlanRequest
    from veloxquant.planner.result import Decision, Note
    from veloxquant.planner.setting import Setting
    from veloxquant.planner.snapshot import Snapshot


def plan(request: PlanRequest, snapshot: Snapshot) -> Plan:
    """The cache for this model and workload on this machine, with what else was looked at and why it was not taken.

    Raises InvalidParams when weights or memory are unknown and no memory_budget_bytes is given.
    """
    setting = set_up(request, snapshot)
    found = [consider(setting, offer) for offer in snapshot.offers]
    options = [one for one in found if isinstance(one, Option)]
    refused = [one for one in found if isinstance(one, Rejected)]
    ordered, missed = decide([option for option in options if not option.sizing.short_by])
    chosen = ordered[0] if ordered else None
    return Plan(
        plan_id=facts.plan_id(setting, snapshot),
        generation=snapshot.generation_for(request),
        source="daemon" if snapshot.source == "daemon" else "local",
        decision=_decision(setting, chosen, found),
        chosen=candidate(chosen) if chosen is not None else None,
        alternatives=tuple(candidate(option) for option in ordered[1:]),
        rejected=_rejected(snapshot, refused, options, missed),
        hardware=facts.hardware_facts(setting.hardware),
        model=facts.model_facts(setting),
        workload=facts.workload_facts(setting),
        engine=facts.engine_facts(setting),
        budget=setting.room.budget,
        warnings=_warnings(setting, chosen, options),
        suggestions=_suggestions(setting, snapshot, chosen, options),
    )


def _decision(setting: Setting, chosen: Option | None, found: Sequence[Option | Rejected]) -> Decision:
    if setting.room.short_without_caches:
        return "weights_do_not_fit"
    if chosen is None:
        return "no_fit"
    if not chosen.engine_own:
        return "quantize"
    others = [one for one in found if not (isinstance(one, Option) and one.engine_own) and _asked(one)]
    unpackable = all(isinstance(one, Rejected) and one.reason in _CANNOT_PACK for one in others)
    return "nothing_to_quantize" if others and unpackable else "keep_fp16"


_CANNOT_PACK = ("not_supported_by_engine", "width_not_divisible")


_UNTRIED = ("not_requested", "drops_tokens", "not_calibrated")
"""Whether the model could take such a variant was not looked at."""


def _asked(one: Option | Rejected) -> bool:
    return isinstance(one, Option) or one.reason not in _UNTRIED


def _rejected(
    snapshot: Snapshot, refused: list[Rejected], options: list[Option], missed: list[Rejected]
) -> tuple[Rejected, ...]:
    """Every variant that was not used, by label; fenced methods under their own name, an impostor with its origin."""
    fenced = [
        Rejected(method=one.name, params={}, label=snapshot.label_of(one), reason="quarantined", detail=one.reason)
        for one in snapshot.quarantined
    ]
    large = [too_large(option) for option in options if option.sizing.short_by]
    return tuple(
        sorted(refused + large + missed + fenced, key=lambda one: (one.label, one.reason, one.method, one.detail))
    )


def _warnings(setting: Setting, chosen: Option | None, options: Sequence[Option]) -> tuple[Note, ...]:
    notes = warnings(setting, chosen, options)
    return (weights_do_not_fit(setting), *notes) if setting.room.short_without_caches else notes


def _suggestions(
    setting: Setting, snapshot: Snapshot, chosen: Option | None, options: Sequence[Option]
) -> tuple[Note, ...]:
    if chosen is not None:
        return (*suggest.when_quality_suffers(setting, chosen, options), *suggest.more_slots(chosen))
    dropping = None if setting.workload.allow_eviction else _best_that_drops_tokens(setting, snapshot)
    return (*suggest.when_nothing_is_left(setting, options), *suggest.allowed_eviction(dropping))


def _best_that_drops_tokens(setting: Setting, snapshot: Snapshot) -> Option | None:
    """What would be chosen of the variants that drop tokens, if the request allowed them."""
    allowed = setting.allowing_eviction()
    found = [consider(allowed, offer) for offer in snapshot.offers if offer.method.drops_tokens]
    ordered, _ = decide([one for one in found if isinstance(one, Option) and not one.sizing.short_by])
    return ordered[0] if ordered else None
