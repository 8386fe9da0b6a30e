"""Builds caches of a method, fills them, and weighs what a call takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models import llama

from veloxquant.methods import LayerSpec, Variant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veloxquant.methods import Method


def variant(method: Method, params: Mapping[str, Any]) -> Variant:
    """A variant with these parameters."""
    return Variant(method=method.name, label="asked", params=dict(params))


def built(method: Method, params: Mapping[str, Any], part: Any) -> Any:
    """An empty cache."""
    return method.build(LayerSpec(index=0, part=part), variant(method, params))


def rows(part: Any, tokens: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """Keys and values."""
    shapes = ((1, part.heads, tokens, width) for width in (part.key_width, part.value_width))
    keys, values = (mx.random.normal(shape).astype(dtype) for shape in shapes)
    return keys, values


def written(method: Method, params: Mapping[str, Any], part: Any, dtype: mx.Dtype, calls: Sequence[int]) -> Any:
    """A built cache after calls of so many tokens."""
    cache = built(method, params, part)
    mx.random.seed(1)
    for tokens in calls:
        cache.update_and_fetch(*rows(part, tokens, dtype))
    return cache


def peak(lazy: Any) -> int:
    """Bytes beside what is held already, at the most, while these (or what a function gives) are computed."""
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(lazy() if callable(lazy) else lazy)
    return mx.get_peak_memory() - held


def odd_llama(width: int) -> Any:
    """Two layers, four query heads over two KV heads of a width that no group of 64 divides."""
    mx.random.seed(3)
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=96,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=width,
            rms_norm_eps=1e-5,
            vocab_size=50,
        )
    )
