"""Records arranged by model, then by what they were measured on, then by variant, so that few of them are looked at.

Records of the model itself count fully, unless what they tell says that they are of a namesake. A record of
another model stands in, at a cost, only when nothing says that it would mislead: the same architecture, the same
parameter count as far as the names, a "parameters:" tag or the profile say (and they must say it), the same weight
bits, and, where the record tells its 16-bit bytes a token, a cache of about that size.

Records of one run differ in nothing that is scored but their context, so the closest of them is the one whose context
is nearest. What a run could score at best is known from its machine and sequences alone; most runs are never opened.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.benchmarks import sorted_run
from veloxquant.benchmarks.eviction import recorded_at
from veloxquant.benchmarks.fingerprint import known
from veloxquant.benchmarks.matching import UNSTATED, chip_factor, reach, size_factor, version_factor
from veloxquant.benchmarks.model_name import (
    SAME_SIZE_RATIO,
    model_key,
    named_parameters,
    named_weight_bits,
    stated_parameters,
)
from veloxquant.benchmarks.same_model import has_same_cache, is_namesake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from veloxquant.benchmarks.records import BenchmarkMatchQuery, BenchmarkRecord
    from veloxquant.benchmarks.sorted_run import Entry, Run
    from veloxquant.profiles import ModelProfile

    Accepts = Callable[[BenchmarkRecord], bool]

OTHER_MODEL_FACTOR = 0.75
"""What a record loses for being of another model that has the same architecture, size and weight bits."""
_ROUNDING = 1.0 + 1e-9
"""Products of the same factors in another order differ by less."""

Scored = tuple[float, "BenchmarkRecord"]
_Found = tuple[float, float, str, "BenchmarkRecord"]
"""Minus the score, minus the time in seconds, id, record: the least is the best."""


class Trait(NamedTuple):
    """What the records of a run share beside the model: the machine and the number of sequences.

    The parameter count is that of the model where it is known and records of several models are together, else 0.
    """

    chip: str
    mlx_version: str
    sequences: int
    parameters: float


class Path(NamedTuple):
    """Where the run of a record is: key of the model, or of models that are like it; trait; variant label."""

    key: tuple[str, ...]
    trait: Trait
    label: str


class Asked(NamedTuple):
    """What is asked for, the score from 0 to 1 that is enough, and what a score is worth here."""

    query: BenchmarkMatchQuery
    threshold: float
    factor: float = 1.0

    def of_others(self) -> Asked:
        """The same of other models' records."""
        return self._replace(factor=OTHER_MODEL_FACTOR)

    def near(self) -> tuple[float, float]:
        """The contexts that alone do not rule a record out."""
        if self.query.context_length == UNSTATED:
            return 0.0, math.inf
        ratio = reach(self.threshold / self.factor)
        return self.query.context_length / ratio, self.query.context_length * ratio

    def factors(self, trait: Trait) -> tuple[float, float]:
        """Those of the machine and of the sequences, as `match_score` has them."""
        asked = self.query
        machine = chip_factor(trait.chip, asked.chip) * version_factor(trait.mlx_version, asked.mlx_version)
        return machine, 1.0 if asked.sequences == UNSTATED else size_factor(trait.sequences, asked.sequences)


_Runs = dict[str, "Run"]
_Traits = dict[Trait, _Runs]
Table = dict[tuple[str, ...], _Traits]


