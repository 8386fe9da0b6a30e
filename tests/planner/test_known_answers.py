"""Answers that follow by arithmetic from published model configs; the working set is always given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planner_kit import (
    GIB,
    Own,
    Packed,
    ask,
    candidate,
    codes,
    deepseek_v3,
    every,
    kv,
    llama_8b,
    mac,
    model,
    offers,
    phi3_mini,
    qwen25_7b,
    qwen35_27b,
    record,
    rejection,
    windowed,
)

MAC_16 = mac(16, 11.8)
PUBLISHED = {
    m["model"]: m["derived"]
    for m in json.loads(Path(__file__).parents[1].joinpath("data/model_configs.json").read_text())["models"]
}


def test_llama_at_32k_keeps_the_engine_cache() -> None:
    """4.5 GiB of weights and 4.0 GiB of 16-bit cache fit a working set of 11.8 GiB with a tenth to spare."""
    answer = ask(llama_8b(), MAC_16, context_length=32768)
    assert answer.decision == "keep_fp16"
    assert answer.chosen.memory.stored_bytes == PUBLISHED["meta-llama/Meta-Llama-3.1-8B"]["bf16_bytes_at"]["32768"]
    assert answer.chosen.memory.stored_bytes == 4 * GIB


def test_llama_at_128k_is_packed_to_four_bits_with_a_quality_warning() -> None:
    """Only 4 bits fit beside the weights; the figure above the soft floor is said, and so is the best 8-bit context."""
    answer = ask(llama_8b(), MAC_16, context_length=131072)
    assert answer.decision == "quantize"
    assert (answer.chosen.label, answer.chosen.memory.stored_bytes) == ("affine4-g64", 4.5 * GIB)
    assert rejection(answer, "fp16").reason == rejection(answer, "affine8-g64").reason == "does_not_fit"
    assert "quality_below_soft_floor" in codes(answer.warnings)
    offered = {s.value["label"]: s.value["context_length"] for s in answer.suggestions if s.code == "largest_context"}
    longest = offered["affine8-g64"]
    at_longest = ask(llama_8b(), MAC_16, context_length=longest, methods=("affine8-g64",))
    beyond = ask(llama_8b(), MAC_16, context_length=longest + 1, methods=("affine8-g64",))
    assert (at_longest.decision, beyond.decision) == ("quantize", "no_fit")


def test_llama_at_128k_sets_a_smaller_prefill_step() -> None:
    """At step 2048 one score matrix takes 32 x 2048 x 131072 x 2 bytes = 16 GiB; the plan sets a step that fits."""
    answer = ask(llama_8b(), MAC_16, context_length=131072)
    step = answer.chosen.cache_config["prefill_step_size"]
    assert step < 2048
    assert answer.chosen.memory.peak_bytes == answer.chosen.memory.stored_bytes + 32 * step * 131072 * 2
    assert answer.chosen.engine_settings["prefill_step_size"] == step
    assert "prefill_step_reduced" in codes(answer.warnings)


@pytest.mark.parametrize(("label", "gib"), [("fp16", 16.0), ("affine8-g64", 8.5), ("affine4-g64", 4.5)])
def test_llama_at_128k_stored_bytes(label: str, gib: float) -> None:
    """2 x 32 layers x 8 heads x 128 x 131072 tokens at 16, 8.5 and 4.5 bits."""
    answer = ask(llama_8b(), mac(128), context_length=131072, max_kl=10)
    assert candidate(answer, label).memory.stored_bytes == gib * GIB


@pytest.mark.parametrize(("label", "key"), [("affine8-g64", "mlx_q8_g64"), ("affine4-g64", "mlx_q4_g64")])
def test_llama_at_32k_packed_bytes_as_published_arithmetic_has_them(label: str, key: str) -> None:
    """The packed sizes agree with figures computed elsewhere from the same config."""
    answer = ask(llama_8b(), mac(128), context_length=32768, max_kl=10)
    expected = PUBLISHED["meta-llama/Meta-Llama-3.1-8B"][f"{key}_bytes_at_32768"]
    assert candidate(answer, label).memory.stored_bytes == expected


def test_qwen25_keys_stay_at_eight_bits() -> None:
    """The family rule rejects keys under 8 bits with its source; the 16-bit cache is 28 x 4 x 128 x 4 x 32768 bytes."""
    answer = ask(qwen25_7b(), mac(32), context_length=32768, objective="memory")
    assert all(c.label == "fp16" or c.label.startswith("affine8") for c in every(answer))
    refused = rejection(answer, "affine4-g64")
    assert refused.reason == "family_rule"
    assert "https://github.com/IonDen/mlx-quant-fidelity" in refused.detail
    assert answer.chosen.memory.fp16_bytes == 1.75 * GIB


def test_a_record_of_the_model_itself_lifts_the_family_rule() -> None:
    """Somebody measured 0.01 nats with 4-bit keys on this very Qwen2.5: the measurement counts."""
    seen = record("affine4-g64", model_id="Qwen/Qwen2.5-7B", architecture="qwen2", tags=["kl_mean=0.01"])
    answer = ask(qwen25_7b(), mac(32), context_length=8192, objective="memory", records=[(0.9, seen)])
    assert answer.chosen.label == "affine4-g64"
    assert answer.chosen.quality.kl_mean == 0.01
    assert answer.chosen.quality.evidence.record_ids == (seen.id,)


def test_a_record_of_another_qwen_does_not_lift_the_family_rule() -> None:
    """Only the very model counts."""
    seen = record("affine4-g64", model_id="Qwen/Qwen2.5-7B-Instruct", architecture="qwen2", tags=["kl_mean=0.01"])
    answer = ask(qwen25_7b(), mac(32), context_length=8192, objective="memory", records=[(0.9, seen)])
    assert rejection(answer, "affine4-g64").reason == "family_rule"


def test_deepseek_keeps_its_latents() -> None:
    """61 x (512 + 64) x 2 = 70,272 bytes a token; the quantizer is refused by the trace in the engine's words."""
    answer = ask(deepseek_v3(refused="'list' has no swapaxes"), mac(512, 400), context_length=100_000)
    assert answer.decision == "nothing_to_quantize"
    assert answer.chosen.memory.bytes_per_token == PUBLISHED["deepseek-ai/DeepSeek-V3"]["bf16_bytes_per_token"]
    # The engine grows by 256 slots: ceil(100,000 / 256) = 391 steps hold 100,096 tokens.
    assert answer.chosen.memory.stored_bytes == 100_096 * 70_272
    assert round(answer.chosen.memory.stored_bytes / GIB, 2) == 6.55
    assert answer.chosen.layers.latent == answer.model["layers"]["latent"] == 61
    assert "swapaxes" in rejection(answer, "affine4-g64").detail


