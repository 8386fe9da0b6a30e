"""The arithmetic behind a plan: of its choice, or of the variant named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.ctl import last
from veloxquant.ctl.question import add_question, given_flags, question
from veloxquant.errors import InvalidParams

if TYPE_CHECKING:
    import argparse

    from veloxquant.ctl.session import Session
    from veloxquant.planner.result import Plan

SCHEMA = "veloxquant.explain/1"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Which variant, of which plan."""
    parser.add_argument("label", nargs="?", metavar="VARIANT", help="such as affine4-g64; the chosen one without it")
    parser.add_argument("--last", action="store_true", help="of the plan that was shown last")
    parser.add_argument("--plan-id", metavar="ID", help="of a plan that the daemon remembers")
    add_question(parser)


def run(session: Session) -> int:
    """Show the sentences."""
    options, client = session.options, session.client
    _one_plan(options)
    if options.plan_id is not None:
        plan_id, lines = options.plan_id, client.explain(options.plan_id, options.label)
    else:
        plan = _plan(session)
        plan_id, lines = plan.plan_id, client.explain(plan, options.label)
    if session.terminal.json:
        session.terminal.value(SCHEMA, {"plan_id": plan_id, "label": options.label, "lines": list(lines)})
    else:
        for line in lines:
            session.terminal.say(line)
    return 0


def _one_plan(options: argparse.Namespace) -> None:
    """Refuse what a plan that was made before cannot take: another plan, or a question."""
    named = [flag for flag, given in (("--last", options.last), ("--plan-id", options.plan_id is not None)) if given]
    extra = [*named[1:], *given_flags(options)]
    if named and extra:
        raise InvalidParams(
            f"{named[0]} means a plan that was made before, {extra[0]} does not go with it",
            hint="leave out one of the two",
            field=extra[0],
        )


def _plan(session: Session) -> Plan:
    options = session.options
    named = options.model is not None or options.config is not None
    if options.last:
        return last.recall()
    if not named:
        raise InvalidParams(
            "explain what?",
            hint="veloxquantctl explain --last, or explain VARIANT --model PATH --context N",
            field="--last",
        )
    plan = session.client.plan(**question(options))
    session.say_where()
    last.remember(plan)
    return plan
