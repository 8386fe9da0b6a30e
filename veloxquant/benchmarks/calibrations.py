"""Calibrations beside the records: one file a model in a folder of the benchmark directory, written whole or not.

`<directory>/calibrations/<model id>-<16 hex digits of the config's hash>.json`, of mode 0600 in a folder of mode 0700.
What is broken, foreign or of a later version is told of and left alone. The store of records has no part in this
folder: it neither lists, nor evicts, nor merges what lies here.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from veloxquant.benchmarks.storage import (
    RECORD_NAME,
    Signature,
    check_writers,
    drop,
    flush_folder,
    make_folder,
    placed,
    reaching,
    signature,
    write_aside,
)
from veloxquant.errors import InvalidParams, StoreUnavailable
from veloxquant.plain_file import NotPlain, open_plain
from veloxquant.profiles.calibration import CALIBRATION_SCHEMA, Calibration

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CALIBRATIONS = "calibrations"
"""The folder's name in the benchmark directory."""
MAX_FILE_BYTES = 16 * 2**20
"""A model of 128 layers and 32 KV heads of width 128 takes about 4 MiB."""
MAX_FILES = 512
MAX_BYTES = 64 * 2**20
"""Of all files together: the daemon holds what is in them, at some four times their length."""
_STALE_S = 3600.0
_TICK_NS = 2 * 10**9
"""More than any file system's clock is coarse."""
_NAME_LETTERS = 100
_STRANGE = re.compile(r"[^A-Za-z0-9._-]+")

_Key = tuple[str, str]


class _Read(NamedTuple):
    """A file as it was read: its calibration, or why there is none."""

    seen: Signature
    found: Calibration | None
    problem: str = ""
    sure: bool = False
    """It was not written just now: an equal signature tells that it is still the same."""


class _Unfit(Exception):
    """This file holds no calibration for us; the text says why. Never leaves the room."""


class Calibrations:
    """Those of one benchmark directory, as last looked at. Raises StoreUnavailable for a ~ that leads nowhere."""

    def __init__(self, directory: Path | str) -> None:
        self.folder = placed(directory) / CALIBRATIONS
        self.known: Mapping[_Key, Calibration] = {}
        """By (model id, config hash); another object after a change."""
        self.skipped: Mapping[str, str] = {}
        """File name -> why it is not used."""
        self.trouble: str | None = None
        """Why the folder cannot be read; what was known before stays known."""
        self._read: dict[str, _Read] = {}

    def look(self) -> bool:
        """Read what has changed; whether other calibrations are known now than before. Never raises."""
        try:
            for folder in (self.folder.parent, self.folder):
                check_writers(folder)
            names = _names(self.folder)
        except StoreUnavailable as error:
            self.trouble = f"the calibrations are not read: {error.message}"
            return False
        except OSError as error:
            self.trouble = f"the calibrations in {self.folder} cannot be read: {error.strerror or error}"
            return False
        self.trouble = None
        fit = [name for name in names if RECORD_NAME.fullmatch(name) is not None]
        kept, left = fit[:MAX_FILES], fit[MAX_FILES:]
        self._read = self._read_all(kept)
        self.skipped = {
            **{name: one.problem for name, one in self._read.items() if one.found is None},
            **dict.fromkeys(left, f"there are more than {MAX_FILES} files"),
            **{ascii(name)[1:-1]: "its name is none that we give" for name in names if name not in fit},
        }
        before, known = self.known, {_key(one.found): one.found for one in self._read.values() if one.found is not None}
        if known == before:
            return False
        self.known = known
        return True

    def _read_all(self, names: list[str]) -> dict[str, _Read]:
        found: dict[str, _Read] = {}
        room = MAX_BYTES
        for name in names:
            one = _again(self.folder / name, self._read.get(name), room)
            if one is not None:
                found[name] = one
                room -= 0 if one.found is None else one.seen.size
        return found

    def put(self, calibration: Calibration) -> Path:
        """Keep it in the place of an earlier one of this model, for good when this returns. Raises StoreUnavailable."""
        path = self.folder / file_name(calibration)
        data = msgspec.json.encode(calibration)
        if len(data) > MAX_FILE_BYTES:
            raise StoreUnavailable(
                f"a calibration of {len(data)} bytes is more than the {MAX_FILE_BYTES} that are kept",
                hint="report which model this is",
            )
        self.make_ready()
        with reaching(path, "write"):
            aside = write_aside(path, data)
            try:
                aside.chmod(0o600)
                aside.replace(path)
            finally:
                drop(aside)
            flush_folder(self.folder)
        self._sweep()
        return path

    def make_ready(self) -> None:
        """Make the folder and try it, so that what cannot be written is told before a run. Raises StoreUnavailable."""
        is_new = not self.folder.is_dir()
        with reaching(self.folder, "create"):
            make_folder(self.folder)
            if is_new:
                self.folder.chmod(0o700)
        with reaching(self.folder, "write to"):
            drop(write_aside(self.folder / "ready", b"", durable=False))

    def _sweep(self) -> None:
        """Delete what killed writers left an hour ago or more."""
        with suppress(OSError):
            for stray in self.folder.glob(".vq-*.tmp"):
                if time.time() - stray.lstat().st_mtime > _STALE_S:
                    drop(stray)


