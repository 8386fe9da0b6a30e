"""The database: what it promises to one process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.benchmarks.benchmark_db import (
    BenchmarkDatabase,
    BenchmarkRecord,
    benchmark_fingerprint,
    default_benchmark_dir,
)
from veloxquant.errors import RecordInvalid, StoreUnavailable
from veloxquant.profiles import ModelProfile, WorkloadProfile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Fill = Callable[..., list[str]]


def write(directory: Path, name: str, content: bytes | dict[str, Any]) -> Path:
    """Put a file among the records, as any program might."""
    path = directory / "records" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_the_default_place(isolated_home: Path) -> None:
    """Without a folder the user's cache is used; opening it creates nothing."""
    assert BenchmarkDatabase().storage_dir == default_benchmark_dir()
    assert not (isolated_home / "cache" / "veloxquant").exists()


def test_add_is_on_disk_when_it_returns(db: BenchmarkDatabase) -> None:
    """The record's file is the record, under its fingerprint."""
    record = db.add("kivi", "m/x", context_length=8192, chip="M4", throughput_tok_s=33.1)
    assert record.id == benchmark_fingerprint("kivi", "m/x", 8192, 1, "M4")
    assert record.workload == WorkloadProfile(context_length=8192)
    assert json.loads((db.records_dir / f"{record.id}.json").read_text()) == record.to_dict()
    assert BenchmarkDatabase(db.storage_dir).find(record.id) == record == db.find(record.id)
    assert db.find("nothing") is None


def test_index_lists_the_records(db: BenchmarkDatabase) -> None:
    """In the public form: version 1, and method, model and path of each id."""
    record = db.add("kivi", "m/x", context_length=8192)
    db.close()
    entry = {"method": "kivi", "model_id": "m/x", "path": f"records/{record.id}.json"}
    assert json.loads(db.index_path.read_text()) == {"version": 1, "records": {record.id: entry}}


def test_upsert_replaces_by_id(db: BenchmarkDatabase) -> None:
    """One id, one record; the last write counts."""
    for speed in (1.0, 2.0):
        db.upsert(BenchmarkRecord("x", "fp16", "m/x", throughput_tok_s=speed))
    assert [r.throughput_tok_s for r in BenchmarkDatabase(db.storage_dir).records.values()] == [2.0]


def test_remove_and_clear(db: BenchmarkDatabase, fill: Fill, in_index: Callable[[Path], set[str]]) -> None:
    """What is removed is gone from memory, folder and index; removing nothing says so."""
    first, *others = fill(db, 3)
    assert db.remove(first)
    assert not db.remove(first)
    assert set(db.records) == set(others) == set(BenchmarkDatabase(db.storage_dir).records)
    db.clear()
    assert db.records == {} == BenchmarkDatabase(db.storage_dir).records
    assert in_index(db.storage_dir) == set()
    assert list(db.records_dir.iterdir()) == []


def test_remove_creates_nothing(db: BenchmarkDatabase) -> None:
    """Asking to remove from a directory that does not exist leaves it so."""
    assert not db.remove("x")
    assert not db.storage_dir.exists()


def test_records_is_a_copy(db: BenchmarkDatabase, fill: Fill) -> None:
    """Changing the mapping does not change the store."""
    fill(db, 1)
    db.records.clear()
    assert len(db.records) == 1


def test_a_model_gives_architecture_and_size(db: BenchmarkDatabase) -> None:
    """The size is noted where the model id does not say it; a given architecture wins."""
    model = ModelProfile(model_id="local/mine", architecture="llama", num_parameters=134_515_008)
    record = db.add("fp16", "local/mine", context_length=1024, model=model, tags=["a"])
    assert (record.architecture, record.tags) == ("llama", ["a", "parameters:134515008"])
    assert db.add("fp16", "m/x-1B", context_length=1024, model=model, architecture="qwen2").tags == []


def test_another_mlx_version_does_not_erase_a_measurement(db: BenchmarkDatabase) -> None:
    """The newest takes the fingerprint, one per version is kept; the same version is replaced."""
    for version, speed in (("0.31.2", 1.0), ("0.32.4", 2.0), ("0.32.4", 3.0), ("0.31.2", 4.0)):
        record = db.add("fp16", "m/x", context_length=1024, mlx_version=version, throughput_tok_s=speed)
        assert db.records[record.id].throughput_tok_s == speed
    kept = {r.mlx_version: r.throughput_tok_s for r in BenchmarkDatabase(db.storage_dir).records.values()}
    assert kept == {"0.32.4": 3.0, "0.31.2": 4.0}
    assert len(db.records) == 2


@pytest.mark.parametrize("context", [0, -1, 2**40, pytest.param(10**5000, id="too long to print"), 1.5, "4096", None])
def test_add_names_the_field_it_refuses(db: BenchmarkDatabase, context: Any) -> None:
    """And has written nothing."""
    with pytest.raises(RecordInvalid) as caught:
        db.add("fp16", "m/x", context_length=context)
    assert caught.value.field == "context_length"
    assert not db.storage_dir.exists()


