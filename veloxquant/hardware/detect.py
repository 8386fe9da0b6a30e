"""This machine as one HardwareProfile: every field with its source, unknown is None with the reason. Never raises.

What other programs are asked is asked in threads of their own while MLX is imported, so that the whole stays under
150 ms.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.hardware import chips, memory_fields, readings
from veloxquant.hardware.findings import Findings, ask, because, count, part, rate, text, truth
from veloxquant.hardware.sources import Sources

if TYPE_CHECKING:
    from veloxquant.hardware.mlx_device import Device
    from veloxquant.profiles import HardwareProfile


_STALE = " (last known; now: "


def detect(sources: Sources | None = None) -> HardwareProfile:
    """Read every source once. Never raises; under 150 ms; imports mlx.core, never mlx_lm."""
    read = sources or Sources()
    found = Findings()
    with ThreadPoolExecutor(2) as pool:
        registry = pool.submit(readings.accelerator, read)
        power = pool.submit(ask, read.mac_power if read.is_mac else read.linux_power)
        _system(found, read)
        _versions(found, read)
        said = readings.Readings(device=readings.device(read), accelerator=registry.result())
        _power(found, read, *power.result())
    _chip(found, read, said.device)
    _cores(found, read, said)
    memory_fields.fill(found, read, said)
    _chip_facts(found, read)
    return found.profile()


def refresh(profile: HardwareProfile, sources: Sources | None = None) -> HardwareProfile:
    """The same machine with what changes by the minute read again: working set, its limit, active and available."""
    read = sources or Sources()
    found = Findings()
    said = readings.Readings(device=readings.device(read), accelerator=readings.accelerator(read))
    memory_fields.fill(found, read, said)
    now = found.profile()
    # What could not be read this time keeps its last value and says so; a busy moment is no other machine.
    kept = [f for f in memory_fields.READINGS if getattr(now, f) is None and getattr(profile, f) is not None]
    fresh = [f for f in memory_fields.VOLATILE if f not in kept]
    origins = {**profile.sources, **{f: now.sources[f] for f in fresh}}
    for f in kept:
        origins[f] = f"{profile.sources[f].partition(_STALE)[0]}{_STALE}{now.sources[f]})"
    return msgspec.structs.replace(profile, **{f: getattr(now, f) for f in fresh}, sources=origins)


def _system(found: Findings, read: Sources) -> None:
    system, why = ask(read.macos if read.is_mac else read.linux)
    source = text(part(system, "source")) or "system files"
    for field, name in (("os_name", "name"), ("os_version", "version")):
        found.put(field, text(part(system, name)), source, why)
    if read.is_mac:
        found.put("macos_version", found.values.get("os_version"), found.sources["os_version"])
    else:
        found.missing("macos_version", "not macOS")


def _power(found: Findings, read: Sources, saving: bool | None, failed: str) -> None:
    source = "pmset" if read.is_mac else "platform_profile"
    found.put("low_power_mode", truth(saving), source, because(source, failed) or f"{source}: no such mode here")


def _versions(found: Findings, read: Sources) -> None:
    for field, distribution in (("mlx_version", "mlx"), ("mlx_lm_version", "mlx-lm")):
        version, why = ask(read.version, distribution)
        found.put(field, text(version), "package metadata", why or f"{distribution} is not installed")


def _chip(found: Findings, read: Sources, said: readings.Reading[Device]) -> None:
    """The processor's name; on CUDA the GPU's, since that is what runs."""
    device = said.value
    found.put("backend", device.backend or None, device.call, said.failed)
    if device.backend == "cuda":
        found.put("chip", text(device.info.get("device_name")), device.call)
    if read.is_mac:
        source, (name, why) = "sysctl machdep.cpu.brand_string", ask(read.sysctl_text, "machdep.cpu.brand_string")
    else:
        source, (name, why) = "/proc/cpuinfo", ask(read.cpu_name)
    found.put("chip", text(name), source, because(source, why))
    found.put("chip", text(device.info.get("device_name")), device.call)
    _generation(found, device)
    if read.is_mac and count(ask(read.sysctl_whole, "sysctl.proc_translated")[0]) == 1:
        found.remark("backend", "this Python runs under Rosetta, where MLX has no Metal: install an arm64 Python")


def _generation(found: Findings, device: Device) -> None:
    """From the name, else from Metal's architecture, which cannot tell Pro from Max."""
    name = found.values.get("chip")
    parsed = chips.parse(name)
    if name is not None:
        found.values["chip"] = chips.clean(name) or name
    if parsed is not None:
        found.put("generation", parsed.generation, found.sources["chip"])
        found.put("tier", parsed.tier, found.sources["chip"])
        return
    family = chips.parse_architecture(device.info.get("architecture")) if name is None else None
    if family is None:
        for field in ("generation", "tier"):
            found.missing(field, "not an Apple M chip" if name else "no chip name")
        return
    source = f"{device.call} architecture {device.info['architecture']}"
    found.put("generation", family[0], source)
    found.put("tier", family[1], source)
    if family[1] is None:
        found.missing("tier", f"{source} is Pro or Max")
        return
    found.put("chip", f"Apple M{family[0]}{'' if family[1] == 'base' else ' ' + family[1]}", source)


