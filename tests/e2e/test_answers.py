"""Answers that follow by arithmetic from published configs, through the command line, the socket and a real trace.

The working set is given and nothing is generated, so that no figure depends on this host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

GIB = 2**30
LLAMA = "meta-llama/Meta-Llama-3.1-8B"
MAC_16 = ("--chip", "Apple M2", "--gpu-cores", "10", "--memory", "16GiB", "--working-set", "11.8GiB", "--active", "0")
ROOMY = ("--working-set", "640GiB")
"""More than the machine under test has: a given working set makes the answer independent of it."""

# Qwen/Qwen2.5-7B-Instruct: https://huggingface.co/Qwen/Qwen2.5-7B-Instruct/blob/main/config.json
QWEN25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}
# microsoft/Phi-3-mini-4k-instruct: https://huggingface.co/microsoft/Phi-3-mini-4k-instruct/blob/main/config.json
PHI3_MINI = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}

Ask = Callable[..., Any]
Published = Callable[..., str]
Inline = Callable[[str, dict[str, Any]], str]


def candidates(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Everything that could be used, by label."""
    return {one["label"]: one for one in [plan["chosen"], *plan["alternatives"]] if one is not None}


def rejected(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Everything that was not, by label."""
    return {one["label"]: one for one in plan["rejected"]}


def test_llama_at_32k_on_a_16_gb_mac_keeps_16_bit(ask: Ask, published: Published) -> None:
    """4.0 GiB of cache beside 4.5 GiB of weights fit 11.8 GiB: doing nothing is enough."""
    config = published(LLAMA)
    code, plan = ask("plan", "--config", config, "--weights", "4.5GiB", "--context", "32k", "--generate", "0", *MAC_16)
    assert (code, plan["decision"], plan["source"]) == (0, "keep_fp16", "daemon")
    assert plan["chosen"]["memory"]["stored_bytes"] == 4 * GIB
    assert plan["model"]["source"] == "traced"


def test_llama_at_128k_on_a_16_gb_mac_packs_as_finely_as_fits(ask: Ask, published: Published) -> None:
    """16 bit and 8 bit do not fit; keys of 5 bits and values of 4 do, leave a tenth free, and need no warning.

    Of 131,072 tokens 4 + 64 stay out of whole groups of 64: 131,004 // 64 = 2,046 groups are packed, at 5 + 32 / 64 and
    4 + 16 / 64 bits a number of 32 layers x 8 heads x 128.
    """
    config = published(LLAMA)
    code, plan = ask("plan", "--context", "128k", "--config", config, "--weights", "4.5GiB", "--generate", "0", *MAC_16)
    assert (code, plan["decision"], plan["warnings"]) == (0, "quantize", [])
    chosen, out = plan["chosen"], rejected(plan)
    assert (chosen["params"]["key_bits"], chosen["params"]["value_bits"]) == (5, 4)
    packed = 2046 * 64 * 32 * 8 * 128 * (5.5 + 4.25) / 8
    assert chosen["memory"]["stored_bytes"] == packed + chosen["memory"]["fixed_bytes"]
    assert chosen["memory"]["fixed_bytes"] < packed / 100
    working_set = round(11.8 * GIB)
    assert chosen["fit"]["total_bytes"] <= working_set * 0.9
    roomy = [one for one in candidates(plan).values() if one["fit"]["total_bytes"] <= working_set * 0.9]
    assert chosen["quality"]["kl_mean"] == min(one["quality"]["kl_mean"] for one in roomy)
    assert out["fp16"]["reason"] == out["affine8-g64"]["reason"] == "does_not_fit"
    assert out["affine4-g64"]["reason"] == "quality_below_floor"


def test_llama_at_128k_on_a_16_gb_mac_with_the_engines_own_formats(ask: Ask, published: Published) -> None:
    """Of 4 and 8 bits in groups of 64, 4 fit, with a quality warning and the largest 8-bit context."""
    config = published(LLAMA)
    question = ("--config", config, "--weights", "4.5GiB", "--generate", "0", *MAC_16)
    offer = ("fp16", "affine4-g64", "affine8-g64")
    code, plan = ask("plan", "--context", "128k", *question, "--method", *offer)
    assert (code, plan["decision"], plan["chosen"]["label"]) == (0, "quantize", "affine4-g64")
    assert plan["chosen"]["memory"]["stored_bytes"] == 4.5 * GIB
    out = rejected(plan)
    assert out["fp16"]["reason"] == out["affine8-g64"]["reason"] == "does_not_fit"
    assert "quality_below_soft_floor" in [warning["code"] for warning in plan["warnings"]]
    offered = {one["value"]["label"]: one["value"] for one in plan["suggestions"] if one["code"] == "largest_context"}
    longest = offered["affine8-g64"]["context_length"]
    fits = ask("plan", "--context", str(longest), "--method", "affine8-g64", *question)
    beyond = ask("plan", "--context", str(longest + 1), "--method", "affine8-g64", *question)
    assert (fits.code, fits.value["chosen"]["label"]) == (0, "affine8-g64")
    assert (beyond.code, beyond.value["decision"]) == (1, "no_fit")


@pytest.mark.parametrize(("label", "gib"), [("fp16", 16.0), ("affine8-g64", 8.5), ("affine4-g64", 4.5)])
def test_llama_at_128k_in_bytes(ask: Ask, published: Published, label: str, gib: float) -> None:
    """32 layers x 8 heads x 128 x 2 x 131,072 tokens at 16, 8.5 and 4.5 bits."""
    config = published(LLAMA)
    _, plan = ask(
        "plan",
        "--config",
        config,
        "--weights",
        "4.5GiB",
        "--context",
        "128k",
        "--generate",
        "0",
        "--max-kl",
        "10",
        *ROOMY,
    )
    assert candidates(plan)[label]["memory"]["stored_bytes"] == gib * GIB


def test_qwen25_keeps_its_keys_above_8_bits(ask: Ask, inline: Inline) -> None:
    """28 layers x 4 heads x 128 x 2 x 2 bytes x 32,768 tokens = 1.75 GiB; fewer than 8 key bits break this family."""
    config = inline("Qwen2.5-7B", QWEN25_7B)
    question = ("--context", "32k", "--generate", "0", "--objective", "memory", *ROOMY)
    code, plan = ask("plan", "--config", config, "--weights", "4.3GB", *question)
    assert code == 0
    found, out = candidates(plan), rejected(plan)
    assert found["fp16"]["memory"]["stored_bytes"] == 1.75 * GIB
    assert not [label for label in found if label.startswith(("affine2", "affine3", "affine4", "affine6"))]
    assert out["affine4-g64"]["reason"] == "family_rule"
    assert "http" in out["affine4-g64"]["detail"]
    assert plan["chosen"]["label"].startswith("affine8")


def test_deepseek_keeps_its_latents(ask: Ask, published: Published) -> None:
    """61 layers x (512 + 64) x 2 bytes = 70,272 bytes a token; no variant may touch them, and the layout says why."""
    config = published("deepseek-ai/DeepSeek-V3")
    question = ("--context", "100000", "--generate", "0", *ROOMY)
    code, plan = ask("plan", "--config", config, "--weights", "400GiB", *question)
    assert (code, plan["decision"], plan["chosen"]["label"]) == (0, "nothing_to_quantize", "fp16")
    memory, layers = plan["chosen"]["memory"], plan["chosen"]["layers"]
    assert memory["bytes_per_token"] == 70_272
    # Slots come in steps of 256: 391 of them hold 100,000 tokens.
    assert memory["stored_bytes"] == 70_272 * 391 * 256
    assert round(memory["stored_bytes"] / GIB, 1) == 6.6
    assert round(70_272 * 100_000 / GIB, 1) == 6.5
    assert (layers["latent"], layers["packed"]) == (61, 0)
    assert rejected(plan)["affine4-g64"]["reason"] == "not_supported_by_engine"


def test_a_hybrid_counts_its_states_apart(ask: Ask, published: Published) -> None:
    """Qwen3.5-27B: 16 of 64 layers grow, 65,536 bytes a token, 2.0 GiB at 32k; the states of the others do not."""
    period = ["linear_attention"] * 3 + ["full_attention"]
    config = published(
        "Qwen/Qwen3.5-4B",
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        linear_num_value_heads=48,
        layer_types=period * 16,
    )
    code, plan = ask("plan", "--config", config, "--weights", "15GiB", "--context", "32k", "--generate", "0", *ROOMY)
    assert code == 0
    own = candidates(plan)["fp16"]
    assert (own["layers"]["growing"], own["layers"]["recurrent"]) == (16, 48)
    assert own["memory"]["bytes_per_token"] == 16 * 4 * 256 * 2 * 2 == 65_536
    # A state: 48 heads x 128 x 128 float32, and three steps of a convolution over 2 x 16 x 128 + 48 x 128 numbers.
    state = 48 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 48 * 128) * 2
    assert own["memory"]["fixed_bytes"] == plan["model"]["layers"]["state_bytes"] == 48 * state
    assert own["memory"]["stored_bytes"] == 2 * GIB + 48 * state


def test_a_width_of_96_takes_groups_of_32_only(ask: Ask, inline: Inline) -> None:
    """Phi-3-mini: 32 x 32 x 96 x 2 x 2 = 393,216 bytes a token; 64 and 128 do not divide 96."""
    config = inline("Phi-3-mini", PHI3_MINI)
    code, plan = ask(
        "plan", "--config", config, "--weights", "2GiB", "--context", "4k", "--generate", "0", "--max-kl", "10", *ROOMY
    )
    assert code == 0
    found, out = candidates(plan), rejected(plan)
    assert found["fp16"]["memory"]["bytes_per_token"] == 393_216
    assert {out[f"affine4-g{group}"]["reason"] for group in (64, 128)} == {"width_not_divisible"}
    assert found["affine4-g32"]["memory"]["stored_bytes"] == 393_216 * 4096 * 5 // 16


def test_windows_stay_as_they_are(ask: Ask, published: Published) -> None:
    """gemma-3-12b: 8 of 48 layers grow and are packed, 40 keep their windows of 1,024 tokens in 16 bit."""
    config = published("google/gemma-3-12b-it")
    code, plan = ask(
        "plan", "--config", config, "--weights", "7GiB", "--context", "32k", "--generate", "0", "--max-kl", "10", *ROOMY
    )
    assert code == 0
    packed = candidates(plan)["affine8-g64"]
    assert {name: packed["layers"][name] for name in ("growing", "windowed", "packed", "kept")} == {
        "growing": 8,
        "windowed": 40,
        "packed": 8,
        "kept": 40,
    }
    assert set(packed["layers"]["reasons"]) == {"window"}
    growing = 8 * 8 * 256 * 2 * 32_768
    assert packed["memory"]["stored_bytes"] - packed["memory"]["fixed_bytes"] == growing * 17 // 16


def test_weights_that_do_not_fit_are_no_cache_choice(ask: Ask, published: Published) -> None:
    """An 8B model in 16 bit on an 8 GB Mac: the shortfall, and exit code 1."""
    config = published(LLAMA)
    weights = 2 * 8_030_261_248
    mac_8 = ("--chip", "Apple M2", "--memory", "8GiB", "--working-set", "5.33GiB", "--active", "0")
    code, plan = ask("plan", "--config", config, "--weights", str(weights), "--context", "4k", *mac_8)
    assert (code, plan["decision"], plan["chosen"]) == (1, "weights_do_not_fit", None)
    shortfall = next(one["value"] for one in plan["warnings"] if one["code"] == "weights_do_not_fit")
    assert shortfall == weights + 512 * 2**20 - int(5.33 * GIB)


def test_a_large_mac_at_1k_keeps_16_bit(ask: Ask, published: Published) -> None:
    """512 GB and a short context: nothing to gain."""
    mac_512 = ("--chip", "Apple M3 Ultra", "--memory", "512GiB", "--working-set", "464GiB", "--active", "0")
    code, plan = ask("plan", "--config", published(LLAMA), "--weights", "16GB", "--context", "1k", *mac_512)
    assert (code, plan["decision"], plan["chosen"]["label"]) == (0, "keep_fp16", "fp16")


def test_fit_agrees_with_plan(ask: Ask, published: Published) -> None:
    """The largest context of `fit` is one that `plan` accepts, and one token more is one that it does not."""
    question = ("--config", published(LLAMA), "--weights", "4.5GiB", "--generate", "0", "--method", "fp16", *MAC_16)
    code, table = ask("fit", *question)
    assert code == 0
    row = next(row for row in table["rows"] if row["label"] == "fp16")
    for cell in row["cells"]:
        slots, longest = str(cell["slots"]), cell["max_context_tokens"]
        assert ask("plan", "--context", str(longest), "--slots", slots, *question).code == 0
        assert ask("plan", "--context", str(longest + 1), "--slots", slots, *question).code == 1


def test_the_same_question_in_this_process_gives_the_same_plan(ask: Ask, published: Published) -> None:
    """Daemon and fallback are the same rooms: but for source, generation and id, the answers are equal."""
    question = ("--config", published(LLAMA), "--weights", "4.5GiB", "--context", "32k", *MAC_16)
    over_socket = ask("plan", *question).value
    alone = ask("plan", "--no-daemon", *question).value
    assert (over_socket["source"], alone["source"]) == ("daemon", "local")
    differing = {"source", "generation", "plan_id", "hardware"}
    assert {k: v for k, v in over_socket.items() if k not in differing} == {
        k: v for k, v in alone.items() if k not in differing
    }
