"""Sizes and weight bits that model ids state."""

from __future__ import annotations

import pytest

from veloxquant.benchmarks.model_name import named_parameters, named_weight_bits, stated_parameters


@pytest.mark.parametrize(
    ("model_id", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8e9),
        ("Qwen/Qwen2.5-0.5B", 0.5e9),
        ("HuggingFaceTB/SmolLM2-135M", 135e6),
        ("mistralai/Mixtral-8x7B-v0.1", 56e9),
        ("Qwen/Qwen3-30B-A3B", 30e9),
        ("google/gemma-3n-E4B-it", 4e9),
        ("microsoft/Phi-3-mini-128k-instruct", None),
        ("mlx-community/some-model-4bit", None),
        ("org-70B/model", None),
        ("", None),
    ],
)
def test_the_first_size_in_the_name_counts(model_id: str, parameters: float | None) -> None:
    """Contexts (128k), weight bits and the owner's name are no sizes."""
    assert named_parameters(model_id) == parameters


@pytest.mark.parametrize(
    ("model_id", "bits"),
    [("a/X-8B", 16), ("a/X-8B-4bit", 4), ("a/X-8B-Q8_0", 8), ("a/X-8B-AWQ", 4), ("a/X-8B-bf16", 16), ("a/X-mxfp4", 4)],
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
