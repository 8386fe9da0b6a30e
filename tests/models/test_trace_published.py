"""Published configs: the trace gives the figures that independent arithmetic derives from them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.models.trace_worker import engine, tracing
from veloxquant.profiles.slots import bytes_per_token, part_bytes

if TYPE_CHECKING:
    from veloxquant.profiles import CacheLayer, CachePart, ModelProfile

_DATA = Path(__file__).parent.parent / "data"
MODELS: dict[str, dict[str, Any]] = {
    entry["model"]: entry for entry in json.loads((_DATA / "model_configs.json").read_text())["models"]
}

REFUSED = {
    "MiniMaxAI/MiniMax-M3": ("not_supported", "minimax_m3", "mlx-lm 0.32 has no such model"),
    "deepseek-ai/DeepSeek-V4-Pro": ("not_supported", "deepseek_v4", "mlx-lm 0.32 has no such model"),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": (
        "config_invalid",
        "linear_attn_config",
        "partial config: it lacks the very field that says which layers are linear",
    ),
}
"""What mlx-lm does not take as it stands: kind of refusal, what the message must name, and why."""

STAND_INS: dict[str, dict[str, Any]] = json.loads((_DATA / "model_stand_ins.json").read_text())
"""For partial configs: mlx-lm names the fields it misses, and these stand-ins for them do not touch K and V.

Falcon-H1's inner width is 48 heads of the engine's default width 64; the published fields leave it at the 0.5B model's.
"""

INDEX_KEYS = {"zai-org/GLM-5.1": 78, "zai-org/GLM-5": 78}
"""The derived figure counts the latent only. mlx-lm also keeps, in each of 78 layers, index keys of width 128 and a
zero buffer as wide in the place of their values (mlx_lm/models/deepseek_v32.py, Indexer): 2 x 128 x 2 bytes more."""

DERIVED = sorted(name for name, entry in MODELS.items() if entry["derived"] and name not in REFUSED)


@cache
def traced(name: str) -> ModelProfile:
    """The trace of one published config in bfloat16, with its stand-ins."""
    return tracing.trace({**MODELS[name]["config"], **STAND_INS.get(name, {})}, "bfloat16")


def expected(name: str) -> dict[str, Any]:
    """Derived figures, and where the file knows that mlx-lm keeps other caches, those."""
    derived = MODELS[name]["derived"]
    actual = derived.get("mlx_lm_actual", {})
    per_token = derived.get("bf16_bytes_per_token_growing", derived.get("bf16_bytes_per_token"))
    all_full = "full cache in every layer" in actual.get("reason", "")
    return {
        "per_token": actual.get("bf16_bytes_per_token", per_token) + INDEX_KEYS.get(name, 0) * 2 * 128 * 2,
        "at": {int(tokens): count for tokens, count in actual.get("bf16_bytes_at", derived["bf16_bytes_at"]).items()},
        "growing": derived["growing_layers"] + (derived.get("sliding_layers", 0) if all_full else 0),
        "sliding": 0 if all_full else derived.get("sliding_layers", 0),
    }


def parts(profile: ModelProfile, *kinds: str) -> list[CachePart]:
    """All parts of these kinds."""
    return [part for layer in profile.layers for part in layer.parts if part.kind in kinds]


def has(layer: CacheLayer, kind: str) -> bool:
    """Whether a layer has a part of this kind."""
    return any(part.kind == kind for part in layer.parts)


@pytest.mark.parametrize("name", DERIVED)
def test_bytes_a_token_are_the_derived_ones(name: str) -> None:
    """What one more token adds once windows are full."""
    assert sum(bytes_per_token(part) for part in parts(traced(name), "kv", "concat")) == expected(name)["per_token"]


@pytest.mark.parametrize("name", DERIVED)
def test_layers_of_each_kind_are_the_derived_ones(name: str) -> None:
    """Growing, sliding and recurrent layers; a layer that does both counts as growing."""
    profile, figures = traced(name), expected(name)
    assert sum(has(layer, "kv") for layer in profile.layers) == figures["growing"]
    assert sum(has(layer, "window") for layer in profile.layers) == figures["sliding"]
    recurrent = sum(has(layer, "state") and not has(layer, "kv") for layer in profile.layers)
    assert recurrent == MODELS[name]["derived"].get("recurrent_layers", 0)


@pytest.mark.parametrize("name", DERIVED)
def test_bytes_at_lengths_are_the_derived_ones(name: str) -> None:
    """Token by token to 4k, 32k and 128k: growing layers hold every token, windows their window, states left out."""
    extra = INDEX_KEYS.get(name, 0) * 2 * 128 * 2
    for tokens, figure in expected(name)["at"].items():
        growing_and_windows = parts(traced(name), "kv", "window", "chunked", "concat")
        held = sum(part_bytes(part, [(1, tokens)]) for part in growing_and_windows)
        assert held == figure + extra * tokens


@pytest.mark.parametrize("name", [name for name in DERIVED if MODELS[name]["derived"].get("bf16_bytes_window_cap")])
def test_full_windows_hold_the_derived_bytes(name: str) -> None:
    """Window x heads x widths x 2 bytes over all sliding layers, where mlx-lm has sliding layers."""
    windows = parts(traced(name), "window")
    cap = MODELS[name]["derived"]["bf16_bytes_window_cap"] if expected(name)["sliding"] else 0
    assert sum(part.window * part.slot_bytes for part in windows) == cap


@pytest.mark.parametrize("name", [name for name in DERIVED if "head_dim" in MODELS[name]["derived"]])
def test_head_widths_are_the_derived_ones(name: str) -> None:
    """Read from the config where it says so, from the keys where it does not (phi-4, GLM-4.5-Air)."""
    assert traced(name).head_width == MODELS[name]["derived"]["head_dim"]


@pytest.mark.parametrize("name", [name for name in DERIVED if MODELS[name]["derived"]["cache_kind"] == "mla-latent"])
def test_latents_are_recognized_where_the_engine_keeps_them(name: str) -> None:
    """One latent a layer, 512 + 64 wide; mlx-lm's DeepSeek-V2 keeps expanded heads and has none."""
    latents = [part for part in parts(traced(name), "kv") if part.latent]
    kept = "mlx_lm_actual" not in MODELS[name]["derived"]
    assert len(latents) == (MODELS[name]["derived"]["growing_layers"] if kept else 0)
    assert {(part.key_width, part.value_width) for part in latents} <= {(512, 64)}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_the_engine_does_not_take_is_refused_by_name(name: str) -> None:
    """Never sized by the standard formula."""
    kind, named, _ = REFUSED[name]
    with pytest.raises(engine.EngineRefused, match=named) as refused:
        tracing.trace(MODELS[name]["config"], "bfloat16")
    assert refused.value.kind == kind


