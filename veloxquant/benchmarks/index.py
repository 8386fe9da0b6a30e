"""`index.json`: for people and for other programs. It is made from the record files and never trusted over them.

    {"version": 1, "records": {id: {"method": ..., "model_id": ..., "path": "records/<file>.json"}}}

Keys beside these two are kept. An index whose version may be a later one, or that cannot be read, is left exactly as it
is; one that is missing or damaged is made again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from veloxquant.benchmarks.storage import Signature, signature
from veloxquant.errors import StoreUnavailable, quoted
from veloxquant.plain_file import open_plain

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    from veloxquant.benchmarks.folder import RecordFolder

VERSION = 1
RECORDS = "records"

_DAMAGED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_SHELF = 2
"""Ids that begin with the same letters are sorted together: fingerprints make 256 small heaps of one large one."""

Listed = tuple[str, str, str, str]
"""Id, method, model id and file name of one record."""


class Index(NamedTuple):
    """The index as it stands."""

    content: dict[str, Any] | None = None
    """All but the records; None when it is missing, damaged, not a JSON object, or left alone."""
    records: msgspec.Raw | None = None
    """Under "records", not yet read."""
    later: str | None = None
    """Why it is left to a newer program."""
    unreadable: str | None = None
    """Why nobody can tell what it is."""

    @property
    def problem(self) -> str | None:
        """Why it is left exactly as it is, None where it may be made again."""
        return self.later or self.unreadable

    def listed(self) -> dict[str, Any] | None:
        """What it says of each record, not yet read; None when that is no mapping."""
        try:
            return None if self.records is None else msgspec.json.decode(self.records, type=dict[str, msgspec.Raw])
        except _DAMAGED:
            return None

    def differs(self, listing: Collection[Listed]) -> bool:
        """Whether it is ours to write and says something else. None says that there are no records.

        It is read entry by entry, so that other threads need not wait for all of it.
        """
        if self.problem is not None or self.content is None:
            return self.problem is None and bool(listing)
        listed = self.listed()
        if self.content.get("version") != VERSION or listed is None or len(listed) != len(listing):
            return True
        return any(one[0] not in listed or said(listed[one[0]]) != entry(one) for one in listing)


def listing(folder: RecordFolder, ids: Iterable[str]) -> list[Listed]:
    """What is to be said of those that are there, copied so that it can be written while the folder changes."""
    records, name_of = folder.records, folder.file_name
    return [(key, records[key].method, records[key].model_id, name_of(key)) for key in ids if key in records]


def entry(listed: Listed) -> dict[str, str]:
    """What the index says of one record."""
    _, method, model_id, name = listed
    return {"method": method, "model_id": model_id, "path": f"{RECORDS}/{name}"}


def said(raw: msgspec.Raw) -> Any:
    """One entry as it stands in an index, None when it is damaged."""
    try:
        return msgspec.json.decode(raw)
    except _DAMAGED:
        return None


def stamp(path: Path) -> Signature | None:
    """What tells that the index is still the one that was read."""
    try:
        return signature(path.stat())
    except OSError:
        return None


def read(path: Path) -> Index:
    """The index as it stands. Only where there is no such file is it missing."""
    try:
        with open_plain(path) as file:
            data = file.read()
    except FileNotFoundError:
        return Index()
    except OSError as error:
        return Index(unreadable=f"cannot read {path}: {error.strerror or type(error).__name__}")
    try:
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        later = _later(path, parts.get("version"))
        records = parts.pop(RECORDS, None)
        return Index(later=later) if later else Index({k: msgspec.json.decode(v) for k, v in parts.items()}, records)
    except _DAMAGED:
        return Index()


def render(listed: Iterable[Listed], before: Index) -> Iterator[bytes]:
    """The index in order of ids, so that two can be compared line by line; further keys of `before` are kept.

    Piece by piece, as an encoder would keep every other thread waiting while it makes 20 MB.
    """
    words: dict[str, str] = {}
    shelves: dict[str, list[Listed]] = {}
    for one in listed:
        shelves.setdefault(one[0][:_SHELF], []).append(one)
    yield f'{{\n  "version": {VERSION},\n  "{RECORDS}": {{'.encode()
    between = "\n"
    for shelf in sorted(shelves):
        lines = [_lines(one, words) for one in sorted(shelves[shelf])]
        yield (between + ",\n".join(lines)).encode()
        between = ",\n"
    yield b"\n  }" if shelves else b"}"
    kept = {key: value for key, value in (before.content or {}).items() if key != "version"}
    for key, value in kept.items():
        yield (",\n" + json.dumps({key: value}, indent=2, ensure_ascii=False)[2:-2]).encode()
    yield b"\n}\n"


def _lines(listed: Listed, words: dict[str, str]) -> str:
    """One entry; `words` keeps method and model ids in their JSON form. Ids and file names are theirs already."""
    key, method, model_id, name = listed
    for word in (method, model_id):
        if word not in words:
            words[word] = json.dumps(word, ensure_ascii=False)
    return (
        f'    "{key}": {{\n      "method": {words[method]},\n      "model_id": {words[model_id]},\n'
        f'      "path": "{RECORDS}/{name}"\n    }}'
    )


def check_readable(found: Index) -> None:
    """Raise StoreUnavailable when nobody can tell what stands in the index's place."""
    if found.unreadable is not None:
        raise StoreUnavailable(
            f"{found.unreadable}; it is left as it is",
            hint="make it readable, or move it away and the index is made again",
        )


def _later(path: Path, version: msgspec.Raw | None) -> str | None:
    """Why a version may be a later one: anything but the numbers up to ours, which a damaged index may have."""
    said = "null" if version is None else bytes(version).decode("utf-8", "replace")
    try:
        value = json.loads(said)
    except ValueError:
        return None
    if value is None or isinstance(value, bool) or (isinstance(value, (int, float)) and value <= VERSION):
        return None
    return f"{path.name} has the version {quoted(value)}, which may be later than {VERSION}; it is left as it is"
