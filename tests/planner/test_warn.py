"""A warning says what it is about: each reason for a smaller prefill step has a sentence of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner_kit import GIB, ask, kv, llama_8b, mac, model

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
