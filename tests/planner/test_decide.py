"""Constraints before objectives, each objective in its own unit, and ties."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from planner_kit import (
    Own,
    Synthetic,
    ask,
    candidate,
    codes,
    every,
    llama_8b,
    mac,
    offers,
    record,
    rejection,
)

if TYPE_CHECKING:
    from veloxquant.planner.result import Plan

ROOMY = mac(512, 400)
TIGHT = mac(16, 11.8)
"""Leaves 6.8 GiB for caches beside Llama's weights and the reserve: no 16-bit cache at 64k."""


def _labels(answer: Plan) -> list[str]:
    return [c.label for c in every(answer)]


def test_quality_takes_the_least_divergence() -> None:
    """The reference is 0, and then the order of divergence."""
    variants = offers(Own(), Synthetic("rough", 4, 0.04), Synthetic("fine", 8, 0.001))
    assert _labels(ask(llama_8b(), ROOMY, on_offer=variants, objective="quality")) == ["fp16", "fine", "rough"]


def test_memory_takes_the_fewest_bytes() -> None:
    """Among what keeps within the soft floor."""
    variants = offers(Own(), Synthetic("broken", 2, 3.0), Synthetic("small", 4, 0.04), Synthetic("fine", 8, 0.001))
    answer = ask(llama_8b(), ROOMY, on_offer=variants, objective="memory")
    assert _labels(answer) == ["small", "fine", "fp16"]
    assert rejection(answer, "broken").reason == "quality_below_floor"


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_a_gain_nobody_measured_does_not_pass_the_engines_own_cache(objective: str) -> None:
    """The estimate may be faster, the confidence is low, and the engine's own cache stays ahead."""
    answer = ask(llama_8b(), ROOMY, context_length=131072, objective=objective, max_kl=1)
    packed = candidate(answer, "affine4-g64")
    assert answer.chosen.label == "fp16"
    assert packed.speed.latency_ms_per_token < answer.chosen.speed.latency_ms_per_token <= packed.speed.high
    assert packed.speed.evidence.confidence <= 0.25


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_a_measured_gain_does(objective: str) -> None:
    """Both measured on this machine: 60 ms and 50 ms a token, and either can be batched."""
    fast = Synthetic("fast", 8, 0.001, batchable=True, fused=True)
    seen = [(1.0, record("fp16", latency_ms_per_token=60.0)), (1.0, record("fast", latency_ms_per_token=50.0))]
    answer = ask(
        llama_8b(), ROOMY, on_offer=offers(Own(), fast), context_length=8192, objective=objective, records=seen
    )
    assert answer.chosen.label == "fast"


def test_a_measured_gain_within_the_spread_is_a_tie() -> None:
    """58 against 60 ms is within what two runs differ by: doing nothing is best when it is enough."""
    seen = [
        (1.0, record("fp16", latency_ms_per_token=60.0)),
        (1.0, record("affine8-g64", latency_ms_per_token=58.0)),
    ]
    answer = ask(llama_8b(), ROOMY, context_length=8192, objective="latency", records=seen)
    assert answer.chosen.label == "fp16"


def test_ties_go_to_fewer_bytes_then_to_the_label() -> None:
    """0.0032 and 0.0039 nats are one octave; of equal bytes the name decides."""
    variants = offers(Synthetic("b", 5, 0.0032), Synthetic("c", 4, 0.0039), Synthetic("a", 4, 0.0036))
    assert _labels(ask(llama_8b(), ROOMY, on_offer=variants, objective="quality")) == ["a", "c", "b"]


def test_an_unchosen_variant_does_not_decide_between_two_others() -> None:
    """0.010, 0.018 and 0.030 nats within a factor of two each: judged by the leader's range, the first would."""
    a, b, c = Synthetic("a", 16, 0.010), Synthetic("b", 12, 0.018), Synthetic("c", 8, 0.030)
    quality = {"objective": "quality", "max_kl": 1}
    assert _labels(ask(llama_8b(), ROOMY, on_offer=offers(a, b, c), **quality)) == ["a", "c", "b"]
    assert _labels(ask(llama_8b(), ROOMY, on_offer=offers(b, c), **quality)) == ["c", "b"]


def test_balanced_leaves_a_tenth_of_the_working_set_free() -> None:
    """8-bit would fit at 90k but leave less than 1.18 GiB; 4-bit with a small step leaves more."""
    variants = offers(Synthetic("eight", 8, 0.001, fused=True), Synthetic("four", 4, 0.01, fused=True))
    # 90,112 x 65,536 bytes = 5.5 GiB of 6.8: the free 1.3 GiB less one layer's old buffer is below a tenth of 11.8.
    answer = ask(llama_8b(), TIGHT, on_offer=variants, context_length=90_112)
    assert answer.chosen.label == "four"
    assert ask(llama_8b(), TIGHT, on_offer=variants, context_length=90_112, objective="quality").chosen.label == "eight"


