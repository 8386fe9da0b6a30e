"""One benchmark directory at work: its lock, its files, its index and its bounds. The owner holds the lock."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from veloxquant.benchmarks import index
from veloxquant.benchmarks.eviction import EvictionOrder, Limits, Victim
from veloxquant.benchmarks.folder import RecordFolder
from veloxquant.benchmarks.handed_out import HandedOut
from veloxquant.benchmarks.index_writer import CHEAP_S, COST_MULTIPLE, IndexWriter
from veloxquant.benchmarks.lock import StoreLock
from veloxquant.benchmarks.merge_journal import MergeJournal
from veloxquant.benchmarks.record_groups import RecordGroups
from veloxquant.benchmarks.storage import Signature, drop, list_folder, make_folder, reaching, signature, write_aside
from veloxquant.errors import StoreError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from veloxquant.benchmarks.adding import Adding
    from veloxquant.benchmarks.folder import Written
    from veloxquant.benchmarks.records import BenchmarkRecord

_TRIES = 2
"""Times that an index is made before others are kept from writing theirs."""
_MOMENT_S = _REST_S = 0.002
"""Of work and of rest in turn, so that who is served meanwhile has half of the interpreter to itself."""
_OTHERS_TURN_S = 0.0002
"""A lock that is taken again at once is seldom given to those who wait for it."""
_BURST = 128
"""Changes that a look found: below, a published record waits for no rest (a stream of 250 records a second)."""
_FEW, _MANY = 64, 1000
"""Records that are placed in the order of eviction beside an add, and at one go of a thread that may take longer."""


def _after_others(piece: bytes) -> bytes:
    """The same, when other threads have had a chance to run."""
    time.sleep(_OTHERS_TURN_S)
    return piece


class _Overtaken(Exception):
    """Another process wrote the index, or took ours for litter, while it was made. Never leaves this file."""


class Directory:
    """What a database works on, apart from it, so that the last index can be written when the database is gone."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path = path
        self.limits = limits
        self.index_path = path / "index.json"
        self.lock = StoreLock(path / ".lock")
        self.folder = RecordFolder(path / index.RECORDS)
        self.journal = MergeJournal(path, self.folder)
        self.handed = HandedOut(self.folder.records)
        self.index = IndexWriter(self.write_index, self.lock.at_once)
        self.groups: RecordGroups | None = None
        self._order: EvictionOrder | None = None
        self._compared: tuple[Signature | None, int] | None = None
        """The index and the version of the folder that were last compared; if they differed, that was told."""
        self._agreed: tuple[Signature | None, int] | None = None
        """The index and the version of the folder that say the same."""
        self._kept: tuple[Signature | None, index.Index] = (None, index.Index())
        """An index that we wrote, without its records: it need not be read for what others put into it."""
        self._grows = False
        """Whether we have put new records here since the index was written: reading and replacing evict none."""
        self._trusted_until = 0.0
        self._is_burst = False
        """Whether the last look found many changes: then it has time, since the next one follows."""

    @property
    def grouped(self) -> RecordGroups:
        """The records for matching; to be read without the lock. There from the first refresh on."""
        return RecordGroups() if self.groups is None else self.groups

    def write_index(self) -> str | None:
        """Make the index say what the folder holds, other processes' records included; why it was left alone, if so.

        Locks are held to copy what is to be said and to put the file in its place, not while the folder is looked at
        and the text is made. Whoever wrote the index meanwhile may have seen more than we: then it is done again.
        Raises StoreUnavailable.
        """
        for _ in range(_TRIES):
            with suppress(_Overtaken):
                return self._write_index()
        with self.lock.held(), suppress(_Overtaken):
            return self._write_index()
        raise StoreUnavailable(
            f"another program keeps writing {self.index_path}", hint="it is made again later; no record is lost"
        )

    def _write_index(self) -> str | None:
        stamp = index.stamp(self.index_path)
        strays = self.refresh()
        with self.lock.held():
            self.sweep(strays)
            if self._grows:
                self.make_room()
                self._grows = False
        version, listing = self._listing()
        if stamp is not None and self._agreed == (stamp, version):
            return None
        is_ours = stamp is not None and stamp == self._kept[0]
        found = self._kept[1] if is_ours else index.read(self.index_path)
        index.check_readable(found)
        if found.later is not None:
            return found.later
        text = b"".join(map(_after_others, index.render(listing, found)))
        written = self._put_index(text, stamp)
        self._kept = written, found._replace(records=None)
        self._agreed = self._compared = written, version
        return None

    def _put_index(self, text: bytes, stamp: Signature | None) -> Signature:
        """Put a new index in the place of the one of this stamp. Written aside without the lock, as it may be long."""
        with reaching(self.index_path, "write"):
            aside = write_aside(self.index_path, text, durable=False)
            try:
                return self._replace_index(aside, stamp)
            except FileNotFoundError as error:
                raise _Overtaken from error  # swept by another process, which could not know whose it was
            finally:
                drop(aside)

    def _replace_index(self, aside: Path, stamp: Signature | None) -> Signature:
        with self.lock.held():
            if index.stamp(self.index_path) != stamp:
                raise _Overtaken
            aside.replace(self.index_path)
            return signature(self.index_path.lstat())

    def refresh(self) -> list[str]:
        """Look at the folder again, keeping other threads out for moments only; returns temporary files lying in it."""
        began = time.monotonic()
        with self.lock.threads():
            known = self.folder.names()
        waiting, strays = self.folder.survey(known, self._rest if self._is_burst else None)
        self._is_burst = self.groups is not None and len(waiting) >= _BURST
        while waiting:
            with self.lock.threads():
                try:
                    self.folder.catch_up(waiting, _MOMENT_S)
                finally:
                    self.settle()
            if waiting:
                self._rest()
        self._arrange()
        spent_s = time.monotonic() - began
        # Where a look takes long, the thread that writes the index has it, and no caller who adds a record.
        self._trusted_until = math.inf if spent_s > CHEAP_S else time.monotonic() + COST_MULTIPLE * spent_s
        return strays

    def _rest(self) -> None:
        """Between two moments of work, leave the interpreter to those who are served already."""
        if self.groups is not None:
            time.sleep(_REST_S)

    def _arrange(self) -> None:
        """What matching and evicting would have to make at their first call is made here."""
        with self.lock.threads():
            if self.groups is None:
                self.groups = RecordGroups(self.folder.records.values())
                self.settle()
                if self._order is not None:
                    self._order.complete()
        while self._order is not None and self._order.is_waiting:
            with self.lock.threads():
                self._order.advance(_MANY)

    def index_is_stale(self) -> bool:
        """Whether the index is ours to write and says something else; False as well where that was already found."""
        stamp = index.stamp(self.index_path)
        with self.lock.threads():
            if (stamp, self.folder.version) == self._compared:
                return False
        version, listing = self._listing()
        seen = self._compared = stamp, version
        found = index.read(self.index_path)
        self.index.problem = found.problem
        is_stale = found.differs(listing)
        if found.problem is None and not is_stale:
            self._agreed = seen
        return is_stale

    def _listing(self) -> tuple[int, list[index.Listed]]:
        """What the index is to say, and the version of the folder from which on changes may be missing in it."""
        with self.lock.threads():
            version, ids = self.folder.version, list(self.folder.records)
        listed: list[index.Listed] = []
        for start in range(0, len(ids), _MANY):
            with self.lock.threads():
                listed += index.listing(self.folder, ids[start : start + _MANY])
            time.sleep(_OTHERS_TURN_S)
        return version, listed

    def settle(self) -> None:
        """Hand what changed to the groups that matching uses and to the order of eviction; the lock is held.

        The order is made by and by while the directory fills up, so that no add has to make it.
        """
        for before, _ in self.folder.changes:
            if before is not None:
                self.handed.forget(before.id)
        for order in (self.groups, self._order):
            for before, after in self.folder.changes if order is not None else ():
                order.change(before, after)  # type: ignore[union-attr]
        self.folder.changes.clear()
        if self._order is not None:
            self._order.advance(_FEW)
        elif self.groups is not None and self.is_over(self.limits.nearly()):
            self._order = EvictionOrder(self.folder.records)

    def sweep(self, strays: list[str]) -> None:
        """Delete what killed writers left; with the lock held, no temporary file of ours is in use."""
        paths = [self.folder.path / name for name in strays]
        with suppress(OSError):
            paths += [self.path / name for name in list_folder(self.path)[1]]
        for path in paths:
            with suppress(OSError):
                path.unlink()

    def put(self, record: BenchmarkRecord, *, flush: bool = True, evicts: bool = True) -> None:
        """Write one record and keep the bounds. Raises RecordInvalid, StoreUnavailable.

        A new record makes the directory keep its limits. One that replaces another makes room for no more than the
        bytes that it has more: what others overfilled is not its affair. With `evicts` False none goes at all.
        """
        bytes_before = self.folder.total_bytes
        with self._writing(record) as written:
            is_new = self._place(written, flush=flush)
        if not evicts:
            return
        if is_new:
            self._make_room_for(record, lambda: self.delete(record.id))
        else:
            self.make_room(record, self.limits.after_replacing(bytes_before))

    def replace_all(self, records: Sequence[BenchmarkRecord]) -> None:
        """Put records in the place of those of their ids; where one of them cannot be written, none is.

        They make room for no more than the bytes that they have more. Raises RecordInvalid, StoreUnavailable.
        """
        bytes_before = self.folder.total_bytes
        with ExitStack() as aside:
            for written in [aside.enter_context(self._writing(record)) for record in records]:
                self._place(written, flush=False)
        if records:
            self.folder.flush()
            self.make_room(records[-1], self.limits.after_replacing(bytes_before))

    def add(self, adding: Adding) -> None:
        """Carry out what `adding` says, all of it or nothing, and keep the bounds. Raises as `put` does.

        After a crash in the middle, what was to be apart may be in front as well; nothing is lost.
        """
        front, apart, record, gives_way = adding
        bytes_before, count_before = self.folder.total_bytes, len(self.folder.records)
        with self._writing(record) as written:
            try:
                if apart is not None:
                    self.put(apart, evicts=False)
                self._place(written)
            except StoreError:
                self._take_back(front, apart, record)
                raise
        if gives_way is not None:
            with suppress(StoreUnavailable):  # then there are two of one version, and the older goes first
                self.delete(gives_way)
        if len(self.folder.records) > count_before:
            self._make_room_for(record, lambda: self._take_back(front, apart, record))
        else:
            self.make_room(record, self.limits.after_replacing(bytes_before))

    def _take_back(self, front: BenchmarkRecord | None, apart: BenchmarkRecord | None, record: BenchmarkRecord) -> None:
        """Make the directory what it was before an add, however far that came."""
        if front is None:
            self.delete(record.id, only=record)
        elif self.folder.find(record.id) is record:
            self.put(front, evicts=False)
        if apart is not None:
            self.delete(apart.id, only=apart)

    @contextmanager
    def _writing(self, record: BenchmarkRecord) -> Iterator[Written]:
        with reaching(self.folder.path, "create"):
            make_folder(self.folder.path)
        with self.folder.writing(record) as written:
            yield written

    def _place(self, written: Written, *, flush: bool = True) -> bool:
        """Whether there was none of this id."""
        is_new = self.folder.find(written.record.id) is None
        self._grows = self._grows or is_new
        try:
            self.folder.place(written, flush=flush)
        except StoreUnavailable:
            with suppress(StoreUnavailable):
                if is_new:
                    self.folder.delete(written.record.id, only=written.record, flush=False)
            raise
        finally:
            self.settle()
        return is_new

    def _make_room_for(self, newcomer: BenchmarkRecord, take_back: Callable[[], object]) -> None:
        size = self.folder.size_bytes(newcomer.id)
        if size <= self.limits.max_bytes:
            self.make_room(newcomer)
        if not self.is_over():
            return
        take_back()
        if self.limits.max_records < 1:
            why = "may hold no record: records.max_records is below 1"
        elif size > self.limits.max_bytes:
            why = f"may hold {self.limits.max_bytes} bytes, and this record has {size}"
        else:
            why = "holds as much as it may, and all of it is pinned"
        raise StoreUnavailable(
            f"{self.path} {why}",
            hint="unpin some records, or raise records.max_records and records.max_bytes",
        )

    def find(self, record_id: str) -> BenchmarkRecord | None:
        """The record of this id as the directory has it now."""
        try:
            return self.folder.find(record_id)
        finally:
            if self.folder.changes:
                self.settle()

    def delete(self, record_id: str, *, only: BenchmarkRecord | None = None, flush: bool = True) -> bool:
        """Delete one record; False when there is none, or, with `only`, when it is not that very one any more."""
        try:
            return self.folder.delete(record_id, only=only, flush=flush)
        finally:
            self.settle()

    def is_over(self, limits: Limits | None = None) -> bool:
        """Whether there are more records or bytes than the limits allow, as far as this process has seen."""
        limits = limits or self.limits
        return len(self.folder.records) > limits.max_records or self.folder.total_bytes > limits.max_bytes

    def make_room(self, newcomer: BenchmarkRecord | None = None, limits: Limits | None = None) -> list[Victim]:
        """Evict until the limits, the store's own unless others are given, are kept. What was just put stays.

        Before anything goes for the store's own, the folder is looked at again, unless that would take more than a
        share of the time. So of several processes each keeps the bound for what it has seen: together they exceed it
        by no more than they add between two of those looks, and whichever writes the index last brings it back.

        An eviction is not flushed to the disk by itself. After a crash of the system an evicted record may be there
        again: it serves like any other, and goes again with the next record that comes, or with `prune`.
        """
        if limits is None and self.is_over() and time.monotonic() > self._trusted_until:
            self.refresh()
        gone: list[Victim] = []
        while self.is_over(limits):
            victim = self._next_victim(newcomer, limits)
            if victim is None:
                break
            gone.append(victim)
        return gone

    def would_go(self) -> list[Victim]:
        """What `make_room` would evict now."""
        order = EvictionOrder(dict(self.folder.records))
        records, size = len(self.folder.records), self.folder.total_bytes
        found: list[Victim] = []
        while records > self.limits.max_records or size > self.limits.max_bytes:
            record = order.pop()
            if record is None:
                break
            victim = Victim(record, self.folder.size_bytes(record.id), order.newest(record))
            records, size = records - 1, size - victim.size_bytes
            found.append(victim)
        return found

    def _next_victim(self, newcomer: BenchmarkRecord | None, limits: Limits | None) -> Victim | None:
        """Evict one record, if it is still what it was when it was last seen. None when there is none to evict."""
        order = self._order = self._order or EvictionOrder(self.folder.records)
        while self.is_over(limits) and (record := order.pop(newcomer)) is not None:
            newer = order.newest(record)
            if newer is None or self.folder.find(newer.id) is newer:
                size = self.folder.size_bytes(record.id) if record.id in self.folder.records else 0
                if self.delete(record.id, only=record, flush=False):
                    return Victim(record, size, newer)
            self.settle()
            order.push(record)
        return None
