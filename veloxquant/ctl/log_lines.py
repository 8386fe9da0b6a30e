"""The daemon's log read from its end, and followed where it goes: through rotation, truncation and removal.

A log is a file and its older ones beside it, `daemon.log`, `daemon.log.1`, `daemon.log.2`, as daemon/log_file.py leaves
them. Nothing is read that need not be: the last lines of a large log cost a few blocks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant.errors import ConfigInvalid
from veloxquant.plain_file import NotPlain, open_plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

_BLOCK_BYTES = 64 * 1024
_HEAD_BYTES = 128
"""Enough of a log's first line to tell it from another: its time is in milliseconds."""
_LINE_BYTES = 2**20
"""A longer line is no line of the daemon's; it is given in pieces."""


def files(log: Path) -> list[Path]:
    """The log and what it was called before, the newest first."""
    older = (log.with_name(f"{log.name}.{number}") for number in itertools.count(1))
    return [one for one in (log, *itertools.takewhile(Path.exists, older)) if one.exists()]


def backwards(file: BinaryIO, end: int) -> Iterator[bytes]:
    """The file's lines before this place from the last to the first, without newlines."""
    place, rest, whole = end, b"", True
    while place > 0:
        step = min(_BLOCK_BYTES, place)
        place = file.seek(place - step)
        block = file.read(step) + rest
        if whole:
            block, whole = block.removesuffix(b"\n"), False
        rest, *others = block.split(b"\n")
        yield from reversed(others)
        if len(rest) > _LINE_BYTES:
            yield rest
            rest, whole = b"", True
    if not whole:
        yield rest


class Follower:
    """A log from this moment: what stood in it, and what is added. `poll` is called now and then; it never waits.

    Making one and polling raise ConfigInvalid for what is no plain file or cannot be read.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._descriptor = -1
        self._place = 0
        self._partial = b""
        self._head = b""
        self._open(at_end=True)

    @property
    def found(self) -> bool:
        """Whether there is a log yet."""
        return self._descriptor >= 0

    def before(self) -> Iterator[bytes]:
        """Every line up to this moment, the last first, from older files too; what was deleted is passed over."""
        own = None
        if self._descriptor >= 0:
            own = os.fstat(self._descriptor)
            with os.fdopen(os.dup(self._descriptor), "rb") as file:
                yield from backwards(file, self._place)
        for older in files(self._log):
            with contextlib.suppress(FileNotFoundError, NotPlain), open_plain(older) as file:
                if own is None or not os.path.samestat(os.fstat(file.fileno()), own):
                    yield from backwards(file, file.seek(0, os.SEEK_END))

    def poll(self) -> Iterator[bytes]:
        """Whole lines that have appeared, without newlines, in their order."""
        yield from self._read()
        if self._replaced():
            yield from self._read()  # what was written between our reading and its renaming
            for file in reversed(self._missed()):
                yield from self._whole(file)
            yield from self._last()
            self.close()
            self._open(at_end=False)
            yield from self._read()

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _open(self, *, at_end: bool) -> None:
        try:
            with open_plain(self._log) as file:
                self._descriptor = os.dup(file.fileno())
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigInvalid(
                f"the log {self._log} cannot be read: {error.strerror}",
                hint="veloxquantctl doctor says what to do about it",
                field="daemon.log_file",
            ) from None
        self._place = os.fstat(self._descriptor).st_size if at_end else 0
        self._head = os.pread(self._descriptor, min(_HEAD_BYTES, self._place), 0)

    def _read(self) -> Iterator[bytes]:
        if self._descriptor < 0:
            return
        if self._emptied():
            self._place, self._partial, self._head = 0, b"", b""  # what it holds now is new
        while block := os.pread(self._descriptor, _BLOCK_BYTES, self._place):
            self._place += len(block)
            *lines, self._partial = (self._partial + block).split(b"\n")
            yield from lines
            if len(self._partial) > _LINE_BYTES:
                yield from self._last()
        if len(self._head) < _HEAD_BYTES:
            self._head = os.pread(self._descriptor, min(_HEAD_BYTES, self._place), 0)

    def _emptied(self) -> bool:
        """Whether somebody cut it off since; it may have grown beyond our place again, with another first line."""
        short = os.fstat(self._descriptor).st_size < self._place
        return short or os.pread(self._descriptor, len(self._head), 0) != self._head

    def _last(self) -> Iterator[bytes]:
        """What has no newline yet and will get none."""
        if self._partial:
            yield self._partial
        self._partial = b""

    def _replaced(self) -> bool:
        """Whether another file is at the log's path, or the first one has come."""
        try:
            there = self._log.stat()
        except FileNotFoundError:
            return False  # between two renames, or until the daemon writes again
        return self._descriptor < 0 or not os.path.samestat(there, os.fstat(self._descriptor))

    def _missed(self) -> list[Path]:
        """Files that came and went between two polls: those newer than the one that is open, the newest first."""
        if self._descriptor < 0:
            return []
        own = os.fstat(self._descriptor)
        older = files(self._log)[1:]
        newer = list(itertools.takewhile(lambda file: not _same(file, own), older))
        return newer if len(newer) < len(older) else []

    def _whole(self, file: Path) -> Iterator[bytes]:
        yield from self._last()
        with contextlib.suppress(FileNotFoundError, NotPlain), open_plain(file) as older:
            yield from older.read().removesuffix(b"\n").split(b"\n")


def _same(file: Path, own: os.stat_result) -> bool:
    try:
        return os.path.samestat(file.stat(), own)
    except FileNotFoundError:
        return False