def _cores(found: Findings, read: Sources, said: readings.Readings) -> None:
    registry = said.accelerator
    found.put("gpu_cores", count(registry.value.gpu_cores), registry.source, registry.failed)
    if not read.is_mac:
        for field in ("performance_cores", "efficiency_cores"):
            found.missing(field, "no performance levels on this system")
        return
    _performance_levels(found, read)


def _performance_levels(found: Findings, read: Sources) -> None:
    """CPU cores by speed. Apple only: not run on a Mac."""
    levels: dict[bool, int] = {}
    for level in range(3):
        cores = count(ask(read.sysctl_whole, f"hw.perflevel{level}.physicalcpu")[0])
        if cores is None:
            break
        # Some chips have two levels of fast cores ("Super", "Performance"), so the level's name decides.
        name = text(ask(read.sysctl_text, f"hw.perflevel{level}.name")[0])
        fast = name != "Efficiency" if name else level == 0
        levels[fast] = levels.get(fast, 0) + cores
    source = "sysctl hw.perflevelN.physicalcpu"
    found.put("performance_cores", levels.get(True), source)
    found.put("efficiency_cores", levels.get(False), source)
    total = count(ask(read.sysctl_whole, "hw.ncpu")[0])
    if total is not None and total >= levels.get(True, total + 1):
        found.put("efficiency_cores", total - levels[True], "sysctl hw.ncpu less the performance cores")


def _chip_facts(found: Findings, read: Sources) -> None:
    """Bandwidth and compute: the table for Apple chips, a stored measurement for others and for extrapolated ones."""
    name = found.values.get("chip")
    facts, _ = ask(chips.lookup, name, found.values.get("gpu_cores")) if name else (None, "")
    measured = _calibrated(found, read) if facts is None or facts.extrapolated else None
    if measured is not None:
        found.put("bandwidth_gbps", measured[0], measured[1])
    if facts is not None:
        found.put("bandwidth_gbps", facts.bandwidth_gbps, facts.sources["bandwidth_gbps"])
        found.put("prefill_tflops", facts.prefill_tflops, facts.sources["prefill_tflops"])
        found.put("decode_efficiency", facts.decode_efficiency, facts.sources["decode_efficiency"])
        return
    found.missing("bandwidth_gbps", "not in the chip table; `veloxquantctl hardware --calibrate` measures it")
    for field in ("prefill_tflops", "decode_efficiency"):
        found.missing(field, "not in the chip table")


def _calibrated(found: Findings, read: Sources) -> tuple[float, str] | None:
    name, version = found.values.get("chip"), found.values.get("mlx_version")
    if name is None or version is None:
        return None
    stored: Any = ask(read.calibration, name, version)[0]
    figure, date = rate(part(stored, "bandwidth_gbps")), text(part(stored, "date"))
    return (figure, f"calibrated {date}: achieved, not nominal") if figure and date else None
