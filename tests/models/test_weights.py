"""Bytes and number format of weights from safetensors headers; damaged files are named."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from veloxquant.errors import ModelConfigInvalid
from veloxquant.models import weights

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"BF16": 2, "F16": 2, "F32": 4, "U32": 4, "U8": 1, "F8_E4M3": 1}


def save(path: Path, tensors: dict[str, tuple[str, int]]) -> None:
    """Write a safetensors file of one-dimensional tensors (format, numbers)."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, (dtype, count) in tensors.items():
        begin, end = end, end + SIZES[dtype] * count
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def test_files_written_by_mlx_itself_are_weighed(tmp_path: Path) -> None:
    """mx.save_safetensors: 1000 + 24 bfloat16 numbers."""
    tensors = {"a": mx.zeros((10, 100), mx.bfloat16), "b": mx.zeros((24,), mx.bfloat16)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    facts = weights.read(tmp_path)
    assert facts is not None
    assert (facts.weights_bytes, facts.source, facts.dtype, facts.quantized) == (2048, "safetensors", "bfloat16", False)


def test_a_quantized_checkpoint_computes_in_the_format_of_its_scales(tmp_path: Path) -> None:
    """Most bytes are packed words and some norms are float32; K and V follow the scales."""
    tensors = {"w.weight": ("U32", 1000), "w.scales": ("F16", 10), "w.biases": ("F16", 10), "norm": ("F32", 500)}
    save(tmp_path / "model.safetensors", tensors)
    facts = weights.read(tmp_path)
    assert facts is not None
    assert (facts.dtype, facts.quantized, facts.weights_bytes) == ("float16", True, 4000 + 20 + 20 + 2000)


def test_scales_that_are_no_floats_leave_the_format_to_the_other_weights(tmp_path: Path) -> None:
    """mxfp4 scales are bytes."""
    save(tmp_path / "model.safetensors", {"w.weight": ("U32", 1000), "w.scales": ("U8", 10), "norm": ("BF16", 5)})
    facts = weights.read(tmp_path)
    assert facts is not None
    assert (facts.dtype, facts.quantized) == ("bfloat16", True)


def test_only_what_the_engine_loads_counts(tmp_path: Path) -> None:
    """mlx-lm loads model*.safetensors and nothing else."""
    save(tmp_path / "model.safetensors", {"a": ("BF16", 10)})
    save(tmp_path / "consolidated.safetensors", {"a": ("BF16", 10)})
    save(tmp_path / "adapters.safetensors", {"a": ("BF16", 10)})
    facts = weights.read(tmp_path)
    assert facts is not None
    assert facts.weights_bytes == 20


def test_files_win_over_an_index_that_says_otherwise(tmp_path: Path) -> None:
    """And a note tells both figures."""
    save(tmp_path / "model.safetensors", {"a": ("BF16", 10)})
    index = {"metadata": {"total_size": 999}, "weight_map": {"a": "model.safetensors"}}
    (tmp_path / weights.INDEX).write_text(json.dumps(index))
    facts = weights.read(tmp_path)
    assert facts is not None
    assert (facts.weights_bytes, facts.source) == (20, "safetensors")
    assert any("999" in note and "20" in note for note in facts.notes)


def test_missing_files_are_listed_and_the_index_counts(tmp_path: Path) -> None:
    """A download that stopped half way: the index knows the whole."""
    save(tmp_path / "model-00001-of-00002.safetensors", {"a": ("BF16", 10)})
    index = {"metadata": {"total_size": 40.0}, "weight_map": {"b": "model-00002-of-00002.safetensors"}}
    (tmp_path / weights.INDEX).write_text(json.dumps(index))
    facts = weights.read(tmp_path)
    assert facts is not None
    assert facts.missing == ("model-00002-of-00002.safetensors",)
    assert (facts.weights_bytes, facts.source) == (40, "index")


@pytest.mark.parametrize("total", [10**30, 1e30, -1, 0, True, "40", None, 1.5])
def test_an_absurd_total_is_not_believed(tmp_path: Path, total: Any) -> None:
    """Unknown rather than wrong; what the index calls its files is never opened."""
    save(tmp_path / "model-00001-of-00002.safetensors", {"a": ("BF16", 10)})
    index = {"metadata": {"total_size": total}, "weight_map": {"b": "../../etc/passwd"}}
    (tmp_path / weights.INDEX).write_text(json.dumps(index))
    facts = weights.read(tmp_path)
    assert facts is not None
    assert (facts.weights_bytes, facts.source) == (None, "index")
    doubts = [note for note in facts.notes if "not believed" in note]
    assert len(doubts) == (total is not None)
    assert all(repr(total) in note for note in doubts)


def test_an_absurd_total_beside_whole_files_is_told(tmp_path: Path) -> None:
    """The files count, and the index is worth a word."""
    save(tmp_path / "model.safetensors", {"a": ("BF16", 10)})
    index = {"metadata": {"total_size": -5}, "weight_map": {"a": "model.safetensors"}}
    (tmp_path / weights.INDEX).write_text(json.dumps(index))
    facts = weights.read(tmp_path)
    assert facts is not None
    assert facts.weights_bytes == 20
    assert facts.notes == (f"{weights.INDEX} states -5 bytes, which no checkpoint has; it is not believed",)


def test_shards_saved_by_the_engine_are_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm splits by size, here at every tensor, and writes an index of its own; both say the same."""
    from mlx import nn
    from mlx_lm import utils

    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    shards = utils.make_shards(dict(tree_flatten(model.parameters())), 0)
    monkeypatch.setattr(utils, "make_shards", lambda *_: shards)
    utils.save_model(tmp_path, model)
    facts = weights.read(tmp_path)
    assert facts is not None
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) == 8  # a shard for each weight and bias
    assert (facts.weights_bytes, facts.missing, facts.notes) == (4 * (16 * 16 + 16) * 4, (), ())


def test_missing_files_are_seen_without_an_index_too(tmp_path: Path) -> None:
    """The numbering tells; the bytes are then unknown rather than too few."""
    save(tmp_path / "model-00001-of-00003.safetensors", {"a": ("BF16", 10)})
    facts = weights.read(tmp_path)
    assert facts is not None
    assert len(facts.missing) == 2
    assert facts.weights_bytes is None


def test_a_link_whose_target_is_gone_is_a_missing_file(tmp_path: Path) -> None:
    """The hub cache links into blobs, which can be pruned."""
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    index = {"metadata": {"total_size": 40}, "weight_map": {"a": "model.safetensors"}}
    (tmp_path / weights.INDEX).write_text(json.dumps(index))
    facts = weights.read(tmp_path)
    assert facts is not None
    assert facts.missing == ("model.safetensors",)


def test_links_that_lead_to_themselves_and_pipes_are_no_weights(tmp_path: Path) -> None:
    """Nothing is opened that a read could wait on."""
    (tmp_path / "model-1.safetensors").symlink_to("model-1.safetensors")
    os.mkfifo(tmp_path / "model-2.safetensors")
    (tmp_path / weights.INDEX).mkdir()
    assert weights.read(tmp_path) is None


def test_a_folder_without_weights_has_no_facts(tmp_path: Path) -> None:
    """None, not zero."""
    assert weights.read(tmp_path) is None


def test_8_bit_floats_are_told_apart(tmp_path: Path) -> None:
    """The engine may widen them, so the bytes on disk are not those in memory."""
    save(tmp_path / "model.safetensors", {"a": ("F8_E4M3", 100), "n": ("BF16", 1)})
    facts = weights.read(tmp_path)
    assert facts is not None
    assert (facts.dtype, facts.weights_bytes, facts.float8_bytes) == ("bfloat16", 102, 100)


WHOLE = struct.pack("<Q", 60) + b'{"a":{"dtype":"BF16","shape":[10],"data_offsets":[0,20]}}   ' + bytes(20)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 0),
        struct.pack("<Q", 8) + b"not json",
        struct.pack("<Q", 9) + b'{"a":"b"}',
        struct.pack("<Q", 2) + b"\xff\xff",
        WHOLE[:-1],
        WHOLE.replace(b"[0,20]", b"[9,-1]"),
    ],
)
def test_a_damaged_header_names_its_file(tmp_path: Path, content: bytes) -> None:
    """Cut short, absurd length, no JSON, tensors outside the file."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelConfigInvalid, match=r"model\.safetensors") as error:
        weights.read(tmp_path)
    assert error.value.field == "model.path"


def test_the_whole_file_of_the_damaged_ones_is_good(tmp_path: Path) -> None:
    """So that each case above fails for its own damage."""
    (tmp_path / "model.safetensors").write_bytes(WHOLE)
    facts = weights.read(tmp_path)
    assert facts is not None
    assert facts.weights_bytes == 20


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"weight_map": 5}', b"\xff"])
def test_a_damaged_index_is_named(tmp_path: Path, content: bytes) -> None:
    """The index is read with its types."""
    (tmp_path / weights.INDEX).write_bytes(content)
    with pytest.raises(ModelConfigInvalid, match="index"):
        weights.read(tmp_path)


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    """Headers are remembered by name, size and time of change."""
    save(tmp_path / "model.safetensors", {"a": ("BF16", 10)})
    first = weights.read(tmp_path)
    save(tmp_path / "model.safetensors", {"a": ("BF16", 1000)})
    second = weights.read(tmp_path)
    assert first is not None
    assert second is not None
    assert (first.weights_bytes, second.weights_bytes) == (20, 2000)


