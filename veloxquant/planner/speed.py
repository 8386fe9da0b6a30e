"""Milliseconds a token in decode, tokens a second in prefill: a roofline, calibrated or overridden by records.

Decode is bound by memory traffic: ms = (weight bytes read + cache bytes read + state bytes) / (bandwidth x efficiency)
+ layers x overhead. Prefill is bound by compute: FLOPs / achieved TFLOPS. Constants and sources: data/speed.json.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.planner import tables
from veloxquant.planner.evidence import evidence, same_context
from veloxquant.planner.result import Evidence, Speed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.planner.evidence import Sighting
    from veloxquant.planner.memory import Shape, Term
    from veloxquant.profiles import HardwareProfile, ModelProfile, WorkloadProfile

ENOUGH_TO_FIT = 3
"""Records on this machine from which a straight line replaces the table."""
ANALYTIC_CONFIDENCE = 0.5
UNCALIBRATED_GAIN_CONFIDENCE = 0.25
"""Low on purpose: whether a packed cache is faster than the engine's own changes sign between chips."""


class _Timed(NamedTuple):
    """A record that tells decode time, in ms for one token of each of its sequences."""

    seen: Sighting
    ms: float

    @property
    def context(self) -> int:
        """Context of the run in tokens."""
        return self.seen.context

    @property
    def sequences(self) -> int:
        """Sequences of the run."""
        return self.seen.record.sequences


class Decode(NamedTuple):
    """Milliseconds for one token of each sequence, with its range and grounds."""

    ms: float
    low: float
    high: float
    evidence: Evidence

    @property
    def least(self) -> float:
        """What is held against a latency ceiling: as measured, or the low end of an estimate."""
        return self.ms if self.evidence.source == "measured" else self.low


class Roofline(NamedTuple):
    """One variant on one machine: ms a token for any length and number of sequences. None fields are unknown."""

    weight_bytes: int | None
    """Read to decode one token of one sequence."""
    all_weight_bytes: int | None
    sparse: bool
    """Experts are selected, so that more sequences read more of the weights."""
    bytes_per_ms: float | None
    overhead_ms: float
    shape: Shape

    def ms(self, tokens: int, sequences: int) -> float | None:
        """Decode ms a token of each of `sequences` sequences that all hold `tokens` tokens."""
        if self.bytes_per_ms is None or self.weight_bytes is None:
            return None
        rows = sequences if self.shape.batchable else min(sequences, self.shape.batch)
        moved = float(self._weights_read(rows))
        picoseconds = 0.0
        for term in self.terms:
            seen = term.read(tokens)
            moved += rows * term.layers * (seen * term.slot_bytes + _beside(term))
            if term.packed:
                numbers = rows * term.layers * seen * term.part.heads * (term.part.key_width + term.part.value_width)
                moved += numbers * term.unpack_bytes
                picoseconds += numbers * term.unpack_picoseconds
        step_ms = moved / self.bytes_per_ms + self.overhead_ms + picoseconds * 1e-9
        return step_ms * sequences / rows

    def _weights_read(self, rows: int) -> float:
        """Each further sequence reads an independent share of what the others left: W x (1 - (1 - p)^rows)."""
        one, whole = self.weight_bytes or 0, self.all_weight_bytes or 0
        if not self.sparse or rows == 1 or whole <= one:
            return one
        return whole * (1 - (1 - one / whole) ** rows)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The parts that are read."""
        return self.shape.terms


def roofline(model: ModelProfile, hardware: HardwareProfile, shape: Shape) -> Roofline:
    """What the machine's table figures say about one variant; another one of the same model differs in its shape."""
    total, active = model.num_parameters, model.active_parameters
    bandwidth = hardware.bandwidth_gbps
    return Roofline(
        weight_bytes=model.read_bytes_per_token if model.read_bytes_per_token is not None else model.weights_bytes,
        all_weight_bytes=model.weights_bytes,
        sparse=total is not None and active is not None and active < total,
        bytes_per_ms=bandwidth * 1e6 * efficiency(hardware, model.weight_bits) if bandwidth else None,
        overhead_ms=(model.num_layers or len(model.layers)) * tables.speed().layer_overhead_ms,
        shape=shape,
    )


