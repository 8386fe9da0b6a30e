"""Where detection reads from: every source is a callable, so that recorded machines can be put in its place."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from veloxquant.hardware import accelerator, calibrate, cpu, memory, mlx_device, os_release, power, sysctl, versions

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Sources:
    """This machine by default. A source may raise anything and return anything: detection stands it."""

    platform: str = sys.platform
    device: Callable[[], mlx_device.Device] = mlx_device.read
    sysctl_whole: Callable[[str], int | None] = sysctl.whole
    sysctl_text: Callable[[str], str | None] = sysctl.text
    accelerator: Callable[[], accelerator.Accelerator] = accelerator.read
    memory: Callable[[], memory.Memory] = memory.read
    cpu_name: Callable[[], str | None] = cpu.name
    macos: Callable[[], os_release.System] = os_release.macos
    linux: Callable[[], os_release.System] = os_release.linux
    mac_power: Callable[[], bool | None] = power.macos
    linux_power: Callable[[], bool | None] = power.linux
    version: Callable[[str], str | None] = versions.installed
    calibration: Callable[[str, str], calibrate.Calibration | None] = calibrate.stored

    @property
    def is_mac(self) -> bool:
        """Whether the Apple sources apply."""
        return self.platform == "darwin"
