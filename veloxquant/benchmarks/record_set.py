"""The records that a planner asks, as they were at one moment, and the question it puts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from veloxquant.benchmarks.fingerprint import UNKNOWN
from veloxquant.benchmarks.matching import ANY, THRESHOLD, UNSTATED
from veloxquant.benchmarks.record_groups import RecordGroups
from veloxquant.benchmarks.records import BenchmarkMatchQuery, BenchmarkRecord
from veloxquant.profiles import WorkloadProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.benchmarks.record_groups import Scored
    from veloxquant.profiles import HardwareProfile, ModelProfile

__all__ = ["RecordGroups", "RecordSet", "query"]


class RecordSet:
    """A frozen set of records for the planner: what a database held at one moment."""

    def __init__(self, records: Sequence[BenchmarkRecord] = (), *, threshold: float = THRESHOLD) -> None:
        self._groups = RecordGroups(records)
        self.threshold = threshold
        self.count = len(records)

    @classmethod
    def frozen(cls, groups: RecordGroups, count: int, threshold: float) -> RecordSet:
        """A view on groups that go on changing elsewhere."""
        made = cls(threshold=threshold)
        made._groups = groups.frozen()
        made.count = count
        return made

    def __len__(self) -> int:
        """How many records there are."""
        return self.count

    def matches(
        self, label: str, model: ModelProfile, workload: WorkloadProfile, hardware: HardwareProfile
    ) -> Sequence[Scored]:
        """Records of this variant label that clear the threshold, best first, each with its match score 0..1."""
        if label not in self._groups.labels:  # most of what is on offer was never measured, and a plan asks for all
            return ()
        return tuple(self._groups.matches(label, model, query(label, model, workload, hardware), self.threshold))

    def at_any_length(self, label: str, model: ModelProfile, hardware: HardwareProfile) -> Sequence[Scored]:
        """Records of this very model at any context and number of sequences, best first; the machine alone is scored.

        For what neither of them changes: how many bytes a token takes.
        """
        if label not in self._groups.labels:
            return ()
        asked = query(label, model, WorkloadProfile(), hardware)
        anywhere = replace(asked, context_length=UNSTATED, batch_size=UNSTATED)
        return tuple(self._groups.of_model(label, model, anywhere, self.threshold))


def query(method: str, model: ModelProfile, workload: WorkloadProfile, hardware: Any | None) -> BenchmarkMatchQuery:
    """What a record for this plan should be like. Without hardware, chip and version are not compared."""
    return BenchmarkMatchQuery(
        method=method,
        model_id=model.model_id,
        architecture=model.architecture,
        context_length=workload.context_length,
        batch_size=workload.sequences,
        chip=ANY if hardware is None else _stated(hardware, "chip"),
        mlx_version=ANY if hardware is None else _stated(hardware, "mlx_version"),
        macos_version=ANY if hardware is None else _stated(hardware, "macos_version"),
    )


def _stated(hardware: Any, name: str) -> str:
    value = getattr(hardware, name, None)
    return value if isinstance(value, str) and value else UNKNOWN