def efficiency(hardware: HardwareProfile, weight_bits: float | None) -> float:
    """Share of bandwidth reached in decode, between the measured weight kinds by bits; 16 bits where unknown."""
    table = tables.speed()
    stated = hardware.decode_efficiency.items()
    known = sorted((table.efficiency_bits[k], v) for k, v in stated if k in table.efficiency_bits and v > 0)
    if not known:
        return table.default_efficiency
    bits = 16.0 if weight_bits is None else weight_bits
    if bits <= known[0][0]:
        return known[0][1]
    for (low, at_low), (high, at_high) in pairwise(known):
        if bits <= high:
            return at_low + (at_high - at_low) * (bits - low) / (high - low)
    return known[-1][1]


def decode(
    line: Roofline,
    workload: WorkloadProfile,
    hardware: HardwareProfile,
    usable: Sequence[Sighting],
    own_ms: float | None,
) -> Decode | None:
    """Decode at the end of the asked context; None when unknown. `own_ms`: the engine's own time, None for itself."""
    measured = _from_records(line, workload, usable)
    if measured is not None:
        return measured
    ms = line.ms(workload.tokens, workload.sequences)
    return _estimate(line, ms, hardware, own_ms) if ms and math.isfinite(ms) else None


def speed(
    found: Decode | None,
    *,
    prefill: float | None,
    model: ModelProfile,
    workload: WorkloadProfile,
    hardware: HardwareProfile,
) -> Speed:
    """What a plan shows of these times, or why there are none."""
    if found is None:
        unknown = Evidence(source="analytic", confidence=0.0, notes=(_why_unknown(model, hardware),))
        return Speed(
            prefill_tok_s=prefill, decode_tok_s=None, latency_ms_per_token=None, low=None, high=None, evidence=unknown
        )
    return Speed(
        prefill_tok_s=prefill,
        decode_tok_s=1000 * workload.sequences / found.ms,
        latency_ms_per_token=found.ms,
        low=found.low,
        high=found.high,
        evidence=found.evidence,
    )


def _estimate(line: Roofline, ms: float, hardware: HardwareProfile, own_ms: float | None) -> Decode:
    table = tables.speed()
    low, high, confidence = ms * table.analytic_low, ms * table.analytic_high, ANALYTIC_CONFIDENCE
    notes = [f"bandwidth: {hardware.sources.get('bandwidth_gbps', 'given')}"]
    if not hardware.decode_efficiency:
        notes.append(f"no decode efficiency is known for this chip: {table.default_efficiency:g} of bandwidth assumed")
        confidence *= 0.6
    if line.sparse and line.shape.rows > 1:
        notes.append("experts read by several sequences are estimated as independent choices")
    if not line.shape.batchable and line.shape.sequences > line.shape.batch:
        notes.append("these caches cannot be batched: requests are served one after another")
    packs = any(term.packed for term in line.terms)
    if packs and own_ms is not None and ms < own_ms:
        # A gain nobody measured does not outrank the engine's own cache: the high end reaches its figure.
        high, confidence = max(high, own_ms), min(confidence, UNCALIBRATED_GAIN_CONFIDENCE)
        notes.append("a gain over the engine's own cache that was not measured on this machine")
    return Decode(ms, low, high, Evidence(source="analytic", confidence=round(confidence, 4), notes=tuple(notes)))


def _from_records(line: Roofline, workload: WorkloadProfile, usable: Sequence[Sighting]) -> Decode | None:
    """By records: one at this context as it is, a line through three, else the nearest moved by the roofline."""
    timed = [_Timed(one, ms) for one in usable if (ms := latency_ms(one)) is not None]
    if not timed:
        return None
    table, context = tables.speed(), workload.context_length
    level = [t for t in timed if t.sequences == workload.sequences]
    here = [t for t in level if same_context(t.context, context)]
    if here:
        grounds = evidence("measured", [here[0].seen])
        return _about(here[0].ms, table.measured_spread + 0.3 * (1 - grounds.confidence), grounds)
    alike = [t for t in level if t.seen.same_chip and t.seen.same_model]
    fitted = fit_line([(t.context, t.ms) for t in alike]) if len(alike) >= ENOUGH_TO_FIT else None
    if fitted is not None:
        a, b = fitted
        note = f"{a:.4g} ms + {b:.4g} ms for each thousand tokens, fitted to {len(alike)} records on this machine"
        grounds = evidence("calibrated", [t.seen for t in alike], (note,))
        return _about(a + b * context / 1000, table.calibrated_spread, grounds)
    return _moved(line, workload, timed)


