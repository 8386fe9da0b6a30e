"""The daemon's log: one JSON object a line, or a line for people when stderr is a terminal.

Every line has `ts` (UTC), `level`, `event` (a stable dotted name) and the event's own fields. Request bodies are never
logged. Lines of one event that come thick are thinned, so that a stuck client cannot fill a disk; texts are cut, so
that no line is long. They go to stderr and to the log file (log_file.py), which is bounded; so is a stderr that leads
to a plain file, as launchd's does, where nothing rotates.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from veloxquant.daemon.log_file import LogFile

if TYPE_CHECKING:
    from pathlib import Path

STDERR_BYTES = 2 * 2**20
"""What a stderr that is a plain file may hold while the log file takes the same lines."""
STDERR_ALONE_BYTES = 4 * 2**20
"""The same while it is all there is. With the log's own 15 MiB it stays below 20 MB, however long the daemon runs."""
TEXT_LETTERS = 4096
TRACEBACK_LETTERS = 16384
"""The end of a traceback says what failed; the middle of a deep one repeats itself."""
BURST = 10
"""Lines of one event a window before thinning starts."""
WINDOW_S = 10.0
THINNED_TO = 100
"""Beyond the burst, one line in this many."""

_log = logging.getLogger("veloxquant")


def event(name: str, severity: int = logging.INFO, **fields: Any) -> None:
    """Log one event. Fields must be JSON values or have a readable str()."""
    _log.log(severity, name, extra={"fields": fields})


def failure(name: str, **fields: Any) -> None:
    """Log an event with the traceback of the exception being handled."""
    _log.error(name, exc_info=True, extra={"fields": fields})


def start(lowest: str, file: Path | None = None, stream: TextIO | None = None, *, strict: bool = True) -> None:
    """Send our log to stderr and, when given, to a rotating file, instead of where it went.

    Raises ConfigInvalid for a file that can never be a log; without `strict` that, too, is only a warning.
    """
    stop()
    logging.raiseExceptions = False  # a full disk or a closed stderr must not become noise of its own
    out = sys.stderr if stream is None else stream
    shown = logging.StreamHandler(out)
    kept = None if file is None else LogFile(file, _on_trouble, strict=strict)
    thinning = _Thinning()
    _attach(shown, _ForPeople() if out.isatty() else _AsJson(), thinning)
    level(lowest)
    _log.propagate = False
    shown.addFilter(_Brief(out, kept))
    if kept is not None:
        _attach(kept, _AsJson(), thinning)
        if kept.trouble is not None:
            _on_trouble(kept.trouble)


def level(name: str) -> None:
    """Log from this level on: "debug", "info", "warning", "error"."""
    _log.setLevel(name.upper())


def stop() -> None:
    """Close and detach what `start` attached, and leave logging as Python sets it up: who embeds us logs on."""
    for handler in list(_log.handlers):
        _log.removeHandler(handler)
        handler.close()
    _log.propagate = True
    _log.setLevel(logging.NOTSET)
    logging.raiseExceptions = True


def place() -> Path | None:
    """The log file in use, None without one."""
    kept = _kept()
    return None if kept is None else kept.path


def trouble() -> str | None:
    """Why lines are being lost, in a sentence; None while they are not."""
    kept = _kept()
    return None if kept is None else kept.trouble


def printable(text: str) -> str:
    """Control letters by their number: a client's words are in the log, and a terminal obeys them."""
    return "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in text)


def _kept() -> LogFile | None:
    return next((handler for handler in _log.handlers if isinstance(handler, LogFile)), None)


def _on_trouble(text: str | None) -> None:
    """One line when the log file stops taking lines (stderr has it), and one when it takes them again."""
    kept = _kept()
    if text is not None:
        event("log.lost", logging.WARNING, text=text)
    elif kept is not None:
        event("log.back", logging.WARNING, lost=kept.lost)
        kept.lost = 0


