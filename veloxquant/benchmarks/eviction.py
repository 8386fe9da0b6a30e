"""What the store lets go of when it is full: superseded measurements first, the oldest first, never a pinned one.

A measurement is superseded when the store has another one of the same method, model, context, batch and chip that was
made on a newer MLX, or on the same MLX later. When none of those is left, the oldest measurements go.
"""

from __future__ import annotations

import heapq
import sys
from bisect import insort
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


class Limits(NamedTuple):
    """The most records, and bytes of record files, that a store keeps."""

    max_records: int = MAX_RECORDS
    max_bytes: int = MAX_BYTES

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
    """The order in which a set of records goes, kept up to date one by one at O(log n) each."""

    def __init__(self, records: Mapping[str, BenchmarkRecord]) -> None:
        """`records` is the owner's own mapping; every change of it is to be told to `change`."""
        self._records = records
        self._groups: dict[Measured, list[BenchmarkRecord]] = {}
        """Measurements of one thing, the newest last."""
        self._heap: list[tuple[int, float, str]] = []
        self._build()

    def change(self, before: BenchmarkRecord | None, after: BenchmarkRecord | None) -> None:
        """`before` was taken out of the records and `after` put in."""
        if before is not None:
            self._take_out(before)
        if after is not None:
            group = self._groups.setdefault(measured(after), [])
            insort(group, after, key=newness)
            self.push(after)
            for record in group[-2:]:  # what was the newest may not be it any more
                self.push(record)

    def newest(self, record: BenchmarkRecord) -> BenchmarkRecord | None:
        """What supersedes a record, None when nothing does."""
        group = self._groups.get(measured(record), ())
        return None if not group or group[-1] is record else group[-1]

    def pop(self, spared: BenchmarkRecord | None = None) -> BenchmarkRecord | None:
        """The record that goes next, taken out of the order; None when what is left is pinned or `spared`."""
        if len(self._heap) > 8 * len(self._records) + 64:
            self._build()  # mostly places that are no longer true
        found = None
        is_spared = False
        while self._heap and found is None:
            place = heapq.heappop(self._heap)
            record = self._records.get(place[-1])
            if record is None or PINNED in record.tags or place != self._place(record):
                continue
            is_spared = is_spared or record is spared
            found = None if record is spared else record
        if is_spared and spared is not None:
            self.push(spared)
        return found

    def push(self, record: BenchmarkRecord) -> None:
        """Put back what was popped and stayed, or what now has another place."""
        heapq.heappush(self._heap, self._place(record))

    def _take_out(self, record: BenchmarkRecord) -> None:
        key = measured(record)
        left = [one for one in self._groups.pop(key, ()) if one is not record]
        if left:
            self._groups[key] = left
            self.push(left[-1])

    def _build(self) -> None:
        self._groups.clear()
        for record in self._records.values():
            self._groups.setdefault(measured(record), []).append(record)
        for group in self._groups.values():
            group.sort(key=newness)
        self._heap = [self._place(record) for record in self._records.values()]
        heapq.heapify(self._heap)

    def _place(self, record: BenchmarkRecord) -> tuple[int, float, str]:
        """What is superseded before the newest of its kind, then by time."""
        return int(self.newest(record) is None), recorded_at(record), record.id
