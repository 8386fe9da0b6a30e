"""Working sets that Macs of a given memory size reported: data/working_sets.json, each with its source.

The share of memory that macOS gives the GPU changed with its versions and grows with memory, so no ratio is computed
for a size that nobody reported.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import msgspec

GIB = 2**30
# Seen on every current report: max_buffer_length is this share of the default working set.
BUFFER_SHARE = 0.75


class WorkingSet(msgspec.Struct, frozen=True, kw_only=True):
    """One report. `memory_gb` in units of 2**30 bytes, as Macs are sold; `macos` is the major version."""

    memory_gb: int
    macos: int | None
    chip: str | None
    working_set_bytes: int
    max_buffer_bytes: int | None
    exact: bool
    source: str
    note: str | None

    @property
    def sentence(self) -> str:
        """Where the figure is from, for a profile's `sources`."""
        system = f"macOS {self.macos}" if self.macos else "a macOS not stated"
        note = f"; {self.note}" if self.note else ""
        return f"recorded on a Mac with {self.memory_gb} GB on {system}, not measured here: {self.source}{note}"


def working_set(total_memory_bytes: int, macos_version: str | None = None) -> WorkingSet | None:
    """The report of a Mac with this much memory, newest macOS first; None where nobody reported that size.

    With a macOS version, reports of that major version or an older one come before newer ones. A size of N x 10**9
    bytes is taken for the N GB that Macs are sold with.
    """
    sizes = {total_memory_bytes / GIB, total_memory_bytes / 1e9}
    found = [record for record in records() if record.memory_gb in sizes]
    major = _major(macos_version)
    return max(found, key=lambda r: (major is None or (r.macos or 0) <= major, r.macos or 0, r.exact), default=None)


@cache
def records() -> tuple[WorkingSet, ...]:
    """Every report."""
    data: Any = json.loads((resources.files("veloxquant.hardware") / "data" / "working_sets.json").read_bytes())
    return msgspec.convert(data["records"], tuple[WorkingSet, ...])


def _major(version: str | None) -> int | None:
    head = (version or "").partition(".")[0]
    return int(head) if head.isascii() and head.isdigit() and len(head) <= 3 else None  # noqa: PLR2004 -- no year
