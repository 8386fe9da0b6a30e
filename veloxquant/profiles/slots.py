"""How many slots the engine's caches hold after a sequence of writes. Pure arithmetic, checked against the engine.

A slot is room for one token of one sequence in one layer. Sequences of writes are run-length encoded, so that 2**27
single tokens cost no more than one. The rules are those of mlx-lm's cache classes, in our own words in docs/engine.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from veloxquant.profiles.model import CachePart

Run = tuple[int, int]
"""(tokens in one call, number of such calls)"""

ENGINE_STEP = 256
"""Slots by which every growing cache class of mlx-lm grows."""


class _Held(NamedTuple):
    """State of one growing buffer: tokens held, slots allocated, slots just before the last growth."""

    tokens: int = 0
    slots: int = 0
    before_growth: int = 0


def schedule(context_length: int, generation_length: int, prefill_step_size: int) -> tuple[Run, ...]:
    """The calls mlx-lm's generation makes for one sequence, run-length encoded.

    Chunks over all but the last prompt token, that token alone, then one call for each generated token (every one of
    them is fed, so that context_length + generation_length tokens are held). Source: mlx_lm.generate.generate_step.
    """
    chunks, rest = divmod(context_length - 1, prefill_step_size)
    runs = ((prefill_step_size, chunks), (rest, 1), (1, 1 + generation_length))
    return tuple((tokens, calls) for tokens, calls in runs if tokens > 0 and calls > 0)


def kv_slots(runs: Iterable[Run], step: int = ENGINE_STEP) -> int:
    """Slots a KVCache (or a QuantizedKVCache) holds at the end."""
    return _grow_all(runs, step).slots


def kv_growth_peak(runs: Iterable[Run], step: int = ENGINE_STEP) -> tuple[int, int]:
    """(old slots, new slots) alive together at the worst growth; growth copies, and the last one is the worst."""
    held = _grow_all(runs, step)
    return held.before_growth, held.slots


def window_slots(runs: Iterable[Run], window: int, step: int = ENGINE_STEP) -> int:
    """Slots a RotatingKVCache of `window` slots holds at the end; more than `window` after a call of many tokens."""
    return _rotate_all(runs, window, step)[0].slots


def window_peak_slots(runs: Iterable[Run], window: int, step: int = ENGINE_STEP) -> int:
    """Most slots of a RotatingKVCache alive at once, the old and the new buffer of a replacement both counted."""
    return _rotate_all(runs, window, step)[1]


def chunked_slots(runs: Iterable[Run], chunk: int, step: int = ENGINE_STEP) -> int:
    """Slots a ChunkedKVCache of `chunk` tokens holds at the end, trimmed in front before each call (as llama4 does)."""
    return _chunk_all(runs, chunk, step)[0].slots


def chunked_peak_slots(runs: Iterable[Run], chunk: int, step: int = ENGINE_STEP) -> int:
    """Most slots of a ChunkedKVCache alive at once, the old and the new buffer of a replacement both counted."""
    return _chunk_all(runs, chunk, step)[1]


def part_slots(part: CachePart, runs: Iterable[Run]) -> int:
    """Slots one part of the engine's own cache holds for one sequence; 0 for a state, which has none."""
    if part.kind == "kv":
        return kv_slots(runs, part.step)
    if part.kind == "window":
        return window_slots(runs, part.window, part.step)
    if part.kind == "chunked":
        return chunked_slots(runs, part.window, part.step)
    if part.kind == "concat":
        return sum(tokens * calls for tokens, calls in runs)
    return 0


def part_peak_slots(part: CachePart, runs: Iterable[Run]) -> int:
    """Most slots of one part alive at once for one sequence: old and new together where a buffer is replaced."""
    runs = tuple(runs)
    if part.kind == "kv":
        return sum(kv_growth_peak(runs, part.step))
    if part.kind == "window":
        return window_peak_slots(runs, part.window, part.step)
    if part.kind == "chunked":
        return chunked_peak_slots(runs, part.window, part.step)
    if part.kind == "concat":
        written = [tokens for tokens, calls in runs if tokens > 0 and calls > 0]
        return 2 * part_slots(part, runs) - written[-1] if written else 0
    return 0


def part_bytes(part: CachePart, runs: Iterable[Run]) -> int:
    """Bytes one part of the engine's own cache holds for one sequence, slack included."""
    return part.state_bytes if part.kind == "state" else part_slots(part, runs) * part.slot_bytes


