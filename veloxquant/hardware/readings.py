"""What the two GPU sources said, in a shape that later steps can trust whatever was said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from veloxquant.hardware.accelerator import Accelerator
from veloxquant.hardware.findings import ask, text
from veloxquant.hardware.mlx_device import Device

if TYPE_CHECKING:
    from veloxquant.hardware.sources import Sources

BACKENDS = ("metal", "cuda", "cpu")
T = TypeVar("T")


@dataclass(frozen=True)
class Reading(Generic[T]):
    """A value, empty where nothing usable was said, and where it is from or why it is empty."""

    value: T
    source: str
    failed: str = ""


@dataclass(frozen=True)
class Readings:
    """Both GPU sources."""

    device: Reading[Device]
    accelerator: Reading[Accelerator]


def device(read: Sources) -> Reading[Device]:
    """MLX's device report; backend is "" when there is none."""
    report, failed = ask(_device, read)
    if report is not None:
        return Reading(report, report.call)
    return Reading(Device(backend=""), "mx.device_info", f"no device report from MLX: {failed}")


def accelerator(read: Sources) -> Reading[Accelerator]:
    """The Apple GPU's registry entry."""
    if not read.is_mac:
        return Reading(Accelerator(), "ioreg AGXAccelerator", "no Apple GPU on this system")
    entry, failed = ask(read.accelerator)
    if isinstance(entry, Accelerator):
        return Reading(entry, "ioreg AGXAccelerator")
    return Reading(Accelerator(), "ioreg AGXAccelerator", f"ioreg AGXAccelerator: {failed or 'no entry'}")


def _device(read: Sources) -> Device:
    report = read.device()
    backend = text(report.backend) if isinstance(report, Device) else None
    if backend not in BACKENDS:
        raise TypeError("not a device report")
    return Device(backend=backend, info=dict(report.info), call=text(report.call) or "mx.device_info")
