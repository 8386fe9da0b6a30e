"""Sizes and weight bits that model ids state."""

from __future__ import annotations

import pytest

from veloxquant.benchmarks.model_name import named_parameters, named_weight_bits, stated_parameters

# Published ids of Hugging Face and of Ollama's library, with the size that the name gives a reader.
PUBLISHED = {
    "meta-llama/Llama-3.1-8B-Instruct": 8e9,
    "mlx-community/Meta-Llama-3.1-70B-Instruct-4bit": 70e9,
    "Qwen/Qwen2.5-0.5B": 0.5e9,
    "Qwen/Qwen2.5-14B-Instruct-1M": 14e9,
    "Qwen/Qwen3-30B-A3B": 30e9,
    "mlx-community/Qwen3-30B-A3B-4bit-DWQ": 30e9,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": 235e9,
    "Qwen/Qwen1.5-MoE-A2.7B": None,
    "HuggingFaceTB/SmolLM2-135M": 135e6,
    "mlx-community/SmolLM2-135M-Instruct": 135e6,
    "mistralai/Mixtral-8x7B-v0.1": 56e9,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 176e9,
    "google/gemma-3n-E4B-it": 4e9,
    "google/gemma-2b-it": 2e9,
    "google/gemma-3-270m": 270e6,
    "lmsys/vicuna-7b-v1.5": 7e9,
    "liuhaotian/llava-v1.5-7b": 7e9,
    "internlm/internlm2_5-7b-chat-1m": 7e9,
    "microsoft/Phi-3-mini-128k-instruct": None,
    "microsoft/phi-2": None,
    "deepseek-ai/DeepSeek-V3": None,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.5e9,
    "openai/gpt-oss-120b": 120e9,
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": 1.1e9,
    "openlm-research/open_llama_7b_400bt_preview": 7e9,
    "stabilityai/stablelm-3b-4e1t": 3e9,
    "inclusionAI/Ling-1T": 1e12,
    "TheBloke/Mistral-7B-Instruct-v0.2-GGUF": 7e9,
    "llama3.1:70b": 70e9,
    "llama3.1": None,
    "qwen2.5:7b-instruct-q4_K_M": 7e9,
    "gemma3n:e4b": 4e9,
    "mixtral:8x22b": 176e9,
    "smollm2:135m": 135e6,
    "gpt-oss:20b": 20e9,
}
# Made up, to say the rules.
NAMED = {
    "DeepSeek-V3-671B": 671e9,
    "model-3T-tokens-70B": 70e9,
    "model-3T-70B": 70e9,
    "model-300B-tokens-7B": 7e9,
    "model-300B_tokens": None,
    "model-2T-token": None,
    "v1.5-7b": 7e9,
    "2b-it": 2e9,
    "/models/Llama-3.2-1B.Q4_K_M.gguf": 1e9,
    "0B": None,
    "A3B": None,
    "some-model-4bit": None,
    "org-70B/model": None,
    "host:70b/model": None,
    "": None,
}


@pytest.mark.parametrize(("model_id", "parameters"), [*PUBLISHED.items(), *NAMED.items()])
def test_the_first_size_in_the_name_counts(model_id: str, parameters: float | None) -> None:
    """Of the model: not the corpus, the context, the active part, the weight bits, the version or the owner."""
    assert named_parameters(model_id) == parameters


@pytest.mark.parametrize(
    ("model_id", "bits"),
    [
        ("a/X-8B", 16),
        ("a/X-8B-4bit", 4),
        ("a/X-8B-Q8_0", 8),
        ("a/X-8B-AWQ", 4),
        ("a/X-8B-bf16", 16),
        ("a/X-mxfp4", 4),
        ("qwen2.5:7b-instruct-q4_K_M", 4),
        ("llama3.1:8b-instruct-fp16", 16),
        ("X-8B-Instruct.Q4_K_M.gguf", 4),
    ],
)
def test_weight_bits_are_read_from_the_name(model_id: str, bits: int) -> None:
    """A name without a mark is of 16 bits."""
    assert named_weight_bits(model_id) == bits


def test_a_tag_states_what_the_name_does_not() -> None:
    """The name wins; nonsense in the tag is no size."""
    assert stated_parameters("local/mine", ["fast", "parameters:134515008"]) == 134515008
    assert stated_parameters("local/mine-1B", ["parameters:134515008"]) == 1e9
    for nonsense in ("parameters:", "parameters:-1", "parameters:0", "parameters:٣", "parameters:" + "9" * 400):
        assert stated_parameters("local/mine", [nonsense]) is None
