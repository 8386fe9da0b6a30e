"""Which files may hold the record of an id, and which of several serves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_NAMES = 1000
_NUMBERED = re.compile(r"(.+)\.(\d{1,6})")


def names_of(record_id: str) -> Iterator[str]:
    """The file named after an id, then the stand-ins used while that name is taken by a damaged file."""
    yield f"{record_id}.json"
    for number in range(2, _MAX_NAMES):
        yield f"{record_id}.{number}.json"


def rank(record_id: str, name: str) -> tuple[int, str]:
    """Order of files that claim one id: the file named after it, its numbered stand-ins, then any other."""
    stem = name.removesuffix(".json")
    if stem == record_id:
        return 0, name
    found = _NUMBERED.fullmatch(stem)
    if found and found[1] == record_id:
        return int(found[2]), name
    return 10**7, name
