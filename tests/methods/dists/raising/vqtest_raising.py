"""Its hook raises."""

from __future__ import annotations

from veloxquant.methods import Method, hookimpl


@hookimpl
def veloxquant_methods() -> list[Method]:
    """Raise."""
    raise RuntimeError("the hook of a broken plugin")
