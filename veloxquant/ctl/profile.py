"""Run a real model with a method's caches: what they hold, how long each layer and each token takes, what is written.

Each method generates twice, greedily: with profiled caches, for bytes and times per layer, and without, for speed.
The engine's own 16-bit cache (fp16) always runs too, as what the others are compared with.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from veloxquant.ctl import profile_input
from veloxquant.ctl.arguments import count
from veloxquant.errors import VeloxError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
    from veloxquant.ctl.session import Session
    from veloxquant.measure.comparison import Comparison
    from veloxquant.measure.measurement import Subject
    from veloxquant.profiles import ModelProfile

_MAX_TOKENS = 100


def arguments(parser: argparse.ArgumentParser) -> None:
    """Model, methods, prompt, and what to do with what was measured."""
    parser.add_argument("--model", metavar="PATH|ID", required=True, help="a model folder, or an id of the hub cache")
    parser.add_argument(
        "--method",
        metavar="NAME",
        nargs="+",
        action="extend",
        default=[],
        help="methods (with their defaults) or variants such as affine4-g64; none: what the plan chooses",
    )
    parser.add_argument("--plan", action="store_true", help="also what the planner chooses (--timeout is its limit)")
    prompt = parser.add_argument_group("prompt (one of --prompt and --prompt-file)")
    prompt.add_argument("--prompt", metavar="TEXT", help="what the model continues, as one message of a chat")
    prompt.add_argument("--prompt-file", metavar="FILE", help="the same from a UTF-8 file, or - for standard input")
    prompt.add_argument("--ignore-chat-template", action="store_true", help="give the prompt to the model as it is")
    prompt.add_argument(
        "--max-tokens", metavar="N", type=count("--max-tokens"), default=_MAX_TOKENS, help="to write (100)"
    )
    prompt.add_argument("--prefill-step", metavar="N", type=count("--prefill-step"), help="tokens in one call (2048)")
    result = parser.add_argument_group("result")
    result.add_argument("--record", action="store_true", help="write the figures to the benchmark directory")
    result.add_argument("--records", metavar="DIR", help="the benchmark directory to plan from and to write to")
    result.add_argument("--html", metavar="FILE", help="write a page with plots (needs veloxquant[report])")


def run(session: Session) -> int:
    """Everything that can be refused is, before the weights are read; 1 when a method or a file failed."""
    session.may_create_records = session.options.record
    page = _page(session.options.html)
    asked = profile_input.read(session)
    store = _store(session)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print must not mix with our data
        found, described = _measure(session, asked)
    return _finish(session, asked, found, described, store, page)


def _page(named: str | None) -> Path | None:
    if named is None:
        return None
    from veloxquant.ctl import profile_html

    return profile_html.check(named)


def _store(session: Session) -> BenchmarkDatabase | None:
    if not session.options.record:
        return None
    from veloxquant.ctl.records_upkeep import open_store
    from veloxquant.measure import record

    store = open_store(session)
    record.make_ready(store)
    return store


def _measure(session: Session, asked: profile_input.Asked) -> tuple[Comparison, ModelProfile]:
    from veloxquant.ctl.records_progress import Progress
    from veloxquant.measure import comparison, loading, record

    model = loading.load_model(asked.source)
    subjects = profile_input.subjects(asked, model)
    total = len(subjects) * 2 * (len(asked.prompt) + asked.max_tokens)
    with Progress(session.terminal, "profiling", total) as progress:

        def watch(subject: Subject, done: int) -> None:
            progress.at(done, f" {subject.label}")

        found = comparison.compare(
            model, asked.tokenizer, asked.prompt, subjects, max_tokens=asked.max_tokens, watch=watch
        )
    return found, record.describe(asked.source, model)


def _finish(  # noqa: PLR0917 -- what was asked, what was found, where it goes
    session: Session,
    asked: profile_input.Asked,
    found: Comparison,
    described: ModelProfile,
    store: BenchmarkDatabase | None,
    page: Path | None,
) -> int:
    from veloxquant.ctl import profile_html, profile_notes, profile_show
    from veloxquant.ctl.profile_result import Profile

    problems: list[VeloxError] = []
    records = () if store is None else tuple(_recorded(store, described, found, problems))
    result = Profile.of(asked, found, described, records=records)
    if page is not None:
        with _noting(problems):
            profile_html.write(result, page)
    if session.terminal.json:
        more = {"notes": profile_notes.notes(result), "problems": [_told(one) for one in problems]}
        session.terminal.value(result.schema, {**result.as_json(), **more})
    else:
        profile_show.show(result, session.terminal, page)
        for problem in problems:
            session.terminal.complain(problem)
    return 1 if problems or found.failures else 0


def _recorded(
    store: BenchmarkDatabase, described: ModelProfile, found: Comparison, problems: list[VeloxError]
) -> Iterator[str]:
    """The ids of the records, each written by itself: one that is refused keeps no other from the disk."""
    from veloxquant.measure import record

    for one in found.runs:
        with _noting(problems, f"{one.label} is not recorded: "):
            yield record.publish(store, described, found, one).id


@contextlib.contextmanager
def _noting(problems: list[VeloxError], what: str = "") -> Iterator[None]:
    """What was measured took long: that it cannot be written somewhere must not keep it from being shown."""
    try:
        yield
    except VeloxError as error:
        problems.append(type(error)(f"{what}{error.message}", hint=error.hint, field=error.field))


def _told(error: VeloxError) -> dict[str, str]:
    return {"name": error.name, "message": error.message, "hint": error.hint}
