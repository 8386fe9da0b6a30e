"""Bytes of one variant's caches: stored at the end, the most alive at once, the largest single buffer.

Stored bytes of one sequence = sum over parts of slots x bytes of one slot + what does not grow. Slots come from
`planner.growth` (the engine's own growth rules or a method's count, slack included); bytes of one slot = heads x
(key_bits x key_width + value_bits x value_width) / 8. The peak adds, for the worst layer and moment, the old buffer
alive beside the new one at a growth step, or the score matrix and the temporary copies of an attention that makes them,
and what windows hold in prefill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.methods.per_layer import for_layer
from veloxquant.planner.growth import Reader, Slots, by_calls, by_length, pace, schedule
from veloxquant.profiles.model import ENGINE_OWN

if TYPE_CHECKING:
    from veloxquant.planner.layout import Counted, Layout
    from veloxquant.planner.snapshot import Offer
    from veloxquant.profiles import CachePart, ModelProfile

PROMPTS_AT_ONCE = 8
"""Requests that mlx-lm's server prefills together (its --prompt-concurrency)."""

_EXACT_DIGITS = 6
"""What a division leaves beyond them is not a part of a byte."""


class Term(NamedTuple):
    """`layers` cache parts that are alike, parameters included. Bits are stored bits a number, scales included."""

    part: CachePart
    layers: int
    packed: bool
    key_bits: float
    value_bits: float
    slot_bytes: float
    """One slot of one sequence in one layer."""
    array_bytes: float
    """One slot's share of the largest single array (K or V)."""
    step: int
    fixed_bytes: int
    """Of one layer and one sequence, whatever the length."""

    reader: Reader | None
    """Whose attention reads it, None for the engine's own."""
    pace: float
    """Slots that each further token adds in the long run."""
    counts: bool
    """The method counts its own slots."""
    unpack_picoseconds: float = 0.0
    """To make a stored number one that can be multiplied, in decode."""
    unpack_bytes: float = 0.0
    """Moved for that, besides reading what is stored."""

    @property
    def grows(self) -> bool:
        """What is held depends on the length, and not on a window."""
        return self.part.kind in ("kv", "concat")

    def slots(self, context: int, generation: int, step: int) -> Slots:
        """Of one sequence after prefill of `context` tokens in chunks of `step` and decode of `generation` tokens."""
        if self.counts and self.reader is not None:
            return by_length(self.reader, self.part, context + generation)
        return by_calls(self.part, self.step, schedule(context, generation, step))

    def read(self, tokens: int) -> int:
        """Tokens whose K and V attention reads, of `tokens`; not slack."""
        if self.counts and self.reader is not None:
            return min(tokens, by_length(self.reader, self.part, tokens).held)
        if self.part.kind == "state":
            return 0
        return min(self.part.window, tokens) if self.part.kind in ("window", "chunked") else tokens


class Shape(NamedTuple):
    """One variant's caches as coefficients, so that a length costs a few multiplications."""

    terms: tuple[Term, ...]
    score_heads: int
    """Query heads whose score matrix is materialized; 0 with fused attention throughout."""
    score_itemsize: int
    batchable: bool
    """Requests side by side share one batch; else they are served one after another."""
    sequences: int
    batch: int
    """Sequences of one request."""

    @property
    def rows(self) -> int:
        """Sequences that share one buffer and one decode step."""
        return self.sequences if self.batchable else self.batch

    @property
    def prefill_rows(self) -> int:
        """Sequences whose prompts are processed in one call."""
        return min(self.rows, self.batch * PROMPTS_AT_ONCE)


class Footprint(NamedTuple):
    """Bytes of all sequences together at one context and prefill step."""

    stored: int
    peak: int
    largest_buffer: int
    fixed: int


