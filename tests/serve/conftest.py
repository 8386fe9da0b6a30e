"""Tiny mlx-lm models with random float32 weights, and plans for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma3_text, llama

VOCABULARY = 64


def llama_model(*, layers: int = 3, heads: int = 2, width: int = 64) -> Any:
    """A llama whose every layer keeps a plain KVCache."""
    mx.random.seed(7)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=layers,
        intermediate_size=32,
        num_attention_heads=2 * heads,
        num_key_value_heads=heads,
        head_dim=width,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,  # tied random weights would only repeat the last token
    )
    return _with_weights(llama.Model(args))


def gemma_model() -> Any:
    """Gemma 3: layers 2 and 5 of six are full, the others have a window of 32 tokens."""
    mx.random.seed(7)
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=64,
        num_hidden_layers=6,
        intermediate_size=64,
        num_attention_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        num_key_value_heads=1,
        query_pre_attn_scalar=64,
        sliding_window=32,
        sliding_window_pattern=3,
    )
    return _with_weights(gemma3_text.Model(args))


def _with_weights(model: Any) -> Any:
    mx.eval(model.parameters())
    return model


def cache_config(model: Any, label: str = "affine4-g64", packed: list[int] | None = None, **changes: Any) -> Any:
    """A cache_config as a planner writes it: every layer packed unless told."""
    bits, group = label.removeprefix("affine").split("-g") if label != "fp16" else ("", "")
    layers = len(model.layers)
    return {
        "schema": "veloxquant.cache_config/1",
        "method": "affine" if bits else "fp16",
        "label": label,
        "params": {"bits": int(bits), "group": int(group)} if bits else {},
        "packed_layers": (list(range(layers)) if bits else []) if packed is None else packed,
        "layer_count": layers,
        "prefill_step_size": 128,
        **changes,
    }


def generate(model: Any, caches: list[Any] | None, context: int, tokens: int, step: int = 128) -> list[int]:
    """Greedy generation through mlx-lm's own loop: `context` prompt tokens, `tokens` generated ones."""
    prompt = mx.array([(7 * i + 3) % VOCABULARY for i in range(context)])
    made = generate_step(prompt, model, max_tokens=tokens, prompt_cache=caches, prefill_step_size=step)
    return [token for token, _ in made]


@pytest.fixture
def tiny() -> SimpleNamespace:
    """The functions of this file."""
    return SimpleNamespace(
        llama=llama_model, gemma=gemma_model, config=cache_config, generate=generate, vocabulary=VOCABULARY
    )
