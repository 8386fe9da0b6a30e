"""Whose is what we rely on, and who may write it. Nobody but its user and root should, or they decide in our place.

A mode tells: everybody, or a group. A group counts as nobody else when it is the user's own (the name of the user, no
other member: what useradd makes, and why umask 002 is harmless there), root's, or macOS's `admin`, whose members become
root when they wish. See docs/decisions/0012-who-may-write.md.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT_GROUP = 0
_DARWIN_ADMIN_GROUP = 80
_MOST_LINKS = 40


class Exposed(NamedTuple):
    """A path that others can write, or can put something else in the place of."""

    path: Path
    who: str

    @property
    def reason(self) -> str:
        """What is wrong, after the name of what it is about."""
        return f"can be written by others: {self.path} is open to {self.who}"

    @property
    def hint(self) -> str:
        """The command that mends it."""
        return f"chmod go-w '{self.path}'"


def foreign(facts: os.stat_result) -> str | None:
    """What is wrong, after the name of what it is about, where it is not ours; None where it is."""
    if facts.st_uid == os.geteuid():
        return None
    return f"belongs to user id {facts.st_uid}, not to you ({os.geteuid()})"


def not_private(facts: os.stat_result) -> str | None:
    """What is wrong, after the name of what it is about, where others may even look into it; None where they cannot."""
    if facts.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(facts.st_mode):04o})"
    return None


def way_to_close(folder: Path, facts: os.stat_result) -> str | None:
    """The command that keeps others out; None for a folder that all share: to close /tmp would break the machine."""
    return None if facts.st_mode & stat.S_ISVTX else f"chmod 700 '{folder}'"


def others(facts: os.stat_result, platform: str = sys.platform) -> str | None:
    """Who besides its user and root may write what has this mode, None when nobody may."""
    if facts.st_mode & stat.S_IWOTH:
        return "everybody"
    if facts.st_mode & stat.S_IWGRP and not _is_private(facts.st_gid, platform):
        return f"group {_group_name(facts.st_gid)}"
    return None


def exposed(path: Path) -> Exposed | None:
    """This file or folder, or the first folder on the way to it, that others may write; None when there is none.

    Links are followed one by one, since each folder they pass decides where they end. A folder with the sticky bit is
    passed through: others cannot take away what is in it. Raises OSError for what cannot be looked at.
    """
    for step in _steps(path):
        facts = step.stat()
        is_shared = stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX and step != path
        who = None if is_shared else others(facts)
        if who is not None:
            return Exposed(step, who)
    return None


def _steps(path: Path) -> Iterator[Path]:
    """Every folder from the root on that the path leads through, and its end."""
    here, rest, links = Path("/"), list(reversed(path.absolute().parts[1:])), 0
    yield here
    while rest:
        name = rest.pop()
        if name == "..":
            here = here.parent
            continue
        there = here / name
        if not there.is_symlink():
            here = there
            yield here
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = there.readlink()
        here = Path("/") if target.is_absolute() else here
        rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _is_private(group: int, platform: str) -> bool:
    if platform == "darwin" and group == _DARWIN_ADMIN_GROUP:
        return True
    try:
        known = grp.getgrgid(group)
    except KeyError:  # a number without a name: nobody says who is in it
        return False
    user = _user_name()
    return (group == _ROOT_GROUP or known.gr_name == user) and set(known.gr_mem) <= {user, "root"}


def _user_name() -> str | None:
    """None for a number without a name, as containers make them up."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return None


def _group_name(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)
