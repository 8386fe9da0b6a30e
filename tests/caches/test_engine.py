"""The engine's cache module, or a typed error."""

from __future__ import annotations

import sys

import pytest

from veloxquant.caches.engine import cache_module
from veloxquant.errors import EngineUnavailable


def test_without_mlx_lm_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error with the command, not an ImportError."""
    monkeypatch.setitem(sys.modules, "mlx_lm.models", None)
    with pytest.raises(EngineUnavailable) as caught:
        cache_module()
    assert caught.value.hint == "pip install mlx-lm"
