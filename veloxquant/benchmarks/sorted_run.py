"""A sorted sequence that is never changed: with one more or one less it is another, which shares most of its parts.

So a reader needs no lock, a copy costs nothing, and a change costs nearly the same at 100 and at 100,000 entries.
Entries are tuples; all in one sequence differ before their fourth place, and a shorter tuple may be asked for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    at = max(0, bisect_left(run, (least,)) - 1)
    first = run[at] if run else ()
    return chain(islice(first, bisect_left(first, least), None), chain.from_iterable(islice(run, at + 1, None)))


def last_below(run: Run, bound: Entry) -> Entry | None:
    """The last entry below this one, None when there is none."""
    at = bisect_left(run, (bound,)) - 1
    if at < 0:
        return None
    chunk = run[at]
    return chunk[bisect_left(chunk, bound) - 1]
