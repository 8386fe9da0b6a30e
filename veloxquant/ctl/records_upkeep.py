"""`records` show, verify, prune, pin, unpin and schema: one directory looked after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant import local
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.benchmarks.eviction import Limits
from veloxquant.benchmarks.record_schema import shipped
from veloxquant.benchmarks.verify import verify
from veloxquant.ctl.records_progress import Progress
from veloxquant.ctl.terminal import columns
from veloxquant.errors import InvalidParams
from veloxquant.units import format_count, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from veloxquant.benchmarks.benchmark_db import BenchmarkRecord
    from veloxquant.benchmarks.eviction import Victim
    from veloxquant.ctl.session import Session

RECORD = "veloxquant.record/1"
VERIFY = "veloxquant.records-verify/1"
PRUNE = "veloxquant.records-prune/1"
JSON_SCHEMA = "veloxquant.record-schema/1"
PIN = "veloxquant.records-pin/1"
_MOST_SHOWN = 20


def open_store(session: Session, limits: Limits | None = None) -> BenchmarkDatabase:
    """The directory of the configuration or of --records, with the configured bounds."""
    config = session.config
    limits = limits or Limits(config.records.max_records, config.records.max_bytes)
    return BenchmarkDatabase(local.records_directory(config), limits=limits)


def run(session: Session) -> int:
    """Do what the action says."""
    return _ACTIONS[session.options.action](session)


def _show(session: Session) -> int:
    data = _found(open_store(session), session.options.target).to_dict()
    if session.terminal.json:
        session.terminal.value(RECORD, {"record": data})
        return 0
    workload = data.pop("workload")
    rows = [*data.items(), *((f"workload.{name}", value) for name, value in workload.items())]
    for line in columns([(name, _text(value)) for name, value in rows]):
        session.terminal.say(line)
    return 0


def _text(value: object) -> str:
    if value is None or value in ("", []):
        return "-"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _verify(session: Session) -> int:
    terminal = session.terminal
    named = session.options.target
    if named is not None and session.options.records is not None:
        raise InvalidParams("verify takes one directory", hint="leave --records out", field="target")
    if named is not None and not Path(named).is_dir():
        raise InvalidParams(f"{named} is no folder", hint="give the benchmark directory", field="target")
    with Progress(terminal, "reading") as progress:
        found = verify(Path(named) if named is not None else local.records_directory(session.config), progress.of)
    if terminal.json:
        terminal.value(VERIFY, found)
        return 0 if found.sound else 1
    for file, reason in found.set_aside.items():
        terminal.say(f"{terminal.paint('yellow', 'set aside')}  {file}: {reason}")
    for reason in found.index_differs[:_MOST_SHOWN]:
        terminal.say(f"{terminal.paint('yellow', 'index')}      {reason}")
    if len(found.index_differs) > _MOST_SHOWN:
        terminal.say(f"index      and {len(found.index_differs) - _MOST_SHOWN:,} more")
    if found.index_differs:
        terminal.say("           the next program that opens the directory makes the index again; no record is lost")
    for name in found.temporary:
        terminal.say(f"temporary  {name}: of a write under way, or of a writer that was killed")
    verdict = "sound" if found.sound else "not sound"
    terminal.say(
        f"{format_count(found.records, 'record')}, {format_size(found.total_bytes)} in {found.directory}: {verdict}"
    )
    return 0 if found.sound else 1


def _prune(session: Session) -> int:
    options, settings = session.options, session.config.records
    for flag, value in (("--max-records", options.max_records), ("--max-bytes", options.max_bytes)):
        if value == 0:
            raise InvalidParams(f"{flag} is 0, which would keep nothing", hint="give at least 1", field=flag)
    most = settings.max_records if options.max_records is None else options.max_records
    limits = Limits(most, settings.max_bytes if options.max_bytes is None else options.max_bytes)
    store = open_store(session, limits)
    gone = store.prune(dry_run=options.dry_run)
    left = len(store.records) - (len(gone) if options.dry_run else 0)
    freed = sum(victim.size_bytes for victim in gone)
    terminal = session.terminal
    if terminal.json:
        value = {
            "dry_run": options.dry_run,
            "evicted": [victim_value(one) for one in gone],
            "bytes": freed,
            "left": left,
        }
        terminal.value(PRUNE, {**value, "max_records": limits.max_records, "max_bytes": limits.max_bytes})
        return 0
    for line in columns(victim_rows(gone)) if gone else ():
        terminal.say(line)
    would = "would go" if options.dry_run else "are gone"
    bounds = f"at most {limits.max_records:,} and {format_size(limits.max_bytes)} are kept"
    terminal.say(f"{format_count(len(gone), 'record')}, {format_size(freed)} {would}, {left:,} stay; {bounds}")
    if left > limits.max_records:
        terminal.note("all that stay are pinned: veloxquantctl records unpin ID")
    return 0


def victim_rows(gone: Sequence[Victim]) -> list[tuple[str, ...]]:
    """What went and why, for people."""
    return [(one.record.id, one.record.method, one.record.model_id, one.record.created_at, _why(one)) for one in gone]


def victim_value(victim: Victim) -> dict[str, object]:
    """What went, as JSON."""
    by = victim.superseded_by
    return {
        "id": victim.record.id,
        "bytes": victim.size_bytes,
        "created_at": victim.record.created_at,
        "superseded_by": None if by is None else by.id,
    }


def _why(victim: Victim) -> str:
    by = victim.superseded_by
    return "the oldest" if by is None else f"superseded by {by.id}"


def _pin(session: Session) -> int:
    action, record_id = session.options.action, session.options.target
    store = open_store(session)
    if not store.pin(record_id, pinned=action == "pin"):
        _found(store, record_id)
    if session.terminal.json:
        session.terminal.value(PIN, {"id": record_id, "pinned": action == "pin"})
    else:
        session.terminal.say(f"{record_id} is {'pinned' if action == 'pin' else 'no longer pinned'}")
    return 0


def _found(store: BenchmarkDatabase, record_id: str) -> BenchmarkRecord:
    record = store.find(record_id)
    if record is None:
        import difflib

        near = difflib.get_close_matches(record_id, store.records, n=1)
        hint = f"did you mean {near[0]}?" if near else "veloxquantctl records lists them"
        raise InvalidParams(f"there is no record {record_id!r} in {store.storage_dir}", hint=hint, field="target")
    return record


def _schema(session: Session) -> int:
    import json

    if session.terminal.json:
        session.terminal.value(JSON_SCHEMA, {"json_schema": shipped()})
    else:
        session.terminal.say(json.dumps(shipped(), indent=2))
    return 0


_ACTIONS: dict[str, Callable[[Session], int]] = {
    "show": _show,
    "verify": _verify,
    "prune": _prune,
    "pin": _pin,
    "unpin": _pin,
    "schema": _schema,
}