def test_balanced_without_room_takes_the_most_headroom() -> None:
    """When nothing leaves a tenth free, the smallest peak is ahead."""
    variants = offers(Synthetic("eight", 8, 0.001, fused=True), Synthetic("seven", 7, 0.01, fused=True))
    answer = ask(llama_8b(), TIGHT, on_offer=variants, context_length=104_000)
    assert _labels(answer) == ["seven", "eight"]


def _unpacking(name: str, kl: float, times: float) -> Synthetic:
    """Eight bits a number that take so many times as long for a token as 16 on ROOMY at 8,192 + 512 tokens."""
    unpack_ps = 0.0
    for _ in range(3):  # time is linear in it: two points give the line, the third run is on it
        on_offer = offers(Own(), Synthetic(name, 8, kl, fused=True, unpack=unpack_ps))
        answer = ask(llama_8b(), ROOMY, on_offer=on_offer, context_length=8192, objective="quality")
        own, now = (candidate(answer, label).speed.latency_ms_per_token for label in ("fp16", name))
        unpack_ps += (times * own - now) * 1e9 / (8704 * 65_536)  # ms; tokens x numbers a token of Llama-3-8B
    return Synthetic(name, 8, kl, fused=True, unpack=unpack_ps)


def test_fineness_does_not_buy_twice_the_time() -> None:
    """Just below twice the engine's own time is taken for its quality, just above is out while another fits."""
    quick = Synthetic("quick", 4, 0.04, fused=True)
    for times, chosen in ((1.99, "fine"), (2.01, "quick")):
        fine = _unpacking("fine", 0.001, times)
        answer = ask(llama_8b(), ROOMY, on_offer=offers(fine, quick), context_length=8192)
        assert answer.chosen.label == chosen
    assert rejection(answer, "fine").reason == "too_slow"
    assert ask(
        llama_8b(), ROOMY, on_offer=offers(fine, quick), context_length=8192, objective="quality"
    ).chosen.label == ("fine")
    alone = ask(llama_8b(), ROOMY, on_offer=offers(fine), context_length=8192)
    assert alone.chosen.label == "fine"
    told = {note.code: note.text for note in alone.warnings}["slower_than_engine"]
    assert told.startswith("fine takes 2 times as long for a token as the engine's own cache would")
    assert "slower_than_engine" not in codes(ask(llama_8b(), ROOMY, context_length=8192).warnings)


def test_a_slow_variant_is_behind_a_quick_one_above_the_floor_and_ahead_of_a_broken_one() -> None:
    """0.1 nats are up to ten times the floor of 0.05, 3 nats are beyond."""
    fine = _unpacking("fine", 0.001, 4)
    rough, broken = Synthetic("rough", 4, 0.1, fused=True), Synthetic("broken", 2, 3.0, fused=True)
    answer = ask(llama_8b(), ROOMY, on_offer=offers(fine, rough, broken), context_length=8192)
    assert _labels(answer) == ["rough", "fine"]
    warning = next(note.text for note in answer.warnings if note.code == "quality_below_soft_floor")
    assert "no variant that fits and is quick enough keeps within it" in warning
    assert "fine (0.001) fits too and takes 4 times as long for a token as the engine's own cache" in warning
    for objective in ("balanced", "latency", "throughput"):
        alone = ask(llama_8b(), ROOMY, on_offer=offers(fine, broken), context_length=8192, objective=objective)
        assert alone.chosen.label == "fine"


def test_requests_that_wait_for_each_other_are_not_slow_for_that() -> None:
    """Eight requests one after another take eight times as long as a batch of 16 bits; alone each is quicker."""
    answer = ask(llama_8b(), ROOMY, context_length=8192, num_concurrent_requests=8)
    assert candidate(answer, "affine8-g64").speed.latency_ms_per_token > 2 * answer.chosen.speed.latency_ms_per_token


def test_max_kl_is_a_hard_floor() -> None:
    """Nothing above it is used, even when nothing else fits."""
    answer = ask(llama_8b(), TIGHT, context_length=131072, max_kl=0.01)
    assert answer.decision == "no_fit"
    assert rejection(answer, "affine4-g64").reason == "quality_below_floor"


def test_max_kl_replaces_the_soft_floor() -> None:
    """What the request allows needs no warning."""
    answer = ask(llama_8b(), TIGHT, context_length=131072, max_kl=0.2)
    assert answer.chosen.label == "affine4-g64"
    assert "quality_below_soft_floor" not in codes(answer.warnings)


