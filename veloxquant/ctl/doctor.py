"""Check everything that a plan or the daemon depends on, with a fix for each problem; exit 1 when a check fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from veloxquant.ctl import checks_daemon, checks_machine, checks_stores
from veloxquant.ctl.finding import Finding, failed, ok
from veloxquant.errors import ConfigInvalid, SocketRefused, VeloxError

if TYPE_CHECKING:
    import argparse

    from veloxquant.config import Config
    from veloxquant.ctl.finding import Check
    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal

SCHEMA = "veloxquant.doctor/1"

CHECKS: dict[str, Check] = {
    "python": checks_machine.python,
    "engine": checks_machine.engine,
    "device": checks_machine.device,
    "working set": checks_machine.working_set,
    "open files": checks_machine.open_files,
    "socket folder": checks_daemon.socket_folder,
    "socket": checks_daemon.socket_answers,
    "lock": checks_daemon.lock,
    "methods": checks_stores.methods,
    "records": checks_stores.records_readable,
    "record folder": checks_stores.records_writable,
    "calibrations": checks_stores.calibrations_readable,
    "trace cache": checks_stores.traces_writable,
    "disk": checks_stores.disk_space,
    "clock": checks_stores.clock,
}
"""Name -> check. The configuration comes first, since all others read it."""

_MARKS = {"ok": ("green", "✓"), "note": ("yellow", "!"), "failed": ("red", "✗")}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own."""


def run(session: Session) -> int:
    """Run all checks at once and show them in order."""
    findings = examine(session)
    count = sum(one.state == "failed" for one in findings.values())
    if session.terminal.json:
        checks = [
            {"name": name, "state": one.state, "text": one.text, "fix": one.fix} for name, one in findings.items()
        ]
        session.terminal.value(SCHEMA, {"failed": count, "checks": checks})
    else:
        show(findings, session.terminal)
    return 1 if count else 0


def examine(session: Session) -> dict[str, Finding]:
    """Every finding by name. With a configuration that is wrong the others are about the defaults."""
    config, verdict = _configuration(session)
    with ThreadPoolExecutor(len(CHECKS)) as pool:
        running = {name: pool.submit(_fenced, check, config) for name, check in CHECKS.items()}
        found = {name: future.result() for name, future in running.items()}
    return {"config": verdict, **found}


def show(findings: dict[str, Finding], terminal: Terminal) -> None:
    """A line for each check, then the count."""
    width = max(len(name) for name in findings)
    for name, one in findings.items():
        style, mark = _MARKS[one.state]
        fix = f"  → {one.fix}" if one.fix else ""
        terminal.say(f"{terminal.paint(style, mark)} {name:<{width}}  {one.text}{fix}")
    problems = sum(one.state == "failed" for one in findings.values())
    notes = sum(one.state == "note" for one in findings.values())
    terminal.say(f"{_many(problems, 'problem')}, {_many(notes, 'note')}")


def _configuration(session: Session) -> tuple[Config, Finding]:
    """The configuration that the other checks read, and what is to be said of it."""
    try:
        return session.config, ok("the configuration is valid")
    except ConfigInvalid as error:
        verdict = failed(f"{error.message}; what follows is about the defaults", error.hint)
    from veloxquant.config import Config, Socket

    try:
        return Config(socket=Socket(path=session.socket_without_file())), verdict
    except SocketRefused:  # a wrong VELOXQUANT_SOCKET, which the verdict names
        return Config(), verdict


def _fenced(check: Check, config: Config) -> Finding:
    """A check that breaks is a finding, too."""
    try:
        return check(config)
    except VeloxError as error:
        return failed(error.message, error.hint)
    except Exception as error:  # noqa: BLE001 -- the fence: the other checks still have something to say
        return failed(f"the check itself failed: {type(error).__name__}: {error}", "report this")


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
