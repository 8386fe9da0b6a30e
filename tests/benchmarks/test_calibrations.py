"""Calibrations beside the records: kept whole, read again when they change, never fatal, never in the records' way."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from veloxquant.benchmarks import calibrations
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.benchmarks.calibrations import Calibrations, file_name
from veloxquant.benchmarks.verify import verify
from veloxquant.errors import StoreUnavailable
from veloxquant.profiles.calibration import Calibration, LayerSensitivity

if TYPE_CHECKING:
    from collections.abc import Callable

HASH = "0123456789abcdef" * 4
LAYER = LayerSensitivity(
    index=0, key=((0.2, 0.1),), value=((0.3, 0.1),), key_order=((1, 0),), key_classes=((0.1, 0.05), (0.1, 0.05))
)


def calibration(model_id: str = "org/model", **changes: Any) -> Calibration:
    """Of one layer with one head of width 2."""
    given = {"config_hash": HASH, "tokens": 512, "text": "a test", "bits": (2, 4), "layers": (LAYER,)} | changes
    return Calibration(model_id=model_id, architecture="llama", **given)


def test_what_is_put_is_found_by_model_and_config(tmp_path: Path) -> None:
    """In a file named after both, for this user alone; another store of the directory finds it, too."""
    store = Calibrations(tmp_path)
    path = store.put(calibration())
    assert path == tmp_path / "calibrations" / "org-model-0123456789abcdef.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for one in (store, Calibrations(tmp_path)):
        assert one.look()
        assert one.known == {("org/model", HASH): calibration()}
        assert (one.skipped, one.trouble) == ({}, None)
        assert not one.look()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_later_one_takes_the_place_of_the_earlier(tmp_path: Path) -> None:
    """Of the same model and config; another model's stays."""
    store = Calibrations(tmp_path)
    for one in (calibration(), calibration("org/other"), calibration(tokens=1024)):
        store.put(one)
        assert store.look()
    assert {key[0]: one.tokens for key, one in store.known.items()} == {"org/model": 1024, "org/other": 512}


def test_a_file_that_goes_is_forgotten(tmp_path: Path) -> None:
    """At the next look."""
    store = Calibrations(tmp_path)
    path = store.put(calibration())
    store.look()
    path.unlink()
    assert store.look()
    assert store.known == {}


def test_a_directory_without_any_has_none(tmp_path: Path) -> None:
    """And is not made by looking."""
    store = Calibrations(tmp_path / "new")
    assert not store.look()
    assert (store.known, store.trouble) == ({}, None)
    assert not (tmp_path / "new").exists()


def _as_link(path: Path) -> None:
    (path.parent / "elsewhere").write_bytes(msgspec.json.encode(calibration()))
    path.symlink_to(path.parent / "elsewhere")


def _text(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


WHOLE = msgspec.json.encode(calibration())


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (_text(b""), "it is no calibration"),
        (_text(WHOLE[:-1]), "it is no calibration"),
        (_text(b"[" * 100_000), "it is no calibration"),
        (_text(b"\xff\xfe"), "it is no calibration"),
        (_text(WHOLE.replace(b"calibration.v1", b"calibration.v2")), "its schema is 'veloxquant.calibration.v2'"),
        (_text(WHOLE.replace(b"0.3", b"-1.0")), "negative or no number"),
        (_text(WHOLE.replace(b"[2,4]", b"[4,2]")), "not ascending"),
        (_text(WHOLE.replace(b"[1,0]", b"[1,1]")), "does not name each channel once"),
        (_text(WHOLE.replace(b"org/model", b"org/other")), "it is of org/other, and such a file is named"),
        (_text(b" " * (calibrations.MAX_FILE_BYTES + 1)), "it has more than"),
        (lambda path: path.mkdir(), "it is not a regular file|Is a directory"),
        (os.mkfifo, "it is not a regular file"),
        (_as_link, "it is a symbolic link"),
    ],
)
def test_what_is_no_calibration_of_ours_is_told_and_left_alone(
    tmp_path: Path, write: Callable[[Path], object], why: str
) -> None:
    """Broken, foreign and later files keep no other from being used."""
    store = Calibrations(tmp_path)
    store.put(calibration("org/good"))
    path = store.folder / file_name(calibration())
    write(path)
    assert store.look()
    assert list(store.known) == [("org/good", HASH)]
    assert re.search(why, store.skipped[path.name])
    assert os.path.lexists(path)


