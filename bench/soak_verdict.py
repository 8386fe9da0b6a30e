"""What a soak's samples say: memory's slope, descriptors, tasks and the drift of p99, each with its uncertainty.

And that the world went on changing, without which none of them would say much.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOPE_MIB_AN_HOUR = 0.5
DRIFT = 0.10
WARM_UP = 0.5
"""Share of the run in which pools, caches and the allocator fill; an hour at most, which is what R32 grants."""
LEAST_SAMPLES = 8
_Z95 = 1.96
_DRAWS = 1000


@dataclass(frozen=True)
class Sample:
    """The daemon at one moment, and its answers over the window before it (milliseconds)."""

    at_s: float
    rss_mib: float
    fds: int
    threads: int
    tasks: int
    clients: int
    generation: int
    requests: int
    plan_p50_ms: float
    plan_p99_ms: float
    ping_p50_ms: float
    ping_p99_ms: float
    control_p50_ms: float
    control_p99_ms: float
    daemon_p99_ms: float
    cpu_percent: float
    load: float
    trouble: int


@dataclass(frozen=True)
class Claim:
    """One figure beside its target. `low` and `high` bound it to 95 %, where that can be said."""

    what: str
    value: float
    unit: str
    target: str
    met: bool
    low: float | None = None
    high: float | None = None
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON has it, rounded."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items() if v not in (None, "")}

    def line(self) -> str:
        """One sentence."""
        between = "" if self.low is None or self.high is None else f" (95 %: {self.low:.3g} to {self.high:.3g})"
        verdict = "met" if self.met else "NOT MET"
        note = f"; {self.note}" if self.note else ""
        return f"{self.what}: {self.value:.4g} {self.unit}{between}, target {self.target}: {verdict}{note}"


def warm(samples: Sequence[Sample]) -> list[Sample]:
    """Those after the warm-up."""
    last = samples[-1].at_s if samples else 0.0
    begins = min(3600.0, last * WARM_UP)
    return [one for one in samples if one.at_s >= begins]


def claims(samples: Sequence[Sample], quiet: tuple[Sample, Sample]) -> list[Claim]:
    """What the run shows. `quiet`: the daemon with no client but one, before the load and after it."""
    kept = warm(samples)
    if len(kept) < LEAST_SAMPLES:
        return [Claim("samples after the warm-up", len(kept), "", f">= {LEAST_SAMPLES}", met=False)]
    return [memory(kept), descriptors(kept), *left_behind(*quiet), *drifts(kept), changes(kept), errors(samples)]


def memory(samples: Sequence[Sample]) -> Claim:
    """The slope of resident memory."""
    slope, error = fitted([one.at_s / 3600 for one in samples], [one.rss_mib for one in samples])
    low, high = slope - _Z95 * error, slope + _Z95 * error
    met = slope <= SLOPE_MIB_AN_HOUR
    note = "the interval reaches beyond the target" if met and high > SLOPE_MIB_AN_HOUR else ""
    return Claim(
        "slope of resident memory", slope, "MiB/h", f"<= {SLOPE_MIB_AN_HOUR:g} MiB/h", met, low, high, note=note
    )


def descriptors(samples: Sequence[Sample]) -> Claim:
    """Open files that are not clients: the last quarter against the first."""
    quarter = max(1, len(samples) // 4)
    beside = [one.fds - one.clients for one in samples]
    grown = statistics.median(beside[-quarter:]) - statistics.median(beside[:quarter])
    return Claim("open files beside clients, growth", grown, "files", "<= 0 files", grown <= 0)


def left_behind(before: Sample, after: Sample) -> list[Claim]:
    """What the load left in the daemon once it had gone."""
    names = {"fds": "open files", "tasks": "tasks", "threads": "threads"}
    left = {words: getattr(after, name) - getattr(before, name) for name, words in names.items()}
    return [Claim(f"{words} left behind", count, words, f"<= 0 {words}", count <= 0) for words, count in left.items()]


def drifts(samples: Sequence[Sample]) -> list[Claim]:
    """The p99 of plans late in the run against early: as measured, and beside the machine's own (the control)."""
    third = len(samples) // 3
    found = {}
    for name in ("plan_p99_ms", "ping_p99_ms", "control_p99_ms"):
        values = [float(getattr(one, name)) for one in samples]
        found[name] = drift(values[:third], values[-third:])
    value, low, high = found["plan_p99_ms"]
    noise = found["control_p99_ms"]
    note = (
        f"the control, which never touches the daemon, drifted by {noise[0]:+.1%} ({noise[1]:+.1%} to {noise[2]:+.1%})"
    )
    ping, ping_low, ping_high = found["ping_p99_ms"]
    target = f"<= {DRIFT:.0%}"
    return [
        Claim("drift of plan's p99", value * 100, "%", target, value <= DRIFT, low * 100, high * 100, note),
        Claim("drift of ping's p99", ping * 100, "%", target, ping <= DRIFT, ping_low * 100, ping_high * 100),
    ]


def changes(samples: Sequence[Sample]) -> Claim:
    """Windows between two samples in which no record that was published or deleted moved the generation."""
    still = sum(before.generation == after.generation for before, after in itertools.pairwise(samples))
    return Claim("windows without a change of the world", still, "windows", "0 windows", still == 0)


def errors(samples: Sequence[Sample]) -> Claim:
    """Answers that were wrong or missing."""
    count = samples[-1].trouble
    return Claim("answers wrong or missing", count, "answers", "0 answers", count == 0)


def drift(early: Sequence[float], late: Sequence[float]) -> tuple[float, float, float]:
    """(late / early - 1 of the medians of windows' p99, and its bootstrap interval of 95 %)."""
    dice = random.Random(1)  # noqa: S311 -- resampling
    drawn = sorted(
        statistics.median(dice.choices(late, k=len(late))) / statistics.median(dice.choices(early, k=len(early))) - 1
        for _ in range(_DRAWS)
    )
    value = statistics.median(late) / statistics.median(early) - 1
    return value, drawn[int(0.025 * _DRAWS)], drawn[int(0.975 * _DRAWS)]


def fitted(at: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """(slope of the least-squares line, its standard error with neighbours correlated: Newey and West 1987).

    Memory moves in steps that last: errors of an ordinary fit, which takes samples for independent, come out far too
    small. The lag is that of Newey and West 1994, 4 (n / 100)^(2/9), at least a tenth of the samples here.
    """
    count = len(at)
    middle, mean = statistics.fmean(at), statistics.fmean(values)
    apart = [one - middle for one in at]
    spread = math.fsum(one * one for one in apart)
    slope = math.fsum(a * (v - mean) for a, v in zip(apart, values, strict=True)) / spread
    scores = [a * (v - mean - slope * a) for a, v in zip(apart, values, strict=True)]
    lag = max(count // 10, int(4 * (count / 100) ** (2 / 9)))
    total = math.fsum(one * one for one in scores)
    for step in range(1, lag + 1):
        together = math.fsum(scores[n] * scores[n - step] for n in range(step, count))
        total += 2 * (1 - step / (lag + 1)) * together
    return slope, math.sqrt(max(total, 0.0)) / spread