@dataclass(frozen=True)
class Measured:
    """Stored bytes of one sequence by measurement: points of (bytes of growth by the arithmetic, bytes measured).

    Ascending in both and joined by straight lines. Measuring against the arithmetic's growth instead of tokens keeps
    slack out of the slope, and a fixed part fixed.
    """

    points: tuple[tuple[float, float], ...]

    @property
    def per_traced_byte(self) -> float:
        """Measured bytes for each byte of growth by the arithmetic, at the longest lengths measured."""
        return self._slope(len(self.points) - 1)

    def stored(self, growth: float) -> float:
        """Bytes of one sequence whose arithmetic says `growth` bytes beyond what is fixed."""
        after = next((i for i, (x, _) in enumerate(self.points) if x >= growth), len(self.points) - 1)
        after = max(after, min(1, len(self.points) - 1))
        x, y = self.points[after]
        return max(0.0, y + self._slope(after) * (growth - x))

    def _slope(self, after: int) -> float:
        if after == 0:
            return 0.0
        (x0, y0), (x1, y1) = self.points[after - 1], self.points[after]
        return (y1 - y0) / (x1 - x0)


def shape_of(model: ModelProfile, layout: Layout, offer: Offer | None, *, sequences: int, batch: int) -> Shape:
    """Coefficients of one variant; `offer` None means the engine's own caches. Raises MethodError from the method."""
    own = offer is None or offer.method.name == ENGINE_OWN
    packed = () if offer is None else _packed_terms(layout, Reader(offer.method, offer.variant))
    kept = tuple(_engine_term(one.part, one.layers) for one in layout.kept)
    fused = own or offer is None or offer.method.fused_attention
    scored = [t.part for t in packed if not fused]
    scored += [t.part for t in kept if t.part.kind != "state" and not model.fused_attention]
    return Shape(
        terms=packed + kept,
        score_heads=(model.query_heads or max(p.heads for p in scored)) if scored else 0,
        score_itemsize=max((p.key_itemsize for p in scored), default=0),
        batchable=offer.method.batchable if offer is not None else True,
        sequences=sequences,
        batch=batch,
    )


@lru_cache(maxsize=1024)
def _packed_terms(layout: Layout, reader: Reader) -> tuple[Term, ...]:
    """What a method says of the parts it packs; it says the same each time (methods.checks), so it is asked once."""
    return tuple(_packed_term(reader, one) for one in layout.packed)


def _packed_term(asked: Reader, alike: Counted) -> Term:
    method, part = asked.method, alike.part
    variant = for_layer(asked.variant, dict(alike.params))
    reader = Reader(method, variant)
    in_the_long_run = pace(reader, part)
    key_bits, value_bits = method.key_bits(variant, part), method.value_bits(variant, part)
    key, value = part.heads * key_bits * part.key_width / 8, part.heads * value_bits * part.value_width / 8
    return Term(
        part=part,
        layers=alike.layers,
        packed=True,
        key_bits=key_bits,
        value_bits=value_bits,
        slot_bytes=_whole(key + value),
        array_bytes=max(key, value),
        step=method.slot_step(variant, part),
        fixed_bytes=method.fixed_bytes(variant, part),
        reader=reader,
        pace=1 if in_the_long_run is None else in_the_long_run,
        counts=in_the_long_run is not None,
        unpack_picoseconds=method.unpack_cost(variant),
        unpack_bytes=method.unpack_bytes(variant),
    )


def _engine_term(part: CachePart, count: int) -> Term:
    key, value = part.key_width * part.key_itemsize, part.value_width * part.value_itemsize
    return Term(
        part=part,
        layers=count,
        packed=False,
        key_bits=8.0 * part.key_itemsize,
        value_bits=8.0 * part.value_itemsize,
        slot_bytes=part.slot_bytes,
        array_bytes=part.heads * max(key, value),
        step=part.step,
        fixed_bytes=part.state_bytes,
        reader=None,
        pace=1 if part.kind in ("kv", "concat") else 0,
        counts=False,
    )


def _whole(number: float) -> float:
    """An int where it is one, so that sums of many gigabytes stay exact."""
    return int(number) if float(number).is_integer() else number


