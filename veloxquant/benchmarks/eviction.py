"""What the store lets go of when it is full: superseded measurements first, the oldest first, never a pinned one.

A measurement is superseded when the store has another one of the same method, model, context, batch and chip that was
made on a newer MLX, or on the same MLX later. When none of those is left, the oldest measurements go.
"""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_left, insort
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.benchmarks.fingerprint import known
from veloxquant.benchmarks.matching import version_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from veloxquant.benchmarks.records import BenchmarkRecord

PINNED = "pinned"
"""Tag of a record that is never evicted."""
MAX_RECORDS = 100_000
MAX_BYTES = 2**30

Measured = tuple[str, str, int, int, str]


_Newness = tuple[tuple[int, ...], float, str, "BenchmarkRecord"]
"""`newness` and the record; no two are equal before it."""
_PAIR = 2


class Limits(NamedTuple):
    """The most records, and bytes of record files, that a store keeps."""

    max_records: int = MAX_RECORDS
    max_bytes: int = MAX_BYTES

    def nearly(self) -> Limits:
        """Where it is time to get ready for evicting: at nine tenths."""
        return Limits(self.max_records * 9 // 10, self.max_bytes * 9 // 10)

    def after_replacing(self, bytes_before: int) -> Limits:
        """What is to be kept when a record took the place of another: any number, and not more bytes than before."""
        return Limits(sys.maxsize, max(self.max_bytes, bytes_before))


class Victim(NamedTuple):
    """A record that goes, its bytes on disk, and why: the record that supersedes it, None when it is but the oldest."""

    record: BenchmarkRecord
    size_bytes: int
    superseded_by: BenchmarkRecord | None


def measured(record: BenchmarkRecord) -> Measured:
    """What was measured and where: the parts of a fingerprint."""
    chip = record.chip if known(record.chip) else ""
    return record.method, record.model_id, record.context_length, record.batch_size, chip


def recorded_at(record: BenchmarkRecord) -> float:
    """created_at in seconds since 1970; 0.0, the oldest of all, where it is no time."""
    try:
        at = datetime.fromisoformat(record.created_at)
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def newness(record: BenchmarkRecord) -> tuple[tuple[int, ...], float, str]:
    """By MLX version, an unknown one lowest; of equal versions by time; then by id, so that the order is total."""
    return version_numbers(record.mlx_version) or (), recorded_at(record), record.id


class EvictionOrder:
    """The order in which a set of records goes, kept up to date one by one at O(log n) each.

    It is made when it is first asked, or by and by before that, with `advance`.
    """

    def __init__(self, records: Mapping[str, BenchmarkRecord]) -> None:
        """`records` is the owner's own mapping; every change of it is to be told to `change`."""
        self._records = records
        self._groups: dict[Measured, list[_Newness]] = {}
        """Measurements of one thing, the newest last."""
        self._placed: dict[str, tuple[Measured, _Newness]] = {}
        """Where each record is, as it was when it came."""
        self._heap: list[tuple[int, float, str]] = []
        self._waiting = list(records)
        """Ids whose record has not been placed yet, unless it came by a change."""

    def change(self, before: BenchmarkRecord | None, after: BenchmarkRecord | None) -> None:
        """`before` was taken out of the records and `after` put in."""
        if before is not None:
            self._take_out(before.id)
        if after is not None:
            self._put_in(after)

    def advance(self, most: int) -> None:
        """Place so many of the records that are waiting."""
        for _ in range(min(most, len(self._waiting))):
            record = self._records.get(self._waiting.pop())
            if record is not None and record.id not in self._placed:
                self._put_in(record)

    @property
    def is_waiting(self) -> bool:
        """Whether records are waiting to be placed."""
        return bool(self._waiting)

    def complete(self) -> None:
        """Place all that are waiting, at one go."""
        waiting, self._waiting = self._waiting, []
        touched: dict[Measured, list[_Newness]] = {}
        for record_id in waiting:
            record = self._records.get(record_id)
            if record is not None and record_id not in self._placed:
                key, entry = measured(record), _newness(record)
                touched[key] = group = self._groups.setdefault(key, [])
                group.append(entry)
                self._placed[record_id] = key, entry
        for group in touched.values():
            group.sort()
            self._heap += [(int(one is group[-1]), one[1], one[2]) for one in group]
        if touched:
            heapq.heapify(self._heap)

    def newest(self, record: BenchmarkRecord) -> BenchmarkRecord | None:
        """What supersedes a record, None when nothing does."""
        self.complete()
        placed = self._placed.get(record.id)
        if placed is None:
            return None
        last = self._groups[placed[0]][-1]
        return None if last is placed[1] else last[-1]

    def pop(self, spared: BenchmarkRecord | None = None) -> BenchmarkRecord | None:
        """The record that goes next, taken out of the order; None when what is left is pinned or `spared`."""
        self.complete()
        found = None
        is_spared = False
        while self._heap and found is None:
            place = heapq.heappop(self._heap)
            record = self._records.get(place[-1])
            if record is None or PINNED in record.tags or place != self._place(place[-1]):
                continue
            is_spared = is_spared or record is spared
            found = None if record is spared else record
        if is_spared and spared is not None:
            self.push(spared)
        return found

    def push(self, record: BenchmarkRecord) -> None:
        """Put back what was popped and stayed, or what now has another place."""
        if record.id in self._placed:
            self._push(record.id)

    def _push(self, record_id: str) -> None:
        heapq.heappush(self._heap, self._place(record_id))
        if len(self._heap) > 8 * len(self._placed) + 64:
            self._heap = [self._place(one) for one in self._placed]  # the others are no longer true
            heapq.heapify(self._heap)

    def _put_in(self, record: BenchmarkRecord) -> None:
        key, entry = measured(record), _newness(record)
        group = self._groups.setdefault(key, [])
        insort(group, entry)
        self._placed[record.id] = key, entry
        for one in group[-2:]:  # what was the newest may not be it any more
            self._push(one[-2])
        if len(group) > _PAIR:
            self._push(record.id)

    def _take_out(self, record_id: str) -> None:
        placed = self._placed.pop(record_id, None)
        if placed is None:
            return
        key, entry = placed
        group = self._groups[key]
        del group[bisect_left(group, entry)]
        if group:
            self._push(group[-1][-2])
        else:
            del self._groups[key]

    def _place(self, record_id: str) -> tuple[int, float, str]:
        """What is superseded before the newest of its kind, then by time."""
        key, entry = self._placed[record_id]
        return int(self._groups[key][-1] is entry), entry[1], record_id


def _newness(record: BenchmarkRecord) -> _Newness:
    return *newness(record), record
