"""The largest context, or the most requests side by side, that one variant leaves room for."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from veloxquant.planner.memory import bytes_per_token, footprint, with_sequences
from veloxquant.planner.setting import aligned, prefill_steps
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


@lru_cache(maxsize=2048)
def _largest_context(
    shape: Shape, measured: Measured | None, limits: tuple[int, int | None], generation: int, asked_step: int
) -> int:
    kv_bytes, max_buffer = limits
    steps = tuple(reversed(prefill_steps(asked_step)))
    settled = aligned(asked_step) and not any(term.part.kind in ("window", "chunked") for term in shape.terms)

    def room_for(context: int) -> bool:
        for step in steps:
            held = footprint(shape, context, generation, step, measured)
            if held.peak <= kv_bytes and (max_buffer is None or held.largest_buffer <= max_buffer):
                return True
            if settled and held.stored > kv_bytes:
                return False  # stored bytes do not depend on an aligned step
        return False

    growth = shape.sequences * bytes_per_token(shape)
    return _last_true(room_for, int(kv_bytes / growth) if growth > 0 else MAX_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS)


def most_requests(shape: Shape, measured: Measured | None, room: Room, workload: WorkloadProfile) -> int:
    """Requests side by side that fit at this context, each of the shape's own batch; 0 when not even one does."""
    steps = prefill_steps(workload.prefill_step_size)
    lengths = workload.context_length, workload.generation_length

    def room_for(requests: int) -> bool:
        served = with_sequences(shape, requests, shape.batch)
        sizes = (footprint(served, *lengths, step, measured) for step in steps)
        return any(fits(held, room, room.kv_bytes) for held in sizes)

    return _last_true(room_for, 1, MAX_ROWS)


def _last_true(holds: Callable[[int], bool], guess: int, top: int) -> int:
    """Largest n in 1..top that holds, 0 for none, by widening around a guess and halving; `holds` falls once."""
    low, high = 0, top + 1
    at, stride = min(max(guess, 1), top), max(1, guess // 256)
    while high - low > 1:
        if holds(at):
            low = at
            at = low + stride if high > top else (low + high) // 2
        else:
            high = at
            at = high - stride if low == 0 else (low + high) // 2
        stride *= 2 if low == 0 or high > top else 1
        at = min(max(at, low + 1), high - 1)
    return low
