"""The files a plugin consists of: a stamp that changes with any of them, and whether others may write one.

Nothing is imported: finding a top package asks import finders alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from veloxquant import __version__, ownership

if TYPE_CHECKING:
    from collections.abc import Iterator

    from veloxquant.methods.plugin import Plugin

_MOST_FILES = 2000
"""A package of more files is not stamped, and so probed at every load: looking at it would cost more."""
_SKIPPED = ("__pycache__",)


class PluginFiles(NamedTuple):
    """What a look at a plugin's files found."""

    stamp: str | None
    """Of the version and of path, size and time of each file; None where they are unknown."""
    exposed: str | None = None
    """Which of them others may write and how that is mended, None when nobody may."""


class _Seen(NamedTuple):
    path: str
    size: int
    changed_ns: int
    who: str | None


def look(plugin: Plugin) -> PluginFiles:
    """Look at each file of the plugin's top package and at what announces it. Never raises."""
    try:
        roots = _roots(plugin)
        seen = sorted(one for root in roots for one in _walk(root))
    except Exception:  # noqa: BLE001 -- fence: import finders are other people's code, and a bad value has no module
        return PluginFiles(None, _exposed([plugin.metadata], []))
    exposed = _exposed([*roots, plugin.metadata], seen)
    if not seen or len(seen) > _MOST_FILES:
        return PluginFiles(None, exposed)
    files = [one[:3] for one in seen]
    known = [plugin.distribution, plugin.version, plugin.name, plugin.value, __version__, sys.version, files]
    return PluginFiles(digest(known), exposed)


def digest(value: object) -> str:
    """A short name for any JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def site() -> str:
    """A digest of the folders that are searched for imports: installing or removing anything changes it."""
    times: list[tuple[str, int]] = []
    for entry in sys.path:
        with contextlib.suppress(OSError):
            times.append((entry, os.stat(entry or ".").st_mtime_ns))  # noqa: PTH116 -- strings, at every load
    return digest(times)


def _roots(plugin: Plugin) -> list[str]:
    """The folders of the top package, or the file of a top module."""
    spec = importlib.util.find_spec(plugin.module.partition(".")[0])
    if spec is None:
        return []
    folders = list(spec.submodule_search_locations or ())
    return folders or ([spec.origin] if spec.origin else [])


def _walk(root: str) -> Iterator[_Seen]:
    if not os.path.isdir(root):  # noqa: PTH112 -- os.walk speaks strings; thousands of them
        yield _look(root)
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIPPED]
        for name in names:
            yield _look(os.path.join(folder, name))  # noqa: PTH118 -- as above


def _look(path: str) -> _Seen:
    facts = os.stat(path)  # noqa: PTH116 -- as above
    return _Seen(path, facts.st_size, facts.st_mtime_ns, ownership.others(facts))


def _exposed(places: list[str], seen: list[_Seen]) -> str | None:
    """The first place, folder on the way to one, or file that others may write."""
    for place in filter(None, places):
        with contextlib.suppress(OSError):  # a place inside an archive, or one that is gone
            found = ownership.exposed(Path(place))
            if found is not None:
                return f"it {found.reason}: {found.hint}"
    for one in seen:
        if one.who is not None:
            found = ownership.Exposed(Path(one.path), one.who)
            return f"it {found.reason}: {found.hint}"
    return None
