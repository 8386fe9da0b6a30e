"""What was measured and is used in plans; with --skipped what lies in the directory and is not used, and why."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

from veloxquant.ctl import figures
from veloxquant.ctl.arguments import count
from veloxquant.ctl.terminal import columns
from veloxquant.units import format_duration

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal
    from veloxquant.wire.answers import RecordPage

SCHEMA = "veloxquant.records/1"
_HEAD = ("ID", "METHOD", "MODEL", "CONTEXT", "DECODE", "CACHE", "CHIP", "MLX", "AGE")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The filters of a page."""
    parser.add_argument("action", nargs="?", choices=("list",), default="list", metavar="list")
    parser.add_argument("--method", metavar="LABEL", help="of this variant or method only: affine4-g64")
    parser.add_argument("--model", metavar="ID", help="of this model only")
    parser.add_argument("--skipped", action="store_true", help="also what is not used, with the reason")
    parser.add_argument("--limit", metavar="N", type=count("--limit"), help="records on a page (100)")
    parser.add_argument("--offset", metavar="N", type=count("--offset"), help="records to leave out first (0)")
    parser.add_argument("--records", metavar="DIR", help="read DIR in this process, ask no daemon")


def run(session: Session) -> int:
    """Ask and show."""
    options = session.options
    filters = {
        "method": options.method,
        "model_id": options.model,
        "skipped": options.skipped or None,
        "limit": options.limit,
        "offset": options.offset,
    }
    page = session.client.records(**{name: value for name, value in filters.items() if value is not None})
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
    try:
        at = dt.datetime.fromisoformat(created)
    except ValueError:
        return figures.UNKNOWN
    at = at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC)
    return format_duration(max(0.0, (now - at).total_seconds()))
