"""`records` export, import and merge: measurements from one directory to another."""

from __future__ import annotations

import datetime as dt
import io
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from veloxquant.benchmarks.csv_exchange import write_csv
from veloxquant.benchmarks.exchange import BadLine, read_records, write_lines
from veloxquant.benchmarks.folder import RecordFolder
from veloxquant.benchmarks.index import RECORDS
from veloxquant.benchmarks.selection import Selection
from veloxquant.benchmarks.storage import placed, write_atomically
from veloxquant.ctl.records_filters import filters
from veloxquant.ctl.records_progress import Progress
from veloxquant.ctl.records_upkeep import open_store, victim_rows, victim_value
from veloxquant.ctl.terminal import columns
from veloxquant.errors import InvalidParams
from veloxquant.units import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
    from veloxquant.benchmarks.merge_plan import Merged
    from veloxquant.benchmarks.merging import Outcome
    from veloxquant.ctl.session import Session

EXPORT = "veloxquant.records-export/1"
IMPORT = "veloxquant.records-import/1"
MERGE = "veloxquant.records-merge/1"
_OUTCOMES: tuple[Outcome, ...] = ("added", "replaced", "kept beside", "older", "same", "no room")
_MOST_SHOWN = 20


def run(session: Session) -> int:
    """Do what the action says."""
    actions = {"export": _export, "import": _import, "merge": _merge}
    return actions[session.options.action](session)


def _export(session: Session) -> int:
    options, terminal = session.options, session.terminal
    store = open_store(session)
    selection = _selection(session)
    records = [one for _, one in sorted(store.records.items()) if selection.takes(one)]
    to_terminal = options.target in (None, "-")
    if to_terminal and terminal.json:
        terminal.value(EXPORT, {"count": len(records), "records": [one.to_dict() for one in records]})
        return 0
    text = io.StringIO()
    with Progress(terminal, "exporting", len(records)) as progress:
        counted = _counting(records, progress)
        (write_csv if options.csv or _is_csv(options.target) else write_lines)(counted, text)
    if to_terminal:
        if text.getvalue():
            terminal.say(text.getvalue().removesuffix("\n"))
        return 0
    path = placed(options.target)
    if path.is_dir():
        raise InvalidParams(f"{options.target} is a folder", hint="name a file, or - for the terminal", field="target")
    try:
        write_atomically(path, text.getvalue().encode())
    except OSError as error:
        raise InvalidParams(
            f"{options.target} cannot be written: {error.strerror}", hint="choose another file", field="target"
        ) from None
    if terminal.json:
        terminal.value(EXPORT, {"count": len(records), "file": str(path), "bytes": path.stat().st_size})
    else:
        terminal.say(f"{format_count(len(records), 'record')} in {path}")
    return 0


def _selection(session: Session) -> Selection:
    """As `records list` filters."""
    from veloxquant.wire.params import RecordsParams

    asked = filters(session.options, now=dt.datetime.now(tz=dt.UTC))
    since = RecordsParams(since=asked.pop("since", None))
    return Selection(**asked, since_s=since.since_s())


def _is_csv(target: str | None) -> bool:
    """Whether the name of a file says that it is for a spreadsheet."""
    return target is not None and target.lower().endswith(".csv")


def _counting(records: list[BenchmarkRecord], progress: Progress) -> Iterator[BenchmarkRecord]:
    for number, record in enumerate(records):
        progress.at(number)
        yield record


def _import(session: Session) -> int:
    options, terminal = session.options, session.terminal
    store = open_store(session)
    good, bad = _read_file(session)
    merged = _take_in(session, store, good, "importing")
    if terminal.json:
        lines = [{"line": one.line, "reason": one.reason} for one in bad]
        terminal.value(IMPORT, {"dry_run": options.dry_run, **_counted(merged), "bad_lines": lines})
    else:
        for one in bad:
            terminal.say(f"{terminal.paint('yellow', 'refused')}  line {one.line}: {one.reason}")
        _tell(session, merged, f", {format_count(len(bad), 'line')} refused" if bad else "")
    return 1 if bad else 0


