"""What every variant of one plan shares: the request, the machine, the room for caches, and the engine's own cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from veloxquant.planner import evidence, quality
from veloxquant.planner.budget import room
from veloxquant.planner.layout import engine_own
from veloxquant.planner.memory import footprint, shape_of
from veloxquant.planner.siblings import qualities
from veloxquant.planner.speed import decode, prefill_tok_s, roofline, speed
from veloxquant.profiles.model import ENGINE_OWN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veloxquant.planner.budget import Room
    from veloxquant.planner.evidence import Sighting, Sightings
    from veloxquant.planner.memory import Footprint, Shape
    from veloxquant.planner.request import PlanRequest
    from veloxquant.planner.result import Quality, Speed
    from veloxquant.planner.snapshot import Offer, Records, Snapshot
    from veloxquant.planner.speed import Decode, Roofline
    from veloxquant.profiles import Calibration, HardwareProfile, ModelProfile, WorkloadProfile

LEAST_STEP = 64
"""Smaller prefill steps leave the GPU idle: a matrix product of fewer rows is bound by reading the weights."""
ALIGNED = 256
"""Slots an engine buffer grows by; steps that divide it or are multiples of it leave no odd slack."""


@dataclass(frozen=True)
class Setting:
    """One question, resolved. `steps` are the prefill steps a variant may use, the asked one first."""

    request: PlanRequest
    model: ModelProfile
    workload: WorkloadProfile
    hardware: HardwareProfile
    records: Records
    calibration: Calibration | None
    room: Room
    steps: tuple[int, ...]
    baseline: Shape
    baseline_footprint: Footprint
    baseline_line: Roofline
    baseline_seen: Sightings
    baseline_decode: Decode | None
    baseline_speed: Speed

    def own_decode(self, workload: WorkloadProfile) -> Decode | None:
        """Decode with the engine's own caches under a workload like this one."""
        return decode(self.baseline_line, workload, self.hardware, self.baseline_seen.usable, None)

    def allowing_eviction(self) -> Setting:
        """The same question with variants that drop tokens let in."""
        return replace(self, workload=msgspec.structs.replace(self.workload, allow_eviction=True))

    def sightings(self, label: str) -> Sightings:
        """Usable records of one variant."""
        if label not in self._seen:
            self._seen[label] = evidence.sightings(self.records, label, self.model, self.workload, self.hardware)
        return self._seen[label]

    def quality(self, offer: Offer) -> Quality:
        """Mean KL of one variant with its grounds. Raises MethodError from the method."""
        if offer.method.name == ENGINE_OWN:
            return quality.engine_own()
        if id(offer.method) not in self._judged:
            self._judged[id(offer.method)] = qualities(self.model, offer.method, self._usable, self.workload.tokens)
        found = self._judged[id(offer.method)].get(offer.variant.label)
        # A variant that the method could not answer for is asked about once more, so that the error reaches the plan.
        return found if found is not None else quality.prior(offer.method, offer.variant, self.workload.tokens)

    def _usable(self, label: str) -> Sequence[Sighting]:
        return self.sightings(label).usable

    @cached_property
    def _seen(self) -> dict[str, Sightings]:
        """Looked up so far: siblings are asked about by each other."""
        return {}

    @cached_property
    def _judged(self) -> dict[int, Mapping[str, Quality]]:
        """Qualities of each method's variants, by the method's identity; the offers hold the methods as long."""
        return {}


def set_up(request: PlanRequest, snapshot: Snapshot) -> Setting:
    """Resolve what all variants share. Raises InvalidParams where no budget can be stated."""
    model, workload = request.model, request.workload
    hardware = request.hardware if request.hardware is not None else snapshot.hardware
    own = shape_of(model, engine_own(model), None, sequences=workload.sequences, batch=workload.batch_size)
    seen = evidence.sightings(snapshot.records, ENGINE_OWN, model, workload, hardware)
    line = roofline(model, hardware, own)
    found = decode(line, workload, hardware, seen.usable, None)
    prefill = prefill_tok_s(model, workload, hardware)
    asked = workload.prefill_step_size
    return Setting(
        request=request,
        model=model,
        workload=workload,
        hardware=hardware,
        records=snapshot.records,
        calibration=snapshot.calibration(model.model_id, model.config_hash),
        room=room(request, hardware, snapshot.reserve_bytes),
        steps=prefill_steps(asked),
        baseline=own,
        baseline_footprint=footprint(own, workload.context_length, workload.generation_length, asked),
        baseline_line=line,
        baseline_seen=seen,
        baseline_decode=found,
        baseline_speed=speed(found, prefill=prefill, model=model, workload=workload, hardware=hardware),
    )


def prefill_steps(asked: int) -> tuple[int, ...]:
    """The asked step, then the powers of two below it down to 64; never more than was asked."""
    below = (2**power for power in range(asked.bit_length(), 5, -1))
    return (asked, *(step for step in below if LEAST_STEP <= step < asked))


def aligned(step: int) -> bool:
    """Whether stored slots do not depend on this step."""
    return step % ALIGNED == 0 or ALIGNED % step == 0