def _moved(line: Roofline, workload: WorkloadProfile, timed: Sequence[_Timed]) -> Decode:
    """Between two records that bracket the context by a straight line, else the nearest one scaled by the roofline."""
    context = workload.context_length
    level = [t for t in timed if t.sequences == workload.sequences and t.seen.same_model]
    below = max((t for t in level if t.context <= context), key=lambda t: t.context, default=None)
    above = min((t for t in level if t.context >= context), key=lambda t: t.context, default=None)
    if below is not None and above is not None and below.context < above.context:
        share = (context - below.context) / (above.context - below.context)
        ms, used = below.ms + share * (above.ms - below.ms), [below.seen, above.seen]
        note = f"interpolated between contexts {below.context:,} and {above.context:,}"
    else:
        nearest = timed[0]
        times, how = _how_much_longer(line, workload, nearest)
        ms, used = nearest.ms * times, [nearest.seen]
        note = f"measured at context {nearest.context:,} and {nearest.sequences} sequences{how}"
    grounds = evidence("measured", used, (note,))
    return _about(ms, 2 * tables.speed().measured_spread + 0.3 * (1 - grounds.confidence), grounds)


def _how_much_longer(line: Roofline, workload: WorkloadProfile, one: _Timed) -> tuple[float, str]:
    """A token's time under this workload over that in the record, and how that was found."""
    ours, theirs = line.ms(workload.tokens, workload.sequences), line.ms(one.context, one.sequences)
    if ours and theirs:
        return ours / theirs, ", moved to this workload by the roofline"
    if workload.sequences > one.sequences:
        return workload.sequences / one.sequences, ", taken to be served one after another for want of a bandwidth"
    return 1.0, ""


def _about(ms: float, spread: float, grounds: Evidence) -> Decode:
    return Decode(ms, ms * (1 - spread), ms * (1 + spread), grounds)


def latency_ms(one: Sighting) -> float | None:
    """Decode ms a token of each sequence, by the record's latency or else its throughput; None when it has neither."""
    record = one.record
    if record.latency_ms_per_token > 0:
        return float(record.latency_ms_per_token)
    return 1000 * record.sequences / record.throughput_tok_s if record.throughput_tok_s > 0 else None


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """(a in ms, b in ms for a thousand tokens) by least squares; None when all contexts are one or a is no time.

    b is not below 0: a longer cache is not read faster.
    """
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n / 1000, sum(y for _, y in points) / n
    spread = sum((x / 1000 - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return None
    b = max(0.0, sum((x / 1000 - mean_x) * (y - mean_y) for x, y in points) / spread)
    a = mean_y - b * mean_x
    return (a, b) if a > 0 else None


def prefill_tok_s(model: ModelProfile, workload: WorkloadProfile, hardware: HardwareProfile) -> float | None:
    """Prompt tokens a second: FLOPs = 2 x active parameters x n + attention, over achieved TFLOPS; None when unknown.

    Attention of one layer, causal: 2 x query heads x head width x n^2; a window w < n sees at most w of them.
    """
    if not (hardware.prefill_tflops and model.active_parameters):
        return None
    n = workload.context_length
    pairs = 0.0
    for part in (p for layer in model.layers for p in layer.parts if p.kind != "state"):
        seen = min(part.window, n) if part.window else n
        pairs += seen * n - seen * seen / 2
    flops = 2.0 * model.active_parameters * n + 4.0 * (model.query_heads or 0) * (model.head_width or 0) * pairs
    return n * hardware.prefill_tflops * 1e12 / flops


def _beside(term: Term) -> int:
    """Bytes read besides growing slots: a state, and the sinks and rings of a method that counts its slots apart."""
    return term.fixed_bytes if term.counts or not term.packed else 0


def _why_unknown(model: ModelProfile, hardware: HardwareProfile) -> str:
    if not hardware.bandwidth_gbps:
        return f"memory bandwidth is unknown: {hardware.sources.get('bandwidth_gbps', 'not given')}"
    return f"weight bytes are unknown: {model.weights_source or 'not given'}"
