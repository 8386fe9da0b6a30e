"""The background agent: install it into launchd (macOS) or systemd (Linux), then start, stop, restart, see, remove it.

`print` shows the files that `install` would write and the commands it would run. Nothing here needs sudo.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant import __version__, service
from veloxquant.client import Client
from veloxquant.errors import InvalidParams, NotAnswering, NotRunning, ProtocolUnsupported
from veloxquant.paths import SOCKET_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal

SCHEMA = "veloxquant.service/1"
ACTIONS = ("install", "uninstall", "start", "stop", "restart", "status", "print")
_ORDERING = ("install", "print")
_STARTING = ("start", "restart")
_PATIENCE_S = 2.0


class Serving(NamedTuple):
    """The daemon that answers on the socket."""

    pid: int
    version: str


def arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, and what to install."""
    parser.add_argument("action", choices=ACTIONS, metavar="|".join(ACTIONS))
    parser.add_argument("--program", metavar="PATH", help="the veloxquantd to run, kept as written (links, too)")
    parser.add_argument(
        "--activation",
        action=argparse.BooleanOptionalAction,
        help="the manager listens, also while the daemon restarts (by default with systemd; not run on a Mac)",
    )
    parser.add_argument(
        "--env",
        metavar="NAME",
        action="append",
        default=[],
        help="hand over this VELOXQUANT_ variable; may be repeated",
    )


def run(session: Session) -> int:
    """Raises ServiceRefused and InvalidParams (exit 2), AlreadyRunning (exit 75), other ServiceErrors (exit 1)."""
    action = session.options.action
    _refuse_idle_flags(session.options)
    agent = service.find()
    if action == "status":
        return _status(session, agent.state())
    if action == "print":
        return _print(session, agent.preview(_order(session)))
    if action == "install":
        return _tell(session, action, _install(session, agent))
    if action in _STARTING:
        _refuse_rival(session, agent)
    return _tell(session, action, getattr(agent, action)())


def _install(session: Session, agent: service.Agent) -> service.Done:
    order = _order(session)
    notes = tuple(service.notes(order, os.environ))
    serving, state = _serving(session), agent.state()
    service.refuse_rival(state, serving.pid if serving else None)
    done = agent.install(order)
    return replace(done, notes=(*notes, *done.notes))


def _refuse_rival(session: Session, agent: service.Agent) -> None:
    """Raises AlreadyRunning: systemd would take the socket of a daemon that serves, launchd start one in vain."""
    state = agent.state()
    place = service.served(state.installed)
    if place is None or (state.listening and not state.running):  # nobody but the manager itself holds the socket
        return
    serving = _serving(session, place)
    if serving is not None and serving.pid != state.pid:  # or it was started just now
        service.refuse_rival(agent.state(), serving.pid)


def _order(session: Session) -> service.Order:
    from veloxquant.config import socket_of

    options = session.options
    activation = sys.platform != "darwin" if options.activation is None else options.activation
    return service.order(
        sys.argv[0],
        socket_of(session.config),
        os.environ,
        named=options.program,
        socket_given=bool(options.socket or os.environ.get(SOCKET_VARIABLE)),
        activation=activation,
        variables=options.env,
    )


def _refuse_idle_flags(options: argparse.Namespace) -> None:
    """A flag that would do nothing is a slip."""
    given = {"--program": options.program, "--activation": options.activation, "--env": options.env or None}
    idle = [flag for flag, value in given.items() if value is not None]
    if idle and options.action not in _ORDERING:
        raise InvalidParams(
            f"{idle[0]} says what to install, and {options.action} installs nothing",
            hint="veloxquantctl service install, again with what is to change",
            field=idle[0],
        )


def _serving(session: Session, place: Path | None = None) -> Serving | None:
    """Who answers on the socket now, if anybody does; of one that speaks another protocol the pid alone is known."""
    client = session.daemon_client(fallback=False) if place is None else Client(place, fallback=False)
    with contextlib.suppress(NotRunning, NotAnswering), client:
        try:
            found = client.hello(timeout_s=_PATIENCE_S)
        except ProtocolUnsupported:
            return Serving(client.ping(timeout_s=_PATIENCE_S).pid, "another protocol")
        return Serving(found.pid, found.version)
    return None


