"""Variants that drop tokens: what they say, how much they are believed, and when they are offered at all."""

from __future__ import annotations

from typing import Any

import pytest
from planner_kit import Counting, Own, ask, candidate, codes, llama_8b, mac, offers, record, rejection, snapshot

from veloxquant.methods.method import QualityPrior, Variant
from veloxquant.planner.explain import explain
from veloxquant.planner.fit import fit
from veloxquant.planner.request import PlanRequest
from veloxquant.profiles import WorkloadProfile

BOUND = 1024
ROOMY = mac(4096)
TIGHT = {"working_set_bytes": 6 * 2**30, "active_bytes": 0}
"""With 4.5 GiB of weights and half a GiB in reserve 1 GiB is left: 8,192 tokens of Llama-3.1-8B in 16 bits."""


class Dropping(Counting):
    """Holds 1,024 tokens; each doubling of the text beyond them costs 0.01 nats a token."""

    drops_tokens = True

    def quality_at(self, variant: Variant, tokens: int) -> QualityPrior:
        """Nothing while nothing is dropped."""
        lost = 0.01 * max(0, (tokens // BOUND).bit_length() - 1)
        return QualityPrior(kl_mean=lost, low=0.0, high=2 * lost, source="test")


DROPPING = Dropping("dropping", 16, 0.0, step=64, bound=BOUND, fused=True)


def asked(machine: Any = ROOMY, **more: Any) -> Any:
    """A plan with this method beside the engine's own cache."""
    more = {"allow_eviction": True, "objective": "memory", "generation_length": 0, **more}
    return ask(llama_8b(), machine, on_offer=offers(Own(), DROPPING), **more)


@pytest.mark.parametrize(("tokens", "kl"), [(512, 0.0), (1024, 0.0), (2048, 0.01), (8192, 0.03), (16384, 0.04)])
def test_what_is_lost_is_asked_for_the_asked_length(tokens: int, kl: float) -> None:
    """And not for some length that the method has in mind."""
    assert candidate(asked(context_length=tokens), "dropping").quality.kl_mean == pytest.approx(kl)


def test_what_is_generated_counts_too() -> None:
    """The divergence is that at the end."""
    found = candidate(asked(context_length=1024, generation_length=1024), "dropping")
    assert found.quality.kl_mean == pytest.approx(0.01)


def test_a_floor_that_a_short_text_keeps_is_missed_by_a_long_one() -> None:
    """0.05 up to 32k and 0.02 beyond: at 16 budgets 0.04 is within it, at 64 budgets 0.06 is not."""
    assert asked(context_length=16384).chosen.label == "dropping"
    answer = asked(context_length=65536)
    assert (answer.chosen.label, rejection(answer, "dropping").reason) == ("fp16", "quality_below_floor")


@pytest.mark.parametrize(("measured_at", "kl"), [(1000, 0.03), (8192, 0.002), (16384, 0.002)])
def test_a_record_of_a_shorter_text_says_nothing_of_a_longer_one(measured_at: int, kl: float) -> None:
    """A run of 1,000 tokens dropped none; one of as many or more tokens is believed."""
    seen = record("dropping", context_length=measured_at, tags=["kl_mean=0.002"])
    answer = asked(context_length=8192, records=[(0.9, seen)])
    assert candidate(answer, "dropping").quality.kl_mean == pytest.approx(kl)


def test_a_plan_that_drops_tokens_says_so() -> None:
    """How many are held of how many, as a warning and in the explanation."""
    answer = asked(context_length=8192)
    assert answer.chosen.label == "dropping"
    assert ("drops_tokens", BOUND) in [(note.code, note.value) for note in answer.warnings]
    assert answer.chosen.tokens_held == BOUND
    assert any("at most 1,024 of 8,192 tokens" in line for line in explain(answer))
    assert candidate(answer, "fp16").tokens_held is None
    assert not any("drops" in line for line in explain(answer, "fp16"))


def test_nothing_is_dropped_of_a_short_text() -> None:
    """No warning where all is held."""
    answer = asked(context_length=512)
    assert "drops_tokens" not in codes(answer.warnings)
    assert candidate(answer, "dropping").tokens_held == 512


def test_bounded_memory_reaches_as_far_as_the_models_positions() -> None:
    """No token takes more bytes, so that memory sets no limit: 131,072 positions do, less what is generated."""
    profile = llama_8b(max_position=131_072)
    answer = ask(
        profile, ROOMY, on_offer=offers(Own(), DROPPING), allow_eviction=True, generation_length=72, max_kl=100
    )
    assert candidate(answer, "dropping").fit.max_context_tokens == 131_000
    assert candidate(answer, "fp16").fit.max_context_tokens > 131_072
    request = PlanRequest(
        model=profile, workload=WorkloadProfile(generation_length=72, context_length=512, allow_eviction=True)
    )
    row = next(
        row for row in fit(request, snapshot(ROOMY, on_offer=offers(Own(), DROPPING))).rows if row.label != "fp16"
    )
    assert {cell.max_context_tokens for cell in row.cells} == {131_000}


def test_dropping_tokens_is_never_chosen_unasked_but_named_where_nothing_else_fits() -> None:
    """20,000 tokens take 2.4 GiB in 16 bits, 1,024 take an eighth of one."""
    fits = asked(mac(16, **TIGHT), context_length=4096, allow_eviction=False)
    assert fits.chosen.label == "fp16"
    assert "allow_eviction" not in codes(fits.suggestions)
    answer = asked(mac(16, **TIGHT), context_length=20_000, allow_eviction=False)
    assert (answer.decision, answer.chosen) == ("no_fit", None)
    assert rejection(answer, "dropping").reason == "drops_tokens"
    told = next(note for note in answer.suggestions if note.code == "allow_eviction")
    assert told.value == "dropping"
    assert "at most 1,024 of 20,000" in told.text
    assert asked(mac(16, **TIGHT), context_length=20_000).chosen.label == told.value
