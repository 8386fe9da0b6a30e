"""What caches may take: never a silent guess."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from planner_kit import GIB, ask, codes, llama_8b, mac

from veloxquant.errors import InvalidParams

if TYPE_CHECKING:
    from veloxquant.planner.result import Budget
    from veloxquant.profiles import HardwareProfile, ModelProfile

RESERVE = 512 * 2**20


def _budget(machine: HardwareProfile, profile: ModelProfile = None, **fields: Any) -> Budget:
    return ask(profile or llama_8b(), machine, **fields).budget


def test_the_budget_is_what_is_left_of_the_smaller_limit() -> None:
    """min(working set, total) - weights - active - reserve."""
    given = mac(16, 11, active_bytes=GIB)
    assert _budget(given).kv_budget_bytes == 11 * GIB - int(4.5 * GIB) - GIB - RESERVE
    raised = mac(16, 24)
    assert _budget(raised).kv_budget_bytes == 16 * GIB - int(4.5 * GIB) - RESERVE


def test_a_cap_for_caches_alone_holds() -> None:
    """memory_budget_bytes lowers what is left, and never raises it."""
    assert _budget(mac(16, 11), budget=GIB).kv_budget_bytes == GIB
    assert _budget(mac(16, 11), budget=100 * GIB).kv_budget_bytes == 6 * GIB


def test_an_unknown_working_set_is_said() -> None:
    """The total memory is planned with, under a warning."""
    answer = ask(llama_8b(), mac(16, working_set_bytes=None))
    assert answer.budget.kv_budget_bytes == 16 * GIB - int(4.5 * GIB) - RESERVE
    assert "working_set_unknown" in codes(answer.warnings)


def test_a_cpu_has_no_working_set_to_warn_about() -> None:
    """Total memory is the limit there."""
    answer = ask(llama_8b(), mac(16, working_set_bytes=None, backend="cpu"))
    assert "working_set_unknown" not in codes(answer.warnings)


def test_unknown_weights_are_refused_and_not_taken_as_nothing() -> None:
    """A plan that leaves the weights out promises memory that is not there."""
    with pytest.raises(InvalidParams, match="weight bytes") as caught:
        ask(llama_8b(weights_bytes=None, weights_source="no safetensors file"), mac(16))
    assert caught.value.field == "model.weights_bytes"
    assert "no safetensors file" in caught.value.message
    assert caught.value.hint


def test_unknown_weights_are_borne_with_a_budget_for_caches() -> None:
    """Then they do not matter; the plan still says so, and states no decode time."""
    profile = llama_8b(weights_bytes=None, read_bytes_per_token=None)
    answer = ask(profile, mac(16), budget=2 * GIB, context_length=4096)
    assert answer.budget.kv_budget_bytes == 2 * GIB
    assert "weights_unknown" in codes(answer.warnings)
    assert answer.chosen.speed.latency_ms_per_token is None


def test_unknown_memory_is_refused_without_a_budget() -> None:
    """Nothing to plan with."""
    bare = mac(16, working_set_bytes=None, total_memory_bytes=None)
    with pytest.raises(InvalidParams) as caught:
        ask(llama_8b(), bare)
    assert caught.value.field == "hardware.total_memory_bytes"
    assert "memory_unknown" in codes(ask(llama_8b(), bare, budget=4 * GIB).warnings)


def test_unknown_active_memory_is_said() -> None:
    """Taken as 0, in words."""
    assert "active_unknown" in codes(ask(llama_8b(), mac(16, active_bytes=None)).warnings)


def test_other_work_can_crowd_out_the_weights() -> None:
    """The shortfall counts what is held now, and freeing it is suggested."""
    answer = ask(llama_8b(), mac(16, 11, active_bytes=7 * GIB))
    assert answer.decision == "weights_do_not_fit"
    assert "free_memory" in codes(answer.suggestions)
