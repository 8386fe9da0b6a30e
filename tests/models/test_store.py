"""Kept profiles: whole or none, whoever wrote the file and whatever the disk does."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest

from veloxquant.models import store
from veloxquant.profiles import CacheLayer, CachePart, ModelProfile

if TYPE_CHECKING:
    from pathlib import Path

KEY = "ab" * 32
PROFILE = ModelProfile(
    model_id="m",
    layers=(CacheLayer(index=0, engine_class="KVCache", parts=(CachePart(kind="kv", engine_class="KVCache"),)),),
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Equal, and the folder is made on the way."""
    store.write(tmp_path / "new" / "traces", KEY, PROFILE, complete=True)
    assert store.read(tmp_path / "new" / "traces", KEY) == PROFILE
    assert [path.name for path in (tmp_path / "new" / "traces").iterdir()] == [f"{KEY}.json"]


def test_nothing_is_read_where_nothing_is(tmp_path: Path) -> None:
    """A missing file and a missing folder are alike."""
    assert store.read(tmp_path, KEY) is None
    assert store.read(tmp_path / "absent", KEY) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"key":"x","complete":true,"profile":{"model_id":"m"}}',
        b'{"key":"%s","complete":true,"profile":{"model_id":5}}' % KEY.encode(),
        b'{"key":"%s","complete":true,"profile":{"model_id":"m"},"more":1}' % KEY.encode(),
    ],
)
def test_damaged_and_foreign_files_are_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    """Never an error: the next trace writes a good one."""
    (tmp_path / f"{KEY}.json").write_bytes(content)
    assert store.read(tmp_path, KEY) is None
    store.write(tmp_path, KEY, PROFILE, complete=True)
    assert store.read(tmp_path, KEY) == PROFILE


def test_a_file_under_another_name_is_foreign(tmp_path: Path) -> None:
    """The key inside must be the key asked for."""
    store.write(tmp_path, KEY, PROFILE, complete=True)
    (tmp_path / f"{KEY}.json").rename(tmp_path / f"{'cd' * 32}.json")
    assert store.read(tmp_path, "cd" * 32) is None


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_others_may_write_is_not_believed(tmp_path: Path, what: str) -> None:
    """A profile decides what is planned; it is traced again, and kept by whoever may write there."""
    store.write(tmp_path, KEY, PROFILE, complete=True)
    (file,) = tmp_path.iterdir()
    (file if what == "file" else tmp_path).chmod(0o777)
    assert store.read(tmp_path, KEY) is None


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_somebody_else_made_is_not_believed(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With XDG_CACHE_HOME=/tmp anybody can make the folder before we do; its mode says nothing then."""
    store.write(tmp_path, KEY, PROFILE, complete=True)
    (file,) = tmp_path.iterdir()
    if os.geteuid() == 0:
        os.chown(file if what == "file" else tmp_path, 12345, -1)
    else:
        stranger = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: stranger)
    assert store.read(tmp_path, KEY) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """A file stands where the folder should be; not even root can write there."""
    (tmp_path / "traces").write_bytes(b"")
    store.write(tmp_path / "traces", KEY, PROFILE, complete=True)
    assert store.read(tmp_path / "traces", KEY) is None


def test_a_full_disk_is_no_error_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write fails as it does on a full disk."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    store.write(tmp_path, KEY, PROFILE, complete=True)
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_profile_is_tried_again_after_ten_minutes(tmp_path: Path) -> None:
    """One whose probes were killed serves for a while; a complete one for good."""
    old = time.time() - 3600
    for complete, expected in ((False, None), (True, PROFILE)):
        store.write(tmp_path, KEY, PROFILE, complete=complete)
        assert store.read(tmp_path, KEY) == PROFILE
        os.utime(tmp_path / f"{KEY}.json", (old, old))
        assert store.read(tmp_path, KEY) == expected


def test_the_oldest_files_make_room(tmp_path: Path) -> None:
    """512 files are kept, leftovers of killed writers included."""
    for number in range(600):
        (tmp_path / f"{number}.tmp").write_bytes(b"")
        os.utime(tmp_path / f"{number}.tmp", (number, number))
    store.write(tmp_path, KEY, PROFILE, complete=True)
    assert len(list(tmp_path.iterdir())) == 513
    assert not (tmp_path / "0.tmp").exists()


def test_a_file_that_another_process_takes_away_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes make room at the same time: one finds a name whose file is gone."""
    entry = SimpleNamespace(stat=lambda **_: (tmp_path / "gone").stat(), path="gone")
    monkeypatch.setattr(os, "scandir", lambda _: contextlib.nullcontext([entry]))
    store.write(tmp_path, KEY, PROFILE, complete=True)
    assert store.read(tmp_path, KEY) == PROFILE


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    """Two writers of different profiles and a reader: every read is one of the two."""
    profiles = [msgspec.structs.replace(PROFILE, model_id=letter * 200_000) for letter in "ab"]
    store.write(tmp_path, KEY, profiles[0], complete=True)
    writers = [
        threading.Thread(target=lambda p=p: [store.write(tmp_path, KEY, p, complete=True) for _ in range(30)])
        for p in profiles
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert store.read(tmp_path, KEY) in profiles
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
