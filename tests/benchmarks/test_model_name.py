"""Sizes and weight bits that model ids state."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from veloxquant.benchmarks.benchmark_db import BenchmarkMatchQuery, BenchmarkRecord
from veloxquant.benchmarks.model_name import (
    model_size,
    named_parameters,
    named_weight_bits,
    record_size,
    same_size,
    tagged_parameters,
)
from veloxquant.benchmarks.record_groups import RecordGroups
from veloxquant.profiles import ModelProfile

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
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": None,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": None,
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
    """The first that gives a number; nonsense is no size."""
    assert tagged_parameters(["fast", "parameters:134515008", "parameters:1"]) == 134515008
    for nonsense in ("parameters:", "parameters:-1", "parameters:0", "parameters:٣", "parameters:" + "9" * 400):
        assert tagged_parameters([nonsense]) is None


# Parameter counts as published with the models, in billions.
COUNTS = {
    "huggyllama/llama-7b": 6.74,
    "meta-llama/Llama-2-13b-hf": 13.02,
    "huggyllama/llama-65b": 65.29,
    "meta-llama/Llama-2-70b-hf": 68.98,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-70B": 70.55,
    "mistralai/Mistral-7B-v0.3": 7.25,
    "Qwen/Qwen2.5-0.5B": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-7B": 7.616,
    "Qwen/Qwen2.5-14B": 14.77,
    "Qwen/Qwen2.5-32B": 32.76,
    "Qwen/Qwen2.5-72B": 72.71,
    "Qwen/Qwen3-30B-A3B": 30.53,
    "HuggingFaceTB/SmolLM2-135M": 0.1345,
    "HuggingFaceTB/SmolLM2-1.7B": 1.711,
    "TinyLlama/TinyLlama-1.1B": 1.1,
}
SIZES = {name: named_parameters(name) for name in COUNTS}


@pytest.mark.parametrize(("one", "other"), [*combinations_with_replacement(COUNTS, 2)])
def test_published_models_are_of_one_size_where_they_are_called_so(one: str, other: str) -> None:
    """By their names; and the name of the one and the count of the other, whichever the record has, agree."""
    called_alike = SIZES[one] == SIZES[other]
    assert same_size(record_size(one, []), model_size(other, None)) == called_alike
    for name, counted in ((one, other), (other, one)):
        count = round(COUNTS[counted] * 1e9)
        assert same_size(record_size(name, []), model_size("local/mine", count)) == called_alike
        assert same_size(record_size("local/mine", [f"parameters:{count}"]), model_size(name, None)) == called_alike


@pytest.mark.parametrize(
    ("theirs", "tags", "ours", "count", "same"),
    [
        ("x/Llama-4-Scout-17B-16E", [], "x/Llama-4-Maverick-17B-128E", None, False),
        ("x/Llama-4-Scout-17B-16E", [], "x/Llama-4-Maverick-17B-128E", 400e9, False),
        ("x/Llama-4-Scout-17B-16E", ["parameters:109000000000"], "x/Maverick-17B-128E", 400e9, False),
        ("x/Llama-4-Scout-17B-16E", [], "local/mine", 17e9, False),
        ("x/Llama-4-Scout-17B-16E", [], "y/Scout-17B-16E-Instruct", None, True),
        ("x/Llama-4-Scout-17B-16E", ["parameters:109000000000"], "local/mine", 108.6e9, True),
        ("x/Mixtral-8x7B", [], "y/Mixtral-8x7B-Instruct", None, True),
        ("x/Mixtral-8x7B", [], "y/Dense-56B", None, False),
        ("x/Mixtral-8x7B", [], "local/mine", 56e9, False),
        ("huggyllama/llama-65b", [], "meta-llama/Llama-2-70b", None, False),
        ("huggyllama/llama-65b", [], "meta-llama/Llama-2-70b", 68.98e9, False),
        ("x/coder-6.7b", [], "y/llama-7b", None, False),
        ("x/coder-6.7b", [], "local/mine", 6.74e9, True),
        ("x/llama-7b", ["parameters:6738415616"], "Qwen/Qwen2.5-7B", 7.616e9, False),
        ("x/llama-7b", ["parameters:6738415616"], "Qwen/Qwen2.5-7B", None, True),
        ("x/one", ["parameters:1000000000"], "y/other", 1.03e9, True),
        ("x/one", ["parameters:1000000000"], "y/other", 1.031e9, False),
        ("x/one", [], "y/other", 1e9, False),
        ("x/one", [], "y/other", None, False),
    ],
)
def test_sizes_are_compared_as_what_they_are(
    theirs: str, tags: list[str], ours: str, count: float | None, same: bool
) -> None:
    """Counts by 3 %, names as equal, experts as part of the name, and nothing said is nothing known; so in a store."""
    assert same_size(record_size(theirs, tags), model_size(ours, count)) is same
    assert same_size(model_size(ours, count), record_size(theirs, tags)) is same
    record = BenchmarkRecord("a", "fp16", theirs, "llama", tags=tags)
    model = ModelProfile(model_id=ours, architecture="llama", num_parameters=None if count is None else int(count))
    found = RecordGroups([record]).best(model, BenchmarkMatchQuery("", ours, context_length=4096), 0.1, None)
    assert bool(found) is same
