"""What a plan says besides its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.hardware import chips
from veloxquant.planner.decide import SLOW, below_soft_floor, is_slow, misses_latency, straddles, tied
from veloxquant.planner.largest import fits
from veloxquant.planner.memory import footprint
from veloxquant.planner.quality import floor_for
from veloxquant.planner.result import Note
from veloxquant.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from veloxquant.planner.option import Option
    from veloxquant.planner.setting import Setting

_BY_SPEED = ("latency", "throughput")


def warnings(setting: Setting, chosen: Option | None, options: Sequence[Option]) -> tuple[Note, ...]:
    """Doubts about the question, the chosen variant and the records, each once."""
    notes = [
        *setting.room.warnings,
        *about_the_source(setting),
        *_about_the_model(setting),
        *_about_the_machine(setting),
    ]
    if chosen is not None:
        notes += [*_about_quality(chosen, options), *_about_the_chosen(setting, chosen)]
    notes += [note for option in sorted(options, key=_by_label) for note in option.seen.warnings]
    return tuple({(note.code, note.text): note for note in notes}.values())


def _by_label(option: Option) -> str:
    return option.label


def about_the_source(setting: Setting) -> Iterable[Note]:
    """How what is known of the model came to be known, where that is a doubt or costs time again."""
    model = setting.model
    if model.source == "static":
        why = f" ({model.notes[0]})" if model.notes else ""
        text = f"the model was read from its config, not traced{why}: cache sizes are by rule"
        yield Note(code="model_not_traced", text=text)
    if model.unkept is not None:
        yield Note(code="trace_not_kept", text=model.unkept)
    asked, installed = setting.request.engine_version, model.engine_version
    if asked is not None and installed is not None and asked != installed:
        text = f"planned for {model.engine_name} {asked}, but the model was traced under {installed}"
        yield Note(code="engine_version_differs", text=text)


def _about_the_model(setting: Setting) -> Iterable[Note]:
    model, workload = setting.model, setting.workload
    if model.max_position is not None and workload.tokens > model.max_position:
        text = f"{workload.tokens:,} tokens are more than the {model.max_position:,} positions the model was made for"
        yield Note(code="context_beyond_model", text=text, value=model.max_position)


def _about_the_machine(setting: Setting) -> Iterable[Note]:
    chip, cores = setting.hardware.chip, setting.hardware.gpu_cores
    facts = chips.lookup(chip, cores) if chip is not None else None
    if facts is not None and cores is not None and cores != facts.gpu_cores:
        text = f"no {chip} with {cores} GPU cores is known: the speed figures are those of {facts.gpu_cores} GPU cores"
        yield Note(code="gpu_cores_not_known", text=text, value=facts.gpu_cores)
    if setting.hardware.low_power_mode:
        text = "this machine is in low power mode: figures of full power are too fast for it"
        yield Note(code="low_power_mode", text=text)


def _about_the_chosen(setting: Setting, chosen: Option) -> Iterable[Note]:
    workload, speed = setting.workload, chosen.speed
    if chosen.sizing.step < workload.prefill_step_size:
        text = (
            f"the prefill step is set to {chosen.sizing.step} ({workload.prefill_step_size} asked): at the asked step "
            f"{_at_the_asked_step(setting, chosen)}"
        )
        yield Note(code="prefill_step_reduced", text=text, value=chosen.sizing.step)
    if chosen.slowdown > SLOW:
        text = (
            f"{chosen.label} takes {chosen.slowdown:.2g} times as long for a token as the engine's own cache would at "
            f"this length ({speed.evidence.source})"
        )
        yield Note(code="slower_than_engine", text=text, value=round(chosen.slowdown, 2))
    if chosen.tokens_held is not None and chosen.tokens_held < workload.tokens:
        text = (
            f"{chosen.label} drops tokens: a layer holds at most {chosen.tokens_held:,} of {workload.tokens:,}, and "
            "what is gone may be asked for"
        )
        yield Note(code="drops_tokens", text=text, value=chosen.tokens_held)
    if straddles(chosen):
        text = f"the estimate {speed.low:.3g} to {speed.high:.3g} ms a token straddles max_latency_ms"
        yield Note(code="latency_straddles_ceiling", text=text, value=speed.high)
    if workload.max_latency_ms is not None and speed.latency_ms_per_token is None:
        yield Note(code="latency_unknown", text=f"max_latency_ms cannot be judged: {'; '.join(speed.evidence.notes)}")
    elif workload.objective in _BY_SPEED and speed.latency_ms_per_token is None:
        text = f"{workload.objective} cannot be judged in time: {'; '.join(speed.evidence.notes)}"
        yield Note(code="speed_unknown", text=text)
    if not chosen.layout.proven:
        text = f"{chosen.label} was not tried on this model: no trace proves that the engine accepts it"
        yield Note(code="not_proven_by_trace", text=text)


def _about_quality(chosen: Option, options: Sequence[Option]) -> Iterable[Note]:
    workload, quality = chosen.setting.workload, chosen.quality
    fine_but_slow = any(is_slow(o) and not o.sizing.short_by and not below_soft_floor(o) for o in options)
    quick = " and is quick enough" if workload.max_latency_ms is not None or fine_but_slow else ""
    if below_soft_floor(chosen):
        text = (
            f"{chosen.label} diverges by {quality.kl_mean:.3g} nats a token ({quality.evidence.source}, "
            f"{quality.low:.3g} to {quality.high:.3g}); up to {floor_for(workload):g} passes without a warning at this "
            f"context, and no variant that fits{quick} keeps within it{_finest_passed_over(chosen, options)}"
        )
        yield Note(code="quality_below_soft_floor", text=text, value=quality.kl_mean)
    if workload.max_kl is not None and quality.high > workload.max_kl:
        text = f"the estimate {quality.low:.3g} to {quality.high:.3g} nats reaches beyond max_kl {workload.max_kl:g}"
        yield Note(code="quality_straddles_ceiling", text=text, value=quality.high)


def _finest_passed_over(chosen: Option, options: Sequence[Option]) -> str:
    """The variant that diverges least of those that could have been chosen, and why it was not; empty for none."""
    finer = [
        option
        for option in options
        if not option.sizing.short_by
        and option.quality.kl_mean < chosen.quality.kl_mean
        and misses_latency(option) is None
    ]
    if not finer:
        return ""
    finest = min(finer, key=lambda option: (option.quality.kl_mean, option.label))
    objective = chosen.setting.workload.objective
    if tied(finest, chosen):
        why = f"counts as equal under {objective}, where the fewer bytes are taken"
    elif is_slow(finest) and not is_slow(chosen):
        why = f"takes {finest.slowdown:.2g} times as long for a token as the engine's own cache"
    elif objective == "balanced":
        why = "leaves less than a tenth of the working set free" if chosen.roomy else "leaves less memory free"
    else:
        why = f"stands behind it under {objective}"
    return f"; {finest.label} ({finest.quality.kl_mean:.3g}) fits too and {why}"


def _at_the_asked_step(setting: Setting, chosen: Option) -> str:
    """What the asked prefill step would have meant: not fitting, too little left free, or more bytes stored."""
    room, workload = setting.room, setting.workload
    lengths = workload.context_length, workload.generation_length
    asked = footprint(chosen.shape, *lengths, workload.prefill_step_size, chosen.measured)
    if asked.peak > room.kv_bytes:
        return "the peak takes more memory than there is to spare"
    if not fits(asked, room, room.kv_bytes):
        allowed = format_size(room.max_buffer_bytes or 0)
        return f"one buffer takes {format_size(asked.largest_buffer)}, the device allows {allowed}"
    if workload.objective == "memory":
        return f"the caches store {format_size(asked.stored - chosen.sizing.footprint.stored)} more"
    held = room.budget
    used = (held.weights_bytes or 0) + held.active_bytes + held.reserve_bytes + asked.peak
    return f"it fits too, but takes {format_size(used)} of {format_size(room.limit or 0)}: less than a tenth stays free"


def weights_do_not_fit(setting: Setting) -> Note:
    """The shortfall of a model whose weights alone are too much."""
    room = setting.room
    weights, active = room.budget.weights_bytes or 0, room.budget.active_bytes
    text = (
        f"weights of {format_size(weights)} with {format_size(room.budget.reserve_bytes)} kept in reserve and "
        f"{format_size(active)} held by other work exceed {format_size(room.limit or 0)} by "
        f"{format_size(room.short_without_caches)}: no cache choice helps"
    )
    return Note(code="weights_do_not_fit", text=text, value=room.short_without_caches)
