"""What was measured: which records a plan may use for one variant, how far to trust each, and what they say of memory.

Confidence starts at the match score and falls, with words, for everything that makes a record less like the plan.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.benchmarks.fingerprint import known
from veloxquant.benchmarks.matching import chip_factor, size_factor, version_numbers
from veloxquant.benchmarks.model_name import model_key
from veloxquant.benchmarks.same_model import stated_tokens
from veloxquant.benchmarks.validation import MAX_REDUCTION
from veloxquant.planner.memory import Measured, bytes_per_token, load
from veloxquant.planner.result import Evidence, Note

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from veloxquant.benchmarks.benchmark_db import BenchmarkRecord
    from veloxquant.planner.memory import Shape
    from veloxquant.planner.option import Option
    from veloxquant.planner.snapshot import Records
    from veloxquant.profiles import HardwareProfile, ModelProfile, WorkloadProfile

SAME_CONTEXT_RATIO = 1.1
"""Contexts closer than this are one context: a tenth of the cache is less than what one run differs from the next."""
FEW_REPEATS = 3
QUICKEST_MS, SLOWEST_MS = 1e-4, 1e8
"""A token in a ten-millionth of a second, or in a day, is a slip of units whatever the machine."""
_APART = 1.25
"""Lengths nearer than this say nothing about growth: what one run differs from the next would be the slope."""

_UNPROVEN = 0.7

_REPEATS = re.compile(r"(?:repeats|runs|n)[=:](\d{1,6})")
_KL = re.compile(r"kl(?:_mean)?[=:](\d{1,6}(?:\.\d{1,12})?(?:e-?\d{1,2})?)")
_STRAINED = ("battery", "thermal", "throttl", "low-power", "low_power")
MANUAL = "manual"


@dataclass(frozen=True)
class Sighting:
    """One usable record with what it is worth for this plan."""

    record: BenchmarkRecord
    confidence: float
    notes: tuple[str, ...]
    same_model: bool
    same_chip: bool

    @property
    def context(self) -> int:
        """Context of the run in tokens."""
        return self.record.context_length


@dataclass(frozen=True)
class Sightings:
    """Usable records of one variant, best first, and warnings about the unusable ones."""

    usable: tuple[Sighting, ...] = ()
    sizing: tuple[Sighting, ...] = ()
    """Of this very model at any length: what a token takes does not depend on how many are asked for."""
    warnings: tuple[Note, ...] = ()


def sightings(
    records: Records,
    label: str,
    model: ModelProfile,
    workload: WorkloadProfile,
    hardware: HardwareProfile,
) -> Sightings:
    """The records of one variant that this plan may use; one with impossible numbers is left out with a warning."""
    near = records.matches(label, model, workload, hardware)
    anywhere = records.at_any_length(label, model, hardware)
    if not near and not anywhere:
        return _NONE
    wrong = {
        record.id: Note(
            code="record_ignored", text=f"record {record.id} of {label} is left out: {why}", value=record.id
        )
        for _, record in sorted((*near, *anywhere), key=_best_first)
        if (why := _impossible(record, model, hardware))
    }
    usable = [
        _sighting(score, record, model, workload, hardware)
        for score, record in sorted(near, key=_best_first)
        if record.id not in wrong
    ]
    sizing = [
        _sighting(
            score * size_factor(record.context_length, workload.context_length), record, model, workload, hardware
        )
        for score, record in sorted(anywhere, key=_best_first)
        if record.id not in wrong and (record.memory_bytes > 0 or record.memory_reduction is not None)
    ]
    return Sightings(tuple(usable), tuple(sizing), tuple(wrong.values()))


def _best_first(scored: tuple[float, BenchmarkRecord]) -> float:
    return -scored[0]


_NONE = Sightings()


def evidence(kind: str, used: Sequence[Sighting], notes: Iterable[str] = ()) -> Evidence:
    """Evidence that cites these records; confidence is that of the best one."""
    words = dict.fromkeys(note for one in used for note in one.notes)
    return Evidence(
        source="measured" if kind == "measured" else "calibrated",
        record_ids=tuple(dict.fromkeys(one.record.id for one in used)),
        confidence=round(max(one.confidence for one in used), 4),
        notes=(*words, *notes),
    )


def cited(grounds: Evidence) -> str:
    """The records behind a figure, in words."""
    return f"{'record' if len(grounds.record_ids) == 1 else 'records'} {', '.join(grounds.record_ids)}"


def memory_evidence(option: Option) -> Evidence:
    """What an option's bytes rest on: the records that gave them, else the trace or the method's own word."""
    model, notes = option.setting.model, []
    if model.dtype == "float32":
        notes.append(
            "the model computes in float32: the engine's own cache, which is the baseline, has 32 bits a number"
        )
    if option.measured is not None:
        traced = bytes_per_token(option.shape)
        measured = bytes_per_token(option.shape, option.measured)
        notes.append(f"measured: {measured:,.0f} bytes a token; the arithmetic says {traced:,.0f}")
        return evidence("measured", option.measured_by, notes)
    confidence = model.confidence
    if not option.layout.proven:
        notes.append("not proven by a trace: the method's own word for which layers it can pack")
        confidence *= _UNPROVEN
    if option.shape.score_heads and model.query_heads is None:
        notes.append("the number of query heads is unknown: the score matrix is counted with the KV heads")
    traced_layout = model.source == "traced" and option.layout.proven
    return Evidence(source="traced" if traced_layout else "analytic", confidence=confidence, notes=tuple(notes))


def kl_of(record: BenchmarkRecord) -> float | None:
    """Mean KL in nats a token when a tag states it ("kl_mean=0.012")."""
    return next((float(m[1]) for tag in sorted(record.tags) if (m := _KL.fullmatch(tag))), None)


class _Weighed(NamedTuple):
    """A record that tells bytes of one sequence, beside the growth that the arithmetic gives at its length."""

    growth: float
    size: float
    seen: Sighting


def measured_memory(
    sizing: Sequence[Sighting], shape: Shape, baseline: Shape
) -> tuple[Measured, tuple[Sighting, ...]] | None:
    """Stored bytes of one sequence by the records of this very model, at the lengths they were measured at.

    One length gives the ratio of measured to traced growth beside the traced fixed part; several far enough apart give
    straight lines between them, made non-decreasing since a cache does not shrink as it fills. None without a figure.
    """
    used: list[_Weighed] = []
    fixed = 0.0
    sized = [(one, size) for one in sizing if one.same_model and (size := _bytes_of(one.record, baseline))]
    # Longest first, best first of equals: of records too near to each other to give a slope the longest is kept.
    for one, size in sorted(sized, key=lambda pair: -pair[0].context):
        stored, growth = _traced(one.record, shape)
        fixed = stored - growth
        if not used or growth * _APART <= used[-1].growth > growth:
            used.append(_Weighed(growth, size, one))
    if not used:
        return None
    used.reverse()
    highest = accumulate((one.size for one in used), max)
    points = [(one.growth, size) for one, size in zip(used, highest, strict=True)]
    if len(points) == 1 and used[0].growth > 0:
        points.insert(0, (0.0, min(fixed, used[0].size)))
    return Measured(tuple(points)), tuple(one.seen for one in used)


def _bytes_of(record: BenchmarkRecord, baseline: Shape) -> float | None:
    """Bytes of a sequence: measured, or the measured ratio times the engine's own cache at that length in 16 bits."""
    if record.memory_bytes > 0:
        return record.memory_bytes / record.sequences
    if record.memory_reduction is None:
        return None
    return record.memory_reduction * _traced(record, baseline)[0] * _at_16_bits(baseline)