def test_hidden_files_and_other_names_are_not_read(tmp_path: Path) -> None:
    """Backups and notes of a person are left out; a name that we do not give is told in plain letters."""
    store = Calibrations(tmp_path)
    store.put(calibration())
    (store.folder / ".hidden.json").write_bytes(WHOLE)
    (store.folder / "notes.txt").write_bytes(WHOLE)
    (store.folder / "with space.json").write_bytes(WHOLE)
    Path(os.fsdecode(os.fsencode(store.folder) + b"/\xff.json")).write_bytes(WHOLE)
    store.look()
    assert len(store.known) == 1
    assert store.skipped == {
        "with space.json": "its name is none that we give",
        "\\udcff.json": "its name is none that we give",
    }


def test_a_broken_file_that_is_mended_is_read(tmp_path: Path) -> None:
    """Edited in place, within the same moment."""
    store = Calibrations(tmp_path)
    path = store.put(calibration())
    path.write_bytes(WHOLE.replace(b"512", b"51x"))
    store.look()
    assert store.known == {}
    path.write_bytes(WHOLE.replace(b"512", b"513"))
    assert store.look()
    assert [one.tokens for one in store.known.values()] == [513]


def test_only_so_many_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their names; the others are told."""
    monkeypatch.setattr(calibrations, "MAX_FILES", 2)
    store = Calibrations(tmp_path)
    for name in "abc":
        store.put(calibration(name))
    store.look()
    assert [key[0] for key in store.known] == ["a", "b"]
    assert list(store.skipped.values()) == ["there are more than 2 files"]


def test_only_so_many_bytes_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 files of 16 MiB would take the daemon tens of GiB; room that comes back is used."""
    store = Calibrations(tmp_path)
    sizes = [store.put(calibration(name)).stat().st_size for name in "abc"]
    monkeypatch.setattr(calibrations, "MAX_BYTES", sum(sizes[:2]))
    store.look()
    assert [key[0] for key in store.known] == ["a", "b"]
    assert list(store.skipped.values()) == [f"all together they may take {sum(sizes[:2])} bytes"]
    (store.folder / calibrations.file_name(calibration("a"))).unlink()
    store.look()
    assert [key[0] for key in store.known] == ["b", "c"]


def test_a_folder_that_cannot_be_read_leaves_what_was_known(tmp_path: Path) -> None:
    """With a sentence that says why."""
    store = Calibrations(tmp_path)
    store.put(calibration())
    store.look()
    store.folder.rename(tmp_path / "away")
    store.folder.write_text("in the way")
    assert not store.look()
    assert len(store.known) == 1
    assert "cannot be read: Not a directory" in str(store.trouble)
    with pytest.raises(StoreUnavailable):
        store.put(calibration())


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and nothing beside it, an interrupt included."""
    store = Calibrations(tmp_path)
    path = store.put(calibration())

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        store.put(calibration(tokens=7))
    assert path.read_bytes() == WHOLE
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_strange_model_ids_give_plain_names() -> None:
    """No id leads out of the folder, hides the file or makes a name that is too long."""
    for strange in ("../../etc/passwd", "..", "", ".hidden", "a" * 1000, "ä/\n\0"):
        name = file_name(calibration(strange, config_hash="../x"))
        assert calibrations.RECORD_NAME.fullmatch(name)
        assert len(name) < 140


def test_the_store_of_records_leaves_the_folder_alone(tmp_path: Path) -> None:
    """Its scan, its index, its check, its bounds and a merge: the file stays, and is no record."""
    path = Calibrations(tmp_path).put(calibration())
    (path.parent / "broken.json").write_text("{")
    database = BenchmarkDatabase(tmp_path)
    database.save()
    database.load()
    database.prune()
    assert (database.records, database.skipped) == ({}, {})
    found = verify(tmp_path)
    assert "broken" not in repr(found)
    assert "calibration" not in repr(found)
    other = BenchmarkDatabase(tmp_path / "other")
    other.merge(database.records.values())
    other.save()
    assert not (tmp_path / "other" / "calibrations").exists()
    assert path.read_bytes() == WHOLE
