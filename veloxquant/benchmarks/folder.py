"""The record files in memory: which there are, which of them serve, and why others do not.

The folder is the truth. A refresh lists it and reads only files whose signature changed; a file so young that a change
within one clock tick could hide is read again and compared by its digest. What a listing says may be old by the time
it is used, so it decides only which files are looked at.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.benchmarks.record_names import names_of, rank
from veloxquant.benchmarks.record_text import decode, encode
from veloxquant.benchmarks.records import BenchmarkRecord
from veloxquant.benchmarks.storage import (
    RECORD_NAME,
    Signature,
    Unreadable,
    drop,
    flush_folder,
    list_folder,
    reaching,
    read_small,
    signature,
    write_aside,
    write_atomically,
)
from veloxquant.benchmarks.validation import invalid, is_id
from veloxquant.errors import RecordInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    OnLook = Callable[[int, int], None]
    Hint = tuple[str, Signature | str | None]

Change = tuple[BenchmarkRecord | None, BenchmarkRecord | None]
"""What served before and what serves now under one id."""

CLOCK_TICK_NS = 2 * 10**9
"""The coarsest clock of a file system in use: FAT's."""
FINE_TICK_NS = 2 * 10**8
"""More than the clocks of file systems that keep parts of a second: their kernels' ticks are 10 ms at most."""
_SECOND_NS = 10**9


@dataclass(slots=True)
class RecordFile:
    """One file as last seen: the record in it, or the reason there is none."""

    record: BenchmarkRecord | None = None
    reason: str | None = None
    signature: Signature | None = None
    digest: bytes = b""
    settled: bool = False
    """So old that any later write would show in the signature."""


class Written(NamedTuple):
    """A record in a temporary file."""

    record: BenchmarkRecord
    aside: Path
    digest: bytes