def test_deepseek_without_a_trace_keeps_its_latents_too() -> None:
    """A latent part is never packed on the method's word alone."""
    answer = ask(deepseek_v3(), mac(512, 400), context_length=1000, on_offer=offers(Own(), Packed(groups=(64,))))
    assert answer.decision == "nothing_to_quantize"
    assert "latent" in rejection(answer, "affine4-g64").detail


def test_hybrid_counts_growth_and_state_apart() -> None:
    """Qwen3.5-27B: 16 layers x 4 heads x 256 x 2 x 2 bytes = 65,536 bytes a token, 2.0 GiB at 32k, states beside."""
    answer = ask(qwen35_27b(state_bytes=1000), mac(64), context_length=32768)
    memory, found = answer.chosen.memory, answer.chosen.layers
    assert (found.growing, found.recurrent, found.total) == (16, 48, 64)
    assert memory.bytes_per_token == 65_536
    assert memory.stored_bytes - memory.fixed_bytes == 2 * GIB
    assert memory.fixed_bytes == answer.model["layers"]["state_bytes"] == 48 * 1000


def test_phi3_takes_groups_that_divide_its_width() -> None:
    """Heads of 96: groups of 64 and 128 do not divide, 32 does; 2 x 32 x 32 x 96 x 2 = 393,216 bytes a token."""
    answer = ask(phi3_mini(), mac(64), context_length=4096, max_kl=10)
    assert {r.label for r in answer.rejected if r.reason == "width_not_divisible"} == {
        f"affine{bits}-g{group}" for bits in (4, 8) for group in (64, 128)
    }
    assert "do not divide" in rejection(answer, "affine4-g64").detail
    assert {c.label for c in every(answer)} == {"fp16", "affine4-g32", "affine8-g32"}
    assert candidate(answer, "fp16").memory.bytes_per_token == 393_216


