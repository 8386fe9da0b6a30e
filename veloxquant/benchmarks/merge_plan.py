"""What a merge does to a directory, worked out before a byte is written: a dry run and the real one are the same plan.

Where a directory is at its limits, what comes competes with what is there in the order of eviction. A newcomer that
would itself be the next to go is not taken in, and then what it would have replaced or superseded is judged without
it. What comes is placed in one order, the latest first, whatever the order it comes in: so any order ends alike, pins
and limits included. As an eviction can change what supersedes what, the merge is repeated in memory until it changes
nothing more: so merging the same source again changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.benchmarks.eviction import PINNED, EvictionOrder, Limits, Victim, recorded_at
from veloxquant.benchmarks.merging import Holdings, content, hand_pins_on, kind, place, place_order
from veloxquant.benchmarks.record_text import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from veloxquant.benchmarks.merging import Kind, Outcome
    from veloxquant.benchmarks.records import BenchmarkRecord

    OnStep = Callable[[int, int], None]
    Records = dict[str, BenchmarkRecord]

_TAKEN_IN = ("added", "replaced", "kept beside")
_SAME: Outcome = "same"
_OLDER: Outcome = "older"


@dataclass(frozen=True)
class MergePlan:
    """What to write, in this order, then what to delete, and what to evict so that there is room."""

    outcomes: tuple[Outcome, ...]
    """One for each record that came, in their order."""
    puts: tuple[BenchmarkRecord, ...]
    deletes: tuple[str, ...]
    """Ids of records that were moved to another id or gave way to a later measurement."""
    evicted: tuple[Victim, ...]
    """Of whose ids some may be another's now, who is among the `puts`."""


class Merged(NamedTuple):
    """What a merge did, or would do, and what was evicted for it."""

    outcomes: tuple[tuple[str, Outcome], ...]
    """The id that a record came with, and what became of it."""
    evicted: tuple[Victim, ...]

    @property
    def counts(self) -> Counter[Outcome]:
        """How many records there were of each outcome."""
        return Counter(outcome for _, outcome in self.outcomes)


class _Round(NamedTuple):
    """One merge in memory."""

    records: Records
    outcomes: list[Outcome | None]
    """None for a record that was not tried."""
    refused: set[int]
    """Positions of the records for which there is no room."""
    victims: list[Victim]
    moved: bool
    """Whether an id came free, or a record went under another id than its own: another look may place it elsewhere."""

    @property
    def is_settled(self) -> bool:
        """Whether the same merge again would change nothing, for all that shows in this one."""
        return not (self.refused or self.victims or self.moved)


def plan_merge(
    held: Mapping[str, BenchmarkRecord],
    size_bytes: Callable[[str], int],
    incoming: Sequence[BenchmarkRecord],
    limits: Limits,
    on_step: OnStep | None = None,
) -> MergePlan:
    """The plan for records that come to those `held`; `size_bytes` tells the size on disk of one of these by its id.

    `on_step` is told of how many of them it was decided, of how many. Raises RecordInvalid for a record that is too
    large to be written.
    """
    order = sorted(range(len(incoming)), key=lambda number: place_order(incoming[number]), reverse=True)
    plan = _plan_in_order(held, _Sizes(held, size_bytes), [incoming[number] for number in order], limits, on_step)
    outcomes = dict(zip(order, plan.outcomes, strict=True))
    return replace(plan, outcomes=tuple(outcomes[number] for number in range(len(incoming))))


def _plan_in_order(
    held: Mapping[str, BenchmarkRecord],
    sizes: _Sizes,
    incoming: Sequence[BenchmarkRecord],
    limits: Limits,
    on_step: OnStep | None,
) -> MergePlan:
    """The plan for records in the order in which they are placed."""
    states: list[Records] = [dict(held)]
    rounds: list[_Round] = []
    while True:
        rounds.append(_merge(states[-1], incoming, limits, sizes, on_step))
        after = rounds[-1].records
        first = next((number for number, state in enumerate(states) if _equal(state, after)), None)
        if first is not None:
            # More than one state in a circle: any merge that starts in one of them ends in the same one.
            after = states[first] if first == len(states) - 1 else min(states[first:], key=_spelt)
        if first is not None or rounds[-1].is_settled:
            return _plan(held, after, incoming, rounds, sizes)
        states.append(after)


