"""Records arranged for the question "what was measured for this variant on a model like this?".

Records of the model itself count fully, unless a "parameters:" tag says that they are of a namesake. A record of
another model stands in, at a cost, only when nothing says that it would mislead: the same architecture, the same
parameter count as far as the names, a "parameters:" tag or the profile say (and they must say it), the same weight
bits, and, where the record tells its 16-bit bytes a token, a cache of about that size.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.benchmarks.fingerprint import UNKNOWN, known
from veloxquant.benchmarks.matching import ANY, THRESHOLD, UNSTATED, reach
from veloxquant.benchmarks.model_name import (
    SAME_SIZE_RATIO,
    model_key,
    named_parameters,
    named_weight_bits,
    stated_parameters,
)
from veloxquant.benchmarks.records import BenchmarkMatchQuery, BenchmarkRecord
from veloxquant.benchmarks.same_model import has_same_cache, is_namesake
from veloxquant.profiles import WorkloadProfile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from veloxquant.profiles import HardwareProfile, ModelProfile

OTHER_MODEL_FACTOR = 0.75
"""What a record loses for being of another model that has the same architecture, size and weight bits."""

Scored = tuple[float, BenchmarkRecord]


class _Entry(NamedTuple):
    """Sorted by context among records of one model, by parameter count among models of one architecture."""

    at: float
    record_id: str
    record: BenchmarkRecord


def _order(entry: _Entry) -> tuple[float, str]:
    return entry.at, entry.record_id


_Groups = dict[tuple[str, ...], list[_Entry]]


class RecordGroups:
    """Records by variant and model, and by variant, architecture and weight bits; kept up to date one by one.

    A list, once handed out, is never changed, so that a copy of the dictionary is a frozen view.
    """

    def __init__(self, records: Iterable[BenchmarkRecord]) -> None:
        self.groups: _Groups = {}
        self.labels: Counter[str] = Counter()
        """How many records each variant label or method name has."""
        self._places: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for record in records:
            self.labels[record.method] += 1
            self._places[record.id] = places = _places(record)
            for key, at in places:
                self.groups.setdefault(key, []).append(_Entry(at, record.id, record))
        for entries in self.groups.values():
            entries.sort(key=_order)

    def change(self, before: BenchmarkRecord | None, after: BenchmarkRecord | None) -> None:
        """Take `before` out and put `after` in."""
        if before is not None:
            places = self._places.pop(before.id)
            self.labels -= Counter((places[0][0][0],))
            for key, _ in places:
                left = [entry for entry in self.groups.pop(key) if entry.record_id != before.id]
                if left:
                    self.groups[key] = left
        if after is not None:
            self.labels[after.method] += 1
            self._places[after.id] = places = _places(after)
            for key, at in places:
                entries = list(self.groups.get(key, ()))
                insort(entries, _Entry(at, after.id, after), key=_order)
                self.groups[key] = entries

    def matches(self, label: str, model: ModelProfile, query: BenchmarkMatchQuery, threshold: float) -> list[Scored]:
        """Records of this label that reach the threshold, best first; of equals the newest, then by id.

        Other models' records are looked at only when the model has none of its own that reaches it.
        """
        kept = self.of_model(label, model, query, threshold)
        if not kept:
            others = self._stand_ins(label, model, query.context_length, threshold)
            found = [(OTHER_MODEL_FACTOR * record.match_score(query), record) for record in others]
            kept = _ordered(found, threshold)
        return kept

    def of_model(self, label: str, model: ModelProfile, query: BenchmarkMatchQuery, threshold: float) -> list[Scored]:
        """As `matches`, of the model's own records alone."""
        own = self.groups.get((label, model_key(model.model_id)), ())
        found = [(entry.record.match_score(query), entry.record) for entry in _near(own, query, threshold)]
        return [scored for scored in _ordered(found, threshold) if not is_namesake(scored[1], model)]

    def _stand_ins(
        self, label: str, model: ModelProfile, context_length: int, threshold: float
    ) -> list[BenchmarkRecord]:
        """Records of other models that may speak for this one."""
        size = named_parameters(model.model_id) or model.num_parameters
        entries = self.groups.get(_kin_key(label, model.architecture, model.model_id), ())
        if not entries or not size or not known(model.architecture):
            return []
        first = bisect_left(entries, size / SAME_SIZE_RATIO, key=lambda entry: entry.at)
        last = bisect_right(entries, size * SAME_SIZE_RATIO, key=lambda entry: entry.at)
        own, ratio = model_key(model.model_id), reach(threshold / OTHER_MODEL_FACTOR)
        same_size = (entry.record for entry in entries[first:last])
        near = (r for r in same_size if context_length <= ratio * r.context_length <= ratio**2 * context_length)
        sizes: dict[int, int] = {}
        return [record for record in near if model_key(record.model_id) != own and has_same_cache(record, model, sizes)]


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
        made._groups.groups = dict(groups.groups)
        made.count = count
        return made

    def __len__(self) -> int:
        """How many records there are."""
        return self.count

    def matches(
        self, label: str, model: ModelProfile, workload: WorkloadProfile, hardware: HardwareProfile
    ) -> Sequence[Scored]:
        """Records of this variant label that clear the threshold, best first, each with its match score 0..1."""
        return tuple(self._groups.matches(label, model, query(label, model, workload, hardware), self.threshold))

    def at_any_length(self, label: str, model: ModelProfile, hardware: HardwareProfile) -> Sequence[Scored]:
        """Records of this very model at any context and number of sequences, best first; the machine alone is scored.

        For what neither of them changes: how many bytes a token takes.
        """
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


def _ordered(found: list[Scored], threshold: float) -> list[Scored]:
    """Those that reach the threshold, best first; of equals the newest, then by id."""
    kept = [scored for scored in found if scored[0] >= threshold]
    kept.sort(key=lambda scored: scored[1].id)
    kept.sort(key=lambda scored: scored[1].created_at, reverse=True)
    kept.sort(key=lambda scored: scored[0], reverse=True)
    return kept


def _places(record: BenchmarkRecord) -> list[tuple[tuple[str, ...], float]]:
    places: list[tuple[tuple[str, ...], float]] = [
        ((record.method, model_key(record.model_id)), float(record.context_length))
    ]
    size = stated_parameters(record.model_id, record.tags)
    if size is not None and known(record.architecture):
        places.append((_kin_key(record.method, record.architecture, record.model_id), size))
    return places


def _kin_key(label: str, architecture: str, model_id: str) -> tuple[str, ...]:
    return label, model_key(architecture), str(named_weight_bits(model_id))


def _near(entries: Sequence[_Entry], query: BenchmarkMatchQuery, threshold: float) -> Sequence[_Entry]:
    """The entries whose context alone does not rule them out."""
    if query.context_length == UNSTATED:
        return entries
    ratio = reach(threshold)
    first = bisect_left(entries, query.context_length / ratio, key=lambda entry: entry.at)
    last = bisect_right(entries, query.context_length * ratio, key=lambda entry: entry.at)
    return entries[first:last]
