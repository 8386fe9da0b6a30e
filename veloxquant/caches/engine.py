"""The engine's own cache classes, imported when first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.errors import EngineUnavailable

if TYPE_CHECKING:
    from types import ModuleType


def cache_module() -> ModuleType:
    """mlx_lm.models.cache. Raises EngineUnavailable when mlx-lm cannot be imported."""
    try:
        from mlx_lm.models import cache
    except ImportError as error:
        raise EngineUnavailable(f"mlx-lm cannot be imported: {error}", hint="pip install mlx-lm") from error
    return cache  # type: ignore[no-any-return]
