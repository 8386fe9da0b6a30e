"""Apple M chips: names read by a grammar, facts from a table, unknown ones extrapolated and marked.

    name := ["Apple "] "M" generation [" " ("Pro" | "Max" | "Ultra")]        generation := 1..99 without a leading zero

Nothing else is an Apple M chip: neither a name that merely contains one ("AMD EPYC 7M12", "Intel Core m3-7Y32"), nor a
phone chip ("Apple A17 Pro"). The table is data/apple_chips.json; every row names its source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import msgspec

TIERS = ("base", "Pro", "Max", "Ultra")

_NAME = re.compile(r"(?:apple\s+)?m([1-9][0-9]?)(?:\s+(pro|max|ultra))?", re.ASCII | re.IGNORECASE)
_ARCHITECTURE = re.compile(r"applegpu_g([1-9][0-9])([gsd])", re.ASCII)
_NOISE = re.compile(r"\((?:r|tm|c)\)|\s@\s.*$|\bwith\b.*$|\b\d+-core\b|\bprocessor\b|\bcpu\b", re.ASCII | re.IGNORECASE)
# Apple GPU family numbers run 12 ahead of the M number: applegpu_g13 is M1, applegpu_g17 is M5.
_ARCHITECTURE_OFFSET = 12
_ARCHITECTURE_TIERS = {"g": "base", "d": "Ultra"}
# Growth beyond the table is assumed for two generations at most: a wrong guess then stays within about 25 %.
_MAX_STEPS = 2
_PUBLISHED, _SECONDARY, _OTHER_CORES, _EXTRAPOLATED = 1.0, 0.8, 0.7, 0.4


class ChipName(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed name: "Apple M3 Max" is generation 3, tier "Max"."""

    name: str
    generation: int
    tier: str


class ChipFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one chip with one GPU core count.

    bandwidth in GB/s (1e9 bytes), prefill in achieved TFLOPS, efficiency as the share of bandwidth reached in decode by
    weight kind ("f16", "q8", "q4"). `sources` has an entry for each of these. `confidence` is 1 for a published row.
    """

    chip: ChipName
    gpu_cores: int
    bandwidth_gbps: float
    prefill_tflops: float | None
    decode_efficiency: Mapping[str, float]
    memory_options_gb: tuple[int, ...]
    confidence: float
    sources: Mapping[str, str]
    extrapolated: bool = False
    """The table has no row of this generation and tier."""


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    chip: str
    gpu_cores: int
    bandwidth_gbps: float
    prefill_tflops: float | None
    decode_efficiency: Mapping[str, float]
    memory_options_gb: tuple[int, ...]
    source: str
    confidence: str
    note: str | None


def parse(name: object) -> ChipName | None:
    """The Apple M chip of this name, None for anything else (also for what is not text)."""
    match = _NAME.fullmatch(name.strip()) if isinstance(name, str) else None
    if match is None:
        return None
    generation, tier = int(match[1]), (match[2] or "base").capitalize()
    tier = "base" if tier == "Base" else tier
    suffix = "" if tier == "base" else f" {tier}"
    return ChipName(name=f"Apple M{generation}{suffix}", generation=generation, tier=tier)


def parse_architecture(architecture: object) -> tuple[int, str | None] | None:
    """(generation, tier) of Metal's architecture name, "applegpu_g14d" is (2, "Ultra").

    The letter s means Pro or Max, so its tier is None. Phone chips (letter p) and anything else give None.
    """
    match = _ARCHITECTURE.fullmatch(architecture) if isinstance(architecture, str) else None
    generation = int(match[1]) - _ARCHITECTURE_OFFSET if match else 0
    return (generation, _ARCHITECTURE_TIERS.get(match[2])) if match and generation >= 1 else None


def clean(name: str) -> str:
    """A processor's name without vendor noise: "Intel(R) Core(TM) m3-7Y32 CPU @ 1.10GHz" is "Intel Core m3-7Y32"."""
    parsed = parse(name)
    return parsed.name if parsed else " ".join(_NOISE.sub(" ", name).split())


