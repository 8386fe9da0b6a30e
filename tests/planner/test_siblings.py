"""A figure of one variant speaks for its siblings, and what stores less is never credited with less divergence."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_kit import Own, Packed, ask, candidate, codes, every, llama_8b, mac, offers, qwen25_7b, record, rejection
from veloxquant_plugins.affine import Affine
from veloxquant_plugins.fp16 import EngineOwn

from veloxquant.errors import MethodRefused
from veloxquant.methods.method import QualityPrior, Variant

if TYPE_CHECKING:
    from veloxquant.benchmarks.records import BenchmarkRecord
    from veloxquant.planner.result import Plan, Quality
    from veloxquant.profiles import ModelProfile

WIDE = mac(512, 400)
REAL = offers(EngineOwn(), Affine())
BITS, GROUPS = (8, 6, 4), (32, 64, 128)
LABELS = [f"affine{b}-g{g}" for b in BITS for g in GROUPS]


class Claims(Packed):
    """The packed method with a word of its own about each variant."""

    def __init__(self, claims: dict[str, float]) -> None:
        super().__init__(bits=BITS, groups=GROUPS)
        self._claims = claims

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """As claimed."""
        kl = self._claims[variant.label]
        return QualityPrior(kl_mean=kl, low=kl / 2, high=kl * 2, source="test")


def _told(label: str, kl: float) -> BenchmarkRecord:
    return record(label, id=f"seen-{label}", tags=[f"kl_mean={kl:.12f}"])


def _quality(answer: Plan, label: str) -> Quality:
    return candidate(answer, label).quality


@pytest.mark.parametrize("objective", ["memory", "balanced", "quality"])
def test_a_guess_does_not_pass_where_the_published_figure_of_a_finer_variant_fails(objective: str) -> None:
    """Qwen2.5-7B in 8 bits and groups of 64 diverges by 0.009 (mlx-quant-fidelity): no 8-bit variant is below 0.001."""
    machine = mac(16, 11.8)
    answer = ask(
        qwen25_7b(weights_bytes=4_300_000_000),
        machine,
        on_offer=REAL,
        context_length=131072,
        max_kl=0.001,
        objective=objective,
    )
    for group in GROUPS:
        assert rejection(answer, f"affine8-g{group}").reason == "quality_below_floor"
    assert all(one.label == "fp16" for one in every(answer))


def test_a_prior_is_scaled_by_the_published_figure_of_a_sibling() -> None:
    """0.009 where the method says 0.0002: 45 times as much holds for groups of 32 and 128 too, with a wide range."""
    answer = ask(qwen25_7b(), WIDE, on_offer=REAL, max_kl=100)
    for label in ("affine8-g32", "affine8-g128"):
        word = Affine().quality_prior(Variant(method="affine", label=label, params=candidate(answer, label).params))
        found = _quality(answer, label)
        assert found.kl_mean == pytest.approx(word.kl_mean * 0.009 / 0.0002)
        assert (found.low, found.high) == pytest.approx((word.low * 45, word.high * 45))
        assert found.evidence.source == "prior"
        assert found.evidence.confidence <= 0.3
        assert any("scaled from affine8-g64: 0.009 nats (published)" in note for note in found.evidence.notes)
    assert _quality(answer, "affine8-g64").kl_mean == 0.009


def test_a_guess_that_straddles_the_ceiling_carries_a_warning() -> None:
    """0.0135 passes 0.02; that its range reaches beyond is said."""
    answer = ask(qwen25_7b(), WIDE, on_offer=REAL, methods=("affine8-g128",), max_kl=0.02)
    assert answer.chosen.label == "affine8-g128"
    assert "quality_straddles_ceiling" in codes(answer.warnings)


def test_a_measured_sibling_is_scaled_from_and_cited() -> None:
    """0.0006 in groups of 64 where the method says 0.0004, and 0.0006 in groups of 128: 0.0009 there."""
    answer = ask(llama_8b(), WIDE, records=[(1.0, _told("affine8-g64", 0.0006))], max_kl=100)
    found = _quality(answer, "affine8-g128")
    assert found.kl_mean == pytest.approx(0.0009)
    assert found.evidence.record_ids == ("seen-affine8-g64",)
    assert any("scaled from affine8-g64" in note for note in found.evidence.notes)


def test_other_bits_are_not_scaled() -> None:
    """6 bits err 15 times as much as 8 by the method's word: twice at 8 bits is not twice at 6."""
    plain = ask(llama_8b(), WIDE, on_offer=offers(Own(), Packed(bits=BITS)), max_kl=100)
    seen = [(1.0, _told("affine8-g64", 0.0008))]
    told = ask(llama_8b(), WIDE, on_offer=offers(Own(), Packed(bits=BITS)), records=seen, max_kl=100)
    assert _quality(told, "affine6-g64") == _quality(plain, "affine6-g64")