def bytes_per_token(part: CachePart) -> int:
    """Bytes one more token of one sequence adds once windows are full, slack left out."""
    return part.slot_bytes if part.kind in ("kv", "concat") else 0


def _grow_all(runs: Iterable[Run], step: int) -> _Held:
    held = _Held()
    for tokens, calls in runs:
        held = _grow(held, tokens, calls, step)
    return held


def _grow(held: _Held, tokens: int, calls: int, step: int) -> _Held:
    """Apply `calls` writes of `tokens` each by the KVCache rule.

    A write that does not fit first cuts the buffer to the tokens held (only if they are no multiple of `step`), then
    adds step x ceil(tokens / step). What happens next depends only on (tokens held mod step, free slots) at a growth,
    so the sequence is periodic, and whole periods are jumped over; a period has about `step` growths at most.
    """
    if tokens <= 0 or calls <= 0:
        return held
    added = _whole_steps(tokens, step)
    seen: dict[tuple[int, int], int] = {}
    offset, slots, before = held
    left = calls
    while True:
        fitting = min((slots - offset) // tokens, left)
        offset += fitting * tokens
        left -= fitting
        if left == 0:
            return _Held(offset, slots, before)
        state = (offset % step, slots - offset)
        if state in seen:
            period = seen[state] - left
            jumped = left // period * period
            left -= jumped
            offset, slots, before = (at + jumped * tokens for at in (offset, slots, before))
            seen = {}
            if left == 0:
                return _Held(offset, slots, before)
        seen[state] = left
        before = slots
        slots = (offset if offset % step else slots) + added
        offset += tokens
        left -= 1


def _rotate_all(runs: Iterable[Run], window: int, step: int) -> tuple[_Held, int]:
    held, peak = _Held(), 0
    for tokens, calls in runs:
        if tokens <= 0 or calls <= 0:
            continue
        if tokens == 1:
            held, run_peak = _rotate_in_place(held, calls, window, step)
        else:
            held, run_peak = _rotate_chunks(held, tokens, calls, window)
        peak = max(peak, run_peak)
    return held, peak


def _rotate_chunks(held: _Held, tokens: int, calls: int, window: int) -> tuple[_Held, int]:
    """Writes of many tokens: the buffer keeps min(held, window - 1) tokens and appends the new ones, without slack."""

    def after(count: int) -> int:
        if count == 0:
            return held.slots
        kept = min(held.tokens, held.slots) + (count - 1) * tokens
        return (kept if kept < window else window - 1) + tokens

    peak = max(held.slots + after(1), after(calls - 1) + after(calls))
    return _Held(held.tokens + calls * tokens, after(calls), after(calls - 1)), peak


def _rotate_in_place(held: _Held, calls: int, window: int, step: int) -> tuple[_Held, int]:
    """Writes of one token: grow by min(step, what is missing to the window), then exactly `window` slots for ever."""
    total = held.tokens + calls
    if held.slots > window:
        return _Held(total, window, held.slots), held.slots + window
    if held.slots == window or total <= held.slots:
        return _Held(total, held.slots, held.before_growth), held.slots
    last_growth = (min(total, window) - held.slots - 1) // step
    before = held.slots + last_growth * step
    slots = min(window, before + step)
    return _Held(total, slots, before), before + slots


def _chunk_all(runs: Iterable[Run], chunk: int, step: int) -> tuple[_Held, int]:
    held, peak = _Held(), 0
    for tokens, calls in runs:
        if tokens <= 0 or calls <= 0:
            continue
        held, run_peak = _chunk(held, tokens, calls, chunk, step)
        peak = max(peak, run_peak)
    return held, peak


def _chunk(held: _Held, tokens: int, calls: int, chunk: int, step: int) -> tuple[_Held, int]:
    """Apply `calls` writes of `tokens` each by the ChunkedKVCache rule.

    It grows as a KVCache does while at most `chunk` tokens are held at the start of a call; from then on every call
    cuts to the last `chunk` tokens, which leaves no slack, and grows again.
    """
    growing = min(calls, (chunk - held.tokens) // tokens + 1) if held.tokens <= chunk else 0
    grown = _grow(held, tokens, growing, step)
    peak = grown.slots if grown.slots == held.slots else grown.before_growth + grown.slots
    cutting = calls - growing
    if cutting == 0:
        return grown, peak
    slots = chunk + _whole_steps(tokens, step)
    before = slots if cutting > 1 else grown.slots
    return _Held(chunk + tokens, slots, before), max(peak, grown.slots + slots, before + slots)


def _whole_steps(tokens: int, step: int) -> int:
    return -(-tokens // step) * step
