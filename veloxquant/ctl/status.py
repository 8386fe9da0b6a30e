"""How the daemon is: what it plans with, whom it serves, and what a person should look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.ctl import figures
from veloxquant.units import format_duration, format_size

if TYPE_CHECKING:
    import argparse

    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal
    from veloxquant.profiles import HardwareProfile
    from veloxquant.wire.answers import Status


def arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own."""


def run(session: Session) -> int:
    """Ask and show. Raises NotRunning (exit 3), NotAnswering (exit 4)."""
    status = session.client.status()
    if session.terminal.json:
        session.terminal.value(status.schema, status)
    else:
        show(status, session.terminal)
    return 0


def show(status: Status, terminal: Terminal) -> None:
    """A dense block, a subject a line."""
    up = format_duration(status.uptime_s)
    head = f"veloxquant {status.version}  {terminal.paint('green', 'running')}  pid {status.pid}  up {up}"
    terminal.say(f"{head}  protocol {status.protocol}  generation {status.generation}")
    lines = {
        "machine": _machine(status.hardware),
        "methods": _methods(status),
        "records": _records(status),
        "clients": _clients(status),
        "traces": _traces(status),
        "process": _process(status),
        "socket": status.socket,
    }
    for subject, text in lines.items():
        terminal.say(f"{subject:<9} {text}")
    for warning in status.warnings:
        terminal.say(f"{terminal.paint('yellow', 'warning')}   {warning}")


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
    return f"{records.used:,} used, {records.skipped:,} skipped in {records.directory}; {watching}, {scanned}"


def _clients(status: Status) -> str:
    clients, requests = status.clients, status.requests
    refused = f", {clients.refused:,} refused" if clients.refused else ""
    errors = sum(requests.errors.values())
    plans = requests.by_method.get("plan", 0)
    text = f"{clients.now:,} now, {clients.peak:,} peak{refused}; "
    text += f"{requests.total:,} calls, {plans:,} plans, {errors:,} errors"
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
