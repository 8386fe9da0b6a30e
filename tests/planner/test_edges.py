"""Where one rule ends and the next begins, on both sides of each edge."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from planner_kit import Own, Synthetic, ask, candidate, kv, llama_8b, mac, model, offers, record, rejection

from veloxquant.planner.decide import _octave, _tenths
from veloxquant.planner.evidence import kl_of, same_context
from veloxquant.planner.largest import last_true
from veloxquant.planner.memory import Measured
from veloxquant.planner.quality import floor_for, soft_floor
from veloxquant.planner.setting import aligned, prefill_steps
from veloxquant.planner.speed import fit_line, latency_ms
from veloxquant.profiles import WorkloadProfile

if TYPE_CHECKING:
    from veloxquant.planner.result import Candidate

LARGE = mac(512, 400)


def test_the_steps_of_prefill() -> None:
    """The asked one, then powers of two below it, not below 64."""
    assert prefill_steps(2048) == (2048, 1024, 512, 256, 128, 64)
    assert prefill_steps(300) == (300, 256, 128, 64)
    assert prefill_steps(128) == (128, 64)
    for least in (65, 64, 63, 1):
        assert prefill_steps(least) == ((65, 64) if least == 65 else (least,))


def test_steps_that_leave_no_slack() -> None:
    """Divisors and multiples of the 256 slots that a buffer grows by."""
    assert [step for step in range(1, 1025) if aligned(step)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]


def test_the_floor_of_quality_by_context() -> None:
    """0.05 nats up to 32,768 tokens and 0.02 beyond, unless the request has a floor of its own."""
    assert (soft_floor(1), soft_floor(32_768), soft_floor(32_769)) == (0.05, 0.05, 0.02)
    assert floor_for(WorkloadProfile(context_length=32_769)) == 0.02
    assert floor_for(WorkloadProfile(context_length=32_769, max_kl=0.5)) == 0.5


@pytest.mark.parametrize(("ours", "theirs", "same"), [(1000, 1100, True), (1100, 1000, True), (1000, 1101, False)])
def test_contexts_within_a_tenth_are_one(ours: int, theirs: int, same: bool) -> None:
    """Whichever is the longer."""
    assert same_context(ours, theirs) is same
    assert same_context(theirs, ours) is same


def test_times_of_a_record() -> None:
    """Its latency, however small, else 1,000 ms over what each of its sequences gives; without either, none."""

    def ms(**fields: Any) -> float | None:
        sighting: Any = SimpleNamespace(record=record("fp16", **fields))
        return latency_ms(sighting)

    assert ms(latency_ms_per_token=0.5, throughput_tok_s=1.0) == 0.5
    assert ms(throughput_tok_s=0.5) == 2000
    assert ms(throughput_tok_s=50.0, batch_size=4) == 80
    assert ms() is None


def test_a_line_through_times() -> None:
    """Never falling with length, and none where nothing would be left at length 0."""
    assert fit_line([(1000, 5.0), (3000, 9.0)]) == pytest.approx((3.0, 2.0))
    assert fit_line([(1000, 9.0), (3000, 5.0)]) == (7.0, 0.0)
    assert fit_line([(1000, 1.0), (2000, 3.0)]) is None
    assert fit_line([(1000, 1.0), (2000, 2.0)]) is None


def test_figures_count_in_octaves_and_tenths() -> None:
    """A power of two belongs to the octave below it; a tenth more is the next step, a little less is not."""
    assert [_octave(kl) for kl in (0.25, 0.2500001, 0.5, 0.5000001, 1.0)] == [-2, -1, -1, 0, 0]
    assert _octave(0.0) == -math.inf
    assert [_tenths(ratio) for ratio in (1.0, 1.0999, 1.1, 1.21, 0.9999, 1 / 1.1, 0.9)] == [0, 0, 1, 2, -1, -1, -2]


def test_the_largest_number_that_holds() -> None:
    """By halving; none where not even one does."""
    for most in range(12):
        asked: list[int] = []
        assert last_true(lambda n, most=most, asked=asked: asked.append(n) or n <= most, 11) == most  # type: ignore[misc]
        assert all(1 <= n <= 11 for n in asked)


def test_bytes_between_and_beyond_measured_lengths() -> None:
    """On straight lines, the last one going on, the first one down to nothing and not below."""
    held = Measured(((0.0, 10.0), (100.0, 210.0), (200.0, 260.0)))
    assert [held.stored(growth) for growth in (0, 50, 100, 150, 200, 300)] == [10, 110, 210, 235, 260, 310]
    assert held.per_traced_byte == 0.5
    steep = Measured(((100.0, 50.0), (200.0, 250.0)))
    assert [steep.stored(growth) for growth in (60, 80, 100, 150)] == [0, 10, 50, 150]
    assert Measured(((0.0, 30.0),)).stored(1000) == 30
    assert Measured(((0.0, 30.0),)).per_traced_byte == 0


@pytest.mark.parametrize(
    ("tags", "kl"),
    [
        (["kl_mean=0.012"], 0.012),
        (["kl:3"], 3.0),
        (["kl=1.5e-4"], 0.00015),
        (["a", "kl=0.5", "kl=0.25"], 0.25),
        (["klx=1"], None),
        (["kl=-1"], None),
        ([], None),
    ],
)
def test_a_tag_that_tells_divergence(tags: list[str], kl: float | None) -> None:
    """In one of its spellings; of several the first in order of letters."""
    assert kl_of(record("fp16", tags=tags)) == kl


def ranked(*kls: float, context: int = 4096, **workload: Any) -> list[str]:
    """Labels of variants of eight bits with these divergences, best first."""
    variants = offers(*(Synthetic(f"v{n}", 8, kl, fused=True) for n, kl in enumerate(kls)))
    answer = ask(model([kv(8, 128)]), LARGE, on_offer=variants, context_length=context, **workload)
    return [one.label for one in (answer.chosen, *answer.alternatives) if one is not None]


def test_a_floor_is_within() -> None:
    """Just at it a variant passes; at ten times it, it is not broken yet, and goes where a better one is there."""
    assert ranked(0.05, 0.0501) == ["v0"]
    assert ranked(0.02, 0.0201, context=40_000) == ["v0"]
    assert ranked(0.5, 0.2) == ["v1", "v0"]
    assert ranked(0.5001, 0.2) == ["v1"]
    assert ranked(0.3, 0.2, max_kl=0.2) == ["v1"]


def test_twice_the_time_is_bought_and_more_is_not() -> None:
    """The engine's own cache takes 51.4 ms; unpacking makes another take just under, or just over, twice that."""
    own = ask(llama_8b(), LARGE, on_offer=offers(Own()), context_length=4096).chosen.speed.latency_ms_per_token
    numbers = 4096 * 32 * 8 * 256
    for share, kept in ((1.999, True), (2.001, False)):
        free = Synthetic("packed", 8, 0.001, fused=True)
        base = _of(free).speed.latency_ms_per_token or 0.0
        dear = Synthetic("packed", 8, 0.001, fused=True, unpack=(share * own - base) / numbers * 1e9)
        answer = ask(llama_8b(), LARGE, on_offer=offers(Own(), dear), context_length=4096)
        assert answer.chosen.label == "fp16"
        assert ("packed" in [one.label for one in answer.alternatives]) is kept
        if not kept:
            assert rejection(answer, "packed").reason == "too_slow"


def _of(method: Synthetic) -> Candidate:
    answer = ask(llama_8b(), LARGE, on_offer=offers(Own(), method), context_length=4096)
    return candidate(answer, "packed")