@pytest.mark.parametrize("tags", ["fast", 7, [1], {"a": 1}])
def test_tags_are_a_list_of_words(db: BenchmarkDatabase, tags: Any) -> None:
    """With a model, too, which may add one of its own."""
    model = ModelProfile(model_id="m/x", num_parameters=5)
    with pytest.raises(RecordInvalid) as caught:
        db.add("fp16", "m/x", context_length=1, tags=tags, model=model)
    assert caught.value.field == "tags"


def test_upsert_takes_records_only(db: BenchmarkDatabase) -> None:
    """Not their JSON form."""
    with pytest.raises(RecordInvalid, match="BenchmarkRecord"):
        db.upsert(BenchmarkRecord("x", "fp16", "m/x").to_dict())  # type: ignore[arg-type]


def test_a_model_is_a_profile(db: BenchmarkDatabase) -> None:
    """Its name alone says nothing of architecture and size."""
    with pytest.raises(RecordInvalid) as caught:
        db.add("fp16", "m/x", context_length=1, model="m/x")  # type: ignore[arg-type]
    assert caught.value.field == "model"


@pytest.mark.parametrize("field", ["method", "model_id", "chip"])
def test_add_refuses_what_has_no_fingerprint(db: BenchmarkDatabase, field: str) -> None:
    """Words must be words before they are hashed."""
    with pytest.raises(RecordInvalid) as caught:
        db.add(**({"method": "fp16", "model_id": "m/x", "context_length": 1} | {field: 7}))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_save_writes_what_was_changed_in_memory(db: BenchmarkDatabase, fill: Fill) -> None:
    """And only that: other files keep their very bytes, however they were formatted."""
    changed, same = fill(db, 2)
    other = db.records_dir / f"{same}.json"
    other.write_bytes(other.read_bytes().replace(b"\n", b" "))
    before = other.stat().st_mtime_ns
    db.load()
    db.records[changed].throughput_tok_s = 12.5
    db.save()
    again = BenchmarkDatabase(db.storage_dir)
    assert again.records[changed].throughput_tok_s == 12.5
    assert other.stat().st_mtime_ns == before


def test_save_refuses_a_bad_change_before_writing_any(db: BenchmarkDatabase, fill: Fill) -> None:
    """All or nothing, as far as values go."""
    for number, record_id in enumerate(fill(db, 2)):
        db.records[record_id].throughput_tok_s = (5.0, -1.0)[number]
    with pytest.raises(RecordInvalid, match="throughput_tok_s"):
        db.save()
    assert {r.throughput_tok_s for r in BenchmarkDatabase(db.storage_dir).records.values()} == {0.0}


def test_save_of_nothing_makes_an_empty_store(db: BenchmarkDatabase, in_index: Callable[[Path], set[str]]) -> None:
    """As the document has it: the whole store, however small."""
    db.save()
    assert in_index(db.storage_dir) == set()


def test_save_neither_resurrects_nor_overwrites(db: BenchmarkDatabase, fill: Fill) -> None:
    """What another process deleted stays deleted, what it replaced stays replaced."""
    gone, replaced = fill(db, 2)
    other = BenchmarkDatabase(db.storage_dir)
    other.remove(gone)
    newer = other.records[replaced]
    newer.throughput_tok_s = 99.0
    other.upsert(newer)
    db.records[gone].throughput_tok_s = 1.0
    db.records[replaced].throughput_tok_s = 1.0
    db.save()
    assert db.find(gone) is None
    assert [r.throughput_tok_s for r in BenchmarkDatabase(db.storage_dir).records.values()] == [99.0]


SKIPPED = [
    (b"", "JSON"),
    (b'{"id": "bad", "method": "fp1', "JSON"),
    (b"[" * 60_000, "JSON"),
    (b"\xff\xfe{}", "JSON"),
    (b"[1, 2]", "object"),
    (b'{"id": "bad", "method": "m", "model_id": "m", "throughput_tok_s": NaN}', "throughput_tok_s is nan"),
    (b'{"id": "bad", "method": "m", "model_id": "m", "throughput_tok_s": 1e999}', "throughput_tok_s is inf"),
    (b'{"id": "bad", "method": "m", "model_id": "m", "note": NaN}', "strict JSON"),
    (b'{"id": "bad", "method": "m", "model_id": "m", "context_length": -5}', "context_length is -5"),
    (b'{"id": "bad", "method": "m", "model_id": "m", "memory_bytes": "1 GiB"}', "memory_bytes"),
    (b'{"id": "bad", "model_id": "m"}', "method"),
    (b'{"id": "bad", "method": "m", "model_id": "m", "memory_reduction": 81}', "memory_reduction is 81"),  # percent
    (b'{"id": "bad", "method": "m", "model_id": "m", "schema": "veloxquant.record/2"}', "schema is"),
    (b'{"id": "bad", "method": "m", "model_id": "m", "tags": ["' + b"x" * 70_000 + b'"]}', "more than 65536"),
]


