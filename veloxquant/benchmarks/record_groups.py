"""Records arranged so that few of them are looked at: by model, then by what else decides whether and how they count.

Records of the model itself count fully, unless what they tell says that they are of a namesake. A record of
another model stands in, at a cost, only when nothing says that it would mislead: the same architecture, the same
parameter count as far as the names, a "parameters:" tag or the profile say (and they must say it, see `model_name`),
the same weight bits, and, where the record tells its 16-bit bytes a token, a cache of about that size.

So there is a level for each: the model, or what it is like; its size; what its records tell of the model (likeness);
the chip; the MLX version; the sequences; the variant label. What is below these, a run, differs in nothing that is
scored but the context, and the patch of a version. `nearest` walks the levels from the best on.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.benchmarks import nearest, sorted_run
from veloxquant.benchmarks.eviction import recorded_at
from veloxquant.benchmarks.fingerprint import known
from veloxquant.benchmarks.matching import ANY, chip_key, version_numbers
from veloxquant.benchmarks.model_name import (
    ROUNDED_DOWN,
    ROUNDED_UP,
    SAME_COUNT_RATIO,
    may_be_called,
    model_key,
    model_size,
    named_weight_bits,
    record_size,
)
from veloxquant.benchmarks.nearest import Asked, Branch, Machine, Scored
from veloxquant.benchmarks.same_model import has_same_cache, is_namesake, likeness, may_be_like, own_likeness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from veloxquant.benchmarks.nearest import Accepts
    from veloxquant.benchmarks.records import BenchmarkMatchQuery, BenchmarkRecord
    from veloxquant.benchmarks.same_model import Likeness
    from veloxquant.benchmarks.sorted_run import Entry, Run
    from veloxquant.profiles import ModelProfile

__all__ = ["RecordGroups", "Scored"]

OTHER_MODEL_FACTOR = 0.75
"""What a record loses for being of another model that has the same architecture, size and weight bits."""
_NO_SIZE = 0.0
_NUMBERED, _UNNUMBERED, _WORD = "numbered", "unnumbered", "word "
"""Versions in numbers are in their order. Others are alike, but for one of the very word that is asked for."""

_Machines = dict[str, Machine]
_Likenesses = dict["Likeness", _Machines]
_Key = tuple[str, ...]
_SizeRange = tuple[_Key, float, float, "Callable[[float], bool]"]
"""Key without the kind of version, least and most parameters, and whether this many are meant."""


class Path(NamedTuple):
    """Where the run of a record is; the sizes are parameters, 0 where they do not matter."""

    key: _Key
    size: float
    likeness: Likeness
    chip: str
    version: tuple[int, ...]
    sequences: int
    label: str


class RecordGroups:
    """Runs of records, each in order of context, of equal contexts the newest first; kept up to date one by one.

    Only the outermost dictionary ever changes, by one assignment at a time: a copy of it is a frozen view, and another
    thread may read while this one changes.
    """

    def __init__(self, records: Iterable[BenchmarkRecord] = ()) -> None:
        self.table: dict[_Key, Run] = {}
        self.labels: dict[str, int] = {}
        """How many records each label has; another mapping after each change."""
        self._entries: dict[str, Entry] = {}
        """(context, minus the time, id, record, paths) of each record, as they were when it came."""
        gathered: dict[Path, list[Entry]] = {}
        shared: dict[tuple[Any, ...], tuple[Path, ...]] = {}
        labels: Counter[str] = Counter()
        for record in records:
            own = own_likeness(record)
            machine = record.chip, record.mlx_version, record.sequences
            parts = (record.method, record.model_id, record.architecture, own, *machine, *record.tags)
            paths = shared.get(parts)
            if paths is None:
                paths = shared[parts] = _paths(record, own)
            labels[paths[0].label] += 1
            self._entries[record.id] = entry = _entry(record, paths)
            for path in paths:
                gathered.setdefault(path, []).append(entry)
        self.table, self.labels = _table(gathered), dict(labels)

    def change(self, before: BenchmarkRecord | None, after: BenchmarkRecord | None) -> None:
        """Take `before` out and put `after` in; who reads meanwhile sees one of them or both."""
        old = None if before is None else self._entries.pop(before.id, None)
        new = None if after is None else _entry(after, _paths(after, own_likeness(after)))
        if new is not None:
            self._entries[new[2]] = new
            self.labels = _counted(self.labels, new[4][0].label, 1)
        come, gone = (() if entry is None else entry[4] for entry in (new, old))
        for path in come:
            self._edit(path, old if path in gone else None, new)
        for path in gone:
            if path not in come:
                self._edit(path, old, None)
        if old is not None:
            self.labels = _counted(self.labels, old[4][0].label, -1)

    def frozen(self) -> RecordGroups:
        """What is here now, for reading only."""
        made = RecordGroups()
        made.table, made.labels = dict(self.table), self.labels
        return made

    def matches(self, label: str, model: ModelProfile, query: BenchmarkMatchQuery, threshold: float) -> list[Scored]:
        """Records of this label that reach the threshold, best first; of equals the newest, then by id.

        Other models' records are looked at only when the model has none of its own that reaches it.
        """
        kept = self.of_model(label, model, query, threshold)
        if not kept:
            kept = nearest.every(label, *self._stand_ins(model, Asked(query, threshold, OTHER_MODEL_FACTOR)))
        return kept

    def of_model(self, label: str, model: ModelProfile, query: BenchmarkMatchQuery, threshold: float) -> list[Scored]:
        """As `matches`, of the model's own records alone."""
        return nearest.every(label, *self._own(model, Asked(query, threshold)))

    def best(
        self, model: ModelProfile, query: BenchmarkMatchQuery, threshold: float, labels: list[str] | None
    ) -> dict[str, BenchmarkRecord]:
        """The first of `matches` for each label that has one; all labels when None. The query states a context."""
        wanted = None if labels is None else frozenset(labels)
        found = nearest.best(*self._own(model, Asked(query, threshold)), wanted)
        if wanted is None or wanted - found.keys():
            others = self._stand_ins(model, Asked(query, threshold, OTHER_MODEL_FACTOR))
            found = nearest.best(*others, wanted, frozenset(found)) | found
        return {label: found[label] for label in (sorted(found) if labels is None else labels) if label in found}

    def _own(self, model: ModelProfile, asked: Asked) -> tuple[list[Branch], Asked, Accepts]:
        everything = (_own_key(model.model_id), _NO_SIZE, _NO_SIZE, _any_size)
        return self._branches([everything], model, asked), asked, lambda record: not is_namesake(record, model)

    def _stand_ins(self, model: ModelProfile, asked: Asked) -> tuple[list[Branch], Asked, Accepts]:
        """Records of other models that may speak for this one."""
        own = model_key(model.model_id)
        ranges = _ranges(model) if known(model.architecture) else []

        def accepts(record: BenchmarkRecord) -> bool:
            return model_key(record.model_id) != own and has_same_cache(record, model)

        return self._branches(ranges, model, asked), asked, accepts

    def _branches(self, ranges: Iterable[_SizeRange], model: ModelProfile, asked: Asked) -> list[Branch]:
        """What is below the chips of these sizes, without what by its likeness is of another model."""
        word = asked.query.mlx_version
        kinds = tuple(dict.fromkeys((_NUMBERED, _UNNUMBERED, _WORD + ANY, _WORD + word)))
        alike: dict[Likeness, bool] = {}
        found: list[Branch] = []
        for kind, like, machines in self._of_sizes(ranges, kinds):
            if like not in alike:
                alike[like] = may_be_like(like, model, asked.near())
            if alike[like]:
                found += [(chip, kind.startswith(_WORD), machine) for chip, machine in machines.items()]
        return found

    def _of_sizes(
        self, ranges: Iterable[_SizeRange], kinds: tuple[str, ...]
    ) -> Iterator[tuple[str, Likeness, _Machines]]:
        for (key, least, most, is_meant), kind in product(ranges, kinds):
            for like, machines in _in_range(self.table.get((*key, kind), ()), least, most, is_meant):
                yield kind, like, machines

    def _edit(self, path: Path, old: Entry | None, new: Entry | None) -> None:
        sizes = self.table.get(path.key, ())
        likenesses: _Likenesses = dict(sorted_run.get(sizes, path.size) or {})
        machines = dict(likenesses.get(path.likeness, {}))
        machine = machines.get(path.chip, nearest.NO_MACHINE)
        by_sequences: Run = sorted_run.get(machine.versions, path.version) or ()
        runs: dict[str, Run] = dict(sorted_run.get(by_sequences, path.sequences) or {})
        run, there = runs.get(path.label, ()), path.label in runs
        run = run if old is None else sorted_run.take(run, old)
        run = run if new is None else sorted_run.put(run, new)
        _set(runs, path.label, run)
        by_sequences = sorted_run.with_value(by_sequences, path.sequences, runs)
        machine = Machine(
            _counted(machine.labels, path.label, int(bool(run)) - int(there)),
            sorted_run.with_value(machine.versions, path.version, by_sequences),
        )
        _set(machines, path.chip, machine if machine.versions else None)
        _set(likenesses, path.likeness, machines)
        _set(self.table, path.key, sorted_run.with_value(sizes, path.size, likenesses))


