"""Where a new measurement goes: in front under its fingerprint, and one of another MLX version that stood there apart.

Of one MLX version the newest stays, and the pin stays with the version. Where another measurement has the id that
names the version, what goes apart gets one that it shares with nothing.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.benchmarks.eviction import PINNED, measured
from veloxquant.benchmarks.merging import renamed, version_id
from veloxquant.benchmarks.validation import invalid

if TYPE_CHECKING:
    from collections.abc import Callable

    from veloxquant.benchmarks.records import BenchmarkRecord

    Find = Callable[[str], BenchmarkRecord | None]

_MAX_ID_STEM = 80
_DIGEST_DIGITS = 16


class Adding(NamedTuple):
    """What an add writes, in this order, and then deletes."""

    front: BenchmarkRecord | None
    """What stood there."""
    apart: BenchmarkRecord | None
    """The same under an id of its own, where it is of another version."""
    record: BenchmarkRecord
    """What comes, pinned where what it replaces was."""
    gives_way: str | None
    """Id of the earlier measurement of this version, where that stood apart."""


def add(record: BenchmarkRecord, find: Find) -> Adding:
    """The plan for a record among those that `find` knows by id. Raises RecordInvalid when no id is free."""
    front = find(record.id)
    side = _apart_of(record, find)
    keep_pin(side, record)
    if front is not None and front.mlx_version != record.mlx_version:
        apart = renamed(front, _id_apart(front, find))
        keep_pin(find(apart.id), apart)
    else:
        apart = None
        keep_pin(front, record)
    return Adding(front, apart, record, None if side is None else side.id)


def keep_pin(earlier: BenchmarkRecord | None, record: BenchmarkRecord) -> None:
    """Only `pin` takes a pin off."""
    if earlier is not None and PINNED in earlier.tags and PINNED not in record.tags:
        record.tags = [*record.tags, PINNED]


def _apart_of(record: BenchmarkRecord, find: Find) -> BenchmarkRecord | None:
    """The measurement of the same version that stands apart."""
    there = map(find, _ids_apart(record))
    return next((one for one in there if one is not None and _is_same(one, record)), None)


def _id_apart(front: BenchmarkRecord, find: Find) -> str:
    """The id of an earlier measurement of the same version, or one that is free."""
    earlier = _apart_of(front, find)
    if earlier is not None:
        return earlier.id
    ids = _ids_apart(front)
    free = next((one for one in ids if find(one) is None), None)
    if free is None:
        raise invalid("id", ids[-1], "free", "remove what is stored under this id")
    return free


def _ids_apart(record: BenchmarkRecord) -> tuple[str, str]:
    """The one that names the version, and one for where somebody else has that."""
    digest = hashlib.sha1(record.mlx_version.encode(), usedforsecurity=False).hexdigest()[:_DIGEST_DIGITS]
    return version_id(record.id, record.mlx_version), f"{record.id[:_MAX_ID_STEM]}-mlx{digest}"


def _is_same(one: BenchmarkRecord, other: BenchmarkRecord) -> bool:
    """Whether both are of one measurement and version, so that only the newest is to stay."""
    return one.mlx_version == other.mlx_version and measured(one) == measured(other)
