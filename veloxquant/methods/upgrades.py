"""Plugins that change on disk under a running process: taken out of memory, so that the new files are imported.

Python imports a module once. A plugin of plain Python files can be forgotten and imported again: whoever still holds
its old objects keeps them, and everybody else gets the new ones. One with compiled parts cannot, nor one whose top
package belongs to several distributions; the process goes on with the code it has, and says so.
"""

from __future__ import annotations

import sys
from importlib.machinery import SOURCE_SUFFIXES
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.methods.plugin import Plugin, canonical

if TYPE_CHECKING:
    from types import ModuleType


_SHARED = frozenset({"veloxquant", "veloxquant_plugins", "msgspec", "pluggy", "psutil", "watchdog"})
"""What this process runs on, as it does on the standard library: an entry point may name any of it."""


class Running(NamedTuple):
    """What an import of a plugin gives from here on."""

    plugin: Plugin
    stamp: str | None
    warning: str | None = None
    """When that is not what is on disk, in a sentence."""


class Imported:
    """What this process has imported of each foreign plugin. One for the life of the process, as modules are."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[Plugin, str | None]] = {}

    def renew(self, plugin: Plugin, stamp: str | None) -> Running:
        """Forget the modules of a plugin that changed, where that is possible. To be called before any is imported."""
        key = canonical(plugin.distribution), plugin.name
        first = self._known.get(key, (plugin, stamp))
        if first != (plugin, stamp) and _is_imported(first[0]) and not _forget(first[0]):
            runs = first[0].version if first[0].version != plugin.version else "its earlier files"
            return Running(*first, f"{plugin.distribution}: this process runs {runs}; restart to use {plugin.label}")
        self._known[key] = plugin, stamp
        return Running(plugin, stamp)


def _is_imported(plugin: Plugin) -> bool:
    try:
        return plugin.module in sys.modules
    except AttributeError:  # a value that names no module; the fence says so
        return False


def _forget(plugin: Plugin) -> bool:
    """Take all of the plugin's top package out of sys.modules; whether that could be done."""
    top = plugin.module.partition(".")[0]
    if top in _SHARED or top in sys.stdlib_module_names:
        return False
    ours = {name: module for name, module in sys.modules.items() if name == top or name.startswith(f"{top}.")}
    if not all(_is_plain(module) for module in ours.values()):
        return False
    for name in ours:
        del sys.modules[name]
    return True


def _is_plain(module: ModuleType | None) -> bool:
    """From a source file: no compiled part, which cannot be loaded twice, and no namespace that others share."""
    return str(getattr(module, "__file__", None) or "").endswith(tuple(SOURCE_SUFFIXES))