class RecordGroups:
    """Runs of records, each in order of context, of equal contexts the newest first; kept up to date one by one.

    Only the outermost dictionary ever changes, by one assignment at a time: a copy of it is a frozen view, and another
    thread may read while this one changes.
    """

    def __init__(self, records: Iterable[BenchmarkRecord] = ()) -> None:
        self.table: Table = {}
        self._entries: dict[str, Entry] = {}
        """(context, minus the time, id, record, paths) of each record, as they were when it came."""
        gathered: dict[Path, list[Entry]] = {}
        shared: dict[tuple[Any, ...], tuple[Path, ...]] = {}
        for record in records:
            parts = (record.method, record.model_id, record.architecture, *_machine(record), *record.tags)
            paths = shared.get(parts)
            if paths is None:
                paths = shared[parts] = _paths(record)
            self._entries[record.id] = entry = _entry(record, paths)
            for path in paths:
                gathered.setdefault(path, []).append(entry)
        for (key, trait, label), entries in gathered.items():
            entries.sort()
            self.table.setdefault(key, {}).setdefault(trait, {})[label] = sorted_run.made(entries)

    def change(self, before: BenchmarkRecord | None, after: BenchmarkRecord | None) -> None:
        """Take `before` out and put `after` in; who reads meanwhile sees one of them or both."""
        old = None if before is None else self._entries.pop(before.id, None)
        new = None if after is None else _entry(after, _paths(after))
        if new is not None:
            self._entries[new[2]] = new
        come, gone = (() if entry is None else entry[4] for entry in (new, old))
        for path in come:
            self._edit(path, old if path in gone else None, new)
        for path in gone:
            if path not in come:
                self._edit(path, old, None)

    def frozen(self) -> RecordGroups:
        """What is here now, for reading only."""
        made = RecordGroups()
        made.table = dict(self.table)
        return made

    def matches(self, label: str, model: ModelProfile, query: BenchmarkMatchQuery, threshold: float) -> list[Scored]:
        """Records of this label that reach the threshold, best first; of equals the newest, then by id.

        Other models' records are looked at only when the model has none of its own that reaches it.
        """
        kept = self.of_model(label, model, query, threshold)
        if not kept:
            traits, accepts = self._stand_ins(model)
            kept = _all(traits, label, Asked(query, threshold).of_others(), accepts)
        return kept

    def of_model(self, label: str, model: ModelProfile, query: BenchmarkMatchQuery, threshold: float) -> list[Scored]:
        """As `matches`, of the model's own records alone."""
        traits, accepts = self._own(model)
        return _all(traits, label, Asked(query, threshold), accepts)

    def best(
        self, model: ModelProfile, query: BenchmarkMatchQuery, threshold: float, labels: list[str] | None
    ) -> dict[str, BenchmarkRecord]:
        """The first of `matches` for each label that has one; all labels when None. The query states a context."""
        wanted = None if labels is None else set(labels)
        asked = Asked(query, threshold)
        found = _best(*self._own(model), asked, wanted)
        traits, accepts = self._stand_ins(model)
        if wanted is None:
            wanted = {label for runs in traits.values() for label in runs}
        found |= _best(traits, accepts, asked.of_others(), wanted - found.keys())
        return {label: found[label][-1] for label in (sorted(found) if labels is None else labels) if label in found}

    def _own(self, model: ModelProfile) -> tuple[_Traits, Accepts]:
        return self.table.get(_own_key(model.model_id), {}), lambda record: not is_namesake(record, model)

    def _stand_ins(self, model: ModelProfile) -> tuple[_Traits, Accepts]:
        """Records of other models that may speak for this one."""
        own = model_key(model.model_id)
        size = named_parameters(model.model_id) or model.num_parameters
        traits = self.table.get(_kin_key(model.architecture, model.model_id), {})
        if not size or not known(model.architecture):
            traits = {}
        return (
            {
                trait: runs
                for trait, runs in traits.items()
                if size / SAME_SIZE_RATIO <= trait.parameters <= size * SAME_SIZE_RATIO  # type: ignore[operator]
            },
            lambda record: model_key(record.model_id) != own and has_same_cache(record, model),
        )

    def _edit(self, path: Path, old: Entry | None, new: Entry | None) -> None:
        traits = dict(self.table.get(path.key, {}))
        runs = dict(traits.get(path.trait, {}))
        run = runs.get(path.label, ())
        if old is not None:
            run = sorted_run.take(run, old)
        if new is not None:
            run = sorted_run.put(run, new)
        _set(runs, path.label, run)
        _set(traits, path.trait, runs)
        _set(self.table, path.key, traits)


def _set(holder: dict[Any, Any], key: Any, value: Any) -> None:
    """Nothing empty stays."""
    if value:
        holder[key] = value
    else:
        holder.pop(key, None)


