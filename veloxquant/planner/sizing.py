"""The prefill step that serves a variant best, and whether its caches fit at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from veloxquant.planner.largest import fits
from veloxquant.planner.memory import footprint
from veloxquant.planner.setting import aligned

if TYPE_CHECKING:
    from veloxquant.planner.memory import Footprint, Measured, Shape
    from veloxquant.planner.result import Reason
    from veloxquant.planner.setting import Setting


class Sizing(NamedTuple):
    """What a variant's caches take at its prefill step, in bytes, and by how much that is too much."""

    step: int
    """Tokens a prefill call."""
    footprint: Footprint
    least_peak: int
    """At the best prefill step: what headroom is compared by where too little is left free."""
    short_by: int = 0
    """Bytes too many, 0 when it fits."""
    short_of: Reason | None = None


class _Step(NamedTuple):
    """One prefill step that may be used, and what the caches take at it."""

    tokens: int
    size: Footprint


def choose_step(setting: Setting, held: Shape, measured: Measured | None) -> Sizing:
    """The largest prefill step that leaves a tenth free (for `balanced`), else that fits, else the one nearest to it.

    What `least_peak` (compared where no step leaves a tenth free) and the fit itself depend on is the best step, not
    the chosen one, so that more memory, which lets a larger step in, never makes a variant look worse.
    """
    workload, room = setting.workload, setting.room
    settled = aligned(setting.steps[0]) or workload.objective != "memory"
    wanted = room.roomy_bytes if workload.objective == "balanced" else room.kv_bytes
    steps: list[_Step] = []
    for tokens in setting.steps:
        size = footprint(held, workload.context_length, workload.generation_length, tokens, measured)
        if settled and fits(size, room, wanted):
            return Sizing(tokens, size, least_peak=size.peak)
        steps.append(_Step(tokens, size))
    least_peak = min(step.size.peak for step in steps)
    fitting = [step for step in steps if fits(step.size, room, room.kv_bytes)]
    if not fitting:
        return _short(setting, steps, least_peak)
    best = fitting[0] if settled else min(fitting, key=lambda step: (step.size.stored, -step.tokens))
    return Sizing(best.tokens, best.size, least_peak)


def _short(setting: Setting, steps: list[_Step], least_peak: int) -> Sizing:
    """By how much the best step misses: the budget first, then the largest buffer a device allows."""
    room = setting.room
    within = [step for step in steps if step.size.peak <= room.kv_bytes]
    if not within:
        best = min(steps, key=lambda step: step.size.peak)
        return Sizing(best.tokens, best.size, least_peak, best.size.peak - room.kv_bytes, "does_not_fit")
    best = min(within, key=lambda step: step.size.largest_buffer)
    too_many = best.size.largest_buffer - (room.max_buffer_bytes or 0)
    return Sizing(best.tokens, best.size, least_peak, too_many, "buffer_too_large")
