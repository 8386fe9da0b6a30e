"""Names as attackers and file systems make them: none leads out of the directory, none hides another's record."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks import storage
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.merging import version_id
from veloxquant.benchmarks.validation import is_id
from veloxquant.errors import RecordInvalid

if TYPE_CHECKING:
    from collections.abc import Callable

HOSTILE = [
    "../escaped",
    "..",
    ".",
    "",
    "/absolute",
    "a/b",
    "a\\b",
    "a\0b",
    "a\nb",
    "a\n",
    ".hidden",
    "-dash",
    "~user",
    "x" * 129,
    "x" * 10_000,
    "caf\u00e9",  # one letter, or two in the other normal form: never two names for one file
    "cafe\u0301",
    "\ud800",
    "a:stream",
    "%2e%2e%2f",
    "$(id)",
    " ",
]


def short(name: str) -> str:
    """For the report of a test: without a backslash, which a second collection in one process would double."""
    return f"'{quote(name[:12], errors='surrogatepass')}'"


def around(directory: Path) -> set[Path]:
    """All that lies beside the directory, and in it beside the records."""
    return {path for path in directory.parent.rglob("*") if "records" not in path.parts}


@pytest.mark.parametrize("name", HOSTILE, ids=short)
def test_a_hostile_id_is_refused_everywhere(db: BenchmarkDatabase, name: str) -> None:
    """By the field's name, with nothing written or removed; as a question it is nobody's."""
    db.upsert(BenchmarkRecord("kept", "fp16", "m/x"))
    db.close()
    before = around(db.storage_dir)
    record = BenchmarkRecord(name, "fp16", "m/x")
    for write in (lambda: db.upsert(record), lambda: db.merge([record])):
        with pytest.raises(RecordInvalid) as caught:
            write()
        assert caught.value.field == "id"
    assert db.find(name) is None
    assert not db.remove(name)
    assert not db.pin(name)
    assert around(db.storage_dir) == before
    assert [path.name for path in db.records_dir.iterdir()] == ["kept.json"]


@pytest.mark.parametrize("name", [name for name in HOSTILE if "\ud800" not in name], ids=short)
def test_a_hostile_id_in_a_file_is_set_aside(db: BenchmarkDatabase, name: str) -> None:
    """Whatever the file is called."""
    db.records_dir.mkdir(parents=True)
    (db.records_dir / "plain.json").write_text(json.dumps({"id": name, "method": "fp16", "model_id": "m/x"}))
    db.load()
    assert db.records == {}
    assert "id is" in db.skipped["records/plain.json"]


@pytest.mark.parametrize("name", ["CON", "nul", "com1.txt", "a.", "x" * 128, "-mlx".join("ab")])
def test_odd_ids_that_are_plain_file_names_serve(db: BenchmarkDatabase, name: str) -> None:
    """Device names of another system are names like others; the longest one fits with what we add to it."""
    db.upsert(BenchmarkRecord(name, "fp16", "m/x"))
    assert set(BenchmarkDatabase(db.storage_dir).records) == {name}
    assert db.remove(name)
    assert list(db.records_dir.glob("*.json")) == []


@pytest.mark.parametrize("text", ["../../x", "/etc/passwd", "a\nb", "caf\u00e9", "x" * 5000, "..", "0.1/../../../y"])
def test_model_names_and_versions_never_name_a_file(db: BenchmarkDatabase, text: str) -> None:
    """What a record says of its model, method and versions is kept as it is, under an id that is safe."""
    before = around(db.storage_dir)
    first = db.add(text, text, context_length=1, mlx_version=text, chip=text)
    second = db.add(text, text, context_length=1, mlx_version="0.1", chip=text)
    assert first.id == second.id
    assert all(is_id(path.stem) for path in db.records_dir.glob("*.json"))
    assert {one.mlx_version for one in BenchmarkDatabase(db.storage_dir).records.values()} == {text, "0.1"}
    db.close()
    assert around(db.storage_dir) - before <= {db.storage_dir, *(db.storage_dir / n for n in ("index.json", ".lock"))}


@given(st.text(min_size=1), st.text())
def test_an_id_is_a_file_name_or_refused(record_id: str, version: str) -> None:
    """What is taken for an id stays one with any version behind it, and has no separator, dot in front or NUL."""
    if is_id(record_id):
        made = version_id(record_id, version)
        assert is_id(made)
        for one in (record_id, made):
            assert Path(f"{one}.json").name == f"{one}.json"
            assert one[0] not in ".-"
            assert one.isascii()
            assert len(one) <= 128


@pytest.mark.parametrize("name", ["a b.json", "caf\u00e9.json", "cafe\u0301.json", "x\n.json", "%00.json", "a:b.json"])
def test_files_of_odd_names_are_set_aside(db: BenchmarkDatabase, name: str) -> None:
    """A good record in it does not help: another system may have no such name, or two for it."""
    db.records_dir.mkdir(parents=True)
    (db.records_dir / name).write_text(json.dumps({"id": "x", "method": "fp16", "model_id": "m/x"}))
    db.load()
    assert db.records == {}
    assert list(db.skipped.values()) == [
        "its name is not made of letters, digits and . _ - with a letter or digit first"
    ]


@pytest.fixture
def caseless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that keeps the case of names and ignores it, as macOS' own does."""

    def spelled(path: Any, folder: int | None) -> Any:
        """The name as the folder has it."""
        parent, name = os.path.split(os.fspath(path))
        if not name.endswith(".json"):
            return path
        try:
            names = os.listdir(folder if folder is not None else parent)  # noqa: PTH208 -- of a descriptor, too
        except OSError:
            return path
        found = next((one for one in names if one.casefold() == name.casefold()), name)
        return os.path.join(parent, found)  # noqa: PTH118 -- text, as it came

    def wrap(name: str, *, folders: int = 1) -> None:
        really: Callable[..., Any] = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            paths = [spelled(path, options.get("dir_fd")) for path in arguments[:folders]]
            return really(*paths, *arguments[folders:], **options)

        monkeypatch.setattr(os, name, call)

    for name in ("open", "unlink", "stat", "lstat"):
        wrap(name)
    wrap("replace", folders=2)


