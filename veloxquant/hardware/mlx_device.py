"""What MLX says about the GPU it would run on. Imports mlx.core when called: 5 ms and 6 MiB on the CPU wheel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The backend ("metal", "cuda", "cpu") and the fields of `mx.device_info`, as they came."""

    backend: str
    info: Mapping[str, Any] = {}
    call: str = "mx.device_info"
    """The call that gave `info`."""


def read() -> Device:
    """Ask MLX. Raises ImportError without MLX, and whatever its backend raises. Metal and CUDA: not run on a Mac."""
    import mlx.core as mx

    return device_of(mx)


def device_of(mx: Any) -> Device:
    """The same for a given `mlx.core` module."""
    backend = next((name for name in ("metal", "cuda") if _available(mx, name)), "cpu")
    info, call = _info(mx, backend)
    return Device(backend=backend, info=info, call=call)


def _available(mx: Any, name: str) -> bool:
    room = getattr(mx, name, None)
    return room is not None and bool(room.is_available())


def _info(mx: Any, backend: str) -> tuple[Mapping[str, Any], str]:
    if not hasattr(mx, "device_info"):
        # Before mlx had mx.device_info; without Metal the old call raises.
        return (mx.metal.device_info(), "mx.metal.device_info") if backend == "metal" else ({}, "no mx.device_info")
    if backend == "cpu":
        return mx.device_info(), "mx.device_info"
    try:
        # The call without an argument describes the default device, which may be the CPU although there is a GPU.
        return mx.device_info(mx.gpu), "mx.device_info(gpu)"
    except TypeError:
        return mx.device_info(), "mx.device_info"
