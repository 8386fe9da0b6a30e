"""Which KV cache for a model and a workload: the choice, what else would do, what would not and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.ctl import figures, last, layers
from veloxquant.ctl.question import add_question, question
from veloxquant.ctl.terminal import columns
from veloxquant.units import format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal
    from veloxquant.planner.result import Candidate, Plan, Rejected

_SHOWN = 5
_RIGHT = (2, 3, 4, 5, 6, 7)
_HEAD = ("", "VARIANT", "CACHE", "PEAK", "LEFT", "DECODE", "KL", "CONTEXT TO")

_VERDICTS = {
    "keep_fp16": "keep the engine's own cache",
    "quantize": "quantize",
    "nothing_to_quantize": "nothing to quantize, no method can pack a layer of this model",
    "no_fit": "nothing fits",
    "weights_do_not_fit": "the weights alone do not fit",
}
NO = ("no_fit", "weights_do_not_fit")
"""Decisions that are a no: exit code 1."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The question, and how much of the answer to show."""
    add_question(parser)
    parser.add_argument("--all", action="store_true", help="show every variant, not the first few")


def run(session: Session) -> int:
    """Ask, show, remember for `explain --last`."""
    plan = session.client.plan(**question(session.options))
    session.say_where()
    last.remember(plan)
    if session.terminal.json:
        session.terminal.value(plan.schema, plan)
    else:
        show(plan, session.terminal, limit=None if session.options.all else _SHOWN)
    return 1 if plan.decision in NO else 0


def show(plan: Plan, terminal: Terminal, *, limit: int | None = _SHOWN) -> None:
    """The plan as text."""
    terminal.say(terminal.paint("bold", f"{_VERDICTS[plan.decision]}{_chosen(plan)}"))
    terminal.say(_about(plan))
    candidates = [*filter(None, [plan.chosen]), *plan.alternatives]
    for line in layers.lines(plan):
        terminal.say(line)
    terminal.say(_room(plan))
    if candidates:
        terminal.say()
        for line in columns([_HEAD, *_rows(plan, candidates[:limit])], _RIGHT):
            terminal.say(line)
        _more(terminal, len(candidates), limit)
    if plan.rejected:
        terminal.say()
        _rejected(plan, terminal, limit)
    _notes(plan, terminal)
    if plan.chosen is not None:
        terminal.say(f"from       {figures.evidence(plan.chosen)}")
    terminal.say(terminal.paint("dim", "details    veloxquantctl explain --last"))


def say_cut(lines: Sequence[str], terminal: Terminal) -> None:
    """Lines that end in a free text, each kept to one line of the terminal; says so when something was cut."""
    shown = [terminal.cut(line) for line in lines]
    for line in shown:
        terminal.say(line)
    if shown != list(lines):
        terminal.say(terminal.paint("dim", "        lines are cut to this terminal's width: --json has them whole"))


def by_shortfall(rejected: Sequence[Rejected]) -> list[Rejected]:
    """What is only too large first, the least short first; then the rest as the plan has it, the unasked ones last."""
    return sorted(
        rejected, key=lambda one: (one.short_by_bytes is None, one.short_by_bytes or 0, one.reason == "not_requested")
    )


def _chosen(plan: Plan) -> str:
    return "" if plan.chosen is None else f": {plan.chosen.label}"


def _about(plan: Plan) -> str:
    """The question in one line."""
    work, model = plan.workload, plan.model
    sequences = work["batch_size"] * work["num_concurrent_requests"]
    lengths = f"{work['context_length']:,} + {work['generation_length']:,} tokens"
    several = f", {sequences:,} sequences" if sequences > 1 else ""
    chip = plan.hardware.get("chip") or "unknown chip"
    return f"asked      {model['model_id']}, {lengths}{several}, {work['objective']}, {chip}"


def _room(plan: Plan) -> str:
    """The arithmetic of what caches may take."""
    budget = plan.budget
    room = budget.kv_budget_bytes
    if room is None:
        return "room       not known"
    limits = {"working set": budget.working_set_bytes, "memory": plan.hardware.get("total_memory_bytes")}
    known = [(size, name) for name, size in limits.items() if size is not None]
    limit, name = min(known, default=(None, "memory"))
    if limit is None or budget.weights_bytes is None:
        return f"room       {format_size(room)} for caches, as the budget says"
    parts = [f"{format_size(limit)} {name}", f"{format_size(budget.weights_bytes)} weights"]
    parts += [f"{format_size(budget.active_bytes)} other work", f"{format_size(budget.reserve_bytes)} reserve"]
    left = limit - budget.weights_bytes - budget.active_bytes - budget.reserve_bytes
    cap = f", capped at {format_size(room)} by the budget" if room < left else ""
    shown = f"{format_size(left)} for caches" if left >= 0 else f"none for caches, short by {format_size(-left)}"
    return f"room       {shown} ({' - '.join(parts)}){cap}"


def _rows(plan: Plan, candidates: Sequence[Candidate]) -> list[tuple[str, ...]]:
    names = ["chosen" if plan.chosen is not None else "next", *["next"] * len(candidates)]
    return [
        (
            name,
            one.label,
            format_size(one.memory.stored_bytes),
            format_size(one.memory.peak_bytes),
            format_size(one.fit.headroom_bytes),
            figures.rate(one.speed.decode_tok_s),
            f"{one.quality.kl_mean:.3g}",
            f"{one.fit.max_context_tokens:,}",
        )
        for name, one in zip(names, candidates, strict=False)
    ]


def _out(one: Rejected) -> tuple[str, ...]:
    short = "" if one.short_by_bytes is None else f"over by {format_size(one.short_by_bytes)}"
    return ("out   ", one.label, short, f"{one.reason}: {one.detail}")


def _rejected(plan: Plan, terminal: Terminal, limit: int | None) -> None:
    say_cut(columns([_out(one) for one in by_shortfall(plan.rejected)[:limit]], (2,)), terminal)
    _more(terminal, len(plan.rejected), limit)


def _more(terminal: Terminal, count: int, limit: int | None) -> None:
    if limit is not None and count > limit:
        terminal.say(terminal.paint("dim", f"        {count - limit} more: --all shows them"))


def _notes(plan: Plan, terminal: Terminal) -> None:
    said = " ".join(note.text for note in plan.warnings)
    about_the_model = [text for text in plan.model.get("notes", ()) if text not in said]
    if plan.warnings or plan.suggestions or about_the_model:
        terminal.say()
    for note in plan.warnings:
        terminal.say(f"{terminal.paint('yellow', 'warning')}    {note.text}")
    for text in about_the_model:
        terminal.say(f"note       {text}")
    for note in plan.suggestions:
        terminal.say(f"{terminal.paint('green', 'instead')}    {note.text}")
