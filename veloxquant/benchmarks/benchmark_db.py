"""The benchmark directory as a database: what was measured, kept so that nothing acknowledged is ever lost.

The record files are the truth; `index.json` is made from them. Several threads, objects and processes may use one
directory at once. Reading takes no lock between processes; each write does, and is on the disk when the call returns.
"""

from __future__ import annotations

import time
import weakref
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from veloxquant.benchmarks import index
from veloxquant.benchmarks.adding import add, keep_pin
from veloxquant.benchmarks.collector import no_collections
from veloxquant.benchmarks.directory import Directory
from veloxquant.benchmarks.eviction import PINNED, Limits, Victim
from veloxquant.benchmarks.fingerprint import UNKNOWN, benchmark_fingerprint, default_benchmark_dir
from veloxquant.benchmarks.handed_out import copied, taken
from veloxquant.benchmarks.matching import THRESHOLD
from veloxquant.benchmarks.merge_run import take_in, undo_abandoned
from veloxquant.benchmarks.model_name import PARAMETERS_TAG, named_parameters
from veloxquant.benchmarks.record_set import RecordSet, query
from veloxquant.benchmarks.record_text import encode
from veloxquant.benchmarks.records import BenchmarkMatchQuery, BenchmarkRecord
from veloxquant.benchmarks.storage import check_writers, list_folder, make_folder, placed, reaching
from veloxquant.benchmarks.validation import check_types, invalid, is_id
from veloxquant.errors import StoreUnavailable
from veloxquant.profiles import ModelProfile, WorkloadProfile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from veloxquant.benchmarks.merge_plan import Merged, OnStep

__all__ = [
    "BenchmarkDatabase",
    "BenchmarkMatchQuery",
    "BenchmarkRecord",
    "benchmark_fingerprint",
    "default_benchmark_dir",
]

_UNNAMED = "0"
"""Id of a record whose fingerprint waits for its fields to be checked."""