def _at_16_bits(own: Shape) -> float:
    """What the engine's own cache would take with two bytes a number, by what it takes: 0.5 of a float32 model's."""
    taken = sum(term.layers * term.slot_bytes for term in own.terms)
    numbers = sum(term.layers * term.part.heads * (term.part.key_width + term.part.value_width) for term in own.terms)
    return 2 * numbers / taken if taken else 1.0


def _tokens(record: BenchmarkRecord) -> int:
    """Tokens held when the bytes were read: a "tokens=N" tag, else the context and what our own runs generated.

    What else wrote the record may not have generated what its workload says, so that only the context counts then: a
    byte too many a token is safe, one too few is not.
    """
    stated = stated_tokens(record)
    if stated:
        return stated
    own_run = record.source != MANUAL and record.workload.context_length == record.context_length
    return record.context_length + (record.workload.generation_length if own_run else 0)


def _traced(record: BenchmarkRecord, shape: Shape) -> tuple[float, float]:
    """(stored, what of it depends on the length) of one sequence, by the arithmetic at the record's own length."""
    tokens = _tokens(record)
    context = min(record.context_length, tokens)
    held = load(shape, context, tokens - context, record.workload.prefill_step_size)
    return held.stored, held.growth


def _sighting(
    score: float,
    record: BenchmarkRecord,
    model: ModelProfile,
    workload: WorkloadProfile,
    hardware: HardwareProfile,
) -> Sighting:
    same_chip = hardware.chip is not None and known(record.chip) and chip_factor(record.chip, hardware.chip) >= 1
    same_model = model_key(record.model_id) == model_key(model.model_id)
    doubts = _doubts(record, workload, hardware, same_chip=same_chip)
    if not same_model:
        doubts.append((0.8, f"measured on {record.model_id}, another model of this architecture and size"))
    confidence = score
    for factor, _ in doubts:
        confidence *= factor
    return Sighting(record, confidence, tuple(note for _, note in doubts), same_model, same_chip)


