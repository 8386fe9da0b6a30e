"""The one hook a plugin implements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from veloxquant.methods.method import Method

PROJECT = "veloxquant"
ENTRY_POINT_GROUP = "veloxquant.methods"

hookspec = pluggy.HookspecMarker(PROJECT)


@hookspec
def veloxquant_methods() -> list[Method]:  # type: ignore[empty-body]
    """Called when plugins are loaded: once in the daemon, once in each trace worker and inference process.

    Returns the plugin's method objects, at most 32, each of a name that no other plugin uses.
    """
