"""A merge carried out, all of it or nothing: a batch under one hold of the lock, so that other writers get their turn.

What it will change is in the journal before it does. Whatever ends it early, an error, a kill or a crash, it is undone:
at once, or by the next who opens the directory or writes to it.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from veloxquant.benchmarks.merge_plan import Merged, plan_merge
from veloxquant.benchmarks.validation import check_types
from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from veloxquant.benchmarks.directory import Directory
    from veloxquant.benchmarks.eviction import Victim
    from veloxquant.benchmarks.merge_plan import MergePlan, OnStep
    from veloxquant.benchmarks.records import BenchmarkRecord

_BATCH = 200
"""Records that are written under one hold of the lock, and made to survive a crash together."""
_log = logging.getLogger(__name__)
_TRIES = 3
"""Times that it is decided without the lock, which may take seconds, before others are kept out meanwhile."""


def take_in(store: Directory, records: Iterable[BenchmarkRecord], *, dry_run: bool, on_step: OnStep | None) -> Merged:
    """Place records from elsewhere among ours. A dry run only tells; else it is on the disk when the call returns.

    `on_step` is told how far deciding has come, and then writing. Raises RecordInvalid, StoreUnavailable, or what
    `on_step` raises, with the directory as it was; where that cannot be now, with an account of how to get there.
    """
    incoming = list(records)
    for record in incoming:
        check_types(record)
    run = _Run(store, incoming, on_step)
    if dry_run:
        return run.merged(run.decide().evicted)
    with store.journal.lock.held():
        if store.journal.is_abandoned():
            _undo(store)
        store.journal.begin()
        try:
            run.carry_out()
            store.journal.end()
        except BaseException:
            _give_up(store)
            raise
    return run.merged(run.evicted)


def undo_abandoned(store: Directory) -> bool:
    """Undo a merge whose process is gone; whether there was one. Waits for no merge, and never raises."""
    if not store.journal.is_abandoned():
        return False
    try:
        with store.journal.lock.at_once(), store.journal.lock.held():
            if not store.journal.is_abandoned():  # another process has undone it meanwhile
                return False
            _undo(store)
    except StoreUnavailable as error:
        _log.info("an interrupted merge is not undone yet: %s", error.message)
        return False
    _log.warning("undid a merge into %s that was interrupted", store.path)
    return True


def _undo(store: Directory) -> None:
    with store.lock.held():
        try:
            store.journal.undo()
        finally:
            store.settle()


def _give_up(store: Directory) -> None:
    """Undo our own merge. Where the disk does not let us, the journal stays for the next."""
    try:
        with suppress(StoreUnavailable):
            _undo(store)
    finally:
        store.journal.leave()
    store.index.mark(waits=False)


class _Run:
    """What is decided and how much of it is done. Where another process comes between, the rest is decided anew."""

    def __init__(self, store: Directory, incoming: list[BenchmarkRecord], on_step: OnStep | None) -> None:
        self.is_under_way = True
        self.evicted: tuple[Victim, ...] = ()
        self._store = store
        self._incoming = incoming
        self._on_step = on_step
        self._first: MergePlan | None = None
        """What was decided before anything was written tells what became of each record."""
        self._plan: MergePlan | None = None
        self._tries = 0

    def merged(self, evicted: tuple[Victim, ...]) -> Merged:
        """The account."""
        outcomes = () if self._first is None else self._first.outcomes
        return Merged(tuple((one.id, what) for one, what in zip(self._incoming, outcomes, strict=True)), evicted)

    def carry_out(self) -> None:
        """Batch by batch, with the lock let go in between."""
        while self.is_under_way:
            self.get_ready()
            with self._store.lock.held():
                self.batch()

    def get_ready(self) -> None:
        """Decide, unless that was in vain too often."""
        if self._plan is None and self._tries < _TRIES:
            self._decide_to_do()

    def decide(self) -> MergePlan:
        """Look at the directory and plan for it as it is now."""
        store, folder = self._store, self._store.folder
        self._tries += 1
        store.refresh()
        with store.lock.threads():
            self._held = dict(folder.records)
            sizes = {record_id: folder.size_bytes(record_id) for record_id in self._held}
        self._plan = plan_merge(self._held, sizes.__getitem__, self._incoming, store.limits, self._on_step)
        self._first = self._first or self._plan
        self._puts = iter(self._plan.puts)
        self._written = 0
        self._gone: list[Victim] = []
        written = {one.id for one in self._plan.puts}
        self._victims = deque(one for one in self._plan.evicted if one.record.id not in written)
        return self._plan

    def _decide_to_do(self) -> MergePlan:
        """Decide, and note what will be changed."""
        plan = self.decide()
        self._store.journal.note(plan)
        return plan

    def batch(self) -> None:
        """Write some, or with the last of them end; the lock is held."""
        plan = self._plan or self._decide_to_do()
        store = self._store
        try:
            for record in islice(self._puts, _BATCH):
                if not self._is_unchanged(record.id):
                    self._plan = None
                    self.evicted += tuple(self._gone)
                    return
                store.put(record, flush=False, evicts=False)
                self._tell(plan)
                while self._victims and store.is_over():
                    self._evict(self._victims.popleft())
            if self._written == len(plan.puts):
                self._end(plan)
        finally:
            store.settle()
            if store.folder.path.exists():
                store.folder.flush()

    def _end(self, plan: MergePlan) -> None:
        for record_id in plan.deletes:
            if self._is_unchanged(record_id):
                self._store.delete(record_id, flush=False)
        for victim in self._victims:
            self._evict(victim)
        self.evicted += plan.evicted
        self.is_under_way = False

    def _evict(self, victim: Victim) -> None:
        if self._is_unchanged(victim.record.id):
            self._store.delete(victim.record.id, flush=False)
            self._gone.append(victim)

    def _is_unchanged(self, record_id: str) -> bool:
        """Whether a file still holds what it held when it was decided."""
        return self._store.folder.find(record_id) is self._held.get(record_id)

    def _tell(self, plan: MergePlan) -> None:
        self._written += 1
        if self._on_step is not None:
            self._on_step(self._written, len(plan.puts))
