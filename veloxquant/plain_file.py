"""Reading a file whose name somebody else chose: a plain one, up to a length, without ever waiting for it."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path


class _Refused(OSError):
    """`strerror` says why of "it", the text of the file's name."""

    def __init__(self, number: int, path: Path, why: str) -> None:
        super().__init__(number, f"it {why}")
        self._text = f"{path} {why}"

    def __str__(self) -> str:
        return self._text


class NotPlain(_Refused):
    """What is there is no regular file."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, path, "is not a regular file")


class TooLong(_Refused):
    """The file has more than was to be read."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        super().__init__(errno.EFBIG, path, f"is longer than {most_bytes} bytes")


def open_plain(path: Path, *, follow_link: bool = True) -> BinaryIO:
    """The file, open for reading. Raises OSError, NotPlain for what is no regular file.

    What was a file a moment ago may be a pipe now, which nobody may ever write to: opening waits for nothing. With
    `follow_link` false a symbolic link at the path itself is an OSError (ELOOP).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_link else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain(path)
    return os.fdopen(descriptor, "rb")


def read(path: Path, most_bytes: int) -> bytes:
    """All of the file. Raises OSError, TooLong for one that is longer, whatever length it states (/proc states 0)."""
    with open_plain(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise TooLong(path, most_bytes)
    return data
