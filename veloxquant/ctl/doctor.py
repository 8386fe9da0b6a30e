"""Check everything that a plan or the daemon depends on, with a fix for each problem; exit 1 when a check fails."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from veloxquant.ctl import checks_daemon, checks_machine, checks_service, checks_settings, checks_stores
from veloxquant.ctl.finding import Finding, failed, note, ok
from veloxquant.errors import ConfigInvalid, VeloxError
from veloxquant.units import format_count

if TYPE_CHECKING:
    import argparse

    from veloxquant.config import Config
    from veloxquant.ctl.finding import Check
    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal

SCHEMA = "veloxquant.doctor/1"
LIMIT_S = 15.0
"""For all checks together, which run at once: whatever hangs is a finding."""

CHECKS: dict[str, Check] = {
    "environment": checks_settings.environment,
    "python": checks_machine.python,
    "engine": checks_machine.engine,
    "device": checks_machine.device,
    "working set": checks_machine.working_set,
    "wired limit": checks_machine.wired_limit,
    "open files": checks_machine.open_files,
    "socket path": checks_daemon.socket_path,
    "socket folder": checks_daemon.socket_folder,
    "socket file": checks_daemon.leftovers,
    "socket": checks_daemon.socket_answers,
    "lock": checks_daemon.lock,
    "version": checks_daemon.version,
    "protocol": checks_daemon.protocol,
    "watcher": checks_daemon.watcher,
    "agent": checks_service.starts,
    "agent's program": checks_service.same_program,
    "methods": checks_stores.methods,
    "records": checks_stores.records_readable,
    "record folder": checks_stores.records_writable,
    "record dates": checks_stores.record_dates,
    "index": checks_stores.index_readable,
    "calibrations": checks_stores.calibrations_readable,
    "trace cache": checks_stores.traces_writable,
    "log": checks_settings.log,
    "disk": checks_stores.disk_space,
    "clock": checks_stores.clock,
}
"""Name -> check. The configuration comes first, since all others read it."""
_ON_SOCKET = ("socket folder", "socket file", "socket", "lock", "version", "protocol", "watcher", "log")
"""Where the path is refused there is nothing that these could look at."""

_NO_PATH = note("not looked at, since the socket's path is refused")
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
    """Every finding by name. With a configuration that is wrong the others are about what of it holds."""
    config, verdict = _configuration(session)
    refused = _fenced(CHECKS["socket path"], config).state == "failed"
    found: dict[str, Finding] = {}

    def look(name: str, check: Check) -> None:
        found[name] = _NO_PATH if refused and name in _ON_SOCKET else _fenced(check, config)

    limit_s = min(LIMIT_S, session.timeout_s)
    ends = time.monotonic() + limit_s
    # Threads that do not keep the process alive: one of them may hang on a file system that does not answer.
    looks = [threading.Thread(target=look, args=one, name=f"vq-{one[0]}", daemon=True) for one in CHECKS.items()]
    for thread in looks:
        thread.start()
    for thread in looks:
        thread.join(max(0.0, ends - time.monotonic()))
    late = failed(f"the check did not end within {limit_s:g} s", "see what it waits for: a disk, a program, the daemon")
    return {"config": verdict} | {name: found.get(name, late) for name in CHECKS}


def show(findings: dict[str, Finding], terminal: Terminal) -> None:
    """A line for each check, then the count."""
    width = max(len(name) for name in findings)
    for name, one in findings.items():
        style, mark = _MARKS[one.state]
        fix = f"  → {one.fix}" if one.fix else ""
        terminal.say(f"{terminal.paint(style, mark)} {name:<{width}}  {one.text}{fix}")
    problems = sum(one.state == "failed" for one in findings.values())
    notes = sum(one.state == "note" for one in findings.values())
    terminal.say(f"{format_count(problems, 'problem')}, {format_count(notes, 'note')}")


def _configuration(session: Session) -> tuple[Config, Finding]:
    """The configuration that the other checks read, and what is to be said of it."""
    try:
        return session.config, ok("the configuration is valid")
    except ConfigInvalid as error:
        config, without = _what_holds(session, error)
        return config, failed(f"{error.message}; what follows is without {without}", error.hint)


def _what_holds(session: Session, error: ConfigInvalid) -> tuple[Config, str]:
    """The configuration without the layers that are wrong, and what these are."""
    from veloxquant.config import Config, load

    env, flags, with_file = dict(os.environ), session.flags, True
    left_out: list[str] = []
    while True:
        if error.variable in env:
            left_out.append(error.variable)
            del env[error.variable]
        elif with_file:
            left_out.append("the file")
            with_file = False
        else:
            return Config(), "any of it"
        try:
            return load(env=env, flags=flags, with_file=with_file), " and ".join(left_out)
        except ConfigInvalid as another:
            error = another


def _fenced(check: Check, config: Config) -> Finding:
    """A check that breaks is a finding, too."""
    try:
        return check(config)
    except VeloxError as error:
        return failed(error.message, error.hint)
    except Exception as error:  # noqa: BLE001 -- the fence: the other checks still have something to say
        return failed(f"the check itself failed: {type(error).__name__}: {error}", "report this")
