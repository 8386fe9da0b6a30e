"""What a doctor's check says."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from veloxquant.config import Config

State = Literal["ok", "note", "failed"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One result: "ok"; "note", worth knowing and no obstacle; or "failed", with the fix."""

    state: State
    text: str
    fix: str = ""


if TYPE_CHECKING:
    Check = Callable[[Config], Finding]
    """Takes the configuration; must not block for longer than some seconds."""


def ok(text: str) -> Finding:
    """All is well."""
    return Finding(state="ok", text=text)


def note(text: str, fix: str = "") -> Finding:
    """Worth knowing."""
    return Finding(state="note", text=text, fix=fix)


def failed(text: str, fix: str) -> Finding:
    """Something to mend, and how."""
    return Finding(state="failed", text=text, fix=fix)


def existing(folder: Path) -> Path:
    """The folder, or its nearest ancestor that is there and can be seen; a file where one is in the way."""
    while not os.path.exists(folder) and folder != folder.parent:  # noqa: PTH110 -- Path's raises where it may not look
        folder = folder.parent
    return folder


def away(place: Path) -> str:
    """How to take what is in the way out of it, and lose nothing."""
    return f"move it away: mv '{place}' '{place}.moved'"


def way_to_write(place: Path, setting: str, error: OSError | None = None) -> str:
    """How this folder can be written again, by what keeps us from it, or what to set to have another."""
    elsewhere = f"set {setting} to a place that you can write"
    if not place.is_dir():
        return f"{place} is no folder, {away(place)}, or {elsewhere}"
    if (error is not None and error.errno == errno.EROFS) or os.statvfs(place).f_flag & os.ST_RDONLY:
        return f"{place} lies on a file system that is only read: mount it for writing, or {elsewhere}"
    if error is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free some space at {place}, or {elsewhere}"
    owner = place.stat().st_uid
    if owner != os.geteuid():
        return f"{place} belongs to user id {owner}: chown it to {os.geteuid()}, or {elsewhere}"
    return f"chmod u+rwx '{place}', or {elsewhere}"
