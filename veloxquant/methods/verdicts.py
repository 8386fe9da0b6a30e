"""Verdicts of earlier probes, kept on disk, so that a plugin is tried out again only when it changed.

A good verdict holds while the plugin's own files stay as they are. A bad one holds for ten minutes at most and only
while nothing was installed or removed, since its cause may lie outside the plugin (a missing package, a busy machine).
Nothing here raises: without a disk every load simply probes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant import __version__
from veloxquant.methods.probe import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from veloxquant.methods.plugin import Plugin

BAD_FOR_S = 600.0
_MOST_FILES = 2000
"""A package of more files is not stamped, and so probed at every load: looking at it would cost more."""
_SKIPPED = ("__pycache__",)


def stamp(plugin: Plugin) -> str | None:
    """A digest of the plugin's version and of path, size and time of each of its files; None where they are unknown."""
    try:
        files = sorted(_files(plugin))
    except Exception:  # noqa: BLE001 -- fence: import finders are other people's code, and a bad value has no module
        return None
    if not files or len(files) > _MOST_FILES:
        return None
    return _digest([plugin.distribution, plugin.version, plugin.name, plugin.value, __version__, sys.version, files])


def recall(folder: Path, plugin: Plugin, stamped: str | None) -> Verdict | None:
    """The verdict of an earlier probe, None where there is none that still holds."""
    if stamped is None:
        return None
    path = _path(folder, plugin)
    try:
        kept = json.loads(path.read_text())
        age = time.time() - path.stat().st_mtime
        verdict = Verdict(ok=kept["ok"], reason=kept["reason"], took_s=kept["took_s"])
        if kept["stamp"] != stamped or not isinstance(verdict.ok, bool) or not isinstance(verdict.reason, str):
            return None
        fresh = 0 <= age <= BAD_FOR_S and kept["site"] == _site()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return verdict if verdict.ok or fresh else None


def remember(folder: Path, plugin: Plugin, stamped: str | None, verdict: Verdict) -> None:
    """Keep a verdict; a disk that cannot be written costs the next load a probe and nothing else."""
    if stamped is None:
        return
    kept = {"stamp": stamped, "site": _site(), "ok": verdict.ok, "reason": verdict.reason, "took_s": verdict.took_s}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder)
    except OSError:
        return
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(kept, file)
        temporary.replace(_path(folder, plugin))
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _path(folder: Path, plugin: Plugin) -> Path:
    return folder / f"{_digest([plugin.distribution, plugin.name, plugin.value])}.json"


def _files(plugin: Plugin) -> Iterator[tuple[str, int, int]]:
    """The files of the plugin's top package; finding a top package imports nothing."""
    spec = importlib.util.find_spec(plugin.module.partition(".")[0])
    if spec is None:
        return
    roots = list(spec.submodule_search_locations or ())
    if not roots and spec.origin:
        yield _look(spec.origin)
    for root in roots:
        yield from _walk(root)


def _walk(root: str) -> Iterator[tuple[str, int, int]]:
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIPPED]
        for name in names:
            yield _look(os.path.join(folder, name))  # noqa: PTH118 -- os.walk speaks strings; thousands of them


def _look(path: str) -> tuple[str, int, int]:
    seen = os.stat(path)  # noqa: PTH116 -- as above
    return path, seen.st_size, seen.st_mtime_ns


def _site() -> str:
    """A digest of the folders that are searched for imports: installing or removing anything changes it."""
    times: list[tuple[str, int]] = []
    for entry in sys.path:
        try:
            times.append((entry, os.stat(entry or ".").st_mtime_ns))  # noqa: PTH116 -- as above
        except OSError:
            continue
    return _digest(times)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
