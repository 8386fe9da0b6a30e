"""One variant as the plan shows it: every figure with its grounds, and what applies it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.planner.memory import whole_bytes_per_token
from veloxquant.planner.result import CACHE_CONFIG_SCHEMA, Candidate, Fit, Memory, MemoryTerm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from veloxquant.planner.memory import Term
    from veloxquant.planner.option import Option
    from veloxquant.planner.result import Speed
    from veloxquant.profiles import ModelProfile

_SKIPPED_BY_ENGINE = frozenset({"state", "composite"})
"""Kept layers that mlx-lm's own --kv-bits passes over; it raises on windows and breaks latents and donors."""

_LONGEST_TEXT = 40
"""Letters of a parameter that a term of memory repeats; `cache_config` has them all."""


def candidate(option: Option) -> Candidate:
    """Everything the plan says about one variant."""
    return Candidate(
        method=option.offer.method.name,
        params=dict(sorted(option.offer.variant.params.items())),
        label=option.label,
        layers=option.layout.layers,
        memory=_memory(option),
        fit=_fit(option),
        speed=_speed(option),
        quality=option.quality,
        cache_config=_cache_config(option),
        engine_settings=_engine_settings(option),
        tokens_held=option.tokens_held,
    )


def _memory(option: Option) -> Memory:
    size, baseline = option.sizing.footprint, option.setting.baseline_footprint
    return Memory(
        stored_bytes=size.stored,
        peak_bytes=size.peak,
        fixed_bytes=size.fixed,
        bytes_per_token=whole_bytes_per_token(option.shape, option.measured),
        fp16_bytes=baseline.stored,
        ratio=size.stored / baseline.stored if baseline.stored else 1.0,
        largest_buffer_bytes=size.largest_buffer,
        evidence=option.memory_evidence,
        terms=tuple(_term(option, term) for term in option.shape.terms),
    )


def _term(option: Option, term: Term) -> MemoryTerm:
    workload = option.setting.workload
    slots = term.slots(workload.context_length, workload.generation_length, option.sizing.step).held
    return MemoryTerm(
        layers=term.layers,
        packed=term.packed,
        kind=term.part.kind,
        heads=term.part.heads,
        key_width=term.part.key_width,
        value_width=term.part.value_width,
        key_bits=term.key_bits,
        value_bits=term.value_bits,
        slots=slots,
        fixed_bytes=term.fixed_bytes,
        params={} if term.reader is None else _own_params(option, term.reader.variant.params),
        bytes=round(term.layers * (slots * term.slot_bytes + term.fixed_bytes)),
    )


def _own_params(option: Option, params: Mapping[str, Any]) -> dict[str, Any]:
    """What these layers have in the place of, or beside, the variant's own parameters."""
    shared = option.offer.variant.params
    own = {name: value for name, value in sorted(params.items()) if name not in shared or shared[name] != value}
    return {name: value for name, value in own.items() if not isinstance(value, str) or len(value) <= _LONGEST_TEXT}


def _fit(option: Option) -> Fit:
    room, peak = option.setting.room, option.sizing.footprint.peak
    budget = room.budget
    return Fit(
        total_bytes=(budget.weights_bytes or 0) + peak + budget.active_bytes + budget.reserve_bytes,
        headroom_bytes=room.kv_bytes - peak,
        max_context_tokens=option.largest_context,
    )


def _speed(option: Option) -> Speed:
    """With the figures that the objective `throughput` orders by."""
    speed = option.speed
    if option.setting.workload.objective != "throughput":
        return speed
    noted = msgspec.structs.replace(speed.evidence, notes=(*speed.evidence.notes, _over_all_slots(option)))
    return msgspec.structs.replace(speed, evidence=noted)


def _over_all_slots(option: Option) -> str:
    found = option.served
    if not option.shape.batchable:
        return "throughput: these caches cannot be batched, so that more slots give no more tokens a second"
    if found.tok_s is None or found.sure_tok_s is None:
        return f"throughput: {found.slots} slots fit; how many tokens a second is unknown"
    least = "" if option.engine_own else f", at least {found.sure_tok_s:,.4g}"
    return f"throughput: {found.tok_s:,.4g} tokens a second over {found.slots} slots that fit{least}"


def _cache_config(option: Option) -> dict[str, Any]:
    config: dict[str, Any] = {
        "schema": CACHE_CONFIG_SCHEMA,
        "method": option.offer.method.name,
        "label": option.label,
        "params": dict(sorted(option.offer.variant.params.items())),
        "packed_layers": list(option.layout.packed_layers),
        "layer_count": len(option.setting.model.layers),
        "packed_shapes": [list(shape) for shape in _packed_shapes(option.setting.model, option.layout.packed_layers)],
        "prefill_step_size": option.sizing.step,
    }
    if option.layout.layer_params:
        config["layer_params"] = [dict(sorted(params)) for params in option.layout.layer_params]
    return config


@lru_cache(maxsize=1024)
def _packed_shapes(model: ModelProfile, packed_layers: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """(KV heads, key width, value width) of the packed layers, so that a plan is not applied to another model.

    One for all where they are alike, as in nearly every model, else one for each packed layer.
    """
    parts = [part for index in packed_layers if (part := model.layers[index].packable) is not None]
    shapes = tuple((part.heads, part.key_width, part.value_width) for part in parts)
    return shapes if len(set(shapes)) > 1 else shapes[:1]


def _engine_settings(option: Option) -> dict[str, Any] | None:
    """The stock engine's flags, where they give exactly this layout."""
    settings = option.engine_settings
    if settings is None or not option.layout.kept_reasons <= _SKIPPED_BY_ENGINE:
        return None
    return dict(sorted(settings.items())) | {"prefill_step_size": option.sizing.step}
