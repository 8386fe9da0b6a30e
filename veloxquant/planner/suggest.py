"""What would work instead, each suggestion with its number. The asked context is never changed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from veloxquant.planner.decide import below_soft_floor, misses_kl, misses_latency
from veloxquant.planner.largest import fits, largest_context, most_requests
from veloxquant.planner.memory import footprint
from veloxquant.planner.quality import floor_for
from veloxquant.planner.result import Note
from veloxquant.planner.setting import LEAST_STEP
from veloxquant.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.planner.option import Option
    from veloxquant.planner.setting import Setting

_MIB = 2**20


def when_nothing_is_left(setting: Setting, every: Sequence[Option]) -> tuple[Note, ...]:
    """Ways out when no variant that can run fits and keeps within the ceilings, nearest to the request first."""
    options = [option for option in every if option.sizing.short_by]
    short = min((option.sizing.short_by for option in options), default=setting.room.short_without_caches)
    memory_bound = [option for option in options if option.sizing.short_of == "does_not_fit"]
    notes = _higher_ceilings(setting, [option for option in every if not option.sizing.short_by])
    notes += largest_contexts(setting, options) or _shorter_generation(setting, options)
    notes += _fewer_slots(setting, options) + _smaller_step(setting, options)
    if memory_bound or setting.room.short_without_caches:
        notes += _more_room(setting, short)
    return tuple(notes)


def when_quality_suffers(setting: Setting, chosen: Option, options: Sequence[Option]) -> tuple[Note, ...]:
    """The largest contexts of variants that diverge less than the chosen one, where it misses the soft floor."""
    if not below_soft_floor(chosen):
        return ()
    floor = floor_for(setting.workload)
    better = [o for o in options if o.sizing.short_by and o.quality.kl_mean <= floor]
    return tuple(largest_contexts(setting, better))


def more_slots(chosen: Option) -> tuple[Note, ...]:
    """More requests side by side that fit and give more tokens a second, for a plan that asks for throughput."""
    workload = chosen.setting.workload
    if workload.objective != "throughput" or chosen.served.slots <= workload.num_concurrent_requests:
        return ()
    found = chosen.served
    rate = "how fast is unknown" if found.tok_s is None else f"about {found.tok_s:,.4g} tokens a second in all"
    asked = f"{workload.num_concurrent_requests} were asked for"
    text = f"{chosen.label} fits {found.slots} requests side by side, {rate}; {asked}"
    value = {"label": chosen.label, "slots": found.slots, "tok_s": found.tok_s}
    return (Note(code="more_slots", text=text, value=value),)


def allowed_eviction(best: Option | None) -> tuple[Note, ...]:
    """The best of the variants that drop tokens, None where none would do."""
    if best is None or best.tokens_held is None:
        return ()
    text = (
        f"{best.label} would do if tokens may be dropped: a layer holds at most {best.tokens_held:,} of "
        f"{best.setting.workload.tokens:,} ({best.quality.kl_mean:.3g} nats a token, {best.quality.evidence.source})"
    )
    return (Note(code="allow_eviction", text=text, value=best.label),)


def largest_contexts(setting: Setting, options: Sequence[Option]) -> list[Note]:
    """The largest context of each variant at the asked slots, longest first.

    One that another variant passes by both context and divergence is nobody's way out, and is left to `fit`.
    """
    sequences = setting.workload.sequences
    at = "" if sequences == 1 else f" for each of {sequences} sequences"
    ranked = sorted(options, key=lambda option: (-option.largest_context, option.quality.kl_mean, option.label))
    least = [min((o.quality.kl_mean for o in ranked[:place]), default=math.inf) for place in range(len(ranked))]
    return [
        Note(
            code="largest_context",
            text=(
                f"{option.label} fits a context of {option.largest_context:,} tokens{at} "
                f"({option.quality.kl_mean:.3g} nats a token, {option.quality.evidence.source})"
            ),
            value={"label": option.label, "context_length": option.largest_context},
        )
        for option, before in zip(ranked, least, strict=True)
        if option.largest_context and option.quality.kl_mean < before
    ]


def _higher_ceilings(setting: Setting, fitting: Sequence[Option]) -> list[Note]:
    """The least ceiling that lets a variant in, for each ceiling that alone keeps one out."""
    workload, notes = setting.workload, []
    slow = [option for option in fitting if misses_kl(option) is None and misses_latency(option) is not None]
    rough = [option for option in fitting if misses_kl(option) is not None and misses_latency(option) is None]
    if rough:
        best = min(rough, key=lambda option: (option.quality.kl_mean, option.label))
        text = (
            f"{best.label} fits and diverges by {best.quality.kl_mean:.3g} nats a token, max_kl is {workload.max_kl:g}"
        )
        notes.append(Note(code="raise_max_kl", text=text, value=best.quality.kl_mean))
    if slow:
        least, label = min((option.decode.least, option.label) for option in slow if option.decode is not None)
        text = f"{label} fits and may take {least:.3g} ms a token, max_latency_ms is {workload.max_latency_ms:g}"
        notes.append(Note(code="raise_max_latency_ms", text=text, value=least))
    return notes


def _shorter_generation(setting: Setting, options: Sequence[Option]) -> list[Note]:
    """Where not even one prompt token fits beside what is to be generated: what fits in all, at the asked slots."""
    workload = setting.workload
    totals = [
        (largest_context(o.shape, o.measured, setting.room, 0, workload.prefill_step_size), o.label) for o in options
    ]
    most, label = max(totals, default=(0, ""))
    if not most or not workload.generation_length:
        return []
    text = f"{label} fits {most:,} tokens in all, prompt and generation; {workload.tokens:,} were asked for"
    return [Note(code="shorter_generation", text=text, value=most)]


def _fewer_slots(setting: Setting, options: Sequence[Option]) -> list[Note]:
    workload = setting.workload
    if workload.num_concurrent_requests == 1 or not options:
        return []
    counts = [(most_requests(o.shape, o.measured, setting.room, workload), o) for o in options]
    most, option = max(counts, key=lambda pair: (pair[0], -pair[1].quality.kl_mean, pair[1].label))
    if not 0 < most < workload.num_concurrent_requests:
        return []
    text = f"{option.label} fits {most} requests side by side, {workload.num_concurrent_requests} were asked for"
    return [Note(code="fewer_slots", text=text, value=most)]


def _smaller_step(setting: Setting, options: Sequence[Option]) -> list[Note]:
    """Prefill steps below the least one the planner sets by itself; prefill gets slow there."""
    if not any(_fits_at(option, 1) for option in options):
        return []
    ranked = sorted(options, key=lambda option: (option.sizing.short_by, option.label))
    for step in (32, 16, 8, 4, 2, 1):
        if step >= min(LEAST_STEP, *setting.steps):
            continue
        for option in ranked:
            if _fits_at(option, step):
                text = f"{option.label} fits with a prefill step of {step}; prefill is slow at that size"
                return [Note(code="smaller_prefill_step", text=text, value=step)]
    return []


def _fits_at(option: Option, step: int) -> bool:
    workload, room = option.setting.workload, option.setting.room
    size = footprint(option.shape, workload.context_length, workload.generation_length, step, option.measured)
    return fits(size, room, room.kv_bytes)


def _more_room(setting: Setting, short: int) -> list[Note]:
    """Weights, budget, other work and the working set: what each would have to be."""
    room, cap = setting.room, setting.request.memory_budget_bytes
    if cap is not None and cap == room.kv_bytes:
        needed = cap + short
        return [Note(code="raise_budget", text=f"caches need {format_size(needed)}", value=needed)]
    notes = []
    weights, active = room.budget.weights_bytes or 0, room.budget.active_bytes
    if weights > short:
        text = f"weights of {format_size(weights - short)} or less would leave room (now {format_size(weights)})"
        notes.append(Note(code="smaller_weights", text=text, value=weights - short))
    if active >= short:
        text = f"other work holds {format_size(active)}; freeing {format_size(short)} of it would be enough"
        notes.append(Note(code="free_memory", text=text, value=short))
    return notes + _raised_limit(setting, short)


def _raised_limit(setting: Setting, short: int) -> list[Note]:
    """A larger share of memory for the GPU, which macOS lets one set; only on Metal, and never all of it."""
    hardware, room = setting.hardware, setting.room
    total, working_set = hardware.total_memory_bytes, hardware.working_set_bytes
    if hardware.backend != "metal" or total is None or working_set is None or room.limit != working_set:
        return []
    megabytes = -(-(working_set + short) // _MIB)
    if megabytes * _MIB >= total:
        return []
    text = (
        f"a GPU working set of {megabytes:,} MiB would be enough and leaves {format_size(total - megabytes * _MIB)} "
        f"for everything else: sudo sysctl iogpu.wired_limit_mb={megabytes} (it does not survive a restart)"
    )
    return [Note(code="raise_working_set", text=text, value=megabytes)]