class _Sizes:
    """Sizes on disk by the record object; what is not held yet is encoded for it."""

    def __init__(self, held: Mapping[str, BenchmarkRecord], size_bytes: Callable[[str], int]) -> None:
        self._held = held
        self._size_bytes = size_bytes
        self._known: dict[int, tuple[BenchmarkRecord, int]] = {}
        """By the object's identity; the object is kept, so that no other gets it."""

    def of(self, record: BenchmarkRecord) -> int:
        """Bytes of one record."""
        if self._held.get(record.id) is record:
            return self._size_bytes(record.id)
        if id(record) not in self._known:
            self._known[id(record)] = record, len(encode(record))
        return self._known[id(record)][1]

    def total(self, records: Iterable[BenchmarkRecord]) -> int:
        """Bytes of them all."""
        return sum(map(self.of, records))


def _merge(
    before: Records, incoming: Sequence[BenchmarkRecord], limits: Limits, sizes: _Sizes, on_step: OnStep | None
) -> _Round:
    """Merge without those for which there is no room; who they are shows as they are tried."""
    refused = {number for number, one in enumerate(incoming) if sizes.of(one) > limits.max_bytes}
    while True:
        records, outcomes, moved = _place_all(before, incoming, refused, on_step)
        hand_pins_on(records, before, [one for number, one in enumerate(incoming) if number not in refused])
        came = {content(incoming[n]): n for n, outcome in enumerate(outcomes) if outcome in _TAKEN_IN}
        bounds = limits if len(records) > len(before) else limits.after_replacing(sizes.total(before.values()))

        def number_of(one: BenchmarkRecord, came: dict[str, int] = came) -> int | None:
            return None if before.get(one.id) is one else came.get(content(one))

        unwelcome = _pinned_beyond(bounds, before, records, number_of, sizes)
        victims = [] if unwelcome else _evict(records, bounds, sizes)
        unwelcome |= {n for victim in victims if (n := number_of(victim.record)) is not None}
        if not unwelcome:
            return _Round(records, outcomes, refused, victims, moved)
        refused |= unwelcome


def _place_all(
    before: Records, incoming: Sequence[BenchmarkRecord], refused: set[int], on_step: OnStep | None
) -> tuple[Records, list[Outcome | None], bool]:
    records = dict(before)
    outcomes: list[Outcome | None] = []
    moved = False
    holdings = Holdings(records)
    for number, one in enumerate(incoming):
        if number in refused:
            outcomes.append(None)
            continue
        placing = place(one, records.get, holdings)
        holdings.note(placing.puts)
        records |= {put.id: put for put in placing.puts}
        for record_id in placing.deletes:
            del records[record_id]
        outcomes.append(placing.outcome)
        moved = moved or bool(placing.deletes) or any(put.id != one.id for put in placing.puts)
        if on_step is not None:
            on_step(number + 1, len(incoming))
    return records, outcomes, moved


def _pinned_beyond(
    bounds: Limits,
    before: Records,
    records: Records,
    number_of: Callable[[BenchmarkRecord], int | None],
    sizes: _Sizes,
) -> set[int]:
    """Newcomers that are pinned and do not fit even when all goes that may go: the oldest. What was pinned stays."""
    pinned = [one for one in records.values() if PINNED in one.tags]
    count, size = len(pinned), sizes.total(pinned)
    if count <= bounds.max_records and size <= bounds.max_bytes:
        return set()
    held = [one for one in before.values() if PINNED in one.tags]
    most, most_bytes = max(bounds.max_records, len(held)), max(bounds.max_bytes, sizes.total(held))
    beyond: set[int] = set()
    for one in sorted(pinned, key=lambda one: (recorded_at(one), one.id)):
        number = number_of(one)
        if number is not None and (count > most or size > most_bytes):
            beyond.add(number)
            count, size = count - 1, size - sizes.of(one)
    return beyond


