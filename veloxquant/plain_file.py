"""Reading a file whose name somebody else chose: a plain one, up to a length, without ever waiting for it."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path


class NotPlain(OSError):
    """What is there is no regular file."""


def open_plain(path: Path) -> BinaryIO:
    """The file, open for reading. Raises OSError, NotPlain for what is no regular file.

    What was a file a moment ago may be a pipe now, which nobody may ever write to: opening waits for nothing.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read(path: Path, most_bytes: int) -> bytes:
    """All of the file. Raises OSError, also for one that is longer, whatever length it states (/proc states 0)."""
    with open_plain(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(f"{path} is longer than {most_bytes} bytes")
    return data
