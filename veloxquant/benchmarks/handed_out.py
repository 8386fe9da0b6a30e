"""The records that callers hold, apart from those that the store works with.

A caller may change what it got in any way and at any time, so the store never looks into such an object but to save it:
each is a copy of a record that stays inside, made when it is first asked for, and the same one for as long as its file
stays the same.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from veloxquant.benchmarks.records import BenchmarkRecord
from veloxquant.benchmarks.validation import check_types, invalid
from veloxquant.errors import RecordInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FIELDS = tuple(one.name for one in fields(BenchmarkRecord))
_VALUES = attrgetter(*_FIELDS)
_UNKNOWN = "_unknown"
"""Where a record keeps the keys of its file that it does not know."""


def copied(record: BenchmarkRecord) -> BenchmarkRecord:
    """A record that is equal and shares nothing that can be changed."""
    made = BenchmarkRecord(*_VALUES(record))  # not by its __dict__, which Python would make and keep for each
    made.tags = list(made.tags)
    unknown = getattr(record, _UNKNOWN, None)
    if unknown is not None:
        made.__dict__[_UNKNOWN] = _apart(unknown)
    return made


def taken(record: object) -> BenchmarkRecord:
    """A copy of a caller's record, as the store may keep it. Raises RecordInvalid naming the field."""
    if not isinstance(record, BenchmarkRecord):
        raise invalid("record", record, "a BenchmarkRecord", "build one, or use add()")
    values = dict(record.__dict__)
    for name in _FIELDS:
        if name not in values:
            raise RecordInvalid(f"{name} is missing", hint="build the record anew", field=name)
    made = BenchmarkRecord(**{name: values[name] for name in _FIELDS})
    made.__dict__.update({_UNKNOWN: values[_UNKNOWN]} if _UNKNOWN in values else {})
    check_types(made)
    return copied(made)


def _apart(unknown: Any) -> Any:
    try:
        return deepcopy(unknown)
    except RecursionError:
        return unknown  # nested deeper than Python's own stack: nothing that edits a record by hand


def _differs(one: BenchmarkRecord, held: BenchmarkRecord) -> bool:
    """Whether a caller's record is another than the one it was copied from.

    A value of another type differs: it is never asked, as it might answer anything, or raise.
    """
    ours, theirs = held.__dict__, one.__dict__
    for name in _FIELDS:
        value = theirs.get(name, _FIELDS)
        if value is ours[name]:
            continue
        if type(value) is not type(ours[name]) or (name == "tags" and any(type(tag) is not str for tag in value)):
            return True
        if value != ours[name]:
            return True
    return bool(theirs.get(_UNKNOWN) != ours.get(_UNKNOWN))


class HandedOut:
    """By id what callers hold. `of`, `all` and the rest need the owner's lock, `of_match` does not."""

    def __init__(self, held: Mapping[str, BenchmarkRecord]) -> None:
        """`held` is the owner's own mapping of the records inside, each of which is replaced and never changed."""
        self._held = held
        self._pairs: dict[str, tuple[BenchmarkRecord, BenchmarkRecord]] = {}
        """The record inside as it was when it was copied, and the copy, which counts as long as that one is there."""

    def of(self, record_id: str) -> BenchmarkRecord | None:
        """What callers hold of this id, None when there is none."""
        held = self._held.get(record_id)
        if held is None:
            return None
        pair = self._pairs.get(record_id)
        if pair is None:
            pair = self._pairs.setdefault(record_id, (held, copied(held)))  # a match may hand one out at this moment
        if pair[0] is not held:
            pair = self._pairs[record_id] = held, copied(held)
        return pair[1]

    def all(self) -> dict[str, BenchmarkRecord]:
        """All of them by id."""
        return {record_id: self.of(record_id) for record_id in self._held}  # type: ignore[misc]

    def of_match(self, held: BenchmarkRecord) -> BenchmarkRecord:
        """The same for a record that was found inside; where it has just been replaced, a copy of its own."""
        pair = self._pairs.get(held.id)
        if pair is None and self._held.get(held.id) is held:
            pair = self._pairs.setdefault(held.id, (held, copied(held)))
        return pair[1] if pair is not None and pair[0] is held else copied(held)

    def is_held(self, record_id: str, one: object) -> bool:
        """Whether this very object stands for the record that is inside now."""
        pair = self._pairs.get(record_id)
        return pair is not None and pair[1] is one and pair[0] is self._held.get(record_id)

    def keep(self, record_id: str, one: BenchmarkRecord) -> None:
        """This object goes on to stand for the record, which was just replaced on its behalf."""
        held = self._held.get(record_id)
        if held is not None:
            self._pairs[record_id] = held, one

    def forget(self, record_id: str) -> None:
        """The record inside was replaced or is gone, and what callers hold of it is their own affair."""
        self._pairs.pop(record_id, None)

    def edited(self) -> Iterator[tuple[str, BenchmarkRecord]]:
        """Id and object of each that its holder changed since it was read."""
        for record_id, (held, one) in list(self._pairs.items()):
            if held is self._held.get(record_id) and _differs(one, held) and not self._went_elsewhere(record_id, one):
                yield record_id, one

    def _went_elsewhere(self, record_id: str, one: BenchmarkRecord) -> bool:
        """Whether it got another id and was stored under that: then the old one is as it was."""
        new_id = one.__dict__.get("id")
        if not isinstance(new_id, str) or new_id == record_id:
            return False
        there = self._held.get(new_id)
        if there is None or _differs(one, there):
            return False
        self.forget(record_id)
        return True