def raw(path: Path, header: dict[str, Any]) -> None:
    """Write a safetensors file of this header and no tensors."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_what_is_kept_of_a_header_does_not_grow_with_it(tmp_path: Path) -> None:
    """Formats are an attacker's words: a header may name a hundred thousand, and headers are remembered by the file."""
    raw(tmp_path / "model.safetensors", {f"t{n}.scales": {"dtype": f"X{n}", "data_offsets": [0, 0]} for n in range(99)})
    (kept,) = weights._files([tmp_path / "model.safetensors"])
    assert len(kept.formats) == len(kept.scale_formats) == 1


def test_a_folder_that_names_more_files_than_any_model_has_is_refused(tmp_path: Path) -> None:
    """Forty files numbered so took 15 s and 1.4 GB: each number of files stands for as many names."""
    for count in (4097, 99999):
        raw(tmp_path / f"model-00001-of-{count:05d}.safetensors", {})
    with pytest.raises(ModelConfigInvalid, match="4096 weight files"):
        weights.read(tmp_path)


def test_more_files_than_any_model_has_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are named: the count is looked at before the first header."""
    monkeypatch.setattr(weights, "_MAX_FILES", 2)
    for number in range(3):
        (tmp_path / f"model{'x' * number}.safetensors").write_bytes(b"no header")
    with pytest.raises(ModelConfigInvalid, match="3 weight files, more than 2"):
        weights.read(tmp_path)


@pytest.mark.parametrize("names", [[f"{n}.safetensors" for n in range(4097)], ["x" * 256]])
def test_an_index_that_names_more_than_any_model_has_is_refused(tmp_path: Path, names: list[str]) -> None:
    """The names of absent files are part of what a profile is kept under."""
    (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": {f"t{n}": name for n, name in enumerate(names)}}))
    with pytest.raises(ModelConfigInvalid, match="4096 weight files"):
        weights.read(tmp_path)


def test_one_header_under_many_names_is_read_only_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are free: ten thousand to one file of 32 MiB would keep a thread busy for an hour."""
    monkeypatch.setattr(weights, "_MAX_HEADERS_BYTES", 1000)
    raw(tmp_path / "one", {"__metadata__": {"a": "x" * 300}})
    for number in range(3):
        (tmp_path / f"model-{number}.safetensors").symlink_to("one")
    assert weights.read(tmp_path) is not None
    (tmp_path / "model-3.safetensors").symlink_to("one")
    with pytest.raises(ModelConfigInvalid, match="headers of its weight files"):
        weights.read(tmp_path)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """What was a file when the folder was listed may be a pipe when it is opened."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelConfigInvalid, match="not a regular file"):
        weights._file(str(tmp_path / "model.safetensors"), 100, 0)
