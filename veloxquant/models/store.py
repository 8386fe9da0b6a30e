"""Traced profiles on disk, one JSON file each. A file that is damaged or foreign is as good as none."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from typing import TYPE_CHECKING

import msgspec

from veloxquant import ownership, plain_file
from veloxquant.profiles.model import ModelProfile

if TYPE_CHECKING:
    from pathlib import Path

_MAX_FILE_BYTES = 16 * 2**20
_MAX_FILES = 512
_KEEP_INCOMPLETE_S = 600
"""A profile whose probes ran out of time or were killed is worth trying again, but not for every plan."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file holds. `key` is repeated inside, so that a renamed file is foreign."""

    key: str
    complete: bool
    profile: ModelProfile


_ENTRIES = msgspec.json.Decoder(_Entry)


def read(folder: Path, key: str) -> ModelProfile | None:
    """The profile kept under the key, None when there is none that can be used, or others may have written it."""
    path = folder / f"{key}.json"
    try:
        status = path.stat()
        if status.st_size > _MAX_FILE_BYTES or not _is_ours(status) or not _is_ours(folder.stat()):
            return None
        entry = _ENTRIES.decode(plain_file.read(path, _MAX_FILE_BYTES))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if entry.key != key or (not entry.complete and time.time() - status.st_mtime > _KEEP_INCOMPLETE_S):
        return None
    return entry.profile


def _is_ours(facts: os.stat_result) -> bool:
    """Nobody else made it or can write it: a cache folder may lie where others make folders (XDG_CACHE_HOME=/tmp)."""
    return facts.st_uid in (os.geteuid(), 0) and ownership.others(facts) is None


def write(folder: Path, key: str, profile: ModelProfile, *, complete: bool) -> None:
    """Keep the profile under the key: whole or not at all, whoever else writes. Never raises for the disk."""
    entry = msgspec.json.encode(_Entry(key=key, complete=complete, profile=profile))
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _forget_oldest(folder)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{key[:16]}-", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(entry)
            os.replace(name, folder / f"{key}.json")  # noqa: PTH105 -- a name, not a path, is at hand
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108 -- as above


def _forget_oldest(folder: Path) -> None:
    """Keep the newest files only; leftovers of killed writers go with them."""
    with os.scandir(folder) as found:
        files = [(_changed_ns(entry), entry.path) for entry in found]
    for _, path in sorted(files)[: max(0, len(files) - _MAX_FILES)]:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108 -- a name, not a path, is at hand


def _changed_ns(entry: os.DirEntry[str]) -> int:
    """When it was last written; 0 for what another process has just removed."""
    try:
        return entry.stat(follow_symlinks=False).st_mtime_ns
    except OSError:
        return 0