def file_name(calibration: Calibration) -> str:
    """`org/name` of a config whose hash begins with 0123456789abcdef: org-name-0123456789abcdef.json."""
    slug = _STRANGE.sub("-", calibration.model_id).strip("-.")[:_NAME_LETTERS] or "model"
    digest = _STRANGE.sub("", calibration.config_hash)[:16] or "unknown"
    return f"{slug}-{digest}.json"


def _names(folder: Path) -> list[str]:
    """Those that may be calibrations, sorted. Raises OSError; a folder that does not exist is empty."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        return []
    return sorted(name for name in names if name.endswith(".json") and name[0] not in ".#")


def _again(path: Path, before: _Read | None, room: int) -> _Read | None:
    """A file, read if it is another than before and there is room for it; None when it is gone."""
    try:
        seen = signature(path.lstat())
    except FileNotFoundError:
        return None
    except OSError as error:
        return _Read(Signature(0, 0, 0, 0), None, f"it cannot be read: {error.strerror}")
    fits = min(seen.size, MAX_FILE_BYTES) <= room
    if fits and before is not None and before.sure and before.seen == seen:
        return before
    sure = fits and time.time_ns() - seen.ctime_ns > _TICK_NS
    try:
        return _Read(seen, _calibration(path, fits=fits), sure=sure)
    except FileNotFoundError:
        return None
    except _Unfit as why:
        return _Read(seen, None, str(why), sure)


def _calibration(path: Path, *, fits: bool) -> Calibration:
    if not fits:
        raise _Unfit(f"all together they may take {MAX_BYTES} bytes")
    data = _content(path)
    try:
        found = msgspec.json.decode(data, type=Calibration)
    except InvalidParams as error:
        raise _Unfit(error.message) from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _Unfit(_later(data) or f"it is no calibration: {error}") from error
    if file_name(found) != path.name:
        raise _Unfit(f"it is of {found.model_id}, and such a file is named {file_name(found)}")
    return found


def _content(path: Path) -> bytes:
    """Raises FileNotFoundError, and _Unfit for anything that is not a regular file of a size to read."""
    try:
        with open_plain(path, follow_link=False) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise
    except NotPlain as error:
        raise _Unfit(error.strerror) from error
    except OSError as error:
        why = "it is a symbolic link" if path.is_symlink() else f"it cannot be read: {error.strerror}"
        raise _Unfit(why) from error
    if len(data) > MAX_FILE_BYTES:
        raise _Unfit(f"it has more than {MAX_FILE_BYTES} bytes")
    return data


class _Marked(msgspec.Struct):
    schema: str


def _later(data: bytes) -> str | None:
    """What to say of a calibration of another version; None for what is none."""
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        schema = msgspec.json.decode(data, type=_Marked).schema
        if schema != CALIBRATION_SCHEMA:
            return f"its schema is {schema[:64]!r}, and this version reads {CALIBRATION_SCHEMA}"
    return None


def _key(calibration: Calibration) -> _Key:
    return calibration.model_id, calibration.config_hash