class BenchmarkDatabase:
    """Measured records in a directory, by default `default_benchmark_dir()`. Opening reads it and creates nothing.

    Raises StoreUnavailable when the directory is not a folder, cannot be read or written, or can be written by others;
    a write that fails leaves the store as it was. Safe to use from several threads, and over a fork. What is put beyond
    `limits` makes room: superseded measurements go first, the oldest first, and never one with the tag "pinned".
    """

    def __init__(self, storage_dir: Path | str | None = None, *, limits: Limits = Limits()) -> None:  # noqa: B008 -- a constant
        self.storage_dir = placed(default_benchmark_dir() if storage_dir is None else storage_dir)
        self._store = Directory(self.storage_dir, limits)
        weakref.finalize(self, self._store.index.let_go).atexit = False  # the index is closed at exit
        self.load()

    @property
    def index_path(self) -> Path:
        """`index.json` in the directory."""
        return self._store.index_path

    @property
    def records_dir(self) -> Path:
        """The folder of record files."""
        return self._store.folder.path

    def load(self) -> None:
        """Make the memory equal the directory. Only files that changed since they were read are read again.

        Records that cannot be used are set aside (`skipped`). Temporary files of killed writers are deleted, and an
        index that says something else than the records is made again; a directory that cannot be written is only read.
        It waits for no other process: where one is writing at this moment, both are done a little later. What a caller
        changed in a record and has not saved stays as it is, unless its file changed.
        """
        store = self._store
        self._check_folder()
        with store.lock.at_once():
            undo_abandoned(store)
        # Later, other threads have work of their own under way, whose next collection would be a long one.
        with no_collections() if store.groups is None else nullcontext():
            began = time.monotonic()
            strays = store.refresh()
            store.index.rest(time.monotonic() - began)
            stale = not store.index.is_due and store.index_is_stale()
        strays = strays or self._strays_beside_index()
        is_swept = not strays
        if strays:
            with suppress(StoreUnavailable), store.lock.at_once(), store.lock.held():
                store.sweep(strays)
                is_swept = True
        if stale or not is_swept:  # they are a live writer's, or go when the index is looked at
            store.index.mark(waits=False)
        else:
            store.index.retry()

    def save(self) -> None:
        """Write every record that was changed in memory, and the index.

        All are checked, and written aside, before the first is put in its place. A record that another process deleted
        meanwhile stays deleted, one that it replaced stays replaced; files set aside are not touched. Tags are written
        as they are, a pin that was taken out of them too. Raises RecordInvalid naming the field, also where the id was
        changed: with another id it is another record, which is for `upsert`.
        """
        store = self._store
        with self._writing():
            with reaching(self.records_dir, "create"):
                make_folder(self.records_dir)
            edited = [(record_id, one, _as_edited(record_id, one)) for record_id, one in store.handed.edited()]
            store.refresh()
            edited = [entry for entry in edited if store.handed.is_held(*entry[:2])]
            store.replace_all([own for _, _, own in edited])
            for record_id, one, _ in edited:
                store.handed.keep(record_id, one)
        store.index.flush()

    @property
    def records(self) -> dict[str, BenchmarkRecord]:
        """Copy of the mapping id -> record. What is changed in a record is written by `save`, and counts from then."""
        with self._store.lock.threads(), no_collections():
            return self._store.handed.all()

    def as_held(self) -> dict[str, BenchmarkRecord]:
        """The mapping id -> record as it is now, of the objects that the store works with: for reading only.

        Without the copies that `records` makes for callers to change, which take 400 bytes each.
        """
        with self._store.lock.threads():
            return dict(self._store.folder.records)

    @property
    def skipped(self) -> dict[str, str]:
        """Files that are not used, as `records/<name>` -> why. They stay on disk as they are."""
        with self._store.lock.threads():
            return {f"{index.RECORDS}/{name}": why for name, why in self._store.folder.skipped().items()}

    @property
    def index_problem(self) -> str | None:
        """Why `index.json` could not be brought up to date, None when it could. Records are safe either way."""
        return self._store.index.problem

    def find(self, record_id: str) -> BenchmarkRecord | None:
        """The record of this id, the same object as in `records`; None when there is none."""
        if not is_id(record_id):
            return None
        with self._store.lock.threads():
            return self._store.handed.of(record_id)

    def find_best_match(
        self,
        model: ModelProfile,
        workload: WorkloadProfile,
        methods: list[str] | None = None,
        *,
        threshold: float = THRESHOLD,
        hardware: Any | None = None,
    ) -> dict[str, BenchmarkRecord]:
        """The closest record of each method, where its score reaches the threshold; all methods when None.

        With hardware (anything with `chip` and `mlx_version`) those two count; without, they are not compared.
        """
        # Without the lock: groups may be read while another thread changes them.
        found = self._store.grouped.best(model, query("", model, workload, hardware), threshold, methods)
        return {method: self._store.handed.of_match(record) for method, record in found.items()}

    def record_set(self, threshold: float = THRESHOLD) -> RecordSet:
        """The records as they are in memory now, frozen, for a planner's snapshot.

        They are those that the store works with, for reading only; `find` gives one that may be changed.
        """
        with self._store.lock.threads():
            return RecordSet.frozen(self._store.grouped, len(self._store.folder.records), threshold)

    def upsert(self, record: BenchmarkRecord) -> BenchmarkRecord:
        """Insert a record, or replace the one of its id; where that one is pinned, so is what replaces it.

        A copy is stored, and returned as `find` has it. Raises RecordInvalid naming the field.
        """
        own = taken(record)
        store = self._store
        with self._writing():
            earlier = store.find(own.id)
            is_held = store.handed.is_held(own.id, record)
            keep_pin(earlier, own)
            store.put(own)
            if is_held:
                record.tags = list(own.tags)
                store.handed.keep(own.id, record)
            stored = store.handed.of_match(own)
        store.index.mark()
        return stored

    def add(
        self,
        method: str,
        model_id: str,
        *,
        context_length: int,
        batch_size: int = 1,
        memory_bytes: int = 0,
        memory_reduction: float | None = None,
        throughput_tok_s: float = 0.0,
        latency_ms_per_token: float = 0.0,
        perplexity_delta: float | None = None,
        chip: str = UNKNOWN,
        mlx_version: str = UNKNOWN,
        macos_version: str = UNKNOWN,
        workload: WorkloadProfile | None = None,
        source: str = "manual",
        tags: list[str] | None = None,
        architecture: str | None = None,
        model: ModelProfile | None = None,
    ) -> BenchmarkRecord:
        """Store one measurement under its fingerprint and return it. Raises RecordInvalid naming the field.

        A model gives the architecture, and a "parameters:" tag where the model id does not say its size. An earlier
        measurement of the same fingerprint is replaced when it was made on the same MLX version, and kept under an id
        of its own (`<id>-mlx<version>`) when not. A pin stays with the version that has it.
        """
        fields = {name: value for name, value in locals().items() if name not in ("self", "model")}
        record = _new_record(fields, model)
        with self._writing():
            self._store.add(add(record, self._store.find))
            stored = self._store.handed.of_match(record)
        self._store.index.mark()
        return stored

    def merge(
        self, records: Iterable[BenchmarkRecord], *, dry_run: bool = False, on_step: OnStep | None = None
    ) -> Merged:
        """Take in records from elsewhere, as `merging` says; what became of each, and what was evicted for them.

        Merging the same records again changes nothing, also at the limits. On the disk when the call returns; a dry run
        writes nothing and tells the same. `on_step` is told how far it has come, of how many. Raises RecordInvalid and
        StoreUnavailable with the directory as it was; a merge that is killed is undone by the next who opens it.
        """
        merged = take_in(self._store, map(taken, records), dry_run=dry_run, on_step=on_step)
        if not dry_run:
            self._store.index.mark()
        return merged._replace(evicted=tuple(map(_told, merged.evicted)))

    def pin(self, record_id: str, *, pinned: bool = True) -> bool:
        """Pin a record, so that it is never evicted, or unpin it; evicts nothing. False when there is none."""
        store = self._store
        if not is_id(record_id) or not store.path.exists():
            return False
        with self._writing():
            record = store.find(record_id)
            if record is None:
                return False
            if pinned != (PINNED in record.tags):
                one = store.handed.of(record_id)
                changed = copied(record)
                changed.tags = _pinned(record.tags, pinned=pinned)
                store.put(changed, evicts=False)
                if one is not None:  # whoever holds it may have changes of its own in it that are to be saved
                    tags = one.__dict__.get("tags")
                    one.tags = _pinned(tags, pinned=pinned) if isinstance(tags, list) else changed.tags[:]
                    store.handed.keep(record_id, one)
        return True

    def prune(self, *, dry_run: bool = False) -> list[Victim]:
        """Evict what is beyond the limits, and tell what went, in order; a dry run only tells what would go.

        Without a call of this, reading alone never evicts: what other programs put stays until we put something.
        """
        store = self._store
        with store.lock.threads():
            if dry_run or not store.is_over():
                return list(map(_told, store.would_go()))
        with self._writing():
            store.refresh()
            gone = store.make_room()
            if gone:
                store.folder.flush()
        if gone:
            store.index.mark()
        return list(map(_told, gone))

    @property
    def limits(self) -> Limits:
        """The most records and bytes that are kept."""
        return self._store.limits

    def remove(self, record_id: str) -> bool:
        """Delete a record. False when there is none, on disk or in memory."""
        store = self._store
        if not is_id(record_id) or not store.path.exists():
            return False
        with self._writing():
            removed = self._store.delete(record_id)
        if removed:
            store.index.mark()
        return removed

    def clear(self) -> None:
        """Delete every record, those of other processes and second files of one id included.

        Files that hold no record, and so were set aside, stay.
        """
        store = self._store
        with self._writing():
            with reaching(self.records_dir, "create"):
                make_folder(self.records_dir)
            store.refresh()
            try:
                store.folder.delete_all()
            finally:
                store.settle()
        store.index.flush()

    def close(self) -> None:
        """Bring the index up to date if it is behind. Called by itself at exit.

        When the object goes, the same is done without waiting for other writers.
        """
        self._store.index.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep other writers out, and write on what is there without a merge that was interrupted."""
        undo_abandoned(self._store)
        with self._store.lock.held():
            yield

    def _check_folder(self) -> None:
        directory = self.storage_dir
        if "\0" in str(directory):
            raise StoreUnavailable(f"{str(directory)!r} is no path", hint="take the NUL out of records.directory")
        with reaching(directory, "look at"):
            wrong = directory.exists() and not directory.is_dir()
        if wrong:
            hint = "move it away, or choose another records.directory"
            raise StoreUnavailable(f"{directory} is not a folder", hint=hint)
        check_writers(directory)
        check_writers(self.records_dir)

    def _strays_beside_index(self) -> list[str]:
        with suppress(OSError):
            return list_folder(self.storage_dir)[1]
        return []


def _new_record(fields: dict[str, Any], model: ModelProfile | None) -> BenchmarkRecord:
    """The record of an `add` call, checked before anything is computed from it. Raises RecordInvalid."""
    if model is not None and not isinstance(getattr(model, "architecture", None), str):
        raise invalid("model", model, "a ModelProfile", "leave it out, or give a traced profile")
    tags, workload = fields["tags"], fields["workload"]
    fields["tags"] = list(tags) if isinstance(tags, (list, tuple)) else ([] if tags is None else tags)
    fields["workload"] = WorkloadProfile() if workload is None else workload
    if fields["architecture"] is None:
        fields["architecture"] = UNKNOWN if model is None else model.architecture
    record = BenchmarkRecord(id=_UNNAMED, **fields)
    check_types(record)
    if workload is None:
        record.workload = WorkloadProfile(context_length=record.context_length, batch_size=record.batch_size)
    size = getattr(model, "num_parameters", None)
    if size and named_parameters(record.model_id) is None:
        record.tags.append(f"{PARAMETERS_TAG}{size}")
    key = (record.method, record.model_id, record.context_length, record.batch_size, record.chip)
    record.id = benchmark_fingerprint(*key)
    return record


def _as_edited(record_id: str, one: BenchmarkRecord) -> BenchmarkRecord:
    """What is to be written of a record that was changed in memory. Raises RecordInvalid naming the field."""
    own = taken(one)
    if own.id != record_id:
        hint = "upsert() it to store it under the new id, and remove() the old one"
        raise invalid("id", own.id, f"{record_id!r}, under which this record is stored", hint)
    encode(own)
    return own


def _told(victim: Victim) -> Victim:
    """For callers, who may change what they get."""
    newer = victim.superseded_by
    return victim._replace(record=copied(victim.record), superseded_by=None if newer is None else copied(newer))


def _pinned(tags: list[str], *, pinned: bool) -> list[str]:
    return [tag for tag in tags if tag != PINNED] + [PINNED] * pinned