@pytest.mark.parametrize(("context", "warned"), [(32768, False), (32769, True)])
def test_the_soft_floor_is_stricter_beyond_32k(context: int, warned: bool) -> None:
    """0.03 nats pass up to 32,768 tokens, not beyond."""
    answer = ask(llama_8b(), ROOMY, on_offer=offers(Synthetic("only", 4, 0.03)), context_length=context)
    assert ("quality_below_soft_floor" in codes(answer.warnings)) is warned
    assert answer.chosen.label == "only"


@pytest.mark.parametrize("objective", ["memory", "latency", "throughput", "balanced", "quality"])
def test_what_is_broken_is_used_only_where_nothing_else_fits(objective: str) -> None:
    """Beyond 32k the floor is 0.02: 0.19 is above it, 0.21 is more than ten times as much and saves bytes in vain."""
    variants = offers(Synthetic("broken", 2, 0.21), Synthetic("rough", 4, 0.19))
    answer = ask(llama_8b(), ROOMY, on_offer=variants, context_length=40_000, objective=objective)
    assert answer.chosen.label == "rough"
    assert "more than ten times 0.02" in rejection(answer, "broken").detail
    alone = ask(llama_8b(), ROOMY, on_offer=offers(Synthetic("broken", 2, 0.21)), context_length=40_000)
    assert alone.chosen.label == "broken"
    assert "quality_below_soft_floor" in codes(alone.warnings)


def test_the_latency_ceiling_removes_what_cannot_meet_it() -> None:
    """4 GiB at 84 GB/s take 51 ms; 10 ms is out of reach for every variant, and the plan says by how much."""
    answer = ask(llama_8b(), ROOMY, context_length=1024, max_latency_ms=10)
    assert answer.decision == "no_fit"
    assert {r.reason for r in answer.rejected} <= {"too_slow", "quality_below_floor"}
    assert "max_latency_ms is 10" in rejection(answer, "fp16").detail


def test_an_estimate_that_straddles_the_latency_ceiling_stays_with_a_warning() -> None:
    """Its range holds the ceiling: it may be met."""
    figure = ask(llama_8b(), ROOMY, context_length=1024).chosen.speed.latency_ms_per_token
    answer = ask(llama_8b(), ROOMY, context_length=1024, max_latency_ms=figure * 0.9)
    assert answer.chosen.label == "fp16"
    assert "latency_straddles_ceiling" in codes(answer.warnings)


def test_a_measured_latency_is_held_to_the_ceiling() -> None:
    """60 ms measured is above 59."""
    seen = [(1.0, record("fp16", latency_ms_per_token=60.0))]
    answer = ask(llama_8b(), ROOMY, context_length=8192, max_latency_ms=59, records=seen, methods=("fp16",))
    assert rejection(answer, "fp16").reason == "too_slow"


def test_variants_that_drop_tokens_need_leave() -> None:
    """No bit width predicts what a dropped token costs."""
    evicting = Synthetic("evict", 4, 0.001)
    evicting.drops_tokens = True
    kept = ask(llama_8b(), ROOMY, on_offer=offers(Own(), evicting), objective="memory")
    allowed = ask(llama_8b(), ROOMY, on_offer=offers(Own(), evicting), objective="memory", allow_eviction=True)
    assert rejection(kept, "evict").reason == "drops_tokens"
    assert allowed.chosen.label == "evict"


@pytest.mark.parametrize("names", [("affine",), ("affine8-g64",)])
def test_methods_are_named_by_method_or_by_label(names: tuple[str, ...]) -> None:
    """What the request leaves out is listed as such."""
    answer = ask(llama_8b(), ROOMY, methods=names)
    assert answer.chosen.label.startswith("affine8")
    assert rejection(answer, "fp16").reason == "not_requested"


def test_quarantined_methods_are_listed_with_their_reason() -> None:
    """A fenced plugin is no silent absence."""
    answer = ask(llama_8b(), ROOMY, quarantined=[("foo", "import failed")])
    assert (rejection(answer, "foo").reason, rejection(answer, "foo").detail) == ("quarantined", "import failed")


def test_only_the_engines_own_cache_on_offer_is_keeping_it() -> None:
    """Nothing was tried that could not pack."""
    assert ask(llama_8b(), ROOMY, on_offer=offers(Own())).decision == "keep_fp16"
    assert ask(llama_8b(), ROOMY, methods=("fp16",)).decision == "keep_fp16"


def test_unknown_speed_leaves_the_choice_to_bytes() -> None:
    """Without a bandwidth there are no times, and the evidence says why."""
    machine = mac(512, 400, bandwidth_gbps=None, sources={"bandwidth_gbps": "chip not in the table"})
    answer = ask(llama_8b(), machine, objective="latency", max_latency_ms=10)
    speed = answer.chosen.speed
    assert (speed.decode_tok_s, speed.latency_ms_per_token, speed.low, speed.high) == (None,) * 4
    assert "chip not in the table" in speed.evidence.notes[0]
    assert "latency_unknown" in codes(answer.warnings)