def _machine(record: BenchmarkRecord) -> tuple[str, str, int]:
    return record.chip, record.mlx_version, record.sequences


def _entry(record: BenchmarkRecord, paths: tuple[Path, ...]) -> Entry:
    return record.context_length, -recorded_at(record), record.id, record, paths


def _paths(record: BenchmarkRecord) -> tuple[Path, ...]:
    own = Path(_own_key(record.model_id), Trait(*_machine(record), 0.0), record.method)
    size = stated_parameters(record.model_id, record.tags)
    if size is None or not known(record.architecture):
        return (own,)
    kin = Path(_kin_key(record.architecture, record.model_id), own.trait._replace(parameters=size), record.method)
    return own, kin


def _own_key(model_id: str) -> tuple[str, ...]:
    return (model_key(model_id),)


def _kin_key(architecture: str, model_id: str) -> tuple[str, ...]:
    return model_key(architecture), str(named_weight_bits(model_id))


def _all(traits: Mapping[Trait, _Runs], label: str, asked: Asked, accepts: Accepts) -> list[Scored]:
    """Every record of one label that reaches the threshold, best first; of equals the newest, then by id."""
    low, high = asked.near()
    found: list[_Found] = []
    for trait, runs in traits.items():
        run = runs.get(label)
        machine, rows = asked.factors(trait) if run is not None else (0.0, 0.0)
        if run is None or asked.factor * machine * rows * _ROUNDING < asked.threshold:
            continue
        for entry in sorted_run.upwards(run, (low,)):
            if entry[0] > high:
                break
            score = asked.factor * entry[3].match_score(asked.query)
            if score >= asked.threshold and accepts(entry[3]):
                found.append((-score, *entry[1:4]))
    found.sort(key=lambda one: one[:3])
    return [(-minus, record) for minus, _, _, record in found]


def _best(traits: Mapping[Trait, _Runs], accepts: Accepts, asked: Asked, wanted: set[str] | None) -> dict[str, _Found]:
    """The first that `_all` would give, for each label."""
    found: dict[str, _Found] = {}
    within = asked.near()
    ranked = [(*asked.factors(trait), runs) for trait, runs in traits.items()]
    ranked.sort(key=lambda one: one[0] * one[1], reverse=True)
    contexts: dict[int, float] = {}
    for machine, rows, runs in ranked:
        limit = asked.factor * machine * rows * _ROUNDING
        if limit < asked.threshold:
            break
        for label, run in list(runs.items()) if wanted is None else [(one, runs[one]) for one in wanted & runs.keys()]:
            best = found.get(label)
            if best is not None and -best[0] > limit:
                continue
            near = _nearest(run, asked.query.context_length, within, accepts)
            rivals = [*_scored(near, machine, rows, asked, contexts), *([] if best is None else [best])]
            if rivals:
                found[label] = min(rivals, key=_rank)
    return found


def _rank(found: _Found) -> tuple[float, float, str]:
    return found[:3]


def _scored(
    near: Iterable[Entry], machine: float, rows: float, asked: Asked, contexts: dict[int, float]
) -> Iterator[_Found]:
    """Those that reach the threshold. `contexts` remembers what a context is worth: few differ."""
    for entry in near:
        context = entry[0]
        if context not in contexts:
            contexts[context] = size_factor(context, asked.query.context_length)
        score = asked.factor * (machine * contexts[context] * rows)
        if score >= asked.threshold:
            yield (-score, *entry[1:4])


def _nearest(run: Run, asked: int, within: tuple[float, float], accepts: Accepts) -> Iterator[Entry]:
    """Of the accepted ones the nearest at or above this context, and the nearest below it."""
    low, high = within
    for entry in sorted_run.upwards(run, (asked,)):
        if entry[0] > high:
            break
        if accepts(entry[3]):
            yield entry
            if entry[0] == asked:
                return
            break
    below = sorted_run.last_below(run, (asked,))
    while below is not None and below[0] >= low:
        for entry in sorted_run.upwards(run, (below[0],)):
            if entry[0] != below[0]:
                break
            if accepts(entry[3]):
                yield entry
                return
        below = sorted_run.last_below(run, (below[0],))
