"""Which variant, by constraints first and then the objective, never by a weighted sum of unlike units.

A figure's uncertainty ties it with others, and ties go to the engine's own cache, then to fewer stored bytes, then by
label. A tie judged pair by pair is not transitive, and would let a variant that nobody chooses reorder the rest (of
A, B, C with A ~ B, B ~ C, A < C, taking one out would change which of the others is ahead). So uncertainty is turned
into fixed steps: divergence counts in octaves, the spread of published figures; a time counts by its high end in tenths
of what the engine's own cache takes, so that a variant passes it only when even its high end is faster. Every variant
then has a place of its own, whatever else is on offer (docs/decisions/0008-how-ties-are-judged.md).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from veloxquant.planner.evidence import cited
from veloxquant.planner.quality import floor_for, soft_floor
from veloxquant.planner.rejection import rejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.planner.option import Option
    from veloxquant.planner.result import Evidence, Rejected

SLOW = 2.0
"""More than this many times what a token takes in the engine's own cache is bought by no fineness of another one."""
_TIMED = ("balanced", "latency", "throughput")
_BROKEN = 3
_TIME_STEP = 1.1
_STEADY = 1e-9
"""Keeps figures that lie on a step's edge on one side of it."""
_Place = tuple[float, ...]


def decide(fitting: Sequence[Option]) -> tuple[list[Option], list[Rejected]]:
    """The variants that keep within every ceiling, best first, and the others with the ceiling they miss."""
    missed = {
        id(option): miss for option in fitting if (miss := misses_kl(option) or misses_latency(option)) is not None
    }
    left = [option for option in fitting if id(option) not in missed]
    least = min(map(floors_missed, left), default=0)
    missed |= {id(option): _soft_miss(option, least) for option in left if floors_missed(option) > least}
    left = [option for option in left if id(option) not in missed]
    return sorted(left, key=place), [missed[id(option)] for option in fitting if id(option) in missed]


def place(option: Option) -> tuple[_Place, bool, int, str, str]:
    """Where a variant stands under the objective, by itself: lower is ahead."""
    return (
        _objective(option),
        not option.engine_own,
        option.sizing.footprint.stored,
        option.label,
        option.offer.method.name,
    )


def below_soft_floor(option: Option) -> bool:
    """Whether the variant diverges more than is let pass without the request's own ceiling."""
    workload = option.setting.workload
    return workload.max_kl is None and option.quality.kl_mean > soft_floor(workload.context_length)


def floors_missed(option: Option) -> int:
    """0 for none, 1 for one of quality and pace, 2 for both, 3 for a broken one: nothing ever buys what is that broken.

    At ten times the floor of 0.05 nats a third of a small model's greedy tokens already differ (0.42 nats, 67 % the
    same: SmolLM2-135M at 3 bits in groups of 32), so what is worse is used only where nothing else fits.
    """
    return _BROKEN if _is_broken(option) else below_soft_floor(option) + is_slow(option)


def is_slow(option: Option) -> bool:
    """Whether the variant misses the soft floor of pace, for objectives that count time at all: see SLOW."""
    counts = option.setting.workload.objective in _TIMED and not _is_broken(option)
    return counts and option.slowdown > SLOW


def _is_broken(option: Option) -> bool:
    return below_soft_floor(option) and option.quality.kl_mean > 10 * soft_floor(option.setting.workload.context_length)


def tied(one: Option, other: Option) -> bool:
    """Whether the objective does not tell two variants apart."""
    return _objective(one) == _objective(other)


def straddles(option: Option) -> bool:
    """An estimate whose range holds the latency ceiling."""
    ceiling, found = option.setting.workload.max_latency_ms, option.decode
    return ceiling is not None and found is not None and found.low <= ceiling < found.high


def _objective(option: Option) -> _Place:
    objective = option.setting.workload.objective
    if objective == "memory":
        return (option.sizing.footprint.stored,)
    if objective == "latency":
        return (_time_step(option),)
    if objective == "throughput":
        return (_rate_step(option),)
    if objective == "quality":
        return (_octave(option.quality.kl_mean),)
    if option.roomy:
        return (0, is_slow(option), _octave(option.quality.kl_mean))
    return (1, option.sizing.least_peak)


def _octave(kl_mean: float) -> float:
    return math.ceil(math.log2(kl_mean) - _STEADY) if kl_mean > 0 else -math.inf


def _time_step(option: Option) -> float:
    """Tenths above (or below) the engine's own time for a token; 0 where either is unknown."""
    own, found = option.setting.baseline_decode, option.decode
    if own is None or found is None or option.engine_own:
        return 0
    return _tenths(found.high / own.ms)


def _rate_step(option: Option) -> float:
    """Tenths below (or above) the engine's own tokens a second over the asked slots, by the slots that fit.

    The measure is taken at the asked slots, since that does not change with memory; the engine's own cache passes it
    itself where more slots fit. Without any times the requests that share a decode step count, in doublings: a gain
    below that may be lost in unpacking.
    """
    own, found = option.setting.baseline_decode, option.served
    if own is None:
        return -math.floor(math.log2(found.in_one_step))
    if found.sure_tok_s is None:
        return 0
    return _tenths(1000 * option.setting.workload.sequences / own.ms / found.sure_tok_s)


def _tenths(ratio: float) -> float:
    return math.floor(math.log(ratio) / math.log(_TIME_STEP) + _STEADY)


def misses_kl(option: Option) -> Rejected | None:
    """The rejection of a variant that diverges by more than the request's hard floor."""
    ceiling, quality = option.setting.workload.max_kl, option.quality
    if ceiling is None or quality.kl_mean <= ceiling:
        return None
    detail = f"{quality.kl_mean:.3g} nats a token ({_source(quality.evidence)}), max_kl is {ceiling:g}"
    return rejected(option.offer, "quality_below_floor", detail, grounds=quality.evidence)


def misses_latency(option: Option) -> Rejected | None:
    """The rejection of a variant that cannot keep within the request's latency; an estimate may straddle it."""
    ceiling, found = option.setting.workload.max_latency_ms, option.decode
    if ceiling is None or found is None or found.least <= ceiling:
        return None
    detail = (
        f"{found.ms:.3g} ms a token ({_source(found.evidence)}, {found.low:.3g} to {found.high:.3g}), "
        f"max_latency_ms is {ceiling:g}"
    )
    return rejected(option.offer, "too_slow", detail, grounds=found.evidence)


def _soft_miss(option: Option, least: int) -> Rejected:
    quality, floor = option.quality, floor_for(option.setting.workload)
    if is_slow(option) and below_soft_floor(option) <= least and option.decode is not None:
        detail = (
            f"{option.decode.ms:.3g} ms a token ({_source(option.decode.evidence)}), {option.slowdown:.2g} times the "
            "engine's own cache's; another variant that fits is quicker"
        )
        return rejected(option.offer, "too_slow", detail, grounds=option.decode.evidence)
    above = f"more than ten times {floor:g}" if _is_broken(option) else f"above {floor:g}"
    detail = (
        f"{quality.kl_mean:.3g} nats a token ({_source(quality.evidence)}), {above} "
        "at this context, and another variant that fits is below"
    )
    return rejected(option.offer, "quality_below_floor", detail, grounds=quality.evidence)


def _source(grounds: Evidence) -> str:
    return f"{grounds.source} by {cited(grounds)}" if grounds.record_ids else grounds.source