class Load(NamedTuple):
    """Bytes that one sequence holds at one length and prefill step, before sequences are counted."""

    step: int
    stored: float
    growth: float
    """Of it, what depends on the length and not on a window: what a measurement is held against."""
    fixed: float
    """Of it, what no further token adds to once windows, and a method's bounded memory, are full."""
    window_extra: float
    """What windows hold in prefill beyond what they keep."""
    transient: float
    """The old buffer beside the new one of the layer where that is the most."""
    buffer: float
    """The largest single array."""


def load(shape: Shape, context: int, generation: int, step: int, measured: Measured | None = None) -> Load:
    """One sequence after prefill of `context` tokens in chunks of `step` and decode of `generation` tokens."""
    stored: float = 0
    growth: float = 0
    fixed: float = 0
    window_extra: float = 0
    transient: float = 0
    buffer: float = 0
    for term in shape.terms:
        slots_of = term.slots(context, generation, step)
        grown = term.layers * slots_of.held * term.slot_bytes
        constant = term.layers * term.fixed_bytes
        stored += grown + constant
        growth += grown if term.grows else 0
        fixed += constant if term.pace else grown + constant
        window_extra += term.layers * (slots_of.most - slots_of.held) * term.slot_bytes
        transient = max(transient, slots_of.old * term.slot_bytes)
        buffer = max(buffer, slots_of.most * term.array_bytes, term.fixed_bytes)
    if measured is not None:
        traced, stored = stored, measured.stored(growth)
        # What is larger than the arithmetic says is copied at its own size when it grows.
        larger = max(1.0, stored / traced) if traced else 1.0
        transient, buffer = transient * larger, buffer * larger
    return Load(step, stored, growth, fixed, window_extra, transient, buffer)


def held_by(shape: Shape, one: Load, context: int, generation: int) -> Footprint:
    """All sequences of a shape together, each of them with this load."""
    rows, prefill_rows = shape.rows, shape.prefill_rows
    scores = 0
    if shape.score_heads:
        # Score matrix of one layer: query heads x chunk x context x item size for each sequence in the call, the
        # largest in the last prefill chunk; a decode step scores one token a sequence (mlx_lm.models.base).
        scored = max(min(one.step, context) * context * prefill_rows, (context + generation) * rows)
        scores = shape.score_heads * shape.score_itemsize * scored
    stored = one.stored * shape.sequences
    attention = scores + _workspace(shape, min(one.step, context), context, generation)
    peak = stored + one.window_extra * prefill_rows + max(one.transient * rows, attention)
    largest = max(one.buffer * rows, scores)
    return Footprint(round(stored), round(peak), round(largest), round(one.fixed * shape.sequences))


def _workspace(shape: Shape, chunk: int, context: int, generation: int) -> int:
    """Temporary bytes of the layer whose attention takes the most, at the end of prefill or of decode."""
    most = 0
    for term in shape.terms:
        if term.reader is not None:
            ask, variant = term.reader.method.workspace_bytes, term.reader.variant
            prefill = ask(variant, term.part, chunk, context) * shape.prefill_rows
            decode = ask(variant, term.part, 1, context + generation) * shape.rows
            most = max(most, prefill, decode)
    return most


def footprint(shape: Shape, context: int, generation: int, step: int, measured: Measured | None = None) -> Footprint:
    """Bytes after prefill of `context` tokens in chunks of `step` and decode of `generation` tokens."""
    return held_by(shape, load(shape, context, generation, step, measured), context, generation)


def bytes_per_token(shape: Shape, measured: Measured | None = None) -> float:
    """Growth with one more token of one sequence once windows are full, slack left out."""
    traced = float(sum(term.layers * term.slot_bytes * term.pace for term in shape.terms))
    return traced if measured is None else traced * measured.per_traced_byte


def whole_bytes_per_token(shape: Shape, measured: Measured | None = None) -> int:
    """The same as a plan shows it: whole bytes, rounded up."""
    return math.ceil(round(bytes_per_token(shape, measured), _EXACT_DIGITS))


def with_sequences(shape: Shape, concurrent: int, batch: int) -> Shape:
    """The same caches for another number of requests side by side."""
    return shape._replace(sequences=concurrent * batch, batch=batch)
