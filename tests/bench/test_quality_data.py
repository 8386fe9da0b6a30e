"""What methods claim of the hard case is what bench/quality.py measured there with real caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from veloxquant.methods.priors import LOW, MIDDLE
from veloxquant.methods.registry import load

if TYPE_CHECKING:
    from veloxquant.methods.method import Method, Variant

DATA = json.loads((Path(__file__).parents[2] / "bench/data/quality/smollm2-135m-4096.json").read_text(encoding="utf-8"))
ROWS = {row["label"]: row for row in DATA["rows"]}
PLANNED = {variant.label: (method, variant) for method, variant in load().variants if method.name != "fp16"}
NO_ROW = {
    "affine-k5v3-g64",
    *(f"affine{bits}-g128" for bits in (8, 6, 5, 4, 3, 2)),
    *(f"turboquant-mse{bits}" for bits in (5, 3, 2)),
    "turboquant-prod4",
    *(f"{name}-1024-8bit" for name in ("h2o", "knorm", "pyramidkv", "snapkv", "streaming")),
    *(f"{name}-2048-8bit" for name in ("knorm", "pyramidkv", "snapkv", "streaming")),
}
"""Planned variants that were not run: their claims are simulated or extrapolated, or measured at 1,024 tokens."""
PUBLISHED_ABOVE = {"affine8-g32", "affine8-g64"}
"""Upper ends that another model's published figure sets, 0.0016 at llama.cpp's q8_0."""


def row_of(label: str) -> str:
    """The row of a planned variant; of the engine's own format it is that of mlx-lm's cache, the same words."""
    bits, _, group = label.removeprefix("affine").partition("-g")
    return f"mlx-lm {bits} bit g{group}" if bits.isdigit() else label


def claimed(label: str) -> tuple[Method, Variant]:
    """A planned method and its variant."""
    return PLANNED[label]


def test_it_is_known_which_planned_variants_were_never_measured() -> None:
    """A new variant needs a row, or to be named here."""
    assert {label for label in PLANNED if row_of(label) not in ROWS} == NO_ROW


@pytest.mark.parametrize("label", sorted(PLANNED.keys() - NO_ROW - PUBLISHED_ABOVE))
def test_the_upper_end_is_what_was_measured(label: str) -> None:
    """At 4,096 tokens, within 15 %; and the source names the bench."""
    method, variant = claimed(label)
    claim = method.quality_at(variant, DATA["tokens"])
    assert claim.high == pytest.approx(ROWS[row_of(label)]["kl_mean"], rel=0.15)
    assert "bench/quality.py" in claim.source


@pytest.mark.parametrize("label", sorted(PUBLISHED_ABOVE))
def test_a_published_figure_above_the_measured_one_stays_the_upper_end(label: str) -> None:
    """0.0016 nats, Qwen3.5-35B-A3B at q8_0."""
    method, variant = claimed(label)
    assert ROWS[row_of(label)]["kl_mean"] < method.quality_at(variant, DATA["tokens"]).high == 0.0016


@pytest.mark.parametrize("label", sorted(label for label in PLANNED if not label.startswith("affine")))
def test_all_methods_are_scaled_alike(label: str) -> None:
    """Middle and lower end are the same shares of the upper end; the engine's own format has published figures."""
    method, variant = claimed(label)
    claim = method.quality_at(variant, DATA["tokens"])
    assert (claim.kl_mean, claim.low) == pytest.approx((MIDDLE * claim.high, LOW * claim.high))


def test_unmeasured_claims_do_not_name_the_bench_alone() -> None:
    """Simulated, extrapolated, or really packed over fewer tokens: the source says so."""
    words = ("simulated", "extrapolated", "1,024 tokens")
    for label in NO_ROW:
        method, variant = claimed(label)
        assert any(word in method.quality_at(variant, DATA["tokens"]).source for word in words), label