def _evict(records: Records, bounds: Limits, sizes: _Sizes) -> list[Victim]:
    """Take out what goes, and tell it in order."""
    size = sizes.total(records.values())
    victims: list[Victim] = []
    order: EvictionOrder | None = None
    while len(records) > bounds.max_records or size > bounds.max_bytes:
        order = order or EvictionOrder(records)
        record = order.pop()
        if record is None:
            break
        victims.append(Victim(record, sizes.of(record), order.newest(record)))
        size -= victims[-1].size_bytes
        order.change(records.pop(record.id), None)
    return victims


def _plan(
    held: Mapping[str, BenchmarkRecord],
    after: Records,
    incoming: Sequence[BenchmarkRecord],
    rounds: list[_Round],
    sizes: _Sizes,
) -> MergePlan:
    """The difference, and what each record has to do with it."""
    come = [one for key, one in after.items() if key not in held or not _same(held[key], one)]
    changed = {one.id for one in come}
    gone = {content(one): one for key, one in held.items() if key not in after or key in changed}
    arrived = {content(one) for one in come}
    new = arrived - gone.keys()
    lost = {key: one for key, one in gone.items() if key not in arrived}
    given_way = {kind(one) for one in lost.values()}
    outcomes = tuple(
        "added" if outcome == "replaced" and kind(one) not in given_way else outcome
        for one, outcome in zip(incoming, _outcomes(incoming, new, rounds), strict=True)
    )
    evicted = _told(lost, after, [victim for one in rounds for victim in one.victims], sizes)
    away = {victim.record.id for victim in evicted.values()} - changed
    return MergePlan(
        outcomes,
        # What only moves to another id goes first, and to a free id before all: no crash in between loses it.
        tuple(sorted(come, key=lambda one: (content(one) in new, one.id in held))),
        tuple(key for key in held if key not in after and key not in away),
        tuple(evicted.values()),
    )


def _told(lost: Records, after: Records, victims: list[Victim], sizes: _Sizes) -> dict[str, Victim]:
    """Who of those lost, by content, was evicted, or gave way to one that was evicted then."""
    kinds: dict[Kind, list[str]] = {}
    for key, one in lost.items():
        kinds.setdefault(kind(one), []).append(key)
    latest: dict[Kind, float] = {}
    for one in after.values():
        if kind(one) in kinds:
            latest[kind(one)] = max(recorded_at(one), latest.get(kind(one), -math.inf))
    evicted: dict[str, Victim] = {}
    for victim in victims:
        of_kind = kind(victim.record)
        for key in kinds.get(of_kind, ()):
            newest = latest.get(of_kind)
            gave_way = newest is not None and newest >= recorded_at(lost[key]) and lost[key].id in after
            if newest is None or (key == content(victim.record) and not gave_way):
                evicted[key] = victim._replace(record=lost[key], size_bytes=sizes.of(lost[key]))
    return evicted


def _outcomes(incoming: Sequence[BenchmarkRecord], new: set[str], rounds: list[_Round]) -> Iterator[Outcome]:
    for number, one in enumerate(incoming):
        tried = [each.outcomes[number] for each in rounds]
        if content(one) in new:
            yield next((outcome for outcome in tried if outcome in _TAKEN_IN), _SAME)
        elif number in rounds[-1].refused:
            yield "no room"
        else:  # taken in and not there in the end: another of the source was later
            yield next((outcome for outcome in tried if outcome in (_SAME, _OLDER)), _OLDER)


def _equal(one: Records, other: Records) -> bool:
    return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)


def _same(one: BenchmarkRecord, other: BenchmarkRecord) -> bool:
    return one is other or one.to_dict() == other.to_dict()


def _spelt(records: Records) -> list[tuple[str, str]]:
    return sorted((key, repr(one.to_dict())) for key, one in records.items())
