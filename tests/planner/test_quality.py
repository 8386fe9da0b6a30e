"""Divergence in nats: published figures by family and size, the method's own word, and the floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from planner_kit import Own, Packed, ask, candidate, kv, llama_8b, mac, model, offers, qwen25_7b, rejection

from veloxquant.planner.tables import family_rules, published_quality

if TYPE_CHECKING:
    from veloxquant.planner.result import Quality
    from veloxquant.profiles import ModelProfile

MACHINE = mac(512, 400)
FRONTIER = json.loads(Path(__file__).parents[1].joinpath("data/quality_frontier.json").read_text())["rows"]


def _quality(profile: ModelProfile, label: str, **workload: Any) -> Quality:
    answer = ask(profile, MACHINE, on_offer=offers(Own(), Packed(bits=(8, 6, 4))), max_kl=100, **workload)
    return candidate(answer, label).quality


def _llama(parameters: int) -> ModelProfile:
    return llama_8b(num_parameters=parameters)


def test_the_engines_own_cache_is_the_reference() -> None:
    """Exactly zero, low and high included."""
    quality = _quality(llama_8b(), "fp16")
    assert (quality.kl_mean, quality.low, quality.high, quality.perplexity_delta) == (0, 0, 0, 0)


@pytest.mark.parametrize(("parameters", "kl"), [(1_236_000_000, 0.148), (3_213_000_000, 0.051)])
def test_a_published_model_has_its_published_figure(parameters: int, kl: float) -> None:
    """Llama-3.2-1B and 3B with 4-bit groups of 64 (mlx-quant-fidelity)."""
    quality = _quality(_llama(parameters), "affine4-g64")
    assert quality.kl_mean == kl
    assert quality.evidence.source == "published"
    assert any("mlx-quant-fidelity" in note for note in quality.evidence.notes)


def test_sizes_between_are_interpolated() -> None:
    """The geometric middle of the sizes has the geometric middle of the figures."""
    middle = (1_236_000_000 * 3_213_000_000) ** 0.5
    assert _quality(_llama(int(middle)), "affine4-g64").kl_mean == pytest.approx((0.148 * 0.051) ** 0.5, rel=1e-6)


def test_larger_models_keep_the_nearest_figure() -> None:
    """Nobody measured an 8B: it is promised no less than the 3B."""
    assert _quality(llama_8b(), "affine4-g64").kl_mean == 0.051


def test_far_sizes_fall_back_to_the_methods_word() -> None:
    """70 billion are more than eight times 3: the prior, with its low confidence."""
    quality = _quality(_llama(70_000_000_000), "affine4-g64")
    assert quality.evidence.source == "prior"
    assert quality.evidence.confidence < 0.5


def test_other_families_fall_back_to_the_methods_word() -> None:
    """A published Llama says nothing about another family."""
    assert _quality(model([kv(8, 128)]), "affine4-g64").evidence.source == "prior"


@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3, 2])
@pytest.mark.parametrize("group", [32, 64])
def test_the_table_holds_the_measured_rows(bits: int, group: int) -> None:
    """SmolLM2-135M as measured."""
    row = next(r for r in FRONTIER if r["m"] == f"affine{bits}g{group}")
    smallest = published_quality()["llama", f"affine{bits}-g{group}"][0]
    assert (smallest.model, smallest.kl_mean) == ("SmolLM2-135M", row["kl"])


def test_every_row_and_rule_has_a_source() -> None:
    """A number without a source is an opinion."""
    assert all(row.source and row.kl_mean > 0 for rows in published_quality().values() for row in rows)
    assert all(rule.sources and rule.text for rule in family_rules())


@pytest.mark.parametrize("label", ["affine6-g64", "affine6-g32", "affine4-g64"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_family_rule_counts_bits_without_scales(label: str, itemsize: int) -> None:
    """6-bit keys in a float32 model take 8 stored bits in groups of 32; they are 6-bit keys all the same."""
    profile = qwen25_7b(layers=model([kv(4, 128, itemsize=itemsize)] * 28).layers)
    answer = ask(profile, MACHINE, on_offer=offers(Own(), Packed(bits=(8, 6, 4))), max_kl=100)
    assert rejection(answer, label).reason == "family_rule"
    assert candidate(answer, "affine8-g64").quality.kl_mean == 0.009