def _read_file(session: Session) -> tuple[list[BenchmarkRecord], list[BadLine]]:
    """The records of a file, and the lines that are none."""
    name = session.options.target
    good: list[BenchmarkRecord] = []
    bad: list[BadLine] = []
    with _source(name) as (stream, size), Progress(session.terminal, "reading", size) as progress:
        for seen, found in read_records(stream, named_csv=_is_csv(name)):
            progress.at(seen)
            if isinstance(found, BadLine):
                bad.append(found)
            else:
                good.append(found)
    return good, bad


def _take_in(session: Session, store: BenchmarkDatabase, records: list[BenchmarkRecord], title: str) -> Merged:
    with Progress(session.terminal, title) as progress:
        return store.merge(records, dry_run=session.options.dry_run, on_step=progress.of)


@contextmanager
def _source(name: str) -> Iterator[tuple[BinaryIO, int]]:
    """The stream to read and its size in bytes, 0 where that is not known."""
    if name == "-":
        yield sys.stdin.buffer, 0
        return
    try:
        stream = Path(name).open("rb")  # noqa: SIM115 -- closed below; only its opening may be a slip of the caller
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidParams(
            f"{name} cannot be read: {reason}", hint="name a file of JSON lines or CSV", field="target"
        ) from None
    with stream:
        yield stream, os.fstat(stream.fileno()).st_size


def _merge(session: Session) -> int:
    options, terminal = session.options, session.terminal
    source = placed(options.target)
    if not (source / RECORDS).is_dir():
        reason = f"{options.target} is no benchmark directory: there is no folder {RECORDS} in it"
        raise InvalidParams(reason, hint="name the folder that index.json lies in", field="target")
    store = open_store(session)
    if source.resolve() == store.storage_dir.resolve():
        raise InvalidParams(f"{options.target} is the directory itself", hint="name another one", field="target")
    records, skipped = _read(session, source)
    merged = _take_in(session, store, records, "merging")
    if terminal.json:
        changes = [{"id": key, "outcome": outcome} for key, outcome in merged.outcomes if outcome != "same"]
        value = {"dry_run": options.dry_run, **_counted(merged), "changes": changes, "set_aside": skipped}
        terminal.value(MERGE, value)
        return 0
    for file, reason in skipped.items():
        terminal.note(f"{file} in {source} is not used: {reason}")
    _tell(session, merged, "")
    return 0


def _read(session: Session, source: Path) -> tuple[list[BenchmarkRecord], dict[str, str]]:
    """The records of a directory that may be anybody's, and of which nothing is changed."""
    folder = RecordFolder(source / RECORDS)
    with Progress(session.terminal, "reading") as progress:
        folder.refresh(progress.of)
    return [one for _, one in sorted(folder.records.items())], folder.skipped()


def _counted(merged: Merged) -> dict[str, object]:
    counts = {name.replace(" ", "_"): merged.counts[name] for name in _OUTCOMES}
    return {**counts, "evicted": [victim_value(one) for one in merged.evicted]}


def _tell(session: Session, merged: Merged, more: str) -> None:
    """What went to make room, then how many of each outcome; what is rare only where it is."""
    terminal = session.terminal
    gone = merged.evicted
    for line in columns(victim_rows(gone[:_MOST_SHOWN])) if gone else ():
        terminal.say(f"{terminal.paint('yellow', 'evicted')}  {line}")
    if len(gone) > _MOST_SHOWN:
        terminal.say(f"evicted  and {len(gone) - _MOST_SHOWN:,} more")
    counts = merged.counts
    said = [f"{counts[name]:,} {name}" for name in _OUTCOMES if name != "no room" or counts[name]]
    said += [f"{len(gone):,} evicted to make room"] if gone else []
    terminal.say(f"{'would be: ' if session.options.dry_run else ''}{', '.join(said)}{more}")
    if counts["no room"]:
        terminal.note("what had no room would be the next to go: raise records.max_records or records.max_bytes")
