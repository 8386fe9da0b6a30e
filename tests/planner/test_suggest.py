"""Suggestions work: each number, asked for again, gives a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from planner_kit import GIB, Own, Synthetic, ask, codes, llama_8b, mac, offers, record, windowed

if TYPE_CHECKING:
    from veloxquant.planner.result import Note, Plan

SMALL = mac(16, 11.8)


def _one(answer: Plan, code: str) -> Note:
    return next(s for s in answer.suggestions if s.code == code)


def test_every_largest_context_fits_and_one_more_does_not() -> None:
    """For each variant, at the asked slots, longest first."""
    answer = ask(llama_8b(), SMALL, context_length=500_000, num_concurrent_requests=2, max_kl=10)
    assert answer.decision == "no_fit"
    offered = [s.value for s in answer.suggestions if s.code == "largest_context"]
    lengths = [value["context_length"] for value in offered]
    assert lengths == sorted(lengths, reverse=True)
    for value in offered:
        asked = {"methods": (value["label"],), "num_concurrent_requests": 2, "max_kl": 10}
        assert ask(llama_8b(), SMALL, context_length=value["context_length"], **asked).chosen.label == value["label"]
        assert ask(llama_8b(), SMALL, context_length=value["context_length"] + 1, **asked).decision == "no_fit"


def test_a_context_that_another_variant_passes_at_less_divergence_is_not_suggested() -> None:
    """Each longer one costs something: the least divergence of those that reach as far."""
    coarse, fine, longer, poor = (
        Synthetic(name, bits, kl)
        for name, bits, kl in (("coarse", 4, 0.02), ("fine", 8, 0.001), ("longer", 3, 0.04), ("poor", 5, 0.03))
    )
    on_offer = offers(Own(), coarse, fine, longer, poor)
    answer = ask(llama_8b(), SMALL, context_length=900_000, on_offer=on_offer, max_kl=10)
    offered = [s.value["label"] for s in answer.suggestions if s.code == "largest_context"]
    assert offered == ["longer", "coarse", "fine", "fp16"]


def test_fewer_slots_fit() -> None:
    """And one more than suggested does not."""
    answer = ask(llama_8b(), SMALL, context_length=65536, num_concurrent_requests=64, max_kl=10)
    slots = _one(answer, "fewer_slots").value
    assert ask(llama_8b(), SMALL, context_length=65536, num_concurrent_requests=slots, max_kl=10).chosen is not None
    assert ask(llama_8b(), SMALL, context_length=65536, num_concurrent_requests=slots + 1, max_kl=10).chosen is None


def test_smaller_weights_fit() -> None:
    """The suggested size leaves just enough."""
    answer = ask(llama_8b(), SMALL, context_length=250_000, max_kl=10)
    weights = _one(answer, "smaller_weights").value
    fits, beyond = (
        ask(llama_8b(weights_bytes=size), SMALL, context_length=250_000, max_kl=10) for size in (weights, weights + 1)
    )
    assert (fits.decision, beyond.decision) == ("quantize", "no_fit")


def test_a_raised_working_set_fits_and_is_a_command_on_a_mac() -> None:
    """With what it does not do: survive a restart."""
    answer = ask(llama_8b(), SMALL, context_length=250_000, max_kl=10)
    note = _one(answer, "raise_working_set")
    assert f"sudo sysctl iogpu.wired_limit_mb={note.value}" in note.text
    assert "not survive" in note.text
    raised = mac(16, working_set_bytes=note.value * 2**20)
    assert ask(llama_8b(), raised, context_length=250_000, max_kl=10).chosen is not None
    lower = mac(16, working_set_bytes=(note.value - 1) * 2**20)
    assert ask(llama_8b(), lower, context_length=250_000, max_kl=10).chosen is None


@pytest.mark.parametrize("fields", [{"backend": "cuda"}, {"total_memory_bytes": 12 * GIB}])
def test_the_working_set_is_raised_on_metal_alone_and_never_to_all_memory(fields: Any) -> None:
    """Elsewhere there is no such switch, and a Mac needs memory of its own."""
    machine = mac(16, 11.8, **fields)
    answer = ask(llama_8b(), machine, context_length=250_000, max_kl=10)
    assert "raise_working_set" not in codes(answer.suggestions)


def test_a_budget_that_binds_is_named() -> None:
    """More of the machine would not help: the cap is the caller's own."""
    answer = ask(llama_8b(), mac(64), context_length=65536, budget=GIB, max_kl=10)
    needed = _one(answer, "raise_budget").value
    assert ask(llama_8b(), mac(64), context_length=65536, budget=needed, max_kl=10).chosen is not None
    assert "smaller_weights" not in codes(answer.suggestions)


def test_a_step_below_the_least_one_is_only_suggested() -> None:
    """Windows of many layers shrink further with it; the plan does not go there by itself."""
    big = windowed(weights_bytes=0)
    least = ask(big, mac(64), context_length=4096, prefill_step_size=64, methods=("fp16",))
    machine = mac(64, working_set_bytes=least.chosen.fit.total_bytes - 1)
    answer = ask(big, machine, context_length=4096, methods=("fp16",))
    assert answer.decision == "no_fit"
    step = _one(answer, "smaller_prefill_step").value
    assert step < 64
    again = ask(big, machine, context_length=4096, methods=("fp16",), prefill_step_size=step)
    assert again.decision == "keep_fp16"


def test_no_step_is_suggested_at_which_a_record_says_otherwise() -> None:
    """104 MiB by the arithmetic fit 300; the GiB that was measured does so at no step."""
    big, machine = windowed(weights_bytes=0), mac(64, working_set_bytes=(512 + 300) * 2**20)
    seen = record("fp16", model_id="test/windowed", architecture="test", context_length=4096, memory_bytes=GIB)
    for records, decision in (((), "keep_fp16"), (((0.9, seen),), "no_fit")):
        answer = ask(big, machine, context_length=4096, methods=("fp16",), records=records)
        assert answer.decision == decision
        assert "smaller_prefill_step" not in codes(answer.suggestions)


def test_a_generation_that_is_too_long_is_named() -> None:
    """No prompt fits beside 10 million generated tokens: the number is what fits in all."""
    answer = ask(llama_8b(), SMALL, context_length=1, generation_length=10**7, max_kl=10)
    assert "largest_context" not in codes(answer.suggestions)
    total = _one(answer, "shorter_generation").value
    assert ask(llama_8b(), SMALL, context_length=total, max_kl=10).decision == "quantize"
    assert ask(llama_8b(), SMALL, context_length=total + 1, max_kl=10).decision == "no_fit"


def test_the_asked_context_is_never_changed() -> None:
    """Whatever is suggested, the plan is about what was asked."""
    answer = ask(llama_8b(), SMALL, context_length=500_000)
    assert answer.workload["context_length"] == 500_000


def test_ceilings_that_keep_everything_out_are_named_with_what_would_do() -> None:
    """Each value, asked for again, gives a plan."""
    rough = ask(llama_8b(), SMALL, context_length=131072, max_kl=0.001)
    value = _one(rough, "raise_max_kl").value
    assert ask(llama_8b(), SMALL, context_length=131072, max_kl=value).decision == "quantize"
    slow = ask(llama_8b(), SMALL, context_length=1024, max_latency_ms=1)
    value = _one(slow, "raise_max_latency_ms").value
    assert ask(llama_8b(), SMALL, context_length=1024, max_latency_ms=value).chosen is not None
