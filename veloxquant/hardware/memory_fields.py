"""The fields of a profile that are about memory: main memory, and what the GPU may hold of it.

Metal: unified memory, the working set is the device's own figure. CUDA: the card's memory. CPU: no GPU device, so no
working set; what is active is counted out of main memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.hardware.findings import Findings, amount, ask, because, part, size, text
from veloxquant.hardware.recorded import BUFFER_SHARE

if TYPE_CHECKING:
    from veloxquant.hardware.mlx_device import Device
    from veloxquant.hardware.readings import Readings
    from veloxquant.hardware.sources import Sources

VOLATILE = ("working_set_bytes", "wired_limit_bytes", "active_bytes", "available_bytes")
READINGS = ("working_set_bytes", "active_bytes", "available_bytes")
"""Of these, what is never unknown for good once it was known; a limit can be lifted."""

_MIB = 2**20
# Reports agree with buffer = 0.75 x default to within rounding; a limit raised by hand moves it by far more.
_TOLERANCE = 0.005
_DEFAULT_RULES = "the system's default limit rules"


def fill(found: Findings, read: Sources, said: Readings) -> None:
    """Put every memory field, or the reason why it is unknown."""
    device = said.device.value
    _main_memory(found, read, device)
    if device.backend == "cuda":
        _cuda(found, device)
    elif device.backend == "metal" or read.is_mac:
        _metal(found, read, said)
    else:
        _cpu(found, said)


def _main_memory(found: Findings, read: Sources, device: Device) -> None:
    memory, failed = ask(read.memory)
    limit = text(part(memory, "limit"))
    source = f"psutil, {limit}" if limit else "psutil"
    failed = because("psutil", failed)
    if read.is_mac:
        physical, why = ask(read.sysctl_whole, "hw.memsize")
        found.put("total_memory_bytes", size(physical), "sysctl hw.memsize", because("sysctl hw.memsize", why))
    found.put("total_memory_bytes", size(part(memory, "total_bytes")), source, failed)
    found.put("total_memory_bytes", size(device.info.get("memory_size")), device.call)
    found.put("available_bytes", amount(part(memory, "available_bytes")), source, failed)


def _cpu(found: Findings, said: Readings) -> None:
    for field in ("working_set_bytes", "max_buffer_bytes", "wired_limit_bytes"):
        found.missing(
            field, "no GPU device" if said.device.value.backend else f"no GPU device known: {said.device.source}"
        )
    total, available = (found.values.get(f"{name}_bytes") for name in ("total_memory", "available"))
    if total is None or available is None:
        found.missing("active_bytes", "total or available memory is unknown")
    else:
        source = f"total - available ({found.sources['available_bytes']})"
        found.put("active_bytes", max(total - available, 0), source)


def _cuda(found: Findings, device: Device) -> None:
    """Discrete memory: what the card has is what it may hold. Not run on such a card."""
    total, free = size(device.info.get("total_memory")), amount(device.info.get("free_memory"))
    found.put("working_set_bytes", total, f"{device.call} total_memory")
    found.missing("max_buffer_bytes", "CUDA states no limit for one buffer")
    found.missing("wired_limit_bytes", "no such limit on CUDA")
    if total is not None and free is not None and free <= total:
        found.put("active_bytes", total - free, f"{device.call} total_memory - free_memory")
    else:
        found.missing("active_bytes", f"{device.call}: free_memory not reported")


def _metal(found: Findings, read: Sources, said: Readings) -> None:
    """Unified memory: the device's own figure, or the limit set by hand where it is newer. Not run on a Mac."""
    device = said.device.value
    reported = size(device.info.get("max_recommended_working_set_size"))
    buffer = size(device.info.get("max_buffer_length"))
    found.put("max_buffer_bytes", buffer, f"{device.call} max_buffer_length", said.device.failed)
    registry = said.accelerator
    in_use = amount(registry.value.in_use_bytes)
    found.put("active_bytes", in_use, f"{registry.source}: in use by all programs", registry.failed)
    mebibytes, failed = ask(read.sysctl_whole, "iogpu.wired_limit_mb")
    limit = size(mebibytes * _MIB) if size(mebibytes) and mebibytes else None
    if limit is not None:
        # MLX asks the device once in a process; the kernel's value is the one of now.
        found.put("wired_limit_bytes", limit, "sysctl iogpu.wired_limit_mb")
        found.put("working_set_bytes", limit, "sysctl iogpu.wired_limit_mb")
        return
    default = int(buffer / BUFFER_SHARE) if buffer is not None else None
    source = f"{device.call} max_recommended_working_set_size"
    if reported is None or default is None or reported <= default * (1 + _TOLERANCE):
        found.put("working_set_bytes", reported, source, said.device.failed)
        found.missing("wired_limit_bytes", failed or _DEFAULT_RULES)
    elif amount(mebibytes) == 0:
        now = f"max_buffer_length / {BUFFER_SHARE}: iogpu.wired_limit_mb is 0, so the raised limit MLX saw was lifted"
        found.put("working_set_bytes", default, f"{device.call} {now}")
        found.missing("wired_limit_bytes", _DEFAULT_RULES)
    else:
        raised = f"above max_buffer_length / {BUFFER_SHARE} = {default}, so the limit was raised"
        found.put("working_set_bytes", reported, source)
        found.put("wired_limit_bytes", reported, f"{device.call}: {raised}")
