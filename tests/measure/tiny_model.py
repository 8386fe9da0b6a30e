"""A model folder as mlx-lm reads it: a llama of random float32 weights, with a tokenizer of one token a byte."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models import llama
from tokenizers.pre_tokenizers import ByteLevel

from veloxquant.measure.measurement import Subject
from veloxquant.methods import registry
from veloxquant.serve.builder import KVCacheBuilder, KVCacheConfig

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, HEADS, WIDTH = 2, 2, 64
END = 256
"""The end-of-text token: the one beside the 256 bytes."""
NUMBERS = 2 * HEADS * WIDTH
"""Numbers of K and V that one token puts into one layer."""
FLOAT_SLOT = NUMBERS * 4
"""Bytes of one slot of one layer of the engine's own cache, in float32."""
PACKED_SLOT = NUMBERS // 2 + 2 * HEADS * (WIDTH // 64) * 2 * 4
"""affine4-g64: half a byte a number, a scale and a bias of four bytes for each 64 of them."""
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 32,
    "num_attention_heads": 2 * HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": WIDTH,
    "rms_norm_eps": 1e-5,
    "vocab_size": END + 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": END,
}


def save(folder: Path, *, ends: bool = False, **changes: Any) -> Path:
    """Write the model into `folder`. It never ends a text, or with `ends` does at once."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    mx.random.seed(5)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    head = 0.01 * model.lm_head.weight
    # A row of zeros never has the largest of 257 products; with the others zero and a bias in it, it always has.
    model.lm_head.weight = mx.concatenate([mx.zeros((END, 64)) if ends else head[:END] * 100, mx.zeros((1, 64))])
    if ends:
        config["eos_token_id"] = 0  # argmax of equal products is the first
    model.save_weights(str(folder / "model.safetensors"))
    _write(folder / "config.json", config)
    _write(folder / "tokenizer.json", _tokenizer())
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    return folder


def subject(model: Any, label: str, **settings: Any) -> Subject:
    """A variant of the registry for this model."""
    loaded = registry.load()
    variant = next(variant for _, variant in loaded.variants if variant.label == label)
    config = KVCacheConfig.of(variant)
    return Subject(
        label=label,
        method=variant.method,
        params=dict(variant.params),
        build=lambda: KVCacheBuilder.for_model(model, config, methods=loaded),
        **settings,
    )


def _tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    letters = sorted(ByteLevel.alphabet())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": END, "content": "</s>", **flags, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {letter: at for at, letter in enumerate(letters)}, "merges": []},
    }


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
