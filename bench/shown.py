"""How the demo prints a machine and a plan: a few lines each, every figure with where it comes from."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from veloxquant.ctl import figures
from veloxquant.units import format_size

if TYPE_CHECKING:
    from veloxquant.planner.result import Candidate, Plan
    from veloxquant.profiles import HardwareProfile


def say(text: str = "") -> None:
    """One line, at once."""
    print(text, flush=True)


def show_hardware(machine: HardwareProfile) -> None:
    """The machine, with the source of each figure that a plan leans on."""
    size, source = machine.working_set_bytes, machine.sources.get("working_set_bytes", "")
    working = f"not known ({source})" if size is None else f"{format_size(size)} ({source})"
    total = machine.total_memory_bytes
    say(f"  chip         {machine.chip} ({machine.sources.get('chip')})")
    say(f"  memory       {'not known' if total is None else format_size(total)}")
    say(f"  GPU may use  {working}")
    say(f"  backend      {machine.backend}, mlx {machine.mlx_version}, mlx-lm {machine.mlx_lm_version}")


def show_plan(plan: Plan, title: str) -> None:
    """What was chosen, what came next, what did not fit, and the first warning and suggestion."""
    say(f"  {title}")
    for label, candidate in (("chosen", plan.chosen), ("next", plan.alternatives[0] if plan.alternatives else None)):
        if candidate is not None:
            say(f"    {label:8} {describe(candidate)}")
    short = [one for one in plan.rejected if one.short_by_bytes is not None]
    for one in short[:2]:
        say(f"    out      {one.label:14} {one.reason}, short by {format_size(one.short_by_bytes or 0)}")
    others = Counter(one.reason for one in plan.rejected if one not in short[:2])
    if others:
        say(f"    others   {', '.join(f'{reason}: {count}' for reason, count in sorted(others.items()))}")
    for note in (*plan.warnings[:2], *plan.suggestions[:1]):
        say(f"    note     {note.text}")


def describe(candidate: Candidate) -> str:
    """One line: label, bytes, room left, speed with its source, quality."""
    speed = candidate.speed.decode_tok_s
    decode = "speed not known" if speed is None else f"{figures.rate(speed)} ({candidate.speed.evidence.source})"
    return (
        f"{candidate.label:14} {format_size(candidate.memory.stored_bytes):>9} of cache, "
        f"{format_size(candidate.fit.headroom_bytes):>9} left, {decode}, KL {candidate.quality.kl_mean:.2g}"
    )
