"""What a figure was measured under: the machine, the versions, how busy it was. Without it no two figures compare."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import msgspec

from veloxquant.hardware.detect import detect


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The machine at the start of a measurement; None is unknown."""

    at: str
    """ISO 8601, UTC."""
    chip: str | None
    backend: str | None
    """"metal", "cuda" or "cpu": where MLX computes."""
    gpu_cores: int | None
    total_memory_bytes: int | None
    os_name: str | None
    os_version: str | None
    macos_version: str | None
    mlx_version: str | None
    mlx_lm_version: str | None
    load_average: float | None
    """Runnable processes over the last minute, before the first run; about 0 on a quiet machine."""
    on_battery: bool | None
    low_power_mode: bool | None = None
    """Whether the system saved power at the cost of speed."""
    temperature: float = 0.0
    """Of sampling: always greedy."""

    @property
    def machine(self) -> str:
        """The machine in a few words: chip, GPU cores, backend."""
        cores = f", {self.gpu_cores} GPU cores" if self.gpu_cores else ""
        return f"{self.chip or 'unknown chip'}{cores}, MLX {self.mlx_version or '?'} on {self.backend or '?'}"


def now() -> Conditions:
    """This machine at this moment. Never raises."""
    found = detect()
    same = ("chip", "backend", "gpu_cores", "total_memory_bytes", "os_name", "os_version", "macos_version")
    facts = {name: getattr(found, name) for name in (*same, "mlx_version", "mlx_lm_version", "low_power_mode")}
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return Conditions(**facts, at=at, load_average=_load(), on_battery=_on_battery())


def _load() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _on_battery() -> bool | None:
    """None without a battery. A Mac on battery may run its GPU slower."""
    import psutil

    try:
        battery = psutil.sensors_battery()
    except (OSError, RuntimeError, AttributeError):  # not every system has the call, and containers hide the files
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged
