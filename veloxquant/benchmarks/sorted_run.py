"""A sorted sequence that is never changed: with one more or one less it is another, which shares most of its parts.

So a reader needs no lock, a copy costs nothing, and a change costs nearly the same at 100 and at 100,000 entries.
Entries are tuples; all in one sequence differ before their fourth place, and a shorter tuple may be asked for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Entry = tuple[Any, ...]
Chunk = tuple[Entry, ...]
Run = tuple[Chunk, ...]

CHUNK = 256
"""Entries in one part when it is made; one that has grown to twice as many is split."""


def made(entries: Sequence[Entry]) -> Run:
    """A run of entries that are in order."""
    return tuple(tuple(entries[start : start + CHUNK]) for start in range(0, len(entries), CHUNK))


def put(run: Run, entry: Entry) -> Run:
    """With one more."""
    if not run:
        return ((entry,),)
    at = max(0, bisect_left(run, (entry,)) - 1)
    chunk = run[at]
    place = bisect_left(chunk, entry)
    grown = (*chunk[:place], entry, *chunk[place:])
    parts = (grown,) if len(grown) < 2 * CHUNK else (grown[:CHUNK], grown[CHUNK:])
    return run[:at] + parts + run[at + 1 :]


def take(run: Run, entry: Entry) -> Run:
    """Without this very one; the same run when it is not there."""
    at = max(0, bisect_right(run, ((*entry, 0),)) - 1)  # the probe is just above the entry
    chunk = run[at] if run else ()
    place = bisect_left(chunk, entry)
    if place == len(chunk) or chunk[place] is not entry:
        return run
    left = chunk[:place] + chunk[place + 1 :]
    return run[:at] + ((left,) if left else ()) + run[at + 1 :]


def upwards(run: Run, least: Entry) -> Iterator[Entry]:
    """Entries from `least` on, in order."""
    if len(run) == 1:  # most are short
        return islice(run[0], bisect_left(run[0], least), None)
    at = max(0, bisect_left(run, (least,)) - 1)
    first = run[at] if run else ()
    return chain(islice(first, bisect_left(first, least), None), chain.from_iterable(islice(run, at + 1, None)))


def downwards(run: Run, bound: Entry) -> Iterator[Entry]:
    """Entries below `bound`, the last first."""
    at = bisect_left(run, (bound,)) - 1
    last = run[at] if at >= 0 else ()
    return chain(
        reversed(last[: bisect_left(last, bound)]),
        chain.from_iterable(reversed(run[number]) for number in range(at - 1, -1, -1)),
    )


def get(run: Run, key: Any) -> Any:
    """The value at the key of a run of (key, value), None when there is none."""
    at, place = _place(run, key)
    return run[at][place][1] if at < len(run) and place < len(run[at]) and run[at][place][0] == key else None


def _place(run: Run, key: Any) -> tuple[int, int]:
    """Where (key, value) is, if it is: the part and the place in it."""
    at = max(0, bisect_right(run, ((key,),)) - 1)
    place = bisect_left(run[at], (key,)) if run else 0
    return (at + 1, 0) if run and place == len(run[at]) else (at, place)


def keyed(values: Mapping[Any, Any]) -> Run:
    """A run of (key, value) by key: a mapping in order."""
    return made(sorted(values.items(), key=itemgetter(0)))


def with_value(run: Run, key: Any, value: Any) -> Run:
    """With this value at the key, or without the key where the value is empty."""
    at, place = _place(run, key)
    old = run[at][place] if at < len(run) and place < len(run[at]) and run[at][place][0] == key else None
    if old is not None:
        run = take(run, old)
    return put(run, (key, value)) if value else run


def last_below(run: Run, bound: Entry) -> Entry | None:
    """The last entry below this one, None when there is none."""
    at = bisect_left(run, (bound,)) - 1
    if at < 0:
        return None
    chunk = run[at]
    return chunk[bisect_left(chunk, bound) - 1]
