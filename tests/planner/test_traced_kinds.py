"""Models with latents, windows and states, traced for real: what is kept is said, and what does not grow is counted."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner_kit import ask, candidate, mac, offers, rejection
from veloxquant_plugins.affine import Affine
from veloxquant_plugins.fp16 import EngineOwn

from veloxquant.models.trace_worker.tracing import trace

if TYPE_CHECKING:
    from veloxquant.planner.result import Candidate, Plan
    from veloxquant.profiles import ModelProfile

CONFIGS = {
    entry["model"]: entry["config"]
    for entry in json.loads(Path(__file__).parents[1].joinpath("data/model_configs.json").read_text())["models"]
}
TOKENS = 8192


@cache
def _traced(name: str) -> ModelProfile:
    return trace(CONFIGS[name], "bfloat16")


def _ask(profile: ModelProfile, **workload: Any) -> Plan:
    asked = {"on_offer": offers(EngineOwn(), Affine()), "context_length": TOKENS, "max_kl": 100}
    return ask(profile, mac(2048, 2000), **asked | workload)


def _only(answer: Plan, label: str, kind: str) -> Candidate:
    """The candidate of this label, which has a reason for this kind of layer and for no other."""
    one = candidate(answer, label)
    assert list(one.layers.reasons) == [kind]
    return one


def test_deepseek_v3_keeps_latents() -> None:
    """61 layers of one latent of 512 with a rope key of 64: 70,272 bytes a token, all of them growing."""
    answer = _ask(_traced("deepseek-ai/DeepSeek-V3"))
    own = _only(answer, "fp16", "latent")
    told = "61 layers keep the engine's latent cache, which attention reads directly"
    assert own.layers.reasons["latent"] == rejection(answer, "affine4-g64").detail == told
    assert own.memory.fixed_bytes == 0
    assert own.memory.stored_bytes == TOKENS * 61 * (512 + 64) * 2


def test_gemma_3_12b_keeps_windows() -> None:
    """40 of 48 layers are windows of 1,024 x 8 heads x 256 x 2 (K, V) x 2 bytes; 8 grow and are packed."""
    answer = _ask(_traced("google/gemma-3-12b-it"))
    windows = 40 * 1024 * 8 * 256 * 2 * 2
    for label, growing_bits in (("fp16", 16), ("affine4-g64", 4.5)):
        one = _only(answer, label, "window")
        told = "40 layers keep the engine's sliding window, which does not grow beyond its size"
        assert one.layers.reasons["window"] == told
        assert one.memory.fixed_bytes == windows
        assert one.memory.stored_bytes == windows + TOKENS * 8 * 8 * 256 * 2 * growing_bits / 8
    assert candidate(answer, "affine4-g64").layers.packed == 8


def test_qwen35_27b_keeps_states() -> None:
    """48 of 64 layers are states of 48 heads x 128 x 128 float32 and three steps of a convolution in 16 bit."""
    published = CONFIGS["Qwen/Qwen3.5-4B"]
    larger = {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    }
    answer = _ask(trace({**published, "text_config": {**published["text_config"], **larger}}, "bfloat16"))
    states = 48 * (48 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 48 * 128) * 2)
    for label, bits in (("fp16", 16), ("affine8-g64", 8.5)):
        one = _only(answer, label, "state")
        assert one.layers.reasons["state"] == "48 layers keep the engine's recurrent state, which does not grow"
        assert one.memory.fixed_bytes == answer.model["layers"]["state_bytes"] == states
        assert one.memory.stored_bytes == states + TOKENS * 16 * 4 * 256 * 2 * bits / 8


def test_falcon_h1_keeps_layers_that_grow_and_hold_a_state() -> None:
    """44 layers of both: 24 heads x 128 x 256 float32 and 3 x (3,072 + 2 x 256) in 16 bit beside 2 heads of 128."""
    answer = _ask(_traced("tiiuae/Falcon-H1-7B-Instruct"))
    own = _only(answer, "fp16", "composite")
    told = "44 layers keep the engine's composite cache (a recurrent state and a growing cache in one)"
    assert own.layers.reasons["composite"] == rejection(answer, "affine4-g64").detail == told
    states = 44 * (24 * 128 * 256 * 4 + 3 * (3072 + 2 * 256) * 2)
    assert own.memory.fixed_bytes == states
    assert own.memory.stored_bytes == states + TOKENS * 44 * 2 * 128 * 2 * 2
    assert (own.layers.growing, own.layers.recurrent, own.layers.kept) == (44, 44, 44)


def test_windows_that_are_not_full_count_as_they_are() -> None:
    """At 300 tokens a window holds 299 slots and what it grew by: fixed at this length, not at any."""
    answer = _ask(_traced("google/gemma-3-12b-it"), context_length=300)
    own = candidate(answer, "fp16")
    # Prefill of 299 tokens leaves 299 slots; the last prompt token adds 256.
    assert own.memory.fixed_bytes == 40 * (299 + 256) * 8192