def _set(holder: dict[Any, Any], key: Any, value: Any) -> None:
    """Nothing empty stays."""
    if value:
        holder[key] = value
    else:
        holder.pop(key, None)


def _counted(labels: dict[str, int], label: str, change: int) -> dict[str, int]:
    """With one run more or less of this label."""
    if change == 0:
        return labels
    counted = dict(labels)
    _set(counted, label, counted.get(label, 0) + change)
    return counted


def _table(gathered: dict[Path, list[Entry]]) -> dict[_Key, Run]:
    """All levels at once."""
    nested: dict[_Key, Any] = {}
    for path, entries in gathered.items():
        entries.sort()
        level: dict[Any, Any] = nested
        for step in path[:-1]:
            level = level.setdefault(step, {})
        level[path.label] = sorted_run.made(entries)
    return {
        key: sorted_run.keyed(
            {
                size: {
                    like: {chip: _machine(versions) for chip, versions in chips.items()}
                    for like, chips in likenesses.items()
                }
                for size, likenesses in sizes.items()
            }
        )
        for key, sizes in nested.items()
    }


def _machine(versions: dict[tuple[int, ...], dict[int, dict[str, Run]]]) -> Machine:
    labels: dict[str, int] = {}
    for by_sequences in versions.values():
        for runs in by_sequences.values():
            for label in runs:
                labels[label] = labels.get(label, 0) + 1
    return Machine(labels, sorted_run.keyed({key: sorted_run.keyed(value) for key, value in versions.items()}))


