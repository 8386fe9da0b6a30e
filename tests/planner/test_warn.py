"""A warning says what it is about: each reason for a smaller prefill step has a sentence of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from planner_kit import GIB, Synthetic, ask, codes, kv, llama_8b, mac, model, offers

if TYPE_CHECKING:
    from veloxquant.planner.result import Plan

SMALL = mac(16, 11.8)
"""Leaves 6.8 GiB for caches beside Llama's weights and the reserve."""
EIGHT = {"methods": ("affine8-g64",), "context_length": 65536}
"""4.25 GiB stored; a score matrix of 32 x step x 65536 x 2 bytes: 4 MiB for each token of the step."""


def _reason(answer: Plan) -> str:
    return next(w.text for w in answer.warnings if w.code == "prefill_step_reduced")


def _step(answer: Plan) -> Any:
    return answer.chosen.cache_config["prefill_step_size"]


def test_a_step_that_does_not_fit_is_said_not_to() -> None:
    """2048 x 4 MiB = 8 GiB beside 4.25 are more than 6.8."""
    answer = ask(llama_8b(), SMALL, objective="quality", **EIGHT)
    assert _step(answer) == 512
    assert "more memory than there is to spare" in _reason(answer)


def test_a_step_that_only_leaves_too_little_free_is_said_to_fit() -> None:
    """512 x 4 MiB = 2 GiB beside 4.25 fit 6.8 but not 6.8 - 1.18; 256 x 4 MiB = 1 GiB does."""
    answer = ask(llama_8b(), SMALL, prefill_step_size=512, **EIGHT)
    assert _step(answer) == 256
    # 4.5 GiB of weights + 0.5 of reserve + 4.25 + 2.
    assert "it fits too, but takes 11.2 GiB of 11.8 GiB: less than a tenth stays free" in _reason(answer)


def test_a_step_whose_score_matrix_is_no_buffer_is_said_so() -> None:
    """8 GiB for one buffer where the device allows one."""
    answer = ask(llama_8b(), mac(512, 400, max_buffer_bytes=GIB), **EIGHT)
    assert _step(answer) == 256
    assert "one buffer takes 8 GiB, the device allows 1 GiB" in _reason(answer)


def test_a_step_that_only_stores_more_is_said_to() -> None:
    """With a step of 300, 813 tokens hold 1,068 slots; a step of 256 holds 1,024: 44 x 4096 bytes less."""
    answer = ask(
        model([kv(8, 128)]), mac(64), objective="memory", context_length=813, prefill_step_size=300, methods=("fp16",)
    )
    assert _step(answer) == 256
    assert "the caches store 176 KiB more" in _reason(answer)


def _text(answer: Plan, code: str) -> str:
    return next(w.text for w in answer.warnings if w.code == code)


@pytest.mark.parametrize("objective", ["balanced", "quality"])
def test_a_finer_variant_that_ties_and_fits_is_named(objective: str) -> None:
    """At 128k groups of 64 (0.051) and of 32 (0.0328) are above 0.02 and in one octave: the fewer bytes are taken."""
    answer = ask(llama_8b(), SMALL, context_length=131072, objective=objective)
    assert answer.chosen.label == "affine4-g64"
    text = _text(answer, "quality_below_soft_floor")
    assert "no variant that fits keeps within it" in text
    assert f"affine4-g32 (0.0328) fits too and counts as equal under {objective}" in text


def test_a_finer_variant_behind_the_objective_is_named() -> None:
    """`memory` takes the least bytes of those above the floor."""
    text = _text(ask(llama_8b(), SMALL, context_length=131072, objective="memory"), "quality_below_soft_floor")
    assert "affine4-g32 (0.0328) fits too and stands behind it under memory" in text


def test_a_finer_variant_that_leaves_too_little_free_is_named() -> None:
    """4 and 7 GiB of the 8 that weights of 4.5 and the reserve leave of 13: 7 leave less than 1.3 free."""
    on_offer = offers(Synthetic("rough", 4, 2.0, fused=True), Synthetic("fine", 7, 0.4, fused=True))
    answer = ask(llama_8b(), mac(16, 13), on_offer=on_offer, context_length=131072)
    assert answer.chosen.label == "rough"
    text = _text(answer, "quality_below_soft_floor")
    assert "fine (0.4) fits too and leaves less than a tenth of the working set free" in text


def test_without_a_finer_variant_none_is_named() -> None:
    """One variant is passed over by nothing."""
    answer = ask(llama_8b(), SMALL, context_length=131072, methods=("affine4-g64",))
    assert _text(answer, "quality_below_soft_floor").endswith("no variant that fits keeps within it")


def test_a_latency_ceiling_is_part_of_the_sentence() -> None:
    """Nine bits pass the floor and fit, but are too slow: the sentence does not deny that they fit."""
    on_offer = offers(Synthetic("rough", 2, 2.0, fused=True), Synthetic("fine", 9, 0.001, fused=True, unpack=1000.0))
    answer = ask(llama_8b(), mac(64), on_offer=on_offer, context_length=131072, max_latency_ms=300)
    assert answer.chosen.label == "rough"
    assert _text(answer, "quality_below_soft_floor").endswith(
        "no variant that fits and is quick enough keeps within it"
    )


@pytest.mark.parametrize(("objective", "said"), [("latency", 1), ("throughput", 1), ("memory", 0), ("balanced", 0)])
def test_an_unknown_speed_is_a_warning_where_it_is_asked_for(objective: str, said: int) -> None:
    """Elsewhere the evidence is enough; a limit on latency has a warning of its own."""
    unknown = mac(64, chip="AMD EPYC", bandwidth_gbps=None, decode_efficiency={}, backend="cuda")
    answer = ask(llama_8b(), unknown, objective=objective)
    assert codes(answer.warnings).count("speed_unknown") == said
    limited = ask(llama_8b(), unknown, objective=objective, max_latency_ms=50)
    assert codes(limited.warnings).count("latency_unknown") == 1
    assert "speed_unknown" not in codes(limited.warnings)


def test_gpu_cores_that_no_table_knows_are_a_warning() -> None:
    """An M2 has 8 to 10 of them; 77 is none of its variants. An unknown count is not a wrong one."""
    answer = ask(llama_8b(), mac(64, gpu_cores=77))
    note = next(w for w in answer.warnings if w.code == "gpu_cores_not_known")
    assert note.value == 10
    assert "no Apple M2 with 77 GPU cores is known" in note.text
    for cores in (10, None):
        assert "gpu_cores_not_known" not in codes(ask(llama_8b(), mac(64, gpu_cores=cores)).warnings)


def test_low_power_mode_is_a_warning() -> None:
    """While it lasts; not where it is off, nor where there is none."""
    assert "low_power_mode" in codes(ask(llama_8b(), mac(64, low_power_mode=True)).warnings)
    for mode in (False, None):
        assert "low_power_mode" not in codes(ask(llama_8b(), mac(64, low_power_mode=mode)).warnings)
