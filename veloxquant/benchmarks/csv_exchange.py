"""Records as CSV for a spreadsheet, and back: what `write_csv` wrote, `read_csv` reads exactly.

A column for each field; an empty cell is a field left at its default. What a column cannot hold (keys we do not know,
a tag with a blank in it, a text that is empty) is JSON in the last column, `other`, and goes before the cells.

A spreadsheet that saves the file again may say it otherwise: `csv_dialect` reads its lines, and here a header in
another case, whole numbers as 4096.0 and, between semicolons, 0,27 are what they were. What cannot be told any more is
refused: an id that became 1.23E+15, or a time in a country's own order.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.benchmarks import csv_dialect
from veloxquant.benchmarks.records import BenchmarkRecord
from veloxquant.benchmarks.validation import AMOUNTS, WHOLE
from veloxquant.errors import RecordInvalid, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TextIO

    from veloxquant.benchmarks.exchange import Lines

_FIELDS = tuple(f.name for f in fields(BenchmarkRecord) if f.name not in ("workload", "tags"))
_PLAIN_WORKLOAD: dict[str, Any] = BenchmarkRecord("", "", "").to_dict()["workload"]
COLUMNS = (*_FIELDS, *(f"workload.{name}" for name in _PLAIN_WORKLOAD), "tags", "other")
_COLUMN_BY_NAME = {name.casefold(): name for name in COLUMNS}
REQUIRED = ("id", "method", "model_id")
_NUMBERS = {*WHOLE, *AMOUNTS, "memory_reduction", "perplexity_delta"} | {
    f"workload.{name}" for name, value in _PLAIN_WORKLOAD.items() if not isinstance(value, str)
}
_INTEGERS = {*WHOLE} | {f"workload.{name}" for name, value in _PLAIN_WORKLOAD.items() if type(value) is int}
# A spreadsheet runs what starts like this, and hides a ' in front of it.
_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_WHOLE = re.compile(r"-?[0-9]{1,400}", re.ASCII)
_WHOLE_AS_DECIMAL = re.compile(r"-?[0-9]{1,400}\.0+", re.ASCII)
_DECIMAL = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_DECIMAL_COMMA = re.compile(r"-?[0-9]*,[0-9]+(?:[eE][+-]?[0-9]+)?", re.ASCII)
_ROUNDED = re.compile(r"[0-9](?:[.,][0-9]+)?[eE]\+[0-9]+", re.ASCII)
_ABSENT = object()

Cells = dict[str, str]


class BadCell(Exception):
    """A cell or a header that cannot be read; the text names the column. Never leaves the room."""


def write_csv(records: Iterable[BenchmarkRecord], stream: TextIO) -> None:
    """A header and a row a record. Text that a spreadsheet would run as a formula gets a ' in front."""
    stream.write(_line(COLUMNS))
    stream.writelines(_line(_row(record).values()) for record in records)


def is_header(line: bytes) -> bool:
    """Whether a file that starts with this line is CSV of records."""
    return csv_dialect.starts_table(line, REQUIRED)


def read_csv(stream: Lines) -> Iterator[tuple[int, int, BenchmarkRecord | str]]:
    """Each row as the bytes read so far, its line and what it holds: a record, or why it is none. Lines count from 1.

    A header that is not understood is told, and then nothing is read: a column we do not know may be a slip of one
    that we do, and a measurement would go missing in silence.
    """
    table = csv_dialect.Table(stream, REQUIRED)
    rows = csv.reader(table, delimiter=table.delimiter)
    try:
        header = _header(next(rows, []))
    except (BadCell, csv.Error) as error:
        yield table.seen, table.first, str(error)
        return
    while True:
        line = table.first + rows.line_num
        try:
            cells = next(rows)
            if any(cells):
                yield table.seen, line, _record(header, cells, decimal_comma=table.delimiter == ";")
        except StopIteration:
            return
        except (BadCell, csv.Error) as error:
            yield table.seen, line, str(error)


def _header(names: list[str]) -> list[str]:
    header = [_COLUMN_BY_NAME.get(name.strip().casefold(), name.strip()) for name in names]
    while header and not header[-1]:
        header.pop()  # empty columns at the right
    lacking = [name for name in REQUIRED if name not in header]
    if lacking:
        raise BadCell(f"the header has no column {lacking[0]}: it names {', '.join(REQUIRED)} and what was measured")
    for number, name in enumerate(header):
        if name in header[:number]:
            raise BadCell(f"column {quoted(name)} is there twice")
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, n=1)
            hint = f"did you mean {near[0]}?" if near else "what has no column of its own goes into `other`, as JSON"
            raise BadCell(f"column {quoted(name)} is not known; {hint}")
    return header


