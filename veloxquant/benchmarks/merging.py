"""Where a record from elsewhere goes: two directories become one, and no measurement is lost to the other.

One measurement (method, model, context, batch, chip) keeps its newest record under its id, and the newest of every
other MLX version beside it as `<id>-mlx<version>`. Of one version the later record stays; two of the same moment that
differ both stay. Records that share an id and nothing else both stay. In what order the records of a merge come does
not matter, and merging again changes nothing; fingerprinted records end in the same files when one is merged after the
other, too. What is pinned here stays pinned, or what takes its place is; a newcomer's pin comes in with a record that
is new here and pins none that was. Where a directory is at its limits, `merge_plan` decides what there is room for.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from veloxquant.benchmarks.eviction import PINNED, measured, newness, recorded_at
from veloxquant.benchmarks.fingerprint import benchmark_fingerprint
from veloxquant.benchmarks.records import BenchmarkRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from veloxquant.benchmarks.eviction import Measured

    Find = Callable[[str], BenchmarkRecord | None]
    Records = dict[str, BenchmarkRecord]
    Kind = tuple[Measured, str]

Outcome = Literal["added", "replaced", "kept beside", "older", "same", "no room"]
"""What became of a record: new here; newer than ours; under an id of its own; older than ours; already here; next to be
evicted, and so not taken in."""

_MAX_ID_STEM = 80
_MAX_VERSION = 40
_NOT_IN_AN_ID = re.compile(r"[^A-Za-z0-9._]")
_DIGEST = 8
_DIGEST_SIZES = (8, 16, 40)


class Placing(NamedTuple):
    """What to write and to delete, in this order, so that a record is where it belongs."""

    outcome: Outcome
    puts: tuple[BenchmarkRecord, ...] = ()
    deletes: tuple[str, ...] = ()


def version_id(record_id: str, mlx_version: str) -> str:
    """Id under which a measurement is kept once another MLX version has taken its own; no two share one.

    What an id cannot hold or is too long for it gives way to a digest of the whole.
    """
    stem = record_id
    if len(stem) > _MAX_ID_STEM:
        stem = f"{stem[: _MAX_ID_STEM - _DIGEST - 1]}-{_digest(record_id)}"
    version = _NOT_IN_AN_ID.sub("_", mlx_version)
    if version != mlx_version or len(version) > _MAX_VERSION:
        version = f"{version[: _MAX_VERSION - _DIGEST - 1]}-{_digest(mlx_version)}"
    return f"{stem}-mlx{version}"


def renamed(record: BenchmarkRecord, record_id: str) -> BenchmarkRecord:
    """The record under another id, keys we do not know included."""
    return BenchmarkRecord.from_dict(record.to_dict() | {"id": record_id})


class Holdings:
    """Which measurements are held, under whatever ids. Made at the first question, which nothing but news asks."""

    def __init__(self, records: Mapping[str, BenchmarkRecord]) -> None:
        self._records = records
        self._groups: dict[Measured, list[BenchmarkRecord]] | None = None

    def has(self, record: BenchmarkRecord) -> bool:
        """Whether this very record is or was here."""
        return any(content(one) == content(record) for one in self._alike(record))

    def supersede(self, record: BenchmarkRecord) -> bool:
        """Whether a later one of its measurement and version is or was here."""
        return any(recorded_at(one) > recorded_at(record) for one in self._alike(record))

    def _alike(self, record: BenchmarkRecord) -> list[BenchmarkRecord]:
        if self._groups is None:
            self._groups = {}
            self.note(self._records.values())
        return [one for one in self._groups.get(measured(record), ()) if one.mlx_version == record.mlx_version]

    def note(self, puts: Iterable[BenchmarkRecord]) -> None:
        """These have come."""
        for record in puts if self._groups is not None else ():
            self._groups.setdefault(measured(record), []).append(record)  # type: ignore[union-attr]


def place(incoming: BenchmarkRecord, find: Find, holdings: Holdings) -> Placing:
    """Where a record goes among those that `find` knows by id; `holdings` know them by what was measured."""
    front_id = _front_id(incoming)
    side_id = version_id(front_id, incoming.mlx_version)
    front, side, there = find(front_id), find(side_id), find(incoming.id)
    candidates = [one for one in (front, side, there) if one is not None]
    if candidates and content(incoming) in map(content, candidates):
        return Placing("same")
    is_taken = front is not None and measured(front) != measured(incoming)
    if is_taken or (side is not None and not _rivals(side, incoming)):
        return _elsewhere(incoming, front_id, find, holdings)
    ours = [record for record in (front, side) if record is not None and _rivals(record, incoming)]
    if not ours and holdings.has(incoming):
        return Placing("same")
    twin = next((record for record in ours if recorded_at(record) == recorded_at(incoming)), None)
    if twin is not None:
        return _beside_twin(incoming, twin, find)
    if any(recorded_at(record) > recorded_at(incoming) for record in ours):
        return Placing("older")
    return _newer(incoming, front, [record.id for record in ours], (front_id, side_id), find)


def _newer(
    incoming: BenchmarkRecord, front: BenchmarkRecord | None, beaten: list[str], ids: tuple[str, str], find: Find
) -> Placing:
    """A record that is the newest of its measurement and version; `beaten` are the ids it takes the place of."""
    front_id, side_id = ids
    kept = [find(record_id) for record_id in beaten]
    if any(record is not None and PINNED in record.tags for record in kept) and PINNED not in incoming.tags:
        incoming = _pinned(incoming)
    if front is None:
        target = incoming.id if incoming.id in ids else front_id
        moved: Placing | None = None
    elif front.mlx_version == incoming.mlx_version:
        target, moved = front_id, None
    elif _order(incoming) > _order(front):
        target, moved = front_id, _beside_front(front, find)
    else:
        target, moved = side_id, None
    puts = (*(moved.puts if moved else ()), renamed(incoming, target))
    deletes = tuple(one for one in beaten if one != target)
    outcome: Outcome = "replaced" if beaten else "kept beside" if target != incoming.id else "added"
    return Placing(outcome, puts, deletes)


def _beside_front(front: BenchmarkRecord, find: Find) -> Placing:
    """Room in front: what stood there goes under the id of its version, unless a later one is there already."""
    side_id = version_id(front.id, front.mlx_version)
    side = find(side_id)
    if side is None:
        return Placing("kept beside", (renamed(front, side_id),))
    if not _rivals(side, front) or recorded_at(side) == recorded_at(front):
        return _under_digest(front, front.id, find)
    newer = side if recorded_at(side) > recorded_at(front) else front
    return Placing("kept beside", () if newer is side else (renamed(front, side_id),))


def _beside_twin(incoming: BenchmarkRecord, twin: BenchmarkRecord, find: Find) -> Placing:
    """Two records of one moment that differ: the greater content keeps the place, whichever came first."""
    if content(incoming) < content(twin):
        return _under_digest(incoming, _front_id(incoming), find)
    moved = _under_digest(twin, _front_id(twin), find)
    return Placing("kept beside", (*moved.puts, renamed(incoming, twin.id)))


def _elsewhere(incoming: BenchmarkRecord, taken: str, find: Find, holdings: Holdings) -> Placing:
    """Another measurement has the id: ours goes under its fingerprint, or, where that is taken, under its content."""
    if holdings.has(incoming) or holdings.supersede(incoming):
        return Placing("same")
    chip = measured(incoming)[-1]
    parts = (incoming.method, incoming.model_id, incoming.context_length, incoming.batch_size)
    own = benchmark_fingerprint(*parts, chip)
    if own == taken:
        return _under_digest(incoming, taken, find)
    placing = place(renamed(incoming, own), find, holdings)
    return placing._replace(outcome="kept beside") if placing.outcome == "added" else placing


def _under_digest(record: BenchmarkRecord, front_id: str, find: Find) -> Placing:
    digest = _digest(content(record), max(_DIGEST_SIZES))
    for size in _DIGEST_SIZES:
        record_id = f"{front_id[:_MAX_ID_STEM]}-{digest[:size]}"
        there = find(record_id)
        if there is None:
            return Placing("kept beside", (renamed(record, record_id),))
        if content(there) == content(record):
            break
    return Placing("same")


def _digest(text: str, digits: int = _DIGEST) -> str:
    return hashlib.sha1(text.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()[:digits]


def hand_pins_on(records: Records, before: Mapping[str, BenchmarkRecord], came: Iterable[BenchmarkRecord]) -> None:
    """Pin what stands for what was pinned: no pin of ours is lost, and none depends on the order in which records came.

    A pinned record keeps its pin under any id. Where a later one of its measurement and version took its place, that
    one is pinned. A newcomer's pin counts among newcomers alone: what was here is pinned by nobody else.
    """
    pinned = [one for one in before.values() if PINNED in one.tags and records.get(one.id) is not one]
    fresh = [one for one in came if PINNED in one.tags]
    kinds = {kind(one) for one in (*pinned, *fresh)}
    if not kinds:
        return
    standing: dict[Kind, list[BenchmarkRecord]] = {key: [] for key in kinds}
    for one in records.values():
        if (key := kind(one)) in kinds:
            standing[key].append(one)
    ours = {content(one) for one in before.values() if kind(one) in kinds}
    heirs = [_heir(one, standing[kind(one)]) for one in pinned]
    heirs += [heir for one in fresh if (heir := _heir(one, standing[kind(one)])) and content(heir) not in ours]
    for heir in heirs:
        if heir is not None and PINNED not in records[heir.id].tags:
            records[heir.id] = _pinned(heir)


def _heir(pinned: BenchmarkRecord, standing: list[BenchmarkRecord]) -> BenchmarkRecord | None:
    """The same under any id, else the latest of its kind."""
    text = content(pinned)
    same = [one for one in standing if content(one) == text]
    return max(same or standing, key=lambda one: (recorded_at(one), content(one), one.id), default=None)


def _pinned(record: BenchmarkRecord) -> BenchmarkRecord:
    return BenchmarkRecord.from_dict(record.to_dict() | {"tags": [*record.tags, PINNED]})


def place_order(record: BenchmarkRecord) -> tuple[Any, ...]:
    """In which order records are placed, the last first: the latest needs not be moved again. The order is total."""
    return (*_order(record), record.id, PINNED in record.tags, record.tags)


def _front_id(record: BenchmarkRecord) -> str:
    """The id of the measurement, whether the record stands there or beside it."""
    suffix = version_id("", record.mlx_version)
    return record.id[: -len(suffix)] if record.id.endswith(suffix) and len(record.id) > len(suffix) else record.id


def kind(record: BenchmarkRecord) -> Kind:
    """Of what only one record is to stay."""
    return measured(record), record.mlx_version


def _rivals(one: BenchmarkRecord, other: BenchmarkRecord) -> bool:
    return one.mlx_version == other.mlx_version and measured(one) == measured(other)


def _order(record: BenchmarkRecord) -> tuple[float, tuple[int, ...], str]:
    """Which of several versions stands in front: the latest, of one moment that of the newest MLX."""
    return recorded_at(record), newness(record)[0], content(record)


def content(record: BenchmarkRecord) -> str:
    """All but the id, and the pin, which is each directory's own affair; in one spelling."""
    tags = [tag for tag in record.tags if tag != PINNED]
    return json.dumps(record.to_dict() | {"id": "", "tags": tags}, sort_keys=True)