def test_fewer_bits_are_not_credited_with_less_than_measured_for_more() -> None:
    """8 bits measured at 0.5: nothing below is better, published or not, and the record is named."""
    on_offer = offers(Own(), Packed(bits=BITS))
    answer = ask(llama_8b(), WIDE, on_offer=on_offer, records=[(1.0, _told("affine8-g64", 0.5))], max_kl=100)
    for label in ("affine6-g64", "affine4-g64", "affine4-g128"):
        found = _quality(answer, label)
        assert found.kl_mean >= 0.5
        assert found.evidence.record_ids == ("seen-affine8-g64",)
        assert any("no less than" in note for note in found.evidence.notes)


def test_a_finer_guess_is_not_above_a_coarser_measurement() -> None:
    """4 bits measured at 0.0001: whatever the method says of 6 and 8, they are no worse."""
    on_offer = offers(Own(), Packed(bits=BITS))
    answer = ask(llama_8b(), WIDE, on_offer=on_offer, records=[(1.0, _told("affine4-g128", 0.0001))], max_kl=100)
    assert max(_quality(answer, label).kl_mean for label in LABELS) == 0.0001


def test_the_methods_own_word_of_one_variant_may_fail_alone() -> None:
    """The variant that the method does not answer for is refused, its siblings are planned with."""

    class Silent(Packed):
        def quality_prior(self, variant: Variant) -> QualityPrior:
            if variant.label == "affine8-g64":
                raise MethodRefused("no word about it", hint="ask its author")
            return super().quality_prior(variant)

    answer = ask(llama_8b(), WIDE, on_offer=offers(Own(), Silent()), max_kl=100)
    assert rejection(answer, "affine8-g64").reason == "quarantined"
    assert _quality(answer, "affine8-g128").kl_mean > 0


def test_a_claim_of_next_to_nothing_is_not_blown_up_beyond_numbers() -> None:
    """1e-307 claimed and 0.5 measured: the sibling is bounded by the measurement, not multiplied to infinity."""
    claims = dict.fromkeys(LABELS, 1e-307)
    seen = [(1.0, _told("affine8-g64", 0.5))]
    answer = ask(llama_8b(), WIDE, on_offer=offers(Own(), Claims(claims)), records=seen, max_kl=100)
    assert _quality(answer, "affine8-g128").kl_mean == 0.5
    assert msgspec.json.decode(msgspec.json.encode(answer))


CLAIMS = st.fixed_dictionaries({label: st.floats(1e-6, 5) for label in LABELS})
MEASURED = st.dictionaries(st.sampled_from(LABELS), st.floats(1e-6, 5), max_size=4)
MODELS = st.sampled_from((llama_8b(), qwen25_7b()))


def _coarser(one: str, other: str) -> bool:
    """Fewer bits or a larger group, and neither the other way."""
    bits, group = (int(number) for number in one.removeprefix("affine").split("-g"))
    more, finer = (int(number) for number in other.removeprefix("affine").split("-g"))
    return one != other and bits <= more and group >= finer


def _figures(profile: ModelProfile, claims: dict[str, float], seen: dict[str, float]) -> dict[str, float]:
    records = [(1.0, replace(_told(label, kl), model_id=profile.model_id)) for label, kl in seen.items()]
    answer = ask(profile, WIDE, on_offer=offers(Own(), Claims(claims)), records=records, max_kl=100)
    return {one.label: one.quality.kl_mean for one in every(answer) if one.label != "fp16"}


@settings(max_examples=200, deadline=None)
@given(MODELS, CLAIMS, MEASURED)
def test_divergence_never_falls_as_less_is_stored(
    profile: ModelProfile, claims: dict[str, float], seen: dict[str, float]
) -> None:
    """Whatever a method claims; what was measured stands, and only measurements that contradict each other may."""
    found = _figures(profile, claims, seen)
    for label, kl in seen.items():
        assert found[label] == pytest.approx(kl, abs=1e-11)
    contradicted = any(_coarser(one, other) and seen[one] < seen[other] for one, other in permutations(seen, 2))
    for one, other in permutations(found, 2):
        if _coarser(one, other) and not contradicted:
            assert found[one] >= found[other]


@settings(max_examples=100, deadline=None)
@given(MODELS, CLAIMS, MEASURED, st.sampled_from(LABELS))
def test_what_is_not_on_offer_speaks_all_the_same(
    profile: ModelProfile, claims: dict[str, float], seen: dict[str, float], out: str
) -> None:
    """Taking a variant off the offer changes no figure of the others."""
    records = [(1.0, replace(_told(label, kl), model_id=profile.model_id)) for label, kl in seen.items()]
    on_offer = offers(Own(), Claims(claims))
    rest = [offer for offer in on_offer if offer.variant.label != out]
    all_of_them = ask(profile, WIDE, on_offer=on_offer, records=records, max_kl=100)
    without = ask(profile, WIDE, on_offer=rest, records=records, max_kl=100)
    assert every(without) == [one for one in every(all_of_them) if one.label != out]
