"""Everything a plan may look at besides its request, frozen. A change builds a new one with a higher generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veloxquant.benchmarks.benchmark_db import BenchmarkRecord
    from veloxquant.methods.method import Method, Variant
    from veloxquant.planner.request import PlanRequest
    from veloxquant.profiles import Calibration, HardwareProfile, ModelProfile, WorkloadProfile


class Records(Protocol):
    """The measured records a plan may use (`benchmarks.records.RecordSet` is one)."""

    def matches(
        self, label: str, model: ModelProfile, workload: WorkloadProfile, hardware: HardwareProfile
    ) -> Sequence[tuple[float, BenchmarkRecord]]:
        """Records of this variant label that clear the threshold, best first, each with its match score 0..1."""
        ...

    def at_any_length(
        self, label: str, model: ModelProfile, hardware: HardwareProfile
    ) -> Sequence[tuple[float, BenchmarkRecord]]:
        """As `matches`, of this very model, whatever the context and the number of sequences."""
        ...


class NoRecords:
    """Nothing was measured."""

    def matches(
        self, label: str, model: ModelProfile, workload: WorkloadProfile, hardware: HardwareProfile
    ) -> Sequence[tuple[float, BenchmarkRecord]]:
        """Nothing."""
        return ()

    def at_any_length(
        self, label: str, model: ModelProfile, hardware: HardwareProfile
    ) -> Sequence[tuple[float, BenchmarkRecord]]:
        """Nothing."""
        return ()


@dataclass(frozen=True)
class Offer:
    """One variant on offer, with the method object that answers for it."""

    method: Method
    variant: Variant


@dataclass(frozen=True)
class QuarantinedMethod:
    """A method that is known by name but fenced off, why, and the distribution it came from where that is known."""

    name: str
    reason: str
    distribution: str = ""


@dataclass(frozen=True)
class Snapshot:
    """What the planner knows. `reserve_bytes` is kept free for activations and the runtime."""

    hardware: HardwareProfile
    offers: tuple[Offer, ...]
    records: Records = field(default_factory=NoRecords)
    quarantined: tuple[QuarantinedMethod, ...] = ()
    reserve_bytes: int = 512 * 2**20
    generation: int = 0
    settled_generation: int = 0
    """That of the last change but for memory in use moving, on which no answer about another machine depends."""
    source: str = "local"
    calibrations: Mapping[tuple[str, str], Calibration] = field(default_factory=dict)
    """What is known of models' sensitivity, by (model id, config hash)."""

    def generation_for(self, request: PlanRequest) -> int:
        """That of the last change which the answer to this request depends on."""
        return self.settled_generation if request.elsewhere else self.generation

    def calibration(self, model_id: str, config_hash: str) -> Calibration | None:
        """That of this very model, None where it was not calibrated."""
        return self.calibrations.get((model_id, config_hash))

    def label_of(self, fenced: QuarantinedMethod) -> str:
        """The fenced method's name, with its distribution where another method goes by that name, too."""
        others = [offer.method.name for offer in self.offers]
        others += [one.name for one in self.quarantined if one is not fenced]
        alone = fenced.name not in others or not fenced.distribution
        return fenced.name if alone else f"{fenced.name} ({fenced.distribution})"