def _status(session: Session, state: service.State) -> int:
    """0 when it runs and answers, else 1. A daemon that only a call would start is not called."""
    asleep = state.listening and not state.running
    place = service.served(state.installed)
    answering = None if asleep else _serving(session, place)
    warnings = [*state.warnings, *_of_answer(state, answering), *_of_place(session, place)]
    well = state.running and answering is not None and answering.pid == state.pid
    if session.terminal.json:
        session.terminal.value(SCHEMA, _as_value(state, answering, warnings))
    else:
        _show(state, answering, warnings, session.terminal)
    return 0 if well else 1


def _of_answer(state: service.State, answering: Serving | None) -> Iterator[str]:
    if answering is None:
        if state.running:
            yield "it runs and does not answer on the socket: veloxquantctl doctor"
        return
    if answering.pid != state.pid:
        yield f"pid {answering.pid} answers, which {state.manager} did not start: stop it (kill {answering.pid})"
    elif answering.version != __version__:
        yield f"it runs {answering.version}, installed is {__version__}: veloxquantctl service restart"


def _of_place(session: Session, place: Path | None) -> Iterator[str]:
    """Whoever installs with a socket of its own and leaves that out later asks nobody."""
    asked = session.socket()
    if place is not None and place != asked:
        yield f"it serves {place}, calls from here go to {asked}: export VELOXQUANT_SOCKET='{place}', or install again"


def _as_value(state: service.State, answering: Serving | None, warnings: list[str]) -> dict[str, Any]:
    found = state.installed
    return {
        "action": "status",
        "manager": state.manager,
        "target": state.target,
        "installed": found is not None,
        "path": None if found is None else str(found.path),
        "program": None if found is None else list(found.program),
        "socket_unit": None if found is None or found.socket_unit is None else str(found.socket_unit),
        "loaded": state.loaded,
        "running": state.running,
        "listening": state.listening,
        "pid": state.pid,
        "last_exit": state.last_exit,
        "answers": None if answering is None else {"pid": answering.pid, "version": answering.version},
        "warnings": warnings,
    }


def _show(state: service.State, answering: Serving | None, warnings: list[str], terminal: Terminal) -> None:
    found = state.installed
    running = f"pid {state.pid}" if state.running else "no"
    if not state.running and state.listening:
        running = "no; the first call starts it"
    answers = "no" if answering is None else f"pid {answering.pid}, version {answering.version}"
    lines = {
        "installed": "no" if found is None else f"{found.path}",
        "program": "" if found is None else " ".join(found.program),
        "loaded": state.target if state.loaded else "no",
        "running": running,
        "last exit": state.last_exit or "",
        "answers": answers,
    }
    for subject, text in lines.items():
        if text:
            terminal.say(f"{subject:<9} {text}")
    for warning in warnings:
        terminal.say(terminal.warning(warning))


def _print(session: Session, preview: service.Preview) -> int:
    if session.terminal.json:
        texts = {str(path): text for path, text in preview.files.items()}
        session.terminal.value(SCHEMA, {"action": "print", "files": texts, "commands": list(preview.commands)})
        return 0
    for path, text in preview.files.items():
        session.terminal.say(f"# {path}\n{text}")
    for command in preview.commands:
        session.terminal.say(f"$ {command}")
    return 0


def _tell(session: Session, action: str, done: service.Done) -> int:
    if session.terminal.json:
        value = {"action": action, "changed": done.changed, "summary": done.summary}
        session.terminal.value(SCHEMA, {**value, "commands": list(done.commands), "notes": list(done.notes)})
        return 0
    for command in done.commands:
        session.terminal.say(f"$ {command}")
    session.terminal.say(done.summary)
    for note in done.notes:
        session.terminal.note(note)
    return 0
