"""What `apply` reads: plans as values or JSON, and plans with nothing to apply."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from veloxquant.errors import MethodRefused
from veloxquant.planner.result import Budget, Candidate, Evidence, Fit, Layers, Memory, Note, Plan, Quality, Speed
from veloxquant.serve.cache_config import read

CONFIG = {
    "schema": "veloxquant.cache_config/1",
    "method": "affine",
    "label": "affine4-g64",
    "params": {"bits": 4, "group": 64},
    "packed_layers": [1],
    "layer_count": 2,
    "prefill_step_size": 2048,
    "packed_shapes": [[8, 128, 128]],
}
TRACED = Evidence(source="traced")


def plan(decision: Any = "quantize", config: Any = CONFIG, **changes: Any) -> Plan:
    """A plan that chose the config, None for nothing."""
    chosen = config and Candidate(
        method="affine",
        params={"bits": 4, "group": 64},
        label="affine4-g64",
        layers=Layers(total=2, growing=2, windowed=0, recurrent=0, latent=0, shared=0, packed=1, kept=1),
        memory=Memory(
            stored_bytes=1,
            peak_bytes=1,
            fixed_bytes=0,
            bytes_per_token=1,
            fp16_bytes=4,
            ratio=0.25,
            largest_buffer_bytes=1,
            evidence=TRACED,
        ),
        fit=Fit(total_bytes=1, headroom_bytes=1, max_context_tokens=1),
        speed=Speed(
            prefill_tok_s=None, decode_tok_s=None, latency_ms_per_token=None, low=None, high=None, evidence=TRACED
        ),
        quality=Quality(kl_mean=0.05, perplexity_delta=None, low=0.0, high=0.1, evidence=TRACED),
        cache_config=config,
        engine_settings=None,
    )
    budget = Budget(working_set_bytes=None, weights_bytes=None, active_bytes=0, reserve_bytes=0, kv_budget_bytes=None)
    empty: dict[str, Any] = {}
    return Plan(
        decision=decision,
        chosen=chosen,
        hardware=empty,
        model=empty,
        workload=empty,
        engine=empty,
        budget=budget,
        **changes,
    )


def test_a_plan_its_json_and_its_cache_config_read_alike() -> None:
    """It does not matter in which form the plan arrived."""
    value = plan()
    over_the_socket = msgspec.json.decode(msgspec.json.encode(value))
    assert read(value) == read(over_the_socket) == read(CONFIG)
    assert read(value).packed_shapes == ((8, 128, 128),)


def test_a_newer_planners_fields_are_ignored() -> None:
    """Fields are added within a schema, so that an older reader must not mind them."""
    assert read({**CONFIG, "later": True}) == read(CONFIG)


def test_a_plan_that_found_nothing_is_refused_with_its_own_suggestions() -> None:
    """The plan knows what would have worked, and the error passes it on."""
    nothing = plan("no_fit", None, suggestions=(Note(code="shorter_context", text="16384 tokens fit"),))
    with pytest.raises(MethodRefused, match="its decision is 'no_fit'") as caught:
        read(nothing)
    assert caught.value.hint == "16384 tokens fit"


def test_a_plan_without_a_candidate_that_keeps_the_engines_own_says_so() -> None:
    """Nothing to quantize and no candidate: there is nothing to do, and no cache list to check it against."""
    with pytest.raises(MethodRefused, match="nothing_to_quantize") as caught:
        read(plan("nothing_to_quantize", None))
    assert "leave the model as it is" in caught.value.hint
