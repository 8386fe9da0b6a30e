"""What a run says as a record: the store takes it, and the planner reads the very bytes back."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import msgspec
import pytest
import tiny_model
from mlx.utils import tree_flatten
from tiny_model import FLOAT_SLOT, LAYERS, PACKED_SLOT

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.errors import StoreUnavailable
from veloxquant.measure import record
from veloxquant.measure.comparison import Comparison, compare

if TYPE_CHECKING:
    from pathlib import Path
    from types import SimpleNamespace


@pytest.fixture(scope="module")
def found(tiny: SimpleNamespace) -> Comparison:
    """fp16 and affine4-g64 on 300 + 6 tokens."""
    subjects = [tiny_model.subject(tiny.model, label) for label in ("fp16", "affine4-g64")]
    return compare(tiny.model, tiny.tokenizer, tiny.prompt, subjects, max_tokens=6)


def test_one_record_for_each_run(tiny: SimpleNamespace, found: Comparison, tmp_path: Path) -> None:
    """Bytes, ratio, speed and lengths of the run, under the variant's label; the same after reading the disk anew."""
    described = record.describe(tiny.source, tiny.model)
    store = BenchmarkDatabase(tmp_path)
    written = [record.publish(store, described, found, one) for one in found.runs]
    kept = BenchmarkDatabase(tmp_path).records
    assert [kept[one.id] for one in written] == written
    own, packed = written
    assert [one.method for one in written] == ["fp16", "affine4-g64"]
    assert packed.memory_bytes == LAYERS * 512 * PACKED_SLOT
    assert packed.memory_reduction == pytest.approx(2 * PACKED_SLOT / FLOAT_SLOT)  # a 16-bit slot is half of a float's
    assert own.memory_reduction == 2.0
    assert packed.throughput_tok_s == pytest.approx(1000 / packed.latency_ms_per_token)
    assert (packed.context_length, packed.workload.context_length, packed.workload.generation_length) == (300, 300, 6)
    assert packed.source == "profile"
    assert {"tokens=306", "repeats=1", "baseline=float32"} <= set(packed.tags)


def test_the_model_is_described_by_what_was_loaded(tiny: SimpleNamespace) -> None:
    """Name of the folder, the config's model_type, and as many parameters as the weights have numbers."""
    described = record.describe(tiny.source, tiny.model)
    assert (described.model_id, described.architecture) == ("tiny-llama", "llama")
    assert described.num_parameters == sum(weight.size for _, weight in tree_flatten(tiny.model.parameters()))


def test_what_slowed_the_machine_is_tagged(found: Comparison) -> None:
    """A run on battery says so: the planner trusts it less."""
    strained = msgspec.structs.replace(found.conditions, on_battery=True)
    assert "battery" in record.tags(msgspec.structs.replace(found, conditions=strained), found.runs[0])
    assert "battery" not in record.tags(found, found.runs[0])


def test_low_power_mode_is_a_tag_that_the_planner_doubts(found: Comparison) -> None:
    """As on battery: the same word that evidence looks for."""
    strained = msgspec.structs.replace(found.conditions, low_power_mode=True)
    assert "low-power" in record.tags(msgspec.structs.replace(found, conditions=strained), found.runs[0])
    assert "low-power" not in record.tags(found, found.runs[0])


def test_what_is_not_known_of_the_machine_is_unknown(found: Comparison) -> None:
    """A machine without a name makes a record of an unknown chip, which no plan takes for its own."""
    nameless = msgspec.structs.replace(found.conditions, chip=None, mlx_version=None, macos_version=None)
    fields = record.fields(msgspec.structs.replace(found, conditions=nameless), found.runs[0])
    assert {fields[name] for name in ("chip", "mlx_version", "macos_version")} == {"unknown"}


def test_a_run_of_one_token_has_no_speed(found: Comparison) -> None:
    """0 is how a record says "not measured"."""
    short = msgspec.structs.replace(found.runs[0], decode_tok_s=None, ms_per_token=None)
    fields = record.fields(found, short)
    assert (fields["throughput_tok_s"], fields["latency_ms_per_token"]) == (0.0, 0.0)


def test_a_store_is_made_ready(tmp_path: Path) -> None:
    """Folders that are not there are made, nothing is left in them, and it can be done again."""
    store = BenchmarkDatabase(tmp_path / "new" / "records")
    for _ in range(2):
        record.make_ready(store)
        assert list(store.records_dir.iterdir()) == []
    assert store.records == {}


@pytest.mark.parametrize("in_the_way", ["records", ".lock"])
def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path, in_the_way: str) -> None:
    """A file where the folder of records should be, a folder where the lock should be."""
    if in_the_way == "records":
        (tmp_path / in_the_way).write_text("")
    else:
        (tmp_path / in_the_way).mkdir()
    with pytest.raises(StoreUnavailable) as refused:
        record.make_ready(BenchmarkDatabase(tmp_path))
    assert refused.value.hint


def test_a_full_disk_is_found_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is really written there."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record, "write_aside", full)
    with pytest.raises(StoreUnavailable, match="No space left"):
        record.make_ready(BenchmarkDatabase(tmp_path))
