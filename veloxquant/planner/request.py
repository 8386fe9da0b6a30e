"""What one plan is asked for, resolved: values only."""

from __future__ import annotations

import msgspec

from veloxquant.profiles import HardwareProfile, ModelProfile, WorkloadProfile


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved request. `hardware` None means the snapshot's machine; `methods` None means all on offer.

    `elsewhere` when `hardware` is another machine, so that memory in use on the snapshot's own does not count.
    """

    model: ModelProfile
    workload: WorkloadProfile
    hardware: HardwareProfile | None = None
    elsewhere: bool = False
    engine_version: str | None = None
    memory_budget_bytes: int | None = None
    methods: tuple[str, ...] | None = None