@pytest.mark.parametrize(("content", "reason"), SKIPPED)
def test_r24_a_damaged_record_is_set_aside(db: BenchmarkDatabase, fill: Fill, content: bytes, reason: str) -> None:
    """With its reason; it hurts no other, and no save, add of its id, or clear touches it."""
    bad = write(db.storage_dir, "bad.json", content)
    good = fill(db, 2)
    db.load()
    assert reason in db.skipped["records/bad.json"]
    db.upsert(BenchmarkRecord("bad", "fp16", "m/x"))
    db.save()
    assert set(BenchmarkDatabase(db.storage_dir).records) == {*good, "bad"}
    db.clear()
    assert bad.read_bytes() == content
    assert list(db.records_dir.iterdir()) == [bad]


def test_r24_things_that_are_no_record_files(db: BenchmarkDatabase, fill: Fill, tmp_path: Path) -> None:
    """Folders, links and odd names are skipped with a reason; hidden and other files are not looked at."""
    good = set(fill(db, 1))
    folder = db.records_dir
    (folder / "folder.json").mkdir()
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps(BenchmarkRecord("linked", "fp16", "m/x").to_dict()))
    (folder / "link.json").symlink_to(elsewhere)
    (folder / "loop.json").symlink_to(folder / "loop.json")
    (folder / "a b.json").write_text("{}")
    for name in (".hidden.json", "._mac.json", "#draft.json", "x.json~", "x.json.swp", "4913", ".DS_Store", "README"):
        (folder / name).write_text("{")
    db.load()
    assert set(db.records) == good
    assert db.skipped == {
        "records/a b.json": "its name is not made of letters, digits and . _ - with a letter or digit first",
        "records/folder.json": "it is a folder",
        "records/link.json": "it is a symbolic link",
        "records/loop.json": "it is a symbolic link",
    }
    db.upsert(BenchmarkRecord("folder", "fp16", "m/x"))
    db.upsert(BenchmarkRecord("link", "fp16", "m/x"))
    assert set(BenchmarkDatabase(db.storage_dir).records) == good | {"folder", "link"}
    assert (folder / "link.json").is_symlink()
    assert db.remove("link")
    assert set(BenchmarkDatabase(db.storage_dir).records) == good | {"folder"}


def test_r26_two_files_of_one_id(db: BenchmarkDatabase) -> None:
    """The file named after the id serves, whatever the clocks say; removing the id removes both."""
    data = BenchmarkRecord("x", "fp16", "m/x", created_at="2030-01-01T00:00:00+00:00").to_dict()
    write(db.storage_dir, "copy.json", data)
    db.load()
    assert set(db.records) == {"x"}
    write(db.storage_dir, "x.json", data | {"created_at": "2020-01-01T00:00:00+00:00", "throughput_tok_s": 7.0})
    db.load()
    assert db.records["x"].throughput_tok_s == 7.0
    assert db.skipped == {"records/copy.json": "it has the id x, which x.json has too"}
    assert db.remove("x")
    assert BenchmarkDatabase(db.storage_dir).records == {}


def test_a_file_of_another_id_is_in_nobodys_way(db: BenchmarkDatabase) -> None:
    """A record stored where another id's file would be is not overwritten by that other id."""
    write(db.storage_dir, "y.json", BenchmarkRecord("x", "fp16", "m/x").to_dict())
    db.upsert(BenchmarkRecord("y", "fp16", "m/y"))
    again = BenchmarkDatabase(db.storage_dir)
    assert {key: record.model_id for key, record in again.records.items()} == {"x": "m/x", "y": "m/y"}


def test_a_repaired_file_serves_again(db: BenchmarkDatabase) -> None:
    """Nothing is remembered against it."""
    write(db.storage_dir, "x.json", b"{")
    db.load()
    assert db.records == {}
    write(db.storage_dir, "x.json", BenchmarkRecord("x", "fp16", "m/x").to_dict())
    db.load()
    assert set(db.records) == {"x"}
    assert db.skipped == {}


def test_not_a_folder(tmp_path: Path) -> None:
    """A file in the way, at the root or below, is a typed error with a way out."""
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(StoreUnavailable, match="not a folder") as caught:
        BenchmarkDatabase(file)
    assert caught.value.hint
    with pytest.raises(StoreUnavailable):
        BenchmarkDatabase(file / "below").add("fp16", "m/x", context_length=1)
    (tmp_path / "records").write_text("mine")
    with pytest.raises(StoreUnavailable):
        BenchmarkDatabase(tmp_path)
    assert file.read_text() == "mine"
    with pytest.raises(StoreUnavailable, match="no path") as caught:
        BenchmarkDatabase(f"{tmp_path}/a\0b")
    assert str(tmp_path) in caught.value.message