def _entry(record: BenchmarkRecord, paths: tuple[Path, ...]) -> Entry:
    return record.context_length, -recorded_at(record), record.id, record, paths


def _paths(record: BenchmarkRecord, own: Likeness) -> tuple[Path, ...]:
    kinds: tuple[str, ...]
    numbers = version_numbers(record.mlx_version)
    version: tuple[int, ...] = () if numbers is None else nearest.version_key(numbers)
    if numbers is not None:
        kinds = (_NUMBERED,)
    elif known(record.mlx_version):
        kinds = (_UNNUMBERED, _WORD + record.mlx_version)
    else:
        kinds = (_UNNUMBERED,)
    place = chip_key(record.chip), version, record.sequences, record.method
    keys: list[tuple[_Key, float, Likeness]] = [(_own_key(record.model_id), _NO_SIZE, own)]
    if known(record.architecture):
        kin = likeness(own)
        keys += [(key, size, kin) for key, size in _kin(record)]
    return tuple(Path((*key, kind), size, like, *place) for key, size, like in keys for kind in kinds)


def _own_key(model_id: str) -> _Key:
    return (model_key(model_id),)


def _kin(record: BenchmarkRecord) -> Iterator[tuple[_Key, float]]:
    """Keys and sizes under which other models may find a record: by an exact count, by its name, or by the two."""
    size = record_size(record.model_id, record.tags)
    key = _kin_key(record.architecture, record.model_id)
    if size.exact:
        yield (*key, "named and counted" if size.named else "counted", ""), size.exact
    if size.named:
        yield (*key, "counted and named" if size.exact else "named", size.experts), size.named


def _ranges(model: ModelProfile) -> list[_SizeRange]:
    """Where records are that are of this model's size as `same_size` has it."""
    size = model_size(model.model_id, model.num_parameters)
    key = _kin_key(model.architecture, model.model_id)
    exact, named = size.exact or 0.0, size.named or 0.0
    called: list[_SizeRange] = [((*key, "named", size.experts), named, named, _any_size)] if named else []
    if exact:
        near = exact / SAME_COUNT_RATIO, exact * SAME_COUNT_RATIO
        counted: list[_SizeRange] = [
            ((*key, kind, ""), *near, lambda count: max(count, exact) <= SAME_COUNT_RATIO * min(count, exact))
            for kind in ("counted", "named and counted")
        ]
        rounded = exact / ROUNDED_DOWN * (1 - 1e-9), exact / ROUNDED_UP * (1 + 1e-9)
        return [*counted, *(called or [((*key, "named", ""), *rounded, lambda name: may_be_called(exact, name))])]
    if named and not size.experts:
        around = named * ROUNDED_UP * (1 - 1e-9), named * ROUNDED_DOWN * (1 + 1e-9)
        called.append(((*key, "counted", ""), *around, lambda count: may_be_called(count, named)))
    return [*called, *[((*key, "counted and named", size.experts), named, named, _any_size)] * bool(named)]


def _any_size(_size: float) -> bool:
    return True


def _kin_key(architecture: str, model_id: str) -> _Key:
    return model_key(architecture), str(named_weight_bits(model_id))


def _in_range(
    sizes: Run, least: float, most: float, is_meant: Callable[[float], bool]
) -> Iterator[tuple[Likeness, _Machines]]:
    for size, likenesses in sorted_run.upwards(sizes, (least,)):
        if size > most:
            return
        if is_meant(size):
            yield from likenesses.items()