@pytest.mark.parametrize("name", sorted(STAND_INS))
def test_partial_configs_are_refused_as_they_stand(name: str) -> None:
    """Without the stand-ins the engine refuses, and where fields are missing the message lists every one of them."""
    with pytest.raises(engine.EngineRefused) as refused:
        tracing.trace(MODELS[name]["config"], "bfloat16")
    assert refused.value.kind == "config_invalid"
    missing = ["model_type"] if "model_type" in STAND_INS[name] else list(STAND_INS[name])
    if name != "tiiuae/Falcon-H1-1.5B-Instruct":  # here the engine fails on what the fields give, not on their absence
        assert all(field in str(refused.value) for field in missing)


def test_every_config_in_the_file_is_accounted_for() -> None:
    """Each is compared, refused with its reason, or has no derived figures and is compared by hand below."""
    by_hand = {name for name in HAND_WORKED if not MODELS[name]["derived"]}
    assert set(DERIVED) | set(REFUSED) | by_hand == set(MODELS)


HAND_WORKED = {
    # 24 latent layers x (512 + 64) x 2 bytes; 69 linear layers keep states
    "moonshotai/Kimi-K3": (24 * 576 * 2, 24, 0),
    # 49 of 80 blocks attend: 8 KV heads x 128 x 2 x 2 bytes
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": (49 * 8 * 128 * 2 * 2, 49, 0),
    # 12 attention layers x 2 KV heads x 128 x 2 x 2 bytes
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (12 * 2 * 128 * 2 * 2, 12, 0),
    # 9 full layers x 4 KV heads x (192 + 128) x 2 bytes; 39 sliding layers
    "XiaomiMiMo/MiMo-V2-Flash": (9 * 4 * (192 + 128) * 2, 9, 39),
    # 8 of 32 layers are full: 4 KV heads x 128 x 2 x 2 bytes
    "CohereLabs/tiny-aya-global": (8 * 4 * 128 * 2 * 2, 8, 24),
}


@pytest.mark.parametrize("name", sorted(HAND_WORKED))
def test_models_without_derived_figures_give_those_worked_by_hand(name: str) -> None:
    """Bytes a token, growing layers and sliding layers from the config's own fields."""
    per_token, growing, sliding = HAND_WORKED[name]
    profile = traced(name)
    assert sum(bytes_per_token(part) for part in parts(profile, "kv")) == per_token
    assert len(parts(profile, "kv")) == growing
    assert len(parts(profile, "window")) == sliding


def test_state_bytes_of_a_hybrid_are_those_published() -> None:
    """Qwen3.5-122B-A10B: 0.1431 GiB of recurrent state (model_configs.json, from a vendor's KV estimate)."""
    states = sum(part.state_bytes for part in parts(traced("Qwen/Qwen3.5-122B-A10B"), "state"))
    assert round(states / 2**30, 4) == MODELS["Qwen/Qwen3.5-122B-A10B"]["derived"]["recurrent_state_gib_per_kvfit"]


PUBLISHED_PARAMETERS = {
    "meta-llama/Meta-Llama-3.1-8B": (8.03e9, 8.03e9),
    "deepseek-ai/DeepSeek-V3": (671e9, 37e9),
    "Qwen/Qwen3-30B-A3B": (30.5e9, 3.3e9),
    "Qwen/Qwen3-235B-A22B": (235e9, 22e9),
    "openai/gpt-oss-120b": (117e9, 5.1e9 + 0.58e9),  # the card's 5.1 billion leave one of two embedding tables out
}
"""Totals and parameters used for one token, from the model cards."""


@pytest.mark.parametrize("name", sorted(PUBLISHED_PARAMETERS))
def test_parameter_counts_are_those_of_the_model_card(name: str) -> None:
    """Experts a token does not use are left out of the active count; cards round to two or three digits."""
    total, active = PUBLISHED_PARAMETERS[name]
    assert traced(name).num_parameters == pytest.approx(total, rel=0.01)
    assert traced(name).active_parameters == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("name", "fused"),
    [("meta-llama/Meta-Llama-3.1-8B", True), ("deepseek-ai/DeepSeek-V3", False), ("google/gemma-2-9b-it", False)],
)
def test_attention_that_makes_a_score_matrix_is_seen(name: str, fused: bool) -> None:
    """Latent attention adds a score-sized mask, gemma-2 soft-caps its scores: neither runs fused."""
    assert traced(name).fused_attention is fused