class RecordFolder:
    """Mirror of one `records` folder. Not thread-safe: its owner holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._path = str(path)
        self._descriptor: int | None = None
        self.records: dict[str, BenchmarkRecord] = {}
        self.changes: list[Change] = []
        """What changed for users since the owner last emptied it; complete even when an operation failed half-way."""
        self.version = 0
        """Higher after every change."""
        self.total_bytes = 0
        """Size of the files that hold a record."""
        self._files: dict[str, RecordFile] = {}
        self._names: dict[str, list[str]] = {}

    def refresh(self, on_look: OnLook | None = None) -> list[str]:
        """Make the mirror equal the folder; returns the names of temporary files lying about.

        `on_look` is told how many files were looked at, of how many. Raises StoreUnavailable when the folder cannot be
        listed.
        """
        waiting, strays = self.survey(self.names())
        total = len(waiting)
        while waiting:
            self.catch_up(waiting, most_s=0.0)
            if on_look is not None:
                on_look(total - len(waiting), total)
        return strays

    def names(self) -> list[str]:
        """Every file in the mirror."""
        return list(self._files)

    def survey(self, known: Iterable[str], rest: Callable[[], None] | None = None) -> tuple[deque[Hint], list[str]]:
        """What seems to differ from the mirror, and the names of temporary files; changes nothing.

        `known` are the names in the mirror; `rest` is called now and then. The lock need not be held: what others write
        meanwhile makes a hint wrong, and a hint is only where to look. Raises StoreUnavailable when the folder cannot
        be listed.
        """
        with reaching(self.path, "read"):
            listing, strays = list_folder(self.path, self._files, rest)
        gone: list[Hint] = [(name, None) for name in known if name not in listing]
        come: list[Hint] = [(name, seen) for name, seen in listing.items() if self._seems_new(name, seen)]
        return deque(gone + come), strays

    def catch_up(self, waiting: deque[Hint], most_s: float) -> None:
        """Make the mirror equal the folder in the first of these names, in as many as this time allows but one."""
        until = time.monotonic() + most_s
        with self._opened():
            while waiting:
                self._note(*waiting.popleft())
                if time.monotonic() >= until:
                    break

    @contextmanager
    def writing(self, record: BenchmarkRecord) -> Iterator[Written]:
        """One record written aside, for `place`; where that does not follow, the folder is as it was.

        Raises RecordInvalid, StoreUnavailable.
        """
        data = encode(record)
        with reaching(self.path, "write to"):
            aside = write_aside(self.path / f"{record.id}.json", data)
        try:
            yield Written(record, aside, digest_of(data))
        finally:
            drop(aside)

    def place(self, written: Written, *, flush: bool = True) -> None:
        """Put it in its place, durably; the cost does not depend on how many there are.

        Without `flush` it may be gone after a crash, though never half, until `flush` is called.
        Raises RecordInvalid, or StoreUnavailable with the folder as it was.
        """
        name = self._name_for(written.record.id)
        with reaching(self.path, "write to"):
            written.aside.replace(self.path / name)
            seen = signature((self.path / name).lstat())
        self._replace(name, RecordFile(written.record, None, seen, written.digest))
        if flush:
            self.flush()

    def flush(self) -> None:
        """Make what was put without a flush survive a crash."""
        with reaching(self.path, "write to"):
            flush_folder(self.path)

    def delete(self, record_id: str, *, only: BenchmarkRecord | None = None, flush: bool = True) -> bool:
        """Delete every readable file of one record, and nothing else; False when there was none.

        With `only`, not even that where the files hold another than this very record of the mirror.
        """
        found = self.find(record_id)
        if found is None or (only is not None and found is not only):
            return False
        return self._unlink([(record_id, name) for name in self._names[record_id]], flush=flush)

    def delete_all(self) -> None:
        """Delete the files of all records in the mirror, and nothing else."""
        self._unlink([(record_id, name) for record_id, names in self._names.items() for name in names])

    def find(self, record_id: str) -> BenchmarkRecord | None:
        """The record of this id as its files have it now, whatever other processes did."""
        if not is_id(record_id):
            return None
        looked: list[str] = []
        for name in names_of(record_id):
            self._look(name)
            looked.append(name)
            if len(looked) > 1 and name not in self._files:
                break
        for name in set(self._names.get(record_id, ())).difference(looked):
            self._look(name)
        return self.records.get(record_id)

    def size_bytes(self, record_id: str) -> int:
        """Size on disk of a record. Raises KeyError."""
        return sum(_size(self._files[name]) for name in self._names[record_id])

    def files(self, record_id: str) -> list[str]:
        """Names of the files of an id as last seen; the one that serves is the first."""
        return list(self._names.get(record_id, ()))

    def digest(self, name: str) -> bytes | None:
        """What tells the content that a file has now; None when there is none, empty when it cannot be read."""
        found = self._look(name)
        return None if found is None else found.digest

    def restore(self, name: str, data: bytes | None) -> None:
        """Let a file hold these bytes again, or be none. Not flushed. Raises StoreUnavailable."""
        with reaching(self.path, "write to"):
            if data is None:
                (self.path / name).unlink(missing_ok=True)
            else:
                write_atomically(self.path / name, data, flush=False)
        self._look(name)

    def file_name(self, record_id: str) -> str:
        """The file that serves this id. Raises KeyError."""
        return self._names[record_id][0]

    def skipped(self) -> dict[str, str]:
        """File name -> why it does not serve."""
        reasons = {name: file.reason for name, file in self._files.items() if file.reason is not None}
        for record_id, names in self._names.items():
            reasons |= dict.fromkeys(names[1:], f"it has the id {record_id}, which {names[0]} has too")
        return dict(sorted(reasons.items()))

    def _unlink(self, files: list[tuple[str, str]], *, flush: bool = True) -> bool:
        """Delete these files, each only if it still holds a record of its id: another may have come by a rename."""
        gone = False
        with reaching(self.path, "delete from"):
            try:
                for record_id, name in files:
                    gone = self._unlink_one(record_id, name) or gone
            finally:
                if gone and flush:
                    flush_folder(self.path)
        return gone

    def _unlink_one(self, record_id: str, name: str) -> bool:
        self._look(name)
        if name not in self._names.get(record_id, ()):
            return False
        with suppress(FileNotFoundError):
            (self.path / name).unlink()
        self._replace(name, None)
        return True

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Read by names in the open folder, which saves the walk of the path for each of many files."""
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            yield  # there is none, or it is gone again: each file says so
            return
        try:
            yield
        finally:
            os.close(self._descriptor)
            self._descriptor = None

    def _look(self, name: str) -> RecordFile | None:
        """Make the mirror equal the folder in this one name; returns what is in that file."""
        found = self._read(name, self._files.get(name))
        self._replace(name, None if self._is_alias(name, found) else found)
        return found

    def _is_alias(self, name: str, found: RecordFile | None) -> bool:
        """Whether this is a file that is in the mirror by another spelling, where the volume ignores case."""
        if found is None or found.record is None or found.signature is None:
            return False
        return any(
            other != name and other.lower() == name.lower() and _inode(self._files[other]) == found.signature.inode
            for other in self._names.get(found.record.id, ())
        )

    def _seems_new(self, name: str, seen: Signature | str | None) -> bool:
        old = self._files.get(name)
        if isinstance(seen, str):
            return old is None or old.reason != seen
        return old is None or not old.settled or old.signature != seen

    def _note(self, name: str, seen: Signature | str | None) -> None:
        old = self._files.get(name)
        if RECORD_NAME.fullmatch(name) is None:
            self._replace(name, RecordFile(reason=seen) if isinstance(seen, str) else None)
        elif isinstance(seen, str) and (old is None or old.record is None):
            self._replace(name, RecordFile(reason=seen))
        else:
            self._look(name)

    def _read(self, name: str, old: RecordFile | None) -> RecordFile | None:
        """What is in a file now, None when there is none. Where the content is `old`'s, so is the record."""
        now = time.time_ns()
        try:
            whole = f"{self._path}/{name}" if self._descriptor is None else name
            data, seen = read_small(whole, self._descriptor)
        except FileNotFoundError:
            return None
        except Unreadable as error:
            return RecordFile(reason=str(error))
        digest, settled = digest_of(data), is_settled(seen, now)
        if old is not None and old.digest == digest:
            return RecordFile(old.record, old.reason, seen, digest, settled)
        try:
            return RecordFile(decode(data), None, seen, digest, settled)
        except RecordInvalid as error:
            return RecordFile(None, error.message, seen, digest, settled)

    def _replace(self, name: str, new: RecordFile | None) -> None:
        """Put what a file holds now into the mirror."""
        old = self._files.get(name)
        if old is None and new is not None and new.record is not None and new.record.id not in self._names:
            self._enter(name, new, new.record)
            return
        self.total_bytes += _size(new) - _size(old)
        if new is None:
            self._files.pop(name, None)
        else:
            self._files[name] = new
        gone, come = (file.record.id if file and file.record else None for file in (old, new))
        if gone is not None and gone != come:
            self._names[gone].remove(name)
            self._serve(gone)
        if come is not None and gone != come:
            names = self._names.setdefault(come, [])
            names.append(name)
            names.sort(key=lambda other: rank(come, other))
        if come is not None:
            self._serve(come)

    def _enter(self, name: str, file: RecordFile, record: BenchmarkRecord) -> None:
        """The short way of nearly all: a new file with a new id."""
        self._files[name] = file
        self._names[record.id] = [name]
        self.records[record.id] = record
        self.total_bytes += _size(file)
        self.version += 1
        self.changes.append((None, record))

    def _serve(self, record_id: str) -> None:
        """Let the first-ranked file of an id serve it."""
        before = self.records.get(record_id)
        names = self._names[record_id]
        after = self._files[names[0]].record if names else None
        if after is None:
            del self._names[record_id]
            self.records.pop(record_id, None)
        else:
            self.records[record_id] = after
        if before is not after:
            self.version += 1
            self.changes.append((before, after))

    def _name_for(self, record_id: str) -> str:
        """A file name that holds this record or nothing; a damaged or foreign file is left where it is."""
        for name in names_of(record_id):
            file = self._look(name)
            if file is None or (file.record is not None and file.record.id == record_id):
                return name
        raise invalid("id", record_id, "free", "move the damaged files of this id elsewhere")


def _size(file: RecordFile | None) -> int:
    return 0 if file is None or file.record is None or file.signature is None else file.signature.size


def _inode(file: RecordFile) -> int | None:
    return None if file.signature is None else file.signature.inode


def is_settled(seen: Signature, now_ns: int) -> bool:
    """Whether a write after `now_ns` would show in the signature: not before the file system's clock has ticked on.

    A burst is read several times over by looks that follow each other soon, so that a clock known to be fine counts.
    """
    newest = max(seen.mtime_ns, seen.ctime_ns)
    coarse = seen.mtime_ns % _SECOND_NS == 0 or seen.ctime_ns % _SECOND_NS == 0
    tick = CLOCK_TICK_NS if coarse else FINE_TICK_NS
    return int(newest) + tick < now_ns


def digest_of(data: bytes) -> bytes:
    """What tells one content of a file from another."""
    return hashlib.blake2b(data, digest_size=16).digest()