def _attach(handler: logging.Handler, form: logging.Formatter, thinning: logging.Filter) -> None:
    handler.setFormatter(form)
    handler.addFilter(thinning)
    _log.addHandler(handler)


class _Brief(logging.Filter):
    """Nothing more to a stderr that is a plain file and has grown large, sooner where the log file has the line."""

    def __init__(self, stream: TextIO, kept: LogFile | None) -> None:
        super().__init__()
        self._stream = stream
        self._kept = kept

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this line is written."""
        try:
            facts = os.fstat(self._stream.fileno())
        except (OSError, ValueError):  # no descriptor behind it
            return True
        alone = self._kept is None or self._kept.trouble is not None
        return not stat.S_ISREG(facts.st_mode) or facts.st_size < (STDERR_ALONE_BYTES if alone else STDERR_BYTES)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The event's fields; lines from other rooms use plain messages and become the event of their room."""
    return dict(getattr(record, "fields", {}))


def _cut(value: Any) -> Any:
    """A text of bounded length; other values as they are."""
    if isinstance(value, str) and len(value) > TEXT_LETTERS:
        return f"{value[:TEXT_LETTERS]}... ({len(value):,} letters)"
    return value


def _readable(value: object) -> str:
    """What JSON does not know, as text."""
    return str(_cut(str(value)))


class _AsJson(logging.Formatter):
    """{"ts": ..., "level": ..., "event": ..., fields}."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; newlines inside values are escaped by JSON."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {"ts": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        if hasattr(record, "fields"):
            line |= {"event": record.getMessage()} | {name: _cut(value) for name, value in _fields(record).items()}
        else:
            line |= {"event": record.name, "text": _cut(record.getMessage())}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)[-TRACEBACK_LETTERS:]
        return json.dumps(line, default=_readable)


class _ForPeople(logging.Formatter):
    """12:30:01 info  daemon.ready socket=/run/user/501/veloxquant/d.sock pid=4312."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it where there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        words = [f"{name}={value}" for name, value in _fields(record).items()]
        text = printable(" ".join([f"{clock} {record.levelname.lower():<7}", record.getMessage(), *words]))
        below = self.formatException(record.exc_info).splitlines() if record.exc_info else ()
        return "\n".join((text, *map(printable, below)))


class _Thinning(logging.Filter):
    """After BURST lines of one event in a window, every hundredth only, with how many there were.

    The first line of a later window says how many of the earlier one were left out. One verdict for all handlers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this line is written."""
        verdict: bool | None = getattr(record, "written", None)
        if verdict is None:
            verdict = record.written = self._judge(record)
        return verdict

    def _judge(self, record: logging.LogRecord) -> bool:
        # Of an event by its name, else by the line of code: a text made for the occasion is another one each time.
        key = record.msg if hasattr(record, "fields") else f"{record.pathname}:{record.lineno}"
        window = self._seen.get(key)
        left_out = 0
        if window is None or not 0 <= record.created - window.since <= WINDOW_S:
            left_out = 0 if window is None else window.left_out
            window = self._seen[key] = _Window(record.created)
        window.count += 1
        beyond = window.count - 1 - BURST
        if beyond >= 0 and beyond % THINNED_TO:
            window.left_out += 1
            return False
        if beyond >= 0:
            _say(record, repeated=window.count)
            window.left_out = 0
        if left_out:
            _say(record, left_out=left_out)
        return True


class _Window:
    """Lines of one event since a moment, and how many of them nobody has heard of yet."""

    __slots__ = ("count", "left_out", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.count = 0
        self.left_out = 0


def _say(record: logging.LogRecord, **counts: int) -> None:
    """Add to the line's fields; one of another room becomes an event of its room with its text first."""
    if not hasattr(record, "fields"):
        record.fields = {"text": record.getMessage()}
        record.msg, record.args = record.name, None
    record.fields = _fields(record) | counts
