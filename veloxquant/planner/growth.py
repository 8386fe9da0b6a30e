"""Slots of one cache part: by the engine's growth rule, or by the count that a method gives for itself.

A method that counts is believed for every length: the registry has checked that its count never falls, and a trace that
it is what the caches hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.profiles import slots
from veloxquant.profiles.workload import MAX_CONTEXT_TOKENS

if TYPE_CHECKING:
    from veloxquant.methods import Method, Variant
    from veloxquant.profiles import CachePart

_FAR = MAX_CONTEXT_TOKENS // 2
"""Tokens from which growth is taken to have its final pace; a power of two, so that most steps divide it."""
_PACE_DIGITS = 4
"""One step of 2**13 slots at such a length is no part of the pace."""

schedule = lru_cache(maxsize=1024)(slots.schedule)


@dataclass(frozen=True, eq=False)
class Reader:
    """A method that reads what it stored, and the variant it is asked with: a layer's own where layers differ.

    Equal to itself under the same label and parameters, so that sizes can be remembered.
    """

    method: Method
    variant: Variant

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reader) or self.method is not other.method:
            return False
        one, two = self.variant, other.variant
        return one is two or (one.label == two.label and one.params == two.params)

    def __hash__(self) -> int:
        return hash((id(self.method), self.variant.label))


class Slots(NamedTuple):
    """Slots of one part for one sequence."""

    held: int
    """At the end."""
    most: int
    """Of the buffer itself at its largest: a window holds more in prefill than it keeps."""
    old: int
    """Of the old buffer beside the new one at the worst."""


@lru_cache(maxsize=2048)
def by_calls(part: CachePart, step: int, runs: tuple[slots.Run, ...]) -> Slots:
    """The engine's rules for a part, growing by `step`: what is held depends on the calls."""
    if part.kind == "state":
        return Slots(0, 0, 0)
    if part.kind == "kv":
        old, held = slots.kv_growth_peak(runs, step)
        return Slots(held, held, old)
    held, together = slots.part_slots(part, runs), slots.part_peak_slots(part, runs)
    if part.kind == "concat":
        return Slots(held, held, together - held)
    most = max(slots.part_slots(part, runs[:calls]) for calls in range(1, len(runs) + 1))
    return Slots(held, most, max(0, together - most))


@lru_cache(maxsize=8192)
def by_length(reader: Reader, part: CachePart, tokens: int) -> Slots:
    """The method's own count after `tokens` tokens; while a buffer grows the next smaller one is alive beside it.

    Raises MethodError from the method.
    """
    held = counted(reader, part, tokens)
    return Slots(held, held, _next_smaller(reader, part, tokens, held))


@lru_cache(maxsize=1024)
def pace(reader: Reader, part: CachePart) -> float | None:
    """Slots that each further token adds in the long run, 0 for bounded memory; None where the method does not count.

    Raises MethodError from the method.
    """
    near = reader.method.slots(reader.variant, part, _FAR)
    if near is None:
        return None
    return round((counted(reader, part, 2 * _FAR) - near) / _FAR, _PACE_DIGITS)


def counted(reader: Reader, part: CachePart, tokens: int) -> int:
    """The method's count; of one that does not count at this length, none. Raises MethodError from the method."""
    return reader.method.slots(reader.variant, part, tokens) or 0


def _next_smaller(reader: Reader, part: CachePart, tokens: int, held: int) -> int:
    """The most slots below `held` that a shorter sequence has, found backwards in doubling strides, then by halving."""
    fewer, enough, stride = 0, tokens, 1
    while enough - stride > 0:
        if counted(reader, part, enough - stride) < held:
            fewer = enough - stride
            break
        enough, stride = enough - stride, 2 * stride
    while enough - fewer > 1:
        middle = (fewer + enough) // 2
        fewer, enough = (fewer, middle) if counted(reader, part, middle) == held else (middle, enough)
    return counted(reader, part, fewer) if fewer else 0
