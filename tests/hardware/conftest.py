"""Recorded machines as sources for detection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.hardware.memory import Memory
from veloxquant.hardware.mlx_device import Device
from veloxquant.hardware.os_release import System
from veloxquant.hardware.sources import Sources

if TYPE_CHECKING:
    from veloxquant.hardware.accelerator import Accelerator

MakeMac = Callable[..., Sources]


def _mac(
    *,
    info: Mapping[str, Any] | None = None,
    whole: Mapping[str, int] | None = None,
    text: Mapping[str, str] | None = None,
    accelerator: Accelerator | None = None,
    memory: Memory | None = None,
    version: str | None = None,
) -> Sources:
    """A Mac that says exactly this and nothing else."""

    def silent() -> Any:
        raise OSError("not recorded")

    return Sources(
        platform="darwin",
        device=(lambda: Device(backend="metal", info=info)) if info is not None else silent,
        sysctl_whole=(whole or {}).get,
        sysctl_text=(text or {}).get,
        accelerator=(lambda: accelerator) if accelerator else silent,
        memory=(lambda: memory) if memory else silent,
        cpu_name=silent,
        macos=(lambda: System(name="macOS", version=version, source="recorded")) if version else silent,
        linux=silent,
        mac_power=silent,
        linux_power=silent,
        version=lambda distribution: {"mlx": "0.32.4", "mlx-lm": "0.32.2"}[distribution],
        calibration=lambda *_: None,
    )


@pytest.fixture
def mac() -> MakeMac:
    """Build the sources of a Mac that was recorded."""
    return _mac


@pytest.fixture
def this_linux() -> Sources:
    """A Linux machine without a GPU: 16 GiB, 6 of them available."""
    return Sources(
        platform="linux",
        device=lambda: Device(backend="cpu", info={"device_name": "AMD EPYC", "architecture": "x86_64"}),
        memory=lambda: Memory(total_bytes=16 * 2**30, available_bytes=6 * 2**30),
        cpu_name=lambda: "AMD EPYC 7763 64-Core Processor",
        linux=lambda: System(name="Debian GNU/Linux", version="12", source="os-release"),
        linux_power=lambda: None,
        version={"mlx": "0.32.4", "mlx-lm": "0.32.2"}.get,
        calibration=lambda *_: None,
    )
