"""The daemon's log: one JSON object a line, or a line for people when stderr is a terminal.

Every line has `ts` (UTC), `level`, `event` (a stable dotted name) and the event's own fields. Request bodies are never
logged. Lines of one event that come thick are thinned, so that a stuck client cannot fill a disk.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from veloxquant.errors import ConfigInvalid

if TYPE_CHECKING:
    from pathlib import Path

FILE_BYTES = 5 * 2**20
FILE_COUNT = 3
"""The current file and two older ones: at most 15 MiB on disk."""
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


def start(lowest: str, file: Path | None = None, stream: TextIO | None = None) -> None:
    """Send our log to stderr and, when given, to a rotating file, instead of where it went. Raises ConfigInvalid."""
    stop()
    logging.raiseExceptions = False  # a full disk or a closed stderr must not become noise of its own
    out = sys.stderr if stream is None else stream
    _attach(logging.StreamHandler(out), people=out.isatty())
    if file is not None:
        _attach(_file(file), people=False)
    level(lowest)
    _log.propagate = False


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


def _attach(handler: logging.Handler, *, people: bool) -> None:
    handler.setFormatter(_ForPeople() if people else _AsJson())
    handler.addFilter(_Thinning())
    _log.addHandler(handler)


def _file(path: Path) -> logging.Handler:
    """A rotating file that only we can read. Raises ConfigInvalid."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise ConfigInvalid(
            f"the log file {path} cannot be written: {error.strerror}",
            hint="choose another, or leave it out to log to stderr alone",
            field="daemon.log_file",
        ) from None
    return logging.handlers.RotatingFileHandler(
        path, maxBytes=FILE_BYTES, backupCount=FILE_COUNT - 1, encoding="utf-8", delay=True
    )


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The event's fields; lines from other rooms use plain messages and become the event of their room."""
    return dict(getattr(record, "fields", {}))


class _AsJson(logging.Formatter):
    """{"ts": ..., "level": ..., "event": ..., fields}."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; newlines inside values are escaped by JSON."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {"ts": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        if hasattr(record, "fields"):
            line |= {"event": record.getMessage()} | _fields(record)
        else:
            line |= {"event": record.name, "text": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _ForPeople(logging.Formatter):
    """12:30:01 info  daemon.ready socket=/run/user/501/veloxquant/d.sock pid=4312."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it where there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        words = [f"{name}={value}" for name, value in _fields(record).items()]
        text = " ".join([f"{clock} {record.levelname.lower():<7}", record.getMessage(), *words])
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Thinning(logging.Filter):
    """After BURST lines of one event in a window, every hundredth only, with how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this line is written."""
        since, count = self._seen.get(record.msg, (record.created, 0))
        if not 0 <= record.created - since <= WINDOW_S:
            since, count = record.created, 0
        self._seen[record.msg] = (since, count + 1)
        if count < BURST:
            return True
        if (count - BURST) % THINNED_TO:
            return False
        record.fields = _fields(record) | {"repeated": count + 1}
        return True
