"""Who may write: everybody, a group of several, or nobody else."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest

from veloxquant import ownership

ME = 501
"""A user u whose private group u is 501; root's is 0, staff (20) is everybody's, wheel-like `team` has two members."""


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users and groups as a system lists them."""
    groups = {0: ("root", []), ME: ("u", []), 20: ("staff", ["root"]), 600: ("team", ["u", "w"]), 601: ("u", ["w"])}

    def group(number: int) -> grp.struct_group:
        name, members = groups[number]
        return grp.struct_group((name, "x", number, members))

    monkeypatch.setattr(grp, "getgrgid", group)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd(("u", "x", uid, ME, "", "/home/u", "/bin/sh")))


def facts(mode: int, group: int = ME) -> os.stat_result:
    """What stat says of a file of this mode and group."""
    return os.stat_result((0o100000 | mode, 1, 1, 1, ME, group, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "group", "platform", "who"),
    [
        (0o600, ME, "linux", None),
        (0o755, 20, "darwin", None),
        (0o664, ME, "linux", None),  # umask 002 and a private group: Debian, Ubuntu, Fedora
        (0o666, ME, "linux", "everybody"),
        (0o602, ME, "linux", "everybody"),
        (0o664, 20, "darwin", "group staff"),  # every user of a Mac is in staff
        (0o664, 600, "linux", "group team"),
        (0o664, 601, "linux", "group u"),  # named after the user, and somebody else is in it
        (0o664, 0, "linux", None),
        (0o775, 0, "darwin", None),  # wheel
        (0o775, 80, "darwin", None),  # admin: /Applications, /opt/homebrew
        (0o775, 80, "linux", "group 80"),
        (0o664, 777, "linux", "group 777"),  # no such group
    ],
)
@pytest.mark.usefixtures("accounts")
def test_who_may_write_by_its_mode(mode: int, group: int, platform: str, who: str | None) -> None:
    """A group with nobody else in it is nobody else."""
    assert ownership.others(facts(mode, group), platform) == who


@pytest.mark.usefixtures("accounts")
def test_an_unknown_user_has_no_group_but_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a made-up user id, in which all belongs to group 0."""

    def nobody(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert ownership.others(facts(0o664, ME), "linux") == "group u"
    assert ownership.others(facts(0o664, 0), "linux") is None


def test_a_private_path_is_not_exposed(short_folder: Path) -> None:
    """The sticky /tmp above it is no harm: others cannot take our folder away."""
    (short_folder / "a").mkdir(mode=0o755)
    place = short_folder / "a" / "file"
    place.touch(0o600)
    assert ownership.exposed(place) is None


@pytest.mark.parametrize("which", ["", "a", "a/b", "a/b/file"])
def test_every_step_to_the_file_counts(short_folder: Path, which: str) -> None:
    """Whoever can write a folder above can put another one in its place."""
    (short_folder / "a" / "b").mkdir(parents=True)
    place = short_folder / "a" / "b" / "file"
    place.touch(0o600)
    (short_folder / which).chmod(0o777)
    found = ownership.exposed(place)
    assert found == (short_folder / which, "everybody")
    assert found is not None
    assert found.hint == f"chmod go-w '{short_folder / which}'"


def test_the_sticky_bit_does_not_close_the_last_folder(short_folder: Path) -> None:
    """Others cannot take away what is in it, and can add."""
    (short_folder / "a").mkdir()
    (short_folder / "a").chmod(0o1777)
    assert ownership.exposed(short_folder / "a") == (short_folder / "a", "everybody")
    (short_folder / "a" / "file").touch(0o600)
    assert ownership.exposed(short_folder / "a" / "file") is None


def test_links_are_followed_through_every_folder(short_folder: Path) -> None:
    """A link is only as good as the folder it lies in, and each one that it passes on its way."""
    for name in ("open", "good"):
        (short_folder / name).mkdir(mode=0o700)
    (short_folder / "good" / "file").touch(0o600)
    (short_folder / "open" / "hop").symlink_to(Path("..") / "good")
    (short_folder / "start").symlink_to(short_folder / "open" / "hop")
    assert ownership.exposed(short_folder / "start" / "file") is None
    (short_folder / "open").chmod(0o777)
    assert ownership.exposed(short_folder / "start" / "file") == (short_folder / "open", "everybody")


def test_a_circle_of_links_and_a_missing_file_are_system_errors(short_folder: Path) -> None:
    """Whoever asks has opened the file before, and says what is wrong with it."""
    (short_folder / "a").symlink_to("b")
    (short_folder / "b").symlink_to("a")
    for name in ("a", "missing"):
        with pytest.raises(OSError):  # noqa: PT011 -- ELOOP, ENOENT
            ownership.exposed(short_folder / name)


def test_what_is_ours_and_private_needs_no_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the sentence goes on after its name: whose it is, or with which mode it is open."""
    tmp_path.chmod(0o700)
    facts = tmp_path.stat()
    assert ownership.foreign(facts) is None
    assert ownership.not_private(facts) is None
    tmp_path.chmod(0o710)
    assert ownership.not_private(tmp_path.stat()) == "is open to others (mode 0710)"
    monkeypatch.setattr(os, "geteuid", lambda: facts.st_uid + 1)
    assert ownership.foreign(facts) == f"belongs to user id {facts.st_uid}, not to you ({facts.st_uid + 1})"
