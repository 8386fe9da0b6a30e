"""The largest context, or the most requests side by side, that one variant leaves room for."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from veloxquant.planner.memory import bytes_per_token, footprint, held_by, load, with_sequences
from veloxquant.planner.setting import ALIGNED, aligned, prefill_steps
from veloxquant.profiles.workload import MAX_CONTEXT_TOKENS, MAX_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from veloxquant.planner.budget import Room
    from veloxquant.planner.memory import Footprint, Measured, Shape
    from veloxquant.profiles import WorkloadProfile


def fits(held: Footprint, room: Room, kv_bytes: int) -> bool:
    """Whether the peak is within `kv_bytes` and every buffer within what one buffer may be."""
    if held.peak > kv_bytes:
        return False
    return room.max_buffer_bytes is None or held.largest_buffer <= room.max_buffer_bytes


def largest_context(shape: Shape, measured: Measured | None, room: Room, generation: int, asked_step: int) -> int:
    """Most prompt tokens a sequence can have beside `generation` generated ones, at the best step; 0 for none."""
    return _largest_context(shape, measured, (room.kv_bytes, room.max_buffer_bytes), generation, asked_step)


_LEAST_GROWTH = 2**-20
"""Bytes a token below which a straight line leads nowhere."""
_STRAIGHT_TURNS = 2
"""A single buffer that is too large grows much more slowly than all caches do: then a straight line falls short."""
_REMEMBERED = 4096
"""A table of what fits asks for four of each variant, some 160 now: 25 tables of another budget or model each. A table
with none of them remembered takes fifty times as long as one with all: 200 ms on a 2-core x86-64 machine."""


@lru_cache(maxsize=_REMEMBERED)
def _largest_context(
    shape: Shape, measured: Measured | None, limits: tuple[int, int | None], generation: int, asked_step: int
) -> int:
    kv_bytes, max_buffer = limits
    steps = tuple(reversed(prefill_steps(asked_step)))
    settled_from = _settled_from(shape, asked_step)

    def margin(context: int) -> int:
        """Bytes to spare at the first step that fits, below 0 by the least that is missing when none does."""
        most = -(2**200)
        for step in steps:
            held = footprint(shape, context, generation, step, measured)
            spare = kv_bytes - held.peak
            most = max(most, spare if max_buffer is None else min(spare, max_buffer - held.largest_buffer))
            if most >= 0 or (held.stored > kv_bytes and context > settled_from):
                return most
        return most

    return _last_with_room(margin, shape.sequences * bytes_per_token(shape, measured), generation)


def _last_with_room(margin: Callable[[int], int], growth: float, generation: int) -> int:
    """Largest context with a margin of 0 or more; 0 for none.

    Bytes grow almost in proportion to length, so that a straight line finds the place; what is left is the slack of
    the last 256 slots, so that probes are put where a block of slots ends.
    """
    low, high, at_low, at_high, turn = 0, MAX_CONTEXT_TOKENS + 1, 0, -1, 0
    probe = MAX_CONTEXT_TOKENS
    while high - low > 1:
        spare = margin(probe)
        if spare >= 0:
            low, at_low = probe, spare
        else:
            high, at_high = probe, spare
        turn += 1
        if low == 0 and growth > _LEAST_GROWTH and turn <= _STRAIGHT_TURNS:
            probe = high + int(at_high / growth) - ALIGNED
        elif low == 0 or turn % 3 == 0:
            probe = (low + high) // 2
        else:
            probe = _block_end(low, low + (high - low) * at_low // (at_low - at_high), high, generation)
        probe = min(max(probe, low + 1), high - 1)
    return low


def _block_end(low: int, guess: int, high: int, generation: int) -> int:
    """The end of a block of slots near the guess, strictly between low and high where there is one."""
    end = guess - (guess + generation) % ALIGNED
    if low < end < high:
        return end
    return low + (ALIGNED - (low + generation) % ALIGNED if (low + generation) % ALIGNED else 1)


def _settled_from(shape: Shape, asked_step: int) -> float:
    """Context beyond which stored bytes do not depend on the prefill step: aligned steps and full windows."""
    if not aligned(asked_step) or any(term.part.kind == "chunked" for term in shape.terms):
        return math.inf
    return max((term.part.window for term in shape.terms), default=0)


def most_requests(
    shape: Shape, measured: Measured | None, room: Room, workload: WorkloadProfile, top: int = MAX_ROWS
) -> int:
    """Requests side by side, up to `top`, that fit at this context, each of the shape's own batch; 0 for none."""
    lengths = workload.context_length, workload.generation_length
    loads = [load(shape, *lengths, step, measured) for step in reversed(prefill_steps(workload.prefill_step_size))]

    def room_for(requests: int) -> bool:
        served = with_sequences(shape, requests, shape.batch)
        return any(fits(held_by(served, one, *lengths), room, room.kv_bytes) for one in loads)

    return last_true(room_for, top)


def last_true(holds: Callable[[int], bool], top: int) -> int:
    """Largest n in 1..top that holds, 0 for none, by halving; `holds` falls once."""
    if holds(top):
        return top
    low, high = 0, top
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
