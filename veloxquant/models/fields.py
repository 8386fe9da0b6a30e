"""Reading a published config: the same fact has many names, and may sit one level down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.profiles.model import CacheLayer

_INNER = ("text_config", "llm_config", "language_config")
"""Where models of several modalities keep their language model's fields."""

_MOST = 2**40
"""No width, count or length of a real model is above this; a larger one would only make arithmetic slow."""

NUMBER_OF_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_transformer_layers")
QUERY_HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads", "num_query_heads")
KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num")
HEAD_WIDTH = ("head_dim", "hidden_size_per_head", "kv_channels", "d_head")
HIDDEN_SIZE = ("hidden_size", "d_model", "n_embd", "model_dim", "dim")
MAX_POSITION = (
    "max_position_embeddings",
    "max_seq_len",
    "max_sequence_length",
    "n_positions",
    "seq_length",
    "model_max_length",
    "max_context_length",
    "n_ctx",
)
SHARED_LAYERS = ("num_kv_shared_layers", "num_kv_reuse_layers")


def sections(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The language model's own section first, then the config itself."""
    inner = [config[name] for name in _INNER if isinstance(config.get(name), Mapping)]
    return (*inner, config)


def whole(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of the named fields that is a whole number from 0 up, None when there is none."""
    for section in sections(config):
        for name in names:
            value = section.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST:
                return value
    return None


def text(config: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of the named fields that is a string, None when there is none."""
    for section in sections(config):
        for name in names:
            value = section.get(name)
            if isinstance(value, str):
                return value
    return None


def stated_dtype(config: Mapping[str, Any]) -> str | None:
    """What the config says its weights are: "bfloat16", "float16", "float32", or None."""
    stated = (text(config, ("dtype", "torch_dtype")) or "").removeprefix("torch.")
    return stated if stated in ("bfloat16", "float16", "float32") else None


def foreign_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How another program quantized the checkpoint; mlx-lm looks at the config, then at its text_config."""
    text_config = config.get("text_config")
    inner = text_config.get("quantization_config") if isinstance(text_config, Mapping) else None
    found = config.get("quantization_config", inner)
    return found if isinstance(found, Mapping) and found else None


def widens_float8(config: Mapping[str, Any]) -> bool:
    """Whether the engine makes 16-bit weights of 8-bit floats when it loads them.

    It does for quant_method "fp8", but for power-of-two scales over blocks of 32 x 32 (mlx_lm.utils.load_model).
    """
    foreign = foreign_quantization(config)
    if foreign is None or foreign.get("quant_method") != "fp8" or isinstance(config.get("quantization"), Mapping):
        return False
    block = foreign.get("weight_block_size")
    return not (foreign.get("scale_fmt") == "ue8m0" and isinstance(block, (list, tuple)) and [*block] == [32, 32])


def head_width(config: Mapping[str, Any], layers: Sequence[CacheLayer]) -> int | None:
    """Width of one query head: what the config says, else that of the first plain growing key."""
    parts = [part for layer in layers for part in layer.parts if part.kind == "kv"]
    if any(part.latent for part in parts):
        nope, rope = whole(config, ("qk_nope_head_dim",)), whole(config, ("qk_rope_head_dim",))
        return nope + rope if nope is not None and rope is not None else None
    stated = whole(config, HEAD_WIDTH)
    return stated if stated is not None else next((part.key_width for part in parts), None)
