"""The methods of veloxquant-mlx as candidates of `quality.py`, where that package is installed beside ours.

Each at its own defaults. Bytes are counted as everywhere in `quality.py`: every array that is reachable.
"""

from __future__ import annotations

import importlib.util
import typing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def installed() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec("veloxquant_mlx") is not None


def candidates(model: Any, width: int) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """(label, caches) of every method that the package serves models with."""
    from veloxquant_mlx.cache import base

    for name in sorted(typing.get_args(base.MethodName)):
        if name not in base.STANDALONE_METHODS:
            yield f"veloxquant-mlx {name}", _maker(base, model, name, width)


def _maker(base: Any, model: Any, name: str, width: int) -> Callable[[], list[Any]]:
    def make() -> list[Any]:
        config = base.KVCacheConfig(method=name, head_dim=width)
        return list(base.KVCacheBuilder.for_model(model, config))

    return make