def test_windows_stay_and_growing_layers_are_packed() -> None:
    """4 of 24 layers grow: they are packed, the 20 windows keep 512 slots of 2 x 4 x 256 x 2 bytes each."""
    answer = ask(windowed(), mac(64), context_length=32769, max_kl=10)
    packed = candidate(answer, "affine4-g64")
    assert (packed.layers.packed, packed.layers.kept, packed.layers.windowed) == (4, 20, 20)
    assert packed.cache_config["packed_layers"] == [5, 11, 17, 23]
    assert packed.memory.fixed_bytes == 20 * 512 * 4096
    assert packed.memory.stored_bytes == 20 * 512 * 4096 + 4 * (32768 + 256) * 4096 * 4.5 / 16
    assert "20 layers" in packed.layers.reasons["window"]
    assert packed.engine_settings is None, "mlx-lm's own flag raises on a window"


def test_a_record_wins_over_the_trace() -> None:
    """237 KB a token measured where the trace says 27: the record is used and named, and the fitting context falls."""
    # 27 KiB a token: 1 layer x 27 heads x 256 x 2 x 2 bytes; the reserve leaves 10 GiB.
    profile = model([kv(27, 256)], model_id="test/small", weights_bytes=0)
    seen = record("fp16", model_id="test/small", architecture="test", memory_bytes=237 * 1024 * 8192)
    machine = mac(16, 10.5)
    without = ask(profile, machine, context_length=8192)
    answer = ask(profile, machine, context_length=8192, records=[(0.9, seen)])
    assert without.chosen.memory.bytes_per_token == 27 * 1024
    own = candidate(answer, "fp16")
    assert own.memory.bytes_per_token == pytest.approx(237 * 1024)
    assert own.memory.stored_bytes == 237 * 1024 * 8192
    assert own.memory.evidence.source == "measured"
    assert own.memory.evidence.record_ids == (seen.id,)
    ratio = candidate(without, "fp16").fit.max_context_tokens / own.fit.max_context_tokens
    assert ratio == pytest.approx(237 / 27, rel=0.02)


def test_weights_that_do_not_fit_are_no_cache_choice() -> None:
    """8 billion parameters in 16 bit on an 8 GB Mac: the shortfall, not a cache."""
    weights = 2 * 8_030_261_248
    answer = ask(llama_8b(weights_bytes=weights), mac(8, 5.33), context_length=4096)
    assert answer.decision == "weights_do_not_fit"
    assert answer.chosen is None
    note = next(w for w in answer.warnings if w.code == "weights_do_not_fit")
    assert note.value == weights + 512 * 2**20 - int(5.33 * GIB)
    assert "raise_working_set" not in codes(answer.suggestions), "no limit below 8 GiB would hold 15 GiB"


def test_plenty_of_memory_changes_nothing() -> None:
    """512 GB at a context of 1k: do nothing."""
    answer = ask(llama_8b(), mac(512, 400), context_length=1024)
    assert answer.decision == "keep_fp16"
    assert not answer.suggestions
