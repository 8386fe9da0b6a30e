"""The largest context of every variant at 1, 2, 4 and 8 requests side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.ctl import figures
from veloxquant.ctl.plan import by_shortfall, say_cut
from veloxquant.ctl.question import add_question, question
from veloxquant.ctl.terminal import columns

if TYPE_CHECKING:
    import argparse

    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal
    from veloxquant.planner.fit import FitTable


def arguments(parser: argparse.ArgumentParser) -> None:
    """The question, without a context."""
    add_question(parser, context=False)


def run(session: Session) -> int:
    """Ask and show."""
    table = session.client.fit(**question(session.options))
    session.say_where()
    if session.terminal.json:
        session.terminal.value(table.schema, table)
    else:
        show(table, session.terminal)
    return 0 if any(cell.max_context_tokens for row in table.rows for cell in row.cells) else 1


def show(table: FitTable, terminal: Terminal) -> None:
    """The table as text: tokens of context for each request."""
    room = table.budget.kv_budget_bytes
    chip = table.hardware.get("chip") or "unknown chip"
    terminal.say(terminal.paint("bold", f"{table.model['model_id']} on {chip}: {figures.size(room)} for caches"))
    if table.rows:
        slots = [cell.slots for cell in table.rows[0].cells]
        head = ("VARIANT", "BYTES/TOKEN", "KL", *(f"{n} SLOT{'S' if n > 1 else ''}" for n in slots))
        rows = [
            (
                row.label,
                f"{row.bytes_per_token:,.0f}",
                f"{row.kl_mean:.3g}",
                *(f"{cell.max_context_tokens:,}" if cell.max_context_tokens else "none" for cell in row.cells),
            )
            for row in table.rows
        ]
        for line in columns([head, *rows], range(1, len(head))):
            terminal.say(line)
    out = [f"out        {one.label}  {one.reason}: {one.detail}" for one in by_shortfall(table.rejected)]
    say_cut(out, terminal)
    if table.max_position is not None:
        terminal.say(f"made for   {table.max_position:,} positions")
    for note in table.warnings:
        terminal.say(f"{terminal.paint('yellow', 'warning')}    {note.text}")