def _doubts(
    record: BenchmarkRecord, workload: WorkloadProfile, hardware: HardwareProfile, *, same_chip: bool
) -> list[tuple[float, str]]:
    """What lowers a record's worth for this plan: (factor, words)."""
    doubts: list[tuple[float, str]] = []
    if _differs(record.mlx_version, hardware.mlx_version, parts=2):
        doubts.append((0.9, f"measured on MLX {record.mlx_version}, planned for {hardware.mlx_version}"))
    if _differs(record.macos_version, hardware.macos_version, parts=1):
        doubts.append((0.95, f"measured on macOS {record.macos_version}, planned for {hardware.macos_version}"))
    if not same_chip and known(record.chip) and hardware.chip is not None:
        doubts.append((0.8, f"measured on {record.chip}, planned for {hardware.chip}"))
    if not same_context(record.context_length, workload.context_length):
        doubts.append((0.9, f"measured at a context of {record.context_length:,}, extrapolated"))
    repeats = next((int(m[1]) for tag in sorted(record.tags) if (m := _REPEATS.fullmatch(tag))), None)
    if repeats is not None and repeats < FEW_REPEATS:
        doubts.append((0.9, f"few repeats ({repeats})"))
    strained = sorted(tag for tag in record.tags if any(word in tag.casefold() for word in _STRAINED))
    doubts += [(0.8, f"the record notes {tag}") for tag in strained]
    return doubts


def same_context(ours: int, theirs: int) -> bool:
    """Whether two contexts are near enough to be one."""
    return max(ours, theirs) <= SAME_CONTEXT_RATIO * min(ours, theirs)


def _differs(theirs: str, ours: str | None, *, parts: int) -> bool:
    """Whether two known versions differ in their first `parts` numbers."""
    mine, other = version_numbers(ours or ""), version_numbers(theirs)
    return mine is not None and other is not None and mine[:parts] != other[:parts]


def _impossible(record: BenchmarkRecord, model: ModelProfile, hardware: HardwareProfile) -> str | None:
    """Why no machine can have measured this; None when it could be."""
    amounts = (record.memory_bytes, record.throughput_tok_s, record.latency_ms_per_token)
    if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
        return "a figure is negative or not a number"
    if record.perplexity_delta is not None and not math.isfinite(record.perplexity_delta):
        return "its perplexity is not a number"
    times = [record.latency_ms_per_token]
    if record.throughput_tok_s:
        times.append(1000 * record.sequences / record.throughput_tok_s)
    strange = [ms for ms in times if ms and not QUICKEST_MS <= ms <= SLOWEST_MS]
    if strange:
        return f"no machine takes {strange[0]:.3g} ms for a token"
    if record.memory_reduction is not None and not 0 < record.memory_reduction <= MAX_REDUCTION:
        return f"its ratio to the 16-bit cache is {record.memory_reduction:g}, not within 0 to {MAX_REDUCTION:g}"
    return _too_fast(record, model, hardware)


def _too_fast(record: BenchmarkRecord, model: ModelProfile, hardware: HardwareProfile) -> str | None:
    """Each decode step reads the weights once, so that bandwidth over weight bytes bounds the steps a second."""
    if not (hardware.bandwidth_gbps and model.read_bytes_per_token and hardware.chip) or hardware.backend == "cpu":
        return None  # a CPU may hold the weights of a small model in its own caches
    if chip_factor(record.chip, hardware.chip) < 1 or model_key(record.model_id) != model_key(model.model_id):
        return None
    bound = record.sequences * hardware.bandwidth_gbps * 1e9 / model.read_bytes_per_token
    stated = record.throughput_tok_s
    if record.latency_ms_per_token > 0:
        stated = max(stated, record.sequences * 1000 / record.latency_ms_per_token)
    if stated <= bound * SAME_CONTEXT_RATIO:
        return None
    return f"{stated:.4g} tokens a second are more than the bandwidth allows ({bound:.4g})"
