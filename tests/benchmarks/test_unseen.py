"""What another program publishes by a rename between two of our looks is never deleted for what stood there before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.eviction import Limits


def publish(directory: Path, name: str, record_id: str, **fields: Any) -> None:
    """As any program may: write a temporary file, rename it."""
    given = {"method": record_id, "created_at": "2020-01-01T00:00:00+00:00"} | fields
    data = BenchmarkRecord(record_id, model_id="m/x", **given).to_dict()
    (directory / "records").mkdir(parents=True, exist_ok=True)
    temporary = directory / "records" / "publisher.tmp"
    temporary.write_text(json.dumps(data))
    temporary.replace(directory / "records" / name)


def test_remove_leaves_what_came_under_the_same_name(directory: Path) -> None:
    """run.json held "abc" when it was read and holds "def" now: there is no "abc" to delete any more."""
    publish(directory, "run.json", "abc")
    db = BenchmarkDatabase(directory)
    publish(directory, "run.json", "def")
    assert not db.remove("abc")
    assert set(db.records) == {"def"} == set(BenchmarkDatabase(directory).records)


def test_remove_deletes_each_file_that_still_has_the_id(directory: Path) -> None:
    """And only those."""
    for name in ("run.json", "copy.json", "abc.json", "abc.2.json"):
        publish(directory, name, "abc")
    db = BenchmarkDatabase(directory)
    publish(directory, "copy.json", "def")
    publish(directory, "abc.3.json", "abc")
    assert db.remove("abc")
    assert [path.name for path in db.records_dir.iterdir()] == ["copy.json"]


@pytest.mark.parametrize(
    "fields",
    [{"record_id": "abc", "tags": ["pinned"]}, {"record_id": "def", "created_at": "2022-01-01T00:00:00+00:00"}],
)
def test_eviction_leaves_what_came_under_the_same_name(
    directory: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """A pinned record, or one of another id, is in the place of what was to go: the next in order goes."""
    publish(directory, "run.json", "abc")
    publish(directory, "next.json", "next", created_at="2021-01-01T00:00:00+00:00")
    db = BenchmarkDatabase(directory, limits=Limits(2))
    publish(directory, "run.json", **fields)
    monkeypatch.setattr(db._store, "_trusted_until", float("inf"))
    db.upsert(BenchmarkRecord("new", "new", "m/x"))
    assert set(BenchmarkDatabase(directory).records) == {fields["record_id"], "new"}


def test_clear_leaves_what_comes_after_its_look(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first file goes, the second becomes another record."""
    for name in ("one", "two"):
        publish(directory, f"{name}.json", name)
    db = BenchmarkDatabase(directory)
    really, gone = Path.unlink, []

    def unlink(path: Path, *, missing_ok: bool = False) -> None:
        really(path, missing_ok=missing_ok)
        if path.suffix == ".json" and not gone:
            gone.append(path.name)
            publish(directory, "two.json" if path.name == "one.json" else "one.json", "def")

    monkeypatch.setattr(type(directory), "unlink", unlink)
    db.clear()
    assert len(gone) == 1
    assert set(db.records) == {"def"} == set(BenchmarkDatabase(directory).records)


def test_a_second_file_of_an_id_goes_with_clear(directory: Path) -> None:
    """It would serve in the place of the first, so it is no file set aside for good; one that holds no record is."""
    publish(directory, "abc.json", "abc")
    publish(directory, "copy.json", "abc")
    (directory / "records" / "bad.json").write_text("{")
    db = BenchmarkDatabase(directory)
    assert set(db.skipped) == {"records/copy.json", "records/bad.json"}
    db.clear()
    assert [path.name for path in db.records_dir.iterdir()] == ["bad.json"]
    assert BenchmarkDatabase(directory).records == {}
