"""How the daemon is: what it plans with, whom it serves, and what a person should look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.ctl import figures
from veloxquant.errors import InvalidParams
from veloxquant.units import format_duration, format_size, parse_seconds

if TYPE_CHECKING:
    import argparse

    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal
    from veloxquant.profiles import HardwareProfile
    from veloxquant.wire.answers import Status


INTERVAL_S = 2.0
_LEAST_S = 0.1


def arguments(parser: argparse.ArgumentParser) -> None:
    """Once, or for as long as one looks."""
    parser.add_argument("--watch", action="store_true", help="go on: drawn in place, or one JSON object a line")
    parser.add_argument(
        "--interval", metavar="TIME", help=f"with --watch, how often ({INTERVAL_S:g}s); changes at once"
    )


def run(session: Session) -> int:
    """Ask and show. Raises NotRunning (exit 3), NotAnswering (exit 4)."""
    if session.options.watch:
        from veloxquant.ctl.status_watch import watch

        return watch(session, _interval_s(session.options.interval))
    if session.options.interval is not None:
        raise InvalidParams("--interval goes with --watch", hint="add --watch", field="--interval")
    status = session.client.status()
    if session.terminal.json:
        session.terminal.value(status.schema, status)
    else:
        show(status, session.terminal)
    return 0


def show(status: Status, terminal: Terminal) -> None:
    """A dense block, a subject a line, then what is to be looked at."""
    for line in (*subjects(status, terminal), *warnings(status, terminal)):
        terminal.say(line)


def subjects(status: Status, terminal: Terminal) -> list[str]:
    """A line on the daemon as a whole, and one on each part of it."""
    up = format_duration(status.uptime_s)
    head = f"veloxquant {status.version}  {terminal.paint('green', 'running')}  pid {status.pid}  up {up}"
    parts = {
        "machine": _machine(status.hardware),
        "methods": _methods(status),
        "records": _records(status),
        "clients": _clients(status),
        "traces": _traces(status),
        "process": _process(status),
        "socket": status.socket,
        "log": status.log_file or "none",
    }
    lines = [f"{part:<9} {text}" for part, text in parts.items()]
    return [f"{head}  protocol {status.protocol}  generation {status.generation}", *lines]


def warnings(status: Status, terminal: Terminal) -> list[str]:
    """A line on each thing that a person should look at."""
    return [terminal.warning(text) for text in status.warnings]


def _interval_s(text: str | None) -> float:
    """Seconds between two looks. Raises InvalidParams."""
    seconds = INTERVAL_S if text is None else parse_seconds(text, field="--interval")
    if seconds < _LEAST_S:
        raise InvalidParams(f"--interval is {text!r}", hint=f"at least {_LEAST_S:g}s", field="--interval")
    return seconds


def _machine(machine: HardwareProfile) -> str:
    total, room = machine.total_memory_bytes, machine.working_set_bytes
    parts = [
        machine.chip or "unknown chip",
        f"{machine.gpu_cores} GPU cores" if machine.gpu_cores else "",
        f"{format_size(total)} of memory" if total else "",
        f"{format_size(room)} for the GPU" if room else "",
        f"{machine.backend or 'no'} backend",
        f"MLX {machine.mlx_version}" if machine.mlx_version else "no MLX",
        f"mlx-lm {machine.mlx_lm_version}" if machine.mlx_lm_version else "no mlx-lm",
        f"{machine.os_name} {machine.os_version}" if machine.os_name and machine.os_version else "",
    ]
    return ", ".join(part for part in parts if part)


def _methods(status: Status) -> str:
    fenced = [f"{name}: {reason}" for name, reason in status.methods.quarantined.items()]
    listed = f" ({'; '.join(fenced)})" if fenced else ""
    return f"{status.methods.ready} ready, {len(fenced)} quarantined{listed}"


def _records(status: Status) -> str:
    records = status.records
    how = {"native": "watching natively", "scan only": "scanning only", "off": "not watching"}
    watching = how.get(records.watcher, records.watcher)
    scanned = f"last scan {format_duration(records.scan_age_s)} ago"
    age = records.newest_age_s
    newest = f" (newest {_age(age)})" if age is not None else ""
    return f"{records.used:,} used{newest}, {records.skipped:,} skipped in {records.directory}; {watching}, {scanned}"


def _age(seconds: float) -> str:
    return f"{format_duration(seconds)} ago" if seconds >= 0 else f"dated {format_duration(-seconds)} ahead"


def _clients(status: Status) -> str:
    clients, requests = status.clients, status.requests
    refused = f", {clients.refused:,} refused" if clients.refused else ""
    errors = sum(requests.errors.values())
    named = ", ".join(f"{count:,} {name}" for name, count in sorted(requests.errors.items()))
    plans = requests.by_method.get("plan", 0)
    text = f"{clients.now:,} now, {clients.peak:,} peak{refused}; "
    text += f"{requests.total:,} calls, {plans:,} plans, {errors:,} errors"
    text += f" ({named})" if named else ""
    text += f", {requests.slow:,} slow" if requests.slow else ""
    if requests.p50_ms is not None and requests.p99_ms is not None:
        text += f"; p50 {figures.milliseconds(requests.p50_ms)}, p99 {figures.milliseconds(requests.p99_ms)}"
    return text


def _traces(status: Status) -> str:
    traces, cache = status.traces, status.cache
    running = f"{traces.running:,} running, {traces.waiting:,} waiting, {traces.done:,} done, {traces.failed:,} failed"
    return f"{running}; {cache.entries:,} answers remembered, {cache.hits:,} hits"


def _process(status: Status) -> str:
    process = status.process
    memory = format_size(process.rss_bytes) if process.rss_bytes is not None else "unknown"
    files = "unknown" if process.fds is None else f"{process.fds:,}"
    limit = "" if process.fd_limit is None else f" of {process.fd_limit:,}"
    return f"{memory} resident, {files}{limit} files open, {process.threads} threads"
