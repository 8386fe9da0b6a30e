"""What the daemon wrote down: the last lines of its log, those of some level or event, or each as it comes.

With --json the lines are the log's own, one object each; a line that is none is given as {"text": ...}.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veloxquant.ctl import log_lines
from veloxquant.ctl.arguments import count
from veloxquant.daemon.log import printable
from veloxquant.errors import VeloxError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping

    from veloxquant.ctl.session import Session
    from veloxquant.ctl.terminal import Terminal

LEVELS = ("debug", "info", "warning", "error", "critical")
LINES = 20
POLL_S = 0.25
_ASK_S = 1.0
_HIDDEN = {"ts", "level", "event", "traceback"}
_STYLES = {"warning": "yellow", "error": "red", "critical": "red"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """How much, what of it, and whether to go on."""
    parser.add_argument("--lines", type=count("--lines"), default=LINES, metavar="N", help=f"the last N ({LINES})")
    parser.add_argument("--follow", "-f", action="store_true", help="go on with what is added, until Ctrl-C")
    parser.add_argument("--level", choices=LEVELS, metavar="LEVEL", help="this level and above")
    parser.add_argument("--event", metavar="NAME", help="lines of this event; request matches request.slow, too")


def run(session: Session) -> int:
    """Show the last lines, then follow. 1 when there is none and none is waited for. Raises ConfigInvalid (exit 2)."""
    log = place(session)
    follow = session.options.follow
    if log is None:
        session.terminal.note('the log is turned off: daemon.log_file is ""')
        return 1
    follower = log_lines.Follower(log)
    try:
        if not follower.found:
            then = ", waiting for it" if follow else ": no daemon has run here"
            session.terminal.note(f"there is no log at {log}{then}")
        if follower.found or follow:
            _show(follower, session.options, session.terminal)
            return 0
    finally:
        follower.close()
    return 1


def place(session: Session) -> Path | None:
    """The log of the daemon that runs, which may have been started with flags; else the configuration's."""
    from veloxquant.config import log_file_of

    if not session.options.no_daemon:
        try:
            with session.daemon_client(fallback=False) as client:
                status = client.status(timeout_s=_ASK_S)
        except VeloxError:  # it does not run, or does not answer: its log is all the more worth a look
            pass
        else:
            return Path(status.log_file) if status.log_file else None
    return log_file_of(session.config)


def read(line: bytes) -> dict[str, Any]:
    """The line's fields; one that is no JSON object (a traceback of the interpreter) has `text` alone."""
    text = line.decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"text": text}


def show_json(line: Mapping[str, Any], terminal: Terminal) -> None:
    """One object a line."""
    terminal.say(json.dumps(line))


def show_text(line: Mapping[str, Any], terminal: Terminal) -> None:
    """Local time, level, event and fields; a traceback below. Nothing in a line can move the cursor."""
    if "event" not in line:
        terminal.say(printable(str(line.get("text", ""))))
        return
    level = str(line.get("level", ""))
    fields = " ".join(f"{name}={_value(value)}" for name, value in line.items() if name not in _HIDDEN)
    shown = terminal.paint(_STYLES[level], f"{level:<8}") if level in _STYLES else printable(f"{level:<8}")
    words = f"{line['event']}  {fields}".rstrip()
    terminal.say(f"{_local(line.get('ts'))}  {shown}  {printable(words)}")
    for one in str(line.get("traceback", "")).splitlines():
        terminal.say(f"    {printable(one)}")


def _show(follower: log_lines.Follower, options: argparse.Namespace, terminal: Terminal) -> None:
    """The last lines; then, where it is wished, each that comes, until Ctrl-C or until nobody reads any more."""
    wanted, show = _filter(options), show_json if terminal.json else show_text
    last = itertools.islice(filter(wanted, map(read, follower.before())), options.lines)
    lines: Iterable[Mapping[str, Any]] = reversed(list(last))
    while True:
        for line in lines:
            show(line, terminal)
        if not options.follow:
            return
        terminal.flush()
        time.sleep(POLL_S)
        lines = filter(wanted, map(read, follower.poll()))


def _filter(options: argparse.Namespace) -> Callable[[Mapping[str, Any]], bool]:
    """Lines without a level pass every level: what the interpreter says is no small thing."""
    levels = LEVELS[LEVELS.index(options.level) :] if options.level else LEVELS

    def wanted(line: Mapping[str, Any]) -> bool:
        event = str(line.get("event", ""))
        named = options.event is None or event == options.event or event.startswith(f"{options.event}.")
        return named and ("level" not in line or line["level"] in levels)

    return wanted


def _local(stamp: Any) -> str:
    """A UTC time of the log as the reader's clock has it, to the second."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(str(stamp)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # no time at all, or none that this clock's zone has
        return printable(str(stamp))


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return json.dumps(text, ensure_ascii=False) if " " in text and isinstance(value, str) else text
