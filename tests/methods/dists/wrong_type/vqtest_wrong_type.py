"""Returns words instead of methods."""

from __future__ import annotations

from veloxquant.methods import hookimpl


@hookimpl
def veloxquant_methods() -> list[str]:
    """Return what is no method."""
    return ["halved"]
