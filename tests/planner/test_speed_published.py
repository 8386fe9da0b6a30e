"""The roofline against published runs: what data/speed.json states follows from these rows, and can be had again.

Rows, geometry and their sources: tests/data/mlx_decode.json. Chips: the table that detection uses.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from planner_kit import Own, ask, kv, mac, model, offers, window

from veloxquant.hardware import chips
from veloxquant.planner import tables

if TYPE_CHECKING:
    from veloxquant.profiles import HardwareProfile, ModelProfile

PUBLISHED = json.loads(Path(__file__).parents[1].joinpath("data/mlx_decode.json").read_text())
ROWS: list[dict[str, Any]] = PUBLISHED["rows"]
MODELS: dict[str, dict[str, Any]] = PUBLISHED["models"]
SHORT_CHAT_TOKENS = 128
"""Taken where a row says "short chat prompts": at most 5 % of what is read (Phi-3.5-mini), else about 1 %."""


def _parameters(m: dict[str, Any], experts: int) -> int:
    """All parameters with so many experts in each layer; both embeddings where they are two."""
    attention = m["hidden"] * m["head_width"] * 2 * (m["query_heads"] + m["kv_heads"])
    router = m["hidden"] * m["experts"] if "experts" in m else 0
    layer = attention + experts * 3 * m["hidden"] * m["intermediate"] + router + m["small_per_layer"]
    return m["layers"] * layer + m["vocab"] * m["hidden"] * (1 if m["tied"] else 2) + m["hidden"]


def _profile(row: dict[str, Any]) -> ModelProfile:
    m = MODELS[row["model"]]
    total, active = _parameters(m, m.get("experts", 1)), _parameters(m, m.get("experts_used", 1))
    read = active - (0 if m["tied"] else m["vocab"] * m["hidden"])
    every, full = m.get("full_every", 1), kv(m["kv_heads"], m["head_width"])
    parts = [
        full if (i + 1) % every == 0 else window(m["kv_heads"], m["head_width"], m["window"])
        for i in range(m["layers"])
    ]
    return model(
        parts,
        num_layers=m["layers"],
        num_parameters=total,
        active_parameters=active,
        weights_bytes=round(total * row["weight_bits"] / 8),
        read_bytes_per_token=round(read * row["weight_bits"] / 8),
        weight_bits=row["weight_bits"],
        query_heads=m["query_heads"],
        head_width=m["head_width"],
    )


def _machine(row: dict[str, Any]) -> HardwareProfile:
    """By name and core count; where no count is published, the chip of that memory (an M4 Max with 64 GB has 40)."""
    name, cores = chips.parse(row["chip"]), row["gpu_cores"]
    assert name is not None
    counts = [n for n in ((cores,) if cores else (16, 32, 40)) if _comes_with(chips.lookup(name, n), n, row)]
    facts = chips.lookup(name, counts[0])
    assert facts is not None
    efficiency = dict(facts.decode_efficiency)
    return mac(1024, 1000, chip=row["chip"], bandwidth_gbps=facts.bandwidth_gbps, decode_efficiency=efficiency)


def _comes_with(facts: chips.ChipFacts | None, cores: int, row: dict[str, Any]) -> bool:
    there = facts is not None and facts.gpu_cores == cores
    return there and (row["gpu_cores"] == cores or row["memory_gb"] in facts.memory_options_gb)


@cache
def _measured_over_predicted() -> tuple[float, ...]:
    """Measured ms a token over those of the roofline, for each row."""
    return tuple(_ratio(row) for row in ROWS)


def _ratio(row: dict[str, Any]) -> float:
    length = {"context_length": row["context"] or SHORT_CHAT_TOKENS, "generation_length": 0}
    answer = ask(_profile(row), _machine(row), on_offer=offers(Own()), **length)
    return 1000 / row["decode_tok_s"] / answer.chosen.speed.latency_ms_per_token


@pytest.mark.parametrize("name", MODELS)
def test_the_geometry_gives_the_published_number_of_parameters(name: str) -> None:
    """To the last one: no dimension is misread."""
    assert _parameters(MODELS[name], MODELS[name].get("experts", 1)) == MODELS[name]["parameters"]


def test_the_weights_are_within_the_published_peak_memory() -> None:
    """Peak memory holds the weights, the cache and little more: 0.5 to 1.3 GB here."""
    for row in (row for row in ROWS if row["peak_mem_gb"]):
        beside = row["peak_mem_gb"] - _profile(row).weights_bytes / 1e9
        assert 0.5 < beside < 1.3, row["published_as"]


def test_every_published_run_lies_within_the_stated_range() -> None:
    """All of them, and the range reaches no further beyond them than a tenth of the predicted time."""
    ratios, table = sorted(_measured_over_predicted()), tables.speed()
    assert len(ratios) == table.analytic_rows
    assert table.analytic_low <= ratios[0] <= table.analytic_low + 0.1
    assert table.analytic_high - 0.1 <= ratios[-1] <= table.analytic_high
    assert f"{ratios[0]:.2f} to {ratios[-1]:.2f}" in table.analytic_source


def test_most_runs_lie_much_nearer() -> None:
    """The ends of the range are two models on one Ultra; how many lie within a third is said as it is."""
    near = [ratio for ratio in _measured_over_predicted() if 2 / 3 <= ratio <= 4 / 3]
    assert len(near) > 0.85 * len(ROWS)
    assert f"{len(near)} of them within a third" in tables.speed().analytic_source


def test_the_time_for_a_layer_is_the_one_that_fits_these_runs_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all hundredths of a ms, the stated one has the least mean square of log(measured / predicted)."""
    stated = tables.speed()

    def misfit(hundredths: int) -> float:
        changed = msgspec.structs.replace(stated, layer_overhead_ms=hundredths / 100)
        monkeypatch.setattr(tables, "speed", lambda: changed)
        return sum(math.log(_ratio(row)) ** 2 for row in ROWS)

    assert min(range(10), key=misfit) / 100 == stated.layer_overhead_ms
