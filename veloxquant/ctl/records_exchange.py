"""`records` export, import and merge: measurements from one directory to another."""

from __future__ import annotations

import io
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from veloxquant.benchmarks.exchange import BadLine, read_lines, write_csv, write_lines
from veloxquant.benchmarks.folder import RecordFolder
from veloxquant.benchmarks.index import RECORDS
from veloxquant.benchmarks.storage import placed, write_atomically
from veloxquant.ctl.records_progress import Progress
from veloxquant.ctl.records_upkeep import open_store
from veloxquant.errors import InvalidParams

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from veloxquant.benchmarks.benchmark_db import BenchmarkRecord
    from veloxquant.benchmarks.merging import Outcome
    from veloxquant.ctl.session import Session

EXPORT = "veloxquant.records-export/1"
IMPORT = "veloxquant.records-import/1"
MERGE = "veloxquant.records-merge/1"
_OUTCOMES: tuple[Outcome, ...] = ("added", "replaced", "kept beside", "older", "same")


def run(session: Session) -> int:
    """Do what the action says."""
    actions = {"export": _export, "import": _import, "merge": _merge}
    return actions[session.options.action](session)


def _export(session: Session) -> int:
    options, terminal = session.options, session.terminal
    store = open_store(session)
    records = [one for _, one in sorted(store.records.items()) if _wanted(one, options.method, options.model)]
    if options.target == "-" and terminal.json:
        terminal.value(EXPORT, {"count": len(records), "records": [one.to_dict() for one in records]})
        return 0
    text = io.StringIO()
    with Progress(terminal, "exporting", len(records)) as progress:
        counted = _counting(records, progress)
        (write_csv if options.csv else write_lines)(counted, text)
    if options.target == "-":
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
        terminal.say(f"{len(records):,} records in {path}")
    return 0


def _wanted(record: BenchmarkRecord, method: str | None, model: str | None) -> bool:
    """As `records list` filters."""
    return method in (None, record.method) and model in (None, record.model_id)


def _counting(records: list[BenchmarkRecord], progress: Progress) -> Iterator[BenchmarkRecord]:
    for number, record in enumerate(records):
        progress.at(number)
        yield record


def _import(session: Session) -> int:
    options, terminal = session.options, session.terminal
    store = open_store(session)
    bad: list[BadLine] = []
    with _source(options.target) as (stream, size), Progress(terminal, "importing", size) as progress:

        def good() -> Iterator[BenchmarkRecord]:
            for seen, found in read_lines(stream):
                progress.at(seen)
                if isinstance(found, BadLine):
                    bad.append(found)
                else:
                    yield found

        counts = store.merge(good(), dry_run=options.dry_run)
    if terminal.json:
        lines = [{"line": one.line, "reason": one.reason} for one in bad]
        terminal.value(IMPORT, {"dry_run": options.dry_run, **_counted(counts), "bad_lines": lines})
    else:
        for one in bad:
            terminal.say(f"{terminal.paint('yellow', 'refused')}  line {one.line}: {one.reason}")
        _tell(session, counts, f", {len(bad):,} lines refused" if bad else "")
    return 1 if bad else 0


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
            f"{name} cannot be read: {reason}", hint="name a file of JSON lines", field="target"
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
    told: list[tuple[str, Outcome]] = []
    with Progress(terminal, "merging", len(records)) as progress:

        def on_placed(record: BenchmarkRecord, outcome: Outcome) -> None:
            progress.at(len(told))
            told.append((record.id, outcome))

        counts = store.merge(records, dry_run=options.dry_run, on_placed=on_placed)
    if terminal.json:
        changes = [{"id": key, "outcome": outcome} for key, outcome in told if outcome != "same"]
        value = {"dry_run": options.dry_run, **_counted(counts), "changes": changes, "set_aside": skipped}
        terminal.value(MERGE, value)
        return 0
    for file, reason in skipped.items():
        terminal.note(f"{file} in {source} is not used: {reason}")
    _tell(session, counts, "")
    return 0


def _read(session: Session, source: Path) -> tuple[list[BenchmarkRecord], dict[str, str]]:
    """The records of a directory that may be anybody's, and of which nothing is changed."""
    folder = RecordFolder(source / RECORDS)
    with Progress(session.terminal, "reading") as progress:
        folder.refresh(progress.of)
    return [one for _, one in sorted(folder.records.items())], folder.skipped()


def _counted(counts: Counter[Outcome]) -> dict[str, int]:
    return {name.replace(" ", "_"): counts[name] for name in _OUTCOMES}


def _tell(session: Session, counts: Counter[Outcome], more: str) -> None:
    said = ", ".join(f"{counts[name]:,} {name}" for name in _OUTCOMES)
    session.terminal.say(f"{'would be: ' if session.options.dry_run else ''}{said}{more}")
