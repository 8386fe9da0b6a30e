"""Which plugins are installed: reads entry points one distribution at a time and imports nothing."""

from __future__ import annotations

import importlib
from importlib.metadata import Distribution, distributions

from veloxquant.errors import quoted
from veloxquant.methods.fence import one_line, reason_of
from veloxquant.methods.hookspec import ENTRY_POINT_GROUP
from veloxquant.methods.plugin import Plugin, Quarantined, canonical

_LONGEST = 200
"""Characters of a name: they are shown, logged and answered."""


def discover() -> tuple[tuple[Plugin, ...], tuple[Quarantined, ...]]:
    """Every plugin of every distribution on sys.path, sorted, and the distributions whose metadata cannot be read.

    Of several copies of one distribution the first on sys.path counts, as it does for imports.
    """
    importlib.invalidate_caches()
    found: dict[str, frozenset[Plugin]] = {}
    unreadable: list[Quarantined] = []
    for distribution in distributions():
        try:
            plugins = _plugins(distribution)
        except Exception as error:  # noqa: BLE001 -- fence: one damaged installation must not hide all others
            unreadable.append(_unreadable(distribution, error))
            continue
        for plugin in plugins:
            found.setdefault(canonical(plugin.distribution), plugins)
    return tuple(sorted(plugin for plugins in found.values() for plugin in plugins)), tuple(unreadable)


def _plugins(distribution: Distribution) -> frozenset[Plugin]:
    text = distribution.read_text("entry_points.txt") or ""
    if ENTRY_POINT_GROUP not in text:  # the cheap look first: most distributions have no plugin
        return frozenset()
    points = [point for point in distribution.entry_points if point.group == ENTRY_POINT_GROUP]
    if not points:
        return frozenset()
    metadata = distribution.metadata  # read and parsed at each mention
    name, version = metadata["Name"], metadata["Version"]
    if not name:
        raise ValueError("its metadata has no name")
    for text in (name, version or "", *(text for point in points for text in (point.name, point.value))):
        if not text.isprintable() or len(text) > _LONGEST:
            raise ValueError(f"a name or version in it is no short text: {quoted(text)}")
    where = str(getattr(distribution, "_path", "") or "")  # no public name for it
    by_value = {point.value: point.name for point in sorted(points, key=lambda p: p.name, reverse=True)}
    return frozenset(Plugin(name, by_value[value], value, version or "", where) for value in by_value)


def _unreadable(distribution: Distribution, error: Exception) -> Quarantined:
    where = one_line(str(getattr(distribution, "_path", "") or "a distribution"))
    return Quarantined(where.rpartition("/")[2], where, f"its metadata cannot be read: {reason_of(error)}")