def names() -> tuple[str, ...]:
    """The chips of the table by name, each once, oldest generation first."""
    return tuple(dict.fromkeys(parsed.name for parsed, _ in _parsed_rows()))


def lookup(name: str | ChipName, gpu_cores: int | None = None) -> ChipFacts | None:
    """Facts of this chip with this many GPU cores; None when the name is no Apple M chip.

    Without a core count, or with one the table does not have, the narrower variant counts and the source says so. A
    generation the table does not have is extrapolated along its tier, with low confidence.
    """
    chip = name if isinstance(name, ChipName) else parse(name)
    if chip is None:
        return None
    rows = _rows(chip)
    if not rows:
        return _extrapolated(chip, gpu_cores)
    exact = next((row for row in rows if row.gpu_cores == gpu_cores), None)
    return _facts(chip, exact, "", 1.0) if exact else _facts(chip, *_narrower(rows, gpu_cores))


def table() -> tuple[tuple[str, int], ...]:
    """(name, GPU cores) of every row."""
    return tuple((f"Apple {row.chip}", row.gpu_cores) for row in _table())


def _narrower(rows: tuple[_Row, ...], gpu_cores: int | None) -> tuple[_Row, str, float]:
    """The widest row with at most these cores, else the narrowest; what to say; and the confidence to keep."""
    below = [row for row in rows if gpu_cores is not None and row.gpu_cores < gpu_cores]
    row = below[-1] if below else rows[0]
    known = " or ".join(str(r.gpu_cores) for r in rows)
    asked = "GPU core count unknown" if gpu_cores is None else f"no variant with {gpu_cores} GPU cores"
    return row, f" ({asked}, known are {known}: the figures for {row.gpu_cores} are used)", _OTHER_CORES


def _facts(chip: ChipName, row: _Row, remark: str, trust: float) -> ChipFacts:
    prefill, prefill_source = _prefill(chip, row, row.gpu_cores)
    efficiency, efficiency_source = _efficiency(chip, row)
    published = _PUBLISHED if row.confidence == "published" else _SECONDARY
    unsure = "" if row.confidence == "published" else ", not verified"
    return ChipFacts(
        chip=chip,
        gpu_cores=row.gpu_cores,
        bandwidth_gbps=row.bandwidth_gbps,
        prefill_tflops=prefill,
        decode_efficiency=efficiency,
        memory_options_gb=row.memory_options_gb,
        confidence=min(published, trust),
        sources={
            "bandwidth_gbps": f"chip table: {row.source}{unsure}{remark}",
            "prefill_tflops": prefill_source + remark,
            "decode_efficiency": efficiency_source + remark,
        },
    )


def _prefill(chip: ChipName, row: _Row | None, gpu_cores: int) -> tuple[float | None, str]:
    """The row's own figure, else the nearest known one scaled by GPU cores: same generation first, then older ones."""
    if row is not None and row.prefill_tflops is not None:
        return row.prefill_tflops, "chip table: achieved in prefill of a 7B model"
    known = [(parsed, r) for parsed, r in _parsed_rows() if r.prefill_tflops and parsed.generation <= chip.generation]
    if not known:
        return None, "no achieved figure of this or an older generation"
    parsed, near = max(
        known, key=lambda k: (k[0].generation, k[0].tier == chip.tier, -abs(k[1].gpu_cores - gpu_cores), k[1].gpu_cores)
    )
    figure = (near.prefill_tflops or 0.0) * gpu_cores / near.gpu_cores
    return round(figure, 2), f"estimated: {parsed.name} with {near.gpu_cores} GPU cores, scaled to {gpu_cores} cores"


def _efficiency(chip: ChipName, row: _Row | None) -> tuple[Mapping[str, float], str]:
    """The row's own figures, else those of the newest older generation of the same tier (then of any tier)."""
    if row is not None and len(row.decode_efficiency) >= 2:  # noqa: PLR2004 -- q8 and q4; small machines lack f16
        return row.decode_efficiency, "chip table: achieved in decode of a 7B model"
    cores = row.gpu_cores if row is not None else 0
    known = [
        (parsed, r) for parsed, r in _parsed_rows() if r.decode_efficiency and parsed.generation <= chip.generation
    ]
    if not known:
        return {}, "no achieved figure of this or an older generation"
    parsed, near = max(known, key=lambda k: (k[0].tier == chip.tier, k[0].generation, -abs(k[1].gpu_cores - cores)))
    return near.decode_efficiency, f"estimated: as reached by {parsed.name} with {near.gpu_cores} GPU cores"


def _extrapolated(chip: ChipName, gpu_cores: int | None) -> ChipFacts | None:
    """A generation without a row: bandwidth by the tier's growth, the rest by the nearest rows."""
    points = _tier_points(chip.tier)
    bandwidth, how = _extrapolated_bandwidth(points, chip.generation)
    # Without a core count, the fewest of the newest known generation of this tier.
    cores = gpu_cores or next(row.gpu_cores for parsed, row in _parsed_rows() if _is(parsed, points[-1][0], chip.tier))
    prefill, prefill_source = _prefill(chip, None, cores)
    efficiency, efficiency_source = _efficiency(chip, None)
    remark = "extrapolated, no row in the chip table"
    return ChipFacts(
        chip=chip,
        gpu_cores=cores,
        bandwidth_gbps=round(bandwidth, 1),
        prefill_tflops=prefill,
        decode_efficiency=efficiency,
        memory_options_gb=(),
        confidence=_EXTRAPOLATED,
        extrapolated=True,
        sources={
            "bandwidth_gbps": f"{remark}: {how}",
            "prefill_tflops": f"{remark}; {prefill_source}",
            "decode_efficiency": f"{remark}; {efficiency_source}",
        },
    )


def _extrapolated_bandwidth(points: list[tuple[int, float]], generation: int) -> tuple[float, str]:
    """GB/s, and how they were found: even growth between two known generations, beyond them the tier's mean growth."""
    older, newer = [p for p in points if p[0] < generation], [p for p in points if p[0] > generation]
    if older and newer:
        (left, low), (right, high) = older[-1], newer[0]
        bandwidth = low * (high / low) ** ((generation - left) / (right - left))
        return bandwidth, f"between M{left} and M{right} of this tier"
    (first, start), (last, known) = points[0], points[-1]
    growth = (known / start) ** (1 / (last - first))
    steps = min(generation - last, _MAX_STEPS)
    how = f"M{last} of this tier grew {growth:.2f} times a generation, {steps} of them counted"
    return known * growth**steps, how


def _tier_points(tier: str) -> list[tuple[int, float]]:
    """(generation, bandwidth) of a tier's narrowest variants, in order: the careful end of each generation."""
    narrowest: dict[int, float] = {}
    for parsed, row in _parsed_rows():
        if parsed.tier == tier:
            narrowest.setdefault(parsed.generation, row.bandwidth_gbps)
    return sorted(narrowest.items())


def _is(chip: ChipName, generation: int, tier: str) -> bool:
    return chip.generation == generation and chip.tier == tier


def _rows(chip: ChipName) -> tuple[_Row, ...]:
    """Rows of this chip, fewest GPU cores first."""
    return tuple(row for parsed, row in _parsed_rows() if parsed == chip)


@cache
def _parsed_rows() -> tuple[tuple[ChipName, _Row], ...]:
    pairs = [(parse(row.chip), row) for row in _table()]
    named = [(parsed, row) for parsed, row in pairs if parsed is not None]
    return tuple(sorted(named, key=lambda p: (p[0].generation, TIERS.index(p[0].tier), p[1].gpu_cores)))


@cache
def _table() -> tuple[_Row, ...]:
    data: Any = json.loads((resources.files("veloxquant.hardware") / "data" / "apple_chips.json").read_bytes())
    return msgspec.convert(data["chips"], tuple[_Row, ...])
