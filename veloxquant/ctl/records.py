"""The benchmark directory: what was measured, and list, show, verify, export, import, merge, prune, pin and unpin.

`list` asks the daemon; the others work on the directory itself, and a running daemon sees what they change.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

from veloxquant.ctl import figures
from veloxquant.ctl.arguments import count, size
from veloxquant.ctl.records_filters import FILTERS, filter_arguments, filters
from veloxquant.ctl.terminal import columns
from veloxquant.errors import InvalidParams
from veloxquant.units import format_duration

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal
    from veloxquant.wire.answers import RecordPage

SCHEMA = "veloxquant.records/1"
_HEAD = ("ID", "METHOD", "MODEL", "CONTEXT", "DECODE", "CACHE", "CHIP", "MLX", "AGE")
ACTIONS = {
    "list": ("", (*FILTERS, "skipped", "limit", "offset")),
    "show": ("the ID of a record", ()),
    "verify": ("[a DIR, in place of the configured one]", ()),
    "export": ("[a FILE, in place of the terminal]", (*FILTERS, "csv")),
    "import": ("a FILE of JSON lines or CSV, or - for standard input", ("dry_run",)),
    "merge": ("the DIR of another benchmark directory", ("dry_run",)),
    "prune": ("", ("dry_run", "max_records", "max_bytes")),
    "pin": ("the ID of a record", ()),
    "unpin": ("the ID of a record", ()),
    "schema": ("", ()),
}
"""Action -> (what it takes, nothing when empty, in brackets when it may be left out; the flags it knows)."""
_FLAGS = sorted({flag for _, flags in ACTIONS.values() for flag in flags})


def arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, with what, and the filters."""
    parser.add_argument("action", nargs="?", choices=tuple(ACTIONS), default="list", metavar="|".join(ACTIONS))
    parser.add_argument("target", nargs="?", metavar="ID|FILE|DIR", help=_targets())
    filter_arguments(parser)
    parser.add_argument("--skipped", action="store_true", help="also what is not used, with the reason (list)")
    parser.add_argument("--limit", metavar="N", type=count("--limit"), help="records on a page (100)")
    parser.add_argument("--offset", metavar="N", type=count("--offset"), help="records to leave out first (0)")
    parser.add_argument(
        "--csv", action="store_true", help="for a spreadsheet, as for a FILE.csv, in place of JSON lines (export)"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, change nothing")
    parser.add_argument(
        "--max-records", metavar="N", type=count("--max-records"), help="in place of the setting (prune)"
    )
    parser.add_argument("--max-bytes", metavar="SIZE", type=size("--max-bytes"), help="in place of the setting (prune)")
    parser.add_argument(
        "--records", metavar="DIR", help="work on DIR in this process, ask no daemon; import and merge may create it"
    )


def _targets() -> str:
    return "; ".join(f"{action}: {takes.strip('[]')}" for action, (takes, _) in ACTIONS.items() if takes)


def run(session: Session) -> int:
    """Check that the words go together, and do it."""
    action = session.options.action
    _check(session.options)
    session.may_create_records = action in ("import", "merge")
    if action == "list":
        return _list(session)
    if action in ("export", "import", "merge"):
        from veloxquant.ctl import records_exchange

        return records_exchange.run(session)
    from veloxquant.ctl import records_upkeep

    return records_upkeep.run(session)


def _check(options: argparse.Namespace) -> None:
    takes, flags = ACTIONS[options.action]
    if (options.target is not None and not takes) or (options.target is None and takes and takes[0] != "["):
        wanted = f"takes {takes}" if takes else f"takes no {options.target!r}"
        raise InvalidParams(f"records {options.action} {wanted}", hint="veloxquantctl records --help", field="target")
    for flag in _FLAGS:
        if flag not in flags and getattr(options, flag) not in (None, False):
            name = f"--{flag.replace('_', '-')}"
            raise InvalidParams(
                f"records {options.action} takes no {name}", hint="veloxquantctl records --help", field=name
            )


def _list(session: Session) -> int:
    """Ask and show."""
    options = session.options
    asked = {"skipped": options.skipped or None, "limit": options.limit, "offset": options.offset}
    page = session.client.records(
        **filters(options, now=dt.datetime.now(tz=dt.UTC)),
        **{name: value for name, value in asked.items() if value is not None},
    )
    session.say_where()
    if session.terminal.json:
        session.terminal.value(SCHEMA, page)
    else:
        show(page, session.terminal, now=dt.datetime.now(tz=dt.UTC))
    return 0


def show(page: RecordPage, terminal: Terminal, *, now: dt.datetime) -> None:
    """The page as text; ages are counted to `now`."""
    terminal.say(f"{page.total:,} used, {page.skipped_total:,} skipped in {page.directory}")
    if page.records:
        for line in columns([_HEAD, *(_row(record, now) for record in page.records)], (3, 4, 5, 8)):
            terminal.say(line)
    left = page.total - page.offset - len(page.records)
    if left > 0 and page.records:
        terminal.say(terminal.paint("dim", f"{left:,} more: --offset {page.offset + len(page.records)}"))
    for one in page.skipped:
        terminal.say(f"{terminal.paint('yellow', 'skipped')}  {one.file}: {one.reason}")


def _row(record: Mapping[str, Any], now: dt.datetime) -> tuple[str, ...]:
    return (
        str(record["id"]),
        str(record["method"]),
        str(record["model_id"]),
        f"{record['context_length']:,}",
        figures.rate(record["throughput_tok_s"] or None),
        figures.size(record["memory_bytes"] or None),
        str(record["chip"]),
        str(record["mlx_version"]),
        _age(str(record["created_at"]), now),
    )


def _age(created: str, now: dt.datetime) -> str:
    from veloxquant.benchmarks.records import UNDATED

    try:
        at = dt.datetime.fromisoformat(created)
    except ValueError:
        return figures.UNKNOWN
    if created == UNDATED:
        return figures.UNKNOWN
    at = at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC)
    return format_duration(max(0.0, (now - at).total_seconds()))
