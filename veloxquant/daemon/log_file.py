"""The log on disk: a private file that rotates, shared safely, whose disk may be full or read-only.

Three files of FILE_BYTES at most. A line is one write at the file's end, so that lines of two processes never mix.
Rotation is done under a lock on the very file that is rotated, and the path is looked at before every line: of two
daemons with one log file one rotates and the other follows, and a file that somebody moved away is made anew.
A line that cannot be written is counted, not raised; the first one says so, and so does the first that can be again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from typing import TYPE_CHECKING

from veloxquant import ownership
from veloxquant.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FILE_BYTES = 5 * 2**20
FILE_COUNT = 3
"""The current file and two older ones: at most 15 MiB on disk."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRONG_PATH = frozenset(
    {
        errno.EISDIR,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.ENOENT,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENXIO,
        errno.EINVAL,
    }
)
"""What waiting does not heal: a folder, a link, a pipe where the log should be, a place where no folder can be made."""

_AT_THE_PATH = {
    errno.ELOOP: "it is a symbolic link",
    errno.ENXIO: "it is a pipe",
    errno.EEXIST: "its folder is a file",
}
"""Plainer than the system's own words."""


class LogFile(logging.Handler):
    """A handler that never raises and never ends the daemon. `on_trouble` hears once of each loss, and of its end."""

    def __init__(
        self, path: Path, on_trouble: Callable[[str | None], None] = lambda _text: None, *, strict: bool = True
    ) -> None:
        """Open the file. Raises ConfigInvalid (if `strict`) when the path can never be a log, not for a full disk."""
        super().__init__()
        self.path = path
        self.trouble: str | None = None
        """Why lines are being lost, None while they are not."""
        self.lost = 0
        self._on_trouble = on_trouble
        self._descriptor = -1
        self._is_cut = False
        """Whether the file ends amid a line, as after a full disk: the next line must not begin there."""
        try:
            self._open()
        except (OSError, ConfigInvalid) as error:
            self.trouble = _sentence(path, error)
            if not strict:
                return
            if isinstance(error, ConfigInvalid):
                raise
            if error.errno in _WRONG_PATH:
                raise _refusal(path, _words(error)) from None

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, or count it as lost."""
        try:
            self._write(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception as error:  # noqa: BLE001 -- a fence: whoever logs must not fail of it
            self.lost += 1
            self._say(_sentence(self.path, error))
        else:
            self._say(None)

    def close(self) -> None:
        """Let go of the file."""
        self._drop()
        super().close()

    def _say(self, trouble: str | None) -> None:
        """Tell of a change; what is logged meanwhile comes back here and finds none."""
        before, self.trouble = self.trouble, trouble
        if (before is None) != (trouble is None):
            self._on_trouble(trouble)

    def _write(self, line: bytes) -> None:
        if not self._current():
            self._drop()
            self._open()
        if os.fstat(self._descriptor).st_size + len(line) > FILE_BYTES:
            self._rotate()
        data = b"\n" * self._is_cut + line
        written = os.write(self._descriptor, data)
        self._is_cut = data[written - 1 : written] != b"\n"
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _current(self) -> bool:
        """Whether the file that is open is the one at the path."""
        if self._descriptor < 0:
            return False
        try:
            there = self.path.lstat()
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def _open(self) -> None:
        """A plain file of our own that only we may read. Raises OSError, ConfigInvalid."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_folder(self.path)
        descriptor = os.open(self.path, _FLAGS, 0o600)
        try:
            _make_private(self.path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._is_cut = _ends_amid_a_line(self.path)

    def _rotate(self) -> None:
        """Move the files on by one, unless another process is doing so or has done it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # this line still goes to the old file; the next one sees the new
        try:
            if self._current():
                self._move_on()
        finally:
            self._drop()
        self._open()

    def _move_on(self) -> None:
        """Each file takes the next one's name; the oldest is gone."""
        for number in range(FILE_COUNT - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                self._named(number - 1).rename(self._named(number))

    def _named(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _drop(self) -> None:
        """Closing gives the lock back, too."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1


def _ends_amid_a_line(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:  # empty, or gone or emptied this moment
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
    return False


def _make_private(path: Path, descriptor: int) -> None:
    """Whatever mode an older one was left with. Raises ConfigInvalid for what is not ours."""
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        raise _refusal(path, "it is no plain file of yours")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        os.fchmod(descriptor, 0o600)


def _check_folder(path: Path) -> None:
    """Whoever may write in the folder could put something else in the log's place. Raises ConfigInvalid."""
    facts = path.parent.stat()
    if ownership.others(facts) is not None and not facts.st_mode & stat.S_ISVTX:
        raise _refusal(path, f"others can write in its folder: chmod go-w '{path.parent}'")


def _refusal(path: Path, why: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"the log file {path} is refused: {why}",
        hint='name another as daemon.log_file, or "" to log to stderr alone',
        field="daemon.log_file",
    )


def _sentence(path: Path, error: Exception) -> str:
    why = error.message if isinstance(error, ConfigInvalid) else f"{path} cannot be written: {_words(error)}"
    return f"log lines are lost: {why}"


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return _AT_THE_PATH.get(error.errno or 0) or error.strerror or str(error)
    return f"{type(error).__name__}: {error}"
