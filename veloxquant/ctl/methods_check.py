"""Run the conformance suite: what every cache must do, on tiny models, in this process or in several."""

from __future__ import annotations

import contextlib
import itertools
import sys
from typing import TYPE_CHECKING

from veloxquant.ctl.terminal import columns
from veloxquant.errors import InvalidParams, MethodNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from veloxquant.ctl.session import Session
    from veloxquant.measure.conformance import Architecture, Outcome
    from veloxquant.methods import Method, Variant

SCHEMA = "veloxquant.conformance/1"


def run(session: Session) -> int:
    """Check planned variants; 1 when a promise is not kept."""
    from veloxquant.methods import registry

    options = session.options
    if options.jobs == 0:
        raise InvalidParams("no process is to check anything", hint="give 1 or more", field="--jobs")
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print must not mix with our data
        from veloxquant.measure import conformance
        from veloxquant.measure.conformance import selection

        variants = selection.chosen(registry.load(), options.name, options.label)
        if not variants:
            raise MethodNotFound(
                "there is nothing to check: fp16 is the engine itself", hint="name a method that packs"
            )
        names = [options.architecture] if options.architecture else list(conformance.architectures())
        outcomes = list(_checked(session, variants, [conformance.architecture(name) for name in names]))
    return _show(session, outcomes)


def _checked(session: Session, variants: list[tuple[Method, Variant]], where: list[Architecture]) -> Iterator[Outcome]:
    """Outcome by outcome, with progress on a terminal."""
    from veloxquant.ctl.records_progress import Progress
    from veloxquant.measure import conformance

    with Progress(session.terminal, "checking", len(variants) * len(where) * len(conformance.CHECKS)) as progress:
        jobs, pairs = session.options.jobs or 1, itertools.product(variants, where)
        if jobs > 1:
            outcomes = conformance.check_in(jobs, [(*pair, one.name) for pair, one in pairs])
        else:
            subjects = (conformance.Subject(*pair, one) for pair, one in pairs)
            outcomes = itertools.chain.from_iterable(map(conformance.check, subjects))
        for done, outcome in enumerate(outcomes, 1):
            progress.at(done, f" {outcome.label} on {outcome.architecture}")
            yield outcome


def _show(session: Session, outcomes: list[Outcome]) -> int:
    from veloxquant.measure.conformance import report

    failures = report.failures(outcomes)
    if session.terminal.json:
        session.terminal.value(SCHEMA, {"failed": len(failures), "outcomes": outcomes})
        return 1 if failures else 0
    for line in columns(report.rows(outcomes)):
        session.terminal.say(line)
    session.terminal.say(f"({report.LEGEND})")
    for title, lines in (("failed", failures), ("why not", report.reasons(outcomes))):
        if lines:
            session.terminal.say()
            session.terminal.say(session.terminal.paint("bold", title))
            for line in lines:
                session.terminal.say(f"  {line}")
    return 1 if failures else 0