def _record(header: list[str], cells: list[str], *, decimal_comma: bool) -> BenchmarkRecord:
    if len(cells) < len(header) or any(cells[len(header) :]):
        raise BadCell(f"it has {len(cells)} cells, and the header has {len(header)}")
    named = dict(zip(header, cells, strict=False))
    _check_unspoilt(named)
    data = _data(named, decimal_comma=decimal_comma)
    try:
        return BenchmarkRecord.from_dict(data)
    except RecordInvalid as error:
        raise BadCell(f"column {error.field}: {error.message}") from error


def _check_unspoilt(cells: Cells) -> None:
    record_id, at = cells["id"].strip(), cells.get("created_at", "")
    if _ROUNDED.fullmatch(record_id):
        raise BadCell(f"column id: {quoted(record_id)} is what a spreadsheet made of an id; have it read them as text")
    if at and not _is_time(at):
        raise BadCell(f"column created_at: {quoted(at)} is no ISO 8601 time; write it as 2026-01-31T12:00:00+00:00")


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _data(cells: Cells, *, decimal_comma: bool = False) -> dict[str, Any]:
    """The JSON form of a row."""
    data: dict[str, Any] = {}
    workload: dict[str, Any] = {}
    for name, cell in cells.items():
        if cell == "" or name == "other":
            continue
        text = cell[1:] if cell[0] == "'" and _FORMULA.match(cell) else cell
        value: Any = _number(name, text, decimal_comma=decimal_comma) if name in _NUMBERS else text
        if name.startswith("workload."):
            workload[name.removeprefix("workload.")] = value
        else:
            data[name] = text.split(" ") if name == "tags" else value
    other = _other(cells.get("other", ""))
    further = other.pop("workload", {})
    if not isinstance(further, dict):
        raise BadCell("column other: its workload is not a JSON object")
    return data | ({"workload": workload | further} if workload or further else {}) | other


def _number(name: str, text: str, *, decimal_comma: bool = False) -> float:
    plain = text.strip()
    if decimal_comma and _DECIMAL_COMMA.fullmatch(plain):
        plain = plain.replace(",", ".")
    if _WHOLE.fullmatch(plain):
        return int(plain)
    if name in _INTEGERS and _WHOLE_AS_DECIMAL.fullmatch(plain):
        return int(plain.partition(".")[0])
    if name in WHOLE or not _DECIMAL.fullmatch(plain):
        kind = "whole number" if name in WHOLE else "number"
        raise BadCell(f"column {name}: {quoted(text)} is no {kind}; write it in digits, with a point for decimals")
    return float(plain)


def _other(cell: str) -> dict[str, Any]:
    if not cell.strip():
        return {}
    try:
        other = msgspec.json.decode(cell.encode("utf-8", "surrogateescape"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadCell(f"column other: it is not JSON: {error}") from error
    if not isinstance(other, dict):
        raise BadCell(f"column other: {quoted(other)} is not a JSON object")
    return other


def _row(record: BenchmarkRecord) -> Cells:
    """The cells of a record, with all that they would not give back in the last one."""
    data = record.to_dict()
    workload = data["workload"]
    plain = {name: data[name] for name in _FIELDS} | {f"workload.{name}": workload[name] for name in _PLAIN_WORKLOAD}
    cells = {name: _cell(value) for name, value in plain.items()} | {"tags": _cell(" ".join(data["tags"]))}
    if not _is_time(cells["created_at"]):
        cells["created_at"] = ""
    back = BenchmarkRecord.from_dict(_data({name: cells[name] for name in cells})).to_dict()
    other = {
        name: value for name, value in data.items() if name != "workload" and _differs(back.get(name, _ABSENT), value)
    }
    further = {name: value for name, value in workload.items() if _differs(back["workload"].get(name, _ABSENT), value)}
    other |= {"workload": further} if further else {}
    return cells | {"other": json.dumps(other, ensure_ascii=False, allow_nan=False) if other else ""}


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else repr(value)
    return f"'{text}" if isinstance(value, str) and _FORMULA.match(text) else text


def _differs(one: object, other: object) -> bool:
    """1 and 1.0 are two spellings, and so are 0.0 and -0.0."""
    return type(one) is not type(other) or repr(one) != repr(other)


def _line(cells: Iterable[str]) -> str:
    """Told that lines end in CR LF, the writer quotes cells that have either in them; ours end in LF."""
    line = io.StringIO(newline="")
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n") + "\n"