def test_the_volume_of_these_tests_ignores_case(caseless: None, tmp_path: Path) -> None:
    """Or what follows would prove nothing."""
    (tmp_path / "Abc.json").write_text("x")
    assert storage.read_small(str(tmp_path / "aBC.json"))[0] == b"x"
    (tmp_path / "new").write_text("y")
    (tmp_path / "new").replace(tmp_path / "ABC.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Abc.json"]
    (tmp_path / "abc.json").unlink()
    with pytest.raises(FileNotFoundError):
        (tmp_path / "abc.json").stat()


def test_r26_ids_that_differ_in_case_only_are_two_records(caseless: None, db: BenchmarkDatabase) -> None:
    """On a volume that has one name for both: neither overwrites the other, and each goes alone."""
    for name, speed in (("Abc", 1.0), ("abc", 2.0), ("ABC", 3.0), ("abc", 4.0)):
        db.upsert(BenchmarkRecord(name, "fp16", "m/x", throughput_tok_s=speed))
    for each in (db, BenchmarkDatabase(db.storage_dir)):
        each.load()
        assert {key: one.throughput_tok_s for key, one in each.records.items()} == {"Abc": 1.0, "abc": 4.0, "ABC": 3.0}
        assert each.skipped == {}
    assert db.remove("Abc")
    db.load()
    assert set(db.records) == set(BenchmarkDatabase(db.storage_dir).records) == {"abc", "ABC"}
    assert db.skipped == {}


def test_r26_a_rename_in_case_only(caseless: None, db: BenchmarkDatabase) -> None:
    """The record goes on to serve, once; what is put and removed under its id is its file."""
    db.upsert(BenchmarkRecord("Abc", "fp16", "m/x"))
    held = db.records_dir / "aside"
    (db.records_dir / "Abc.json").rename(held)
    held.rename(db.records_dir / "aBC.json")
    for each in (db, BenchmarkDatabase(db.storage_dir)):
        each.load()
        assert set(each.records) == {"Abc"}
        assert each.skipped == {}
    db.upsert(BenchmarkRecord("Abc", "fp16", "m/x", throughput_tok_s=9.0))
    db.load()
    assert [one.throughput_tok_s for one in db.records.values()] == [9.0]
    assert db.skipped == {}
    assert len(list(db.records_dir.glob("*.json"))) == 1
    assert db.remove("Abc")
    assert list(db.records_dir.glob("*.json")) == []
    assert BenchmarkDatabase(db.storage_dir).records == {}
