"""Files of the agent on a disk that fails, sockets that are left behind, and what launchd holds against a file."""

from __future__ import annotations

import errno
import os
import plistlib
import socket
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.errors import ServiceFailed, ServiceRefused
from veloxquant.service import files, installed, launchd_faults, places
from veloxquant.service.values import LABEL, UNIT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def failing(code: int) -> Callable[..., Any]:
    """A system call that always fails."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written whole is not written."""
    path = tmp_path / "a.plist"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", failing(errno.ENOSPC))
    with pytest.raises(ServiceRefused, match=r"a\.plist cannot be written: No space left"):
        files.Staged(path, b"new")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("a.plist", b"old")]


def test_a_place_that_is_taken_by_a_folder_is_an_error(tmp_path: Path) -> None:
    """The rename fails, and what was staged goes."""
    path = tmp_path / "a.plist"
    path.mkdir()
    with files.Staged(path, b"new") as staged, pytest.raises(ServiceRefused, match="Is a directory"):
        staged.publish()
    assert [one.name for one in tmp_path.iterdir()] == ["a.plist"]


def test_what_is_staged_is_no_name_that_a_manager_reads(tmp_path: Path) -> None:
    """Managers look at endings; a login in that very moment must not load half an agent."""
    with files.Staged(tmp_path / "a.plist", b"new"):
        (staged,) = tmp_path.iterdir()
        assert staged.name.startswith(".a.plist.")
        assert staged.suffix == ".new"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("next_step", ["stage", "remove"])
def test_what_a_killed_install_had_staged_goes(tmp_path: Path, next_step: str) -> None:
    """A kill -9 removes nothing; the next install or removal does, and takes nothing of others."""
    path = tmp_path / "a.plist"
    names = [".a.plist.x1y2.new", ".b.plist.x1y2.new", "a.plist.new", ".a.plist.swp"]
    for name in names:
        (tmp_path / name).touch()
    if next_step == "stage":
        with files.Staged(path, b"new") as staged:
            staged.publish()
        assert files.remove(path)
    else:
        assert not files.remove(path)
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(names[1:])


def test_a_file_that_others_may_write_is_not_the_same(tmp_path: Path) -> None:
    """It would be refused by launchd, so an install writes it anew."""
    path = tmp_path / "a.plist"
    path.write_bytes(b"x")
    path.chmod(0o644)
    assert files.same(path, b"x")
    path.chmod(0o664)
    assert not files.same(path, b"x")
    assert not files.same(tmp_path / "absent", b"x")


def test_what_cannot_be_removed_is_an_error(tmp_path: Path) -> None:
    """With the folder to mend."""
    (tmp_path / "a").mkdir()
    with pytest.raises(ServiceRefused, match="cannot be removed"):
        files.remove(tmp_path / "a")
    assert not files.remove(tmp_path / "absent")


def test_a_socket_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """A file stands in its way."""
    (tmp_path / "a").touch()
    with pytest.raises(ServiceFailed, match=r"socket's folder .* cannot be made"):
        files.private_folder(tmp_path / "a" / "b")


def test_a_socket_is_removed_only_if_nobody_listens(short_folder: Path) -> None:
    """Neither one that answers, nor a file of another kind, nor a link."""
    path = short_folder / "d.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        files.remove_dead_socket(path)
        assert path.exists()
    link = short_folder / "link"
    link.symlink_to(path)
    plain = short_folder / "plain"
    plain.touch()
    for other in (link, plain, short_folder / "absent"):
        files.remove_dead_socket(other)
    assert (link.is_symlink(), plain.exists(), path.exists()) == (True, True, True)
    files.remove_dead_socket(path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (None, "No such file"),
        (b"x", "no property list"),
        (plistlib.dumps({"Label": LABEL, "ProgramArguments": ["veloxquantd"]}), "by its absolute path"),
        (plistlib.dumps({"Label": LABEL, "ProgramArguments": ["/x"]}), None),
    ],
)
def test_what_launchd_holds_against_a_file(content: bytes | None, wrong: str | None, tmp_path: Path) -> None:
    """The cause of an Input/output error, as far as it can be seen in the file."""
    path = tmp_path / "a.plist"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o644)
    tmp_path.chmod(0o755)
    found = launchd_faults.bad_file(path)
    assert found is None if wrong is None else wrong in str(found)
    if wrong is None:
        tmp_path.chmod(0o777)
        assert "others could change the file" in str(launchd_faults.bad_file(path))


def test_launchd_takes_no_link(tmp_path: Path) -> None:
    """What is at the path must be the file itself."""
    real = tmp_path / "real"
    real.write_bytes(plistlib.dumps({"Label": LABEL, "ProgramArguments": ["/x"]}))
    (tmp_path / "a.plist").symlink_to(real)
    assert launchd_faults.bad_file(tmp_path / "a.plist") == "not a plain file"


@pytest.mark.parametrize("platform", ["darwin", "linux"])
@pytest.mark.parametrize("what", ["pipe", "endless"])
def test_what_is_no_file_of_the_agents_is_refused_at_once(tmp_path: Path, platform: str, what: str) -> None:
    """A pipe in its place makes nobody wait, and a file of any size is not read to its end."""
    env = {"HOME": str(tmp_path)}
    place = places.launch_agent(env) if platform == "darwin" else places.unit_folder(env) / UNIT
    place.parent.mkdir(parents=True)
    if what == "pipe":
        os.mkfifo(place)
    else:
        place.write_bytes(b" " * (files.MOST_BYTES + 1))
    with pytest.raises(ServiceRefused, match="regular file" if what == "pipe" else "longer than"):
        installed(env, platform)
    assert not files.same(place, b"")
