"""Records on their way in and out of a directory: JSON lines for programs, or the CSV of a spreadsheet."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple, Protocol

from veloxquant.benchmarks.csv_exchange import is_header, read_csv
from veloxquant.benchmarks.record_text import decode
from veloxquant.benchmarks.storage import MAX_RECORD_BYTES
from veloxquant.errors import RecordInvalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO, TextIO

    from veloxquant.benchmarks.records import BenchmarkRecord


class Lines(Protocol):
    """What is read line by line."""

    def readline(self, limit: int, /) -> bytes:
        """The next line, or its first `limit` bytes; nothing at the end."""


class BadLine(NamedTuple):
    """A line that is no record, and why."""

    line: int
    reason: str


def read_records(stream: BinaryIO, *, named_csv: bool = False) -> Iterator[tuple[int, BenchmarkRecord | BadLine]]:
    """JSON lines, or CSV where the first line is a header of it, or the file's name says so and no JSON begins."""
    first = _First(stream)
    begins_json = first.line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")
    if begins_json or not (named_csv or is_header(first.line)):
        yield from read_lines(first)
        return
    for seen, line, found in read_csv(first):
        yield seen, BadLine(line, found) if isinstance(found, str) else found


class _First:
    """A stream whose first line was looked at and is still to be read; it need not be one that can be rewound."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.line = self._left = stream.readline(MAX_RECORD_BYTES + 1)

    def readline(self, limit: int, /) -> bytes:
        """The next line, or its first `limit` bytes."""
        if not self._left:
            return self._stream.readline(limit)
        line, self._left = self._left[:limit], self._left[limit:]
        return line


def read_lines(stream: Lines) -> Iterator[tuple[int, BenchmarkRecord | BadLine]]:
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


def _record(number: int, line: bytes) -> BenchmarkRecord | BadLine:
    try:
        return decode(line)
    except RecordInvalid as error:
        return BadLine(number, error.message)
