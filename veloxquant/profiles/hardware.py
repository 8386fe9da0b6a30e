"""A machine as the planner sees it. Unknown is None, and `sources` says why."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class HardwareProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One machine. Every field but `sources` has an entry in `sources`.

    `sources[field]` names where the value came from ("mx.device_info", "sysctl hw.memsize", "chip table: <url>",
    "given"), or, for a field that is None, why it is unknown ("no Metal device", "sysctl: timed out").
    Sizes in bytes, bandwidth in GB/s (1e9 bytes), compute in TFLOPS (1e12 float operations a second).
    """

    chip: str | None = None
    """Name without vendor noise, as the system gives it: "Apple M4 Max", "AMD EPYC 7763"."""
    generation: int | None = None
    """Apple generation: 4 for M4. None for anything that is not an Apple M chip."""
    tier: str | None = None
    """"base", "Pro", "Max" or "Ultra"; None for anything that is not an Apple M chip."""
    gpu_cores: int | None = None
    performance_cores: int | None = None
    efficiency_cores: int | None = None
    total_memory_bytes: int | None = None
    working_set_bytes: int | None = None
    """What the GPU may hold, as the device reports it; never a fraction of total memory."""
    max_buffer_bytes: int | None = None
    active_bytes: int | None = None
    """Held by other work now, out of the working set (Metal, CUDA) or out of total memory (CPU)."""
    available_bytes: int | None = None
    """What the operating system says a new process could use now."""
    bandwidth_gbps: float | None = None
    prefill_tflops: float | None = None
    """Achieved in prefill, not the nominal figure."""
    decode_efficiency: Mapping[str, float] = {}
    """Share of bandwidth reached in decode, by weight kind: "f16", "q8", "q4"."""
    wired_limit_bytes: int | None = None
    """A raised or lowered iogpu.wired_limit_mb; None when the system default rules."""
    mlx_version: str | None = None
    mlx_lm_version: str | None = None
    os_name: str | None = None
    os_version: str | None = None
    macos_version: str | None = None
    low_power_mode: bool | None = None
    """Whether the system saves power at the cost of speed now; None where it has no such mode."""
    backend: str | None = None
    """"metal", "cuda" or "cpu"."""
    sources: Mapping[str, str] = {}
