"""Sourced numbers of the planner: read once from the JSON files beside this module, on first use."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TypeVar

import msgspec

_Table = TypeVar("_Table")


class FamilyRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known to break for a family of models, by model_type."""

    architectures: tuple[str, ...]
    family: str
    keys_below_bits: int
    text: str
    sources: tuple[str, ...]


class PublishedQuality(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published figure: mean KL in nats a token; the truth is thought to lie within a factor of `spread`."""

    architecture: str
    model: str
    parameters: float
    label: str
    kl_mean: float
    perplexity_delta: float | None
    spread: float
    confidence: float
    source: str
    note: str | None


class SpeedConstants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of the roofline, each with its source beside it in data/speed.json."""

    layer_overhead_ms: float
    layer_overhead_source: str
    analytic_low: float
    analytic_high: float
    analytic_rows: int
    analytic_source: str
    default_efficiency: float
    default_efficiency_source: str
    efficiency_bits: dict[str, float]
    measured_spread: float
    calibrated_spread: float


@cache
def family_rules() -> tuple[FamilyRule, ...]:
    """data/families.json."""
    return _read("families.json", tuple[FamilyRule, ...])


@cache
def published_quality() -> dict[tuple[str, str], tuple[PublishedQuality, ...]]:
    """data/quality.json by (model_type, variant label), ascending by parameters."""
    found: dict[tuple[str, str], tuple[PublishedQuality, ...]] = {}
    for row in sorted(_read("quality.json", tuple[PublishedQuality, ...]), key=lambda r: r.parameters):
        found[row.architecture, row.label] = (*found.get((row.architecture, row.label), ()), row)
    return found


@cache
def speed() -> SpeedConstants:
    """data/speed.json."""
    return _read("speed.json", SpeedConstants)


def _read(name: str, kind: type[_Table]) -> _Table:
    text = resources.files(__package__).joinpath("data", name).read_bytes()
    return msgspec.json.decode(text, type=kind)
