"""Records on their way in and out of a directory: JSON lines for programs, CSV for a spreadsheet."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.benchmarks.folder import decode
from veloxquant.benchmarks.records import BenchmarkRecord
from veloxquant.benchmarks.storage import MAX_RECORD_BYTES
from veloxquant.errors import RecordInvalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO, TextIO

_FIELDS = tuple(f.name for f in fields(BenchmarkRecord) if f.name not in ("workload", "tags"))
_WORKLOAD = tuple(BenchmarkRecord("", "", "").to_dict()["workload"])
COLUMNS = (*_FIELDS, *(f"workload.{name}" for name in _WORKLOAD), "tags", "other")
"""Columns of the CSV form; `other` holds what has no column of its own, as JSON."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class BadLine(NamedTuple):
    """A line that is no record, and why."""

    line: int
    reason: str


def read_lines(stream: BinaryIO) -> Iterator[tuple[int, BenchmarkRecord | BadLine]]:
    """Each line as the bytes read so far and what it holds; empty lines are left out. Lines are counted from 1."""
    number, seen = 0, 0
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        number, seen = number + 1, seen + len(line)
        whole = len(line) <= MAX_RECORD_BYTES or line.endswith(b"\n")
        while not whole and (more := stream.readline(MAX_RECORD_BYTES)):
            seen, whole = seen + len(more), more.endswith(b"\n")
        if len(line) > MAX_RECORD_BYTES:
            yield seen, BadLine(number, f"it has more than {MAX_RECORD_BYTES} bytes")
        elif line.strip():
            yield seen, _record(number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)


def write_lines(records: Iterable[BenchmarkRecord], stream: TextIO) -> None:
    """One JSON object a line, in UTF-8, keys we do not know included: what `read_lines` reads back equal."""
    stream.writelines(json.dumps(one.to_dict(), ensure_ascii=False, allow_nan=False) + "\n" for one in records)


def write_csv(records: Iterable[BenchmarkRecord], stream: TextIO) -> None:
    """A header and a row a record. Text that a spreadsheet would run as a formula gets a ' in front."""
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(COLUMNS)
    for record in records:
        rows.writerow(_row(record))


def _record(number: int, line: bytes) -> BenchmarkRecord | BadLine:
    try:
        return decode(line)
    except RecordInvalid as error:
        return BadLine(number, error.message)


def _row(record: BenchmarkRecord) -> list[object]:
    data = record.to_dict()
    cells = [data.pop(name) for name in _FIELDS]
    workload = data.pop("workload")
    cells += [workload.pop(name) for name in _WORKLOAD]
    cells.append(" ".join(data.pop("tags")))
    other = data | ({"workload": workload} if workload else {})
    cells.append(json.dumps(other, ensure_ascii=False) if other else "")
    return [f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in cells]
