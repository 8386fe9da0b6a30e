"""`status --watch`: told of changes by the daemon, asked for figures each interval, drawn in place on a terminal.

Where no terminal reads, each state is a block of its own, or an object a line. When the daemon goes or hangs, this
is said and it is waited for, --timeout long: a service manager brings it back within some ten seconds.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING

from veloxquant.ctl.status import show, subjects, warnings
from veloxquant.errors import NotAnswering, NotRunning, ShuttingDown, VeloxError
from veloxquant.units import format_count

if TYPE_CHECKING:
    from veloxquant.client import Client
    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal
    from veloxquant.wire.answers import Status

TOPICS = ("generation", "records", "methods", "hardware", "warnings")
_CHANGED, _GONE = "changed", "gone"


def watch(session: Session, interval_s: float) -> int:
    """Until Ctrl-C (exit 130). Raises NotRunning (exit 3) when no daemon is there or comes back, NotAnswering (4)."""
    with session.daemon_client(fallback=False) as client:
        client.ping()
    screen = _Screen(session.terminal)
    try:
        while True:
            why = _while_it_runs(session, interval_s, screen)
            screen.rest()
            session.terminal.note(f"{why}; waiting for it to come back")
            _wait(session)
    finally:
        screen.rest()


def _while_it_runs(session: Session, interval_s: float, screen: _Screen) -> str:
    """Draw until the daemon goes; a sentence that says how."""
    with session.daemon_client(fallback=False) as client, contextlib.suppress(NotRunning, ShuttingDown):
        heard = _listen(client)
        try:
            screen.draw(client.status())
            while _next(heard, interval_s) != _GONE:
                screen.draw(client.status())
        except NotAnswering:  # stopped for a while, as by a debugger or a machine that went to sleep
            return "the daemon does not answer"
    return "the daemon stopped"


def _next(heard: queue.SimpleQueue[str], interval_s: float) -> str:
    """What to do next: draw because something changed or it is time, or leave. A burst of changes is one."""
    found = _CHANGED
    with contextlib.suppress(queue.Empty):
        found = heard.get(timeout=interval_s)
        while found != _GONE:
            found = heard.get_nowait()
    return found


def _listen(client: Client) -> queue.SimpleQueue[str]:
    """What the daemon tells, as it comes; its first notice is the state that is drawn anyway."""
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(VeloxError):  # the end of the subscription, said below however it came
            for notice in client.subscribe(TOPICS):
                if not notice.full:
                    heard.put(_GONE if notice.event == "stopping" else _CHANGED)
        heard.put(_GONE)

    threading.Thread(target=listen, name="vq-watch-status", daemon=True).start()
    return heard


def _wait(session: Session) -> None:
    """Until a daemon answers again, --timeout at most. Raises NotRunning, NotAnswering."""
    ends = time.monotonic() + session.timeout_s
    while not _is_back(session, ends):
        time.sleep(0.1)


def _is_back(session: Session, ends: float) -> bool:
    """Whether one answers; the old one may still be on its way out. Raises what it says when the time is over."""
    with session.daemon_client(wait_s=max(0.0, ends - time.monotonic()), fallback=False) as client:
        try:
            client.ping()
        except (ShuttingDown, NotAnswering):
            if time.monotonic() >= ends:
                raise
            return False
    return True


def _fitting(subjects: list[str], warnings: list[str], rows: int | None) -> list[str]:
    """A state in that many rows: the warnings stay, then the first subjects, and the last row counts what had to go."""
    if rows is None or len(subjects) + len(warnings) <= rows:
        return [*subjects, *warnings]
    warned = warnings[: rows - 1]
    told = subjects[: rows - 1 - len(warned)]
    unseen = len(warnings) - len(warned)
    left_out = format_count(len(subjects) - len(told) + unseen, "line") + " left out"
    which = f", {format_count(unseen, 'warning')} among them" if unseen else ""
    return [*told, *warned, f"{left_out}{which}: the terminal has no more rows"]


def _rows(lines: list[str]) -> list[str]:
    """The same without line breaks within one, such as a folder's name may have."""
    return "\n".join(lines).splitlines()


class _Screen:
    """Where states are drawn: over the last one on a terminal, else one below the other."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._drawn = False

    def draw(self, status: Status) -> None:
        """This state."""
        terminal = self._terminal
        if terminal.json:
            terminal.value(status.schema, status)
        elif terminal.in_place:
            told, warned = (_rows(of(status, terminal)) for of in (subjects, warnings))
            terminal.redraw(_fitting(told, warned, terminal.rows), first=not self._drawn)
        else:
            if self._drawn:
                terminal.say()
            show(status, terminal)
        self._drawn = True
        terminal.flush()

    def rest(self) -> None:
        """Leave what was drawn where it is, with the cursor on a line of its own below."""
        if self._drawn and not self._terminal.json and self._terminal.in_place:
            self._terminal.say()
            self._terminal.flush()
        self._drawn = False
