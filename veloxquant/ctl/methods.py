"""Which methods are ready, with their variants, and which are quarantined and why; a check of what they build."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.ctl.terminal import columns
from veloxquant.errors import InvalidParams

if TYPE_CHECKING:
    import argparse

    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal
    from veloxquant.wire.answers import MethodRow

SCHEMA = "veloxquant.methods/1"
_HEAD = ("NAME", "VARIANTS", "SOURCE", "STATE", "NOTE")


def arguments(parser: argparse.ArgumentParser) -> None:
    """All of them, or one."""
    actions = ("list", "show", "check")
    parser.add_argument("action", nargs="?", choices=actions, default="list", metavar="|".join(actions))
    parser.add_argument("name", nargs="?", metavar="NAME", help="the method to show or to check; check takes all, too")
    parser.add_argument("--variant", dest="label", metavar="LABEL", help="the only variant to check")
    parser.add_argument("--architecture", metavar="NAME", help="the only tiny model to check on, such as llama")


def run(session: Session) -> int:
    """List, show or check."""
    options = session.options
    if options.action == "check":
        from veloxquant.ctl import methods_check

        return methods_check.run(session)
    for flag, given in (("variant", options.label), ("architecture", options.architecture)):
        if given is not None:
            raise InvalidParams(
                f"--{flag} is for check", hint=f"veloxquantctl methods check --{flag} ...", field=f"--{flag}"
            )
    if (options.action == "show") != (options.name is not None):
        raise InvalidParams(
            "show takes the name of a method, list takes none", hint="veloxquantctl methods show affine", field="name"
        )
    found = session.client.methods(options.name)
    session.say_where()
    if session.terminal.json:
        session.terminal.value(SCHEMA, found)
    elif options.action == "show":
        for row in found.methods:
            show(row, session.terminal)
    else:
        for line in columns([_HEAD, *(_row(row) for row in found.methods)], (1,)):
            session.terminal.say(line)
    return 0


def show(row: MethodRow, terminal: Terminal) -> None:
    """Everything known about one method."""
    terminal.say(terminal.paint("bold", f"{row.name}  {row.state}"))
    traits = (
        (row.batchable, "can be batched", "cannot be batched"),
        (row.trimmable, "can be trimmed", "cannot be trimmed"),
        (row.drops_tokens, "drops tokens", "drops no tokens"),
    )
    facts = {
        "summary": row.summary,
        "reason": row.reason,
        "source": row.source,
        "version": row.version,
        "paper": row.paper,
        "traits": ", ".join(yes if value else no for value, yes, no in traits if value is not None),
    }
    for name, value in facts.items():
        if value:
            terminal.say(f"{name:<10} {value}")
    for variant in row.variants:
        params = ", ".join(f"{key} {value}" for key, value in variant["params"].items())
        terminal.say(f"{'variant':<10} {variant['label']}{f'  ({params})' if params else ''}")


def _row(row: MethodRow) -> tuple[str, ...]:
    variants = f"{len(row.variants):,}" if row.variants else "-"
    return (row.name, variants, row.source or "-", row.state, row.reason or row.summary)
