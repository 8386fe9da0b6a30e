"""`index.json`: for people and for other programs. It is made from the record files and never trusted over them.

    {"version": 1, "records": {id: {"method": ..., "model_id": ..., "path": "records/<file>.json"}}}

Keys beside these two are kept. An index of a later version is left exactly as it is.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.benchmarks.storage import Signature, signature, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from veloxquant.benchmarks.folder import RecordFolder

VERSION = 1
RECORDS = "records"


def entries(folder: RecordFolder) -> dict[str, dict[str, str]]:
    """What the index says of the records that serve, in order of their ids so that it can be compared line by line."""
    return {record_id: entry(folder, record_id) for record_id in sorted(folder.records)}


def entry(folder: RecordFolder, record_id: str) -> dict[str, str]:
    """What the index says of one record."""
    record = folder.records[record_id]
    path = f"{RECORDS}/{folder.file_name(record_id)}"
    return {"method": record.method, "model_id": record.model_id, "path": path}


def stamp(path: Path) -> Signature | None:
    """What tells that the index is still the one that was read."""
    try:
        return signature(path.stat())
    except OSError:
        return None


def read(path: Path) -> dict[str, Any] | None:
    """The index as it stands, None when it is missing, truncated, or not ours."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def is_from_later_version(content: dict[str, Any] | None) -> bool:
    """Whether a newer program wrote this index."""
    version = None if content is None else content.get("version")
    return isinstance(version, (int, float)) and not isinstance(version, bool) and version > VERSION


def is_stale(content: dict[str, Any] | None, folder: RecordFolder) -> bool:
    """Whether the index says something else than the folder. None says that there are no records."""
    if is_from_later_version(content):
        return False
    if content is None:
        return bool(folder.records)
    listed = content.get(RECORDS)
    if content.get("version") != VERSION or not isinstance(listed, dict) or len(listed) != len(folder.records):
        return True
    return any(listed.get(record_id) != entry(folder, record_id) for record_id in folder.records)


def write(path: Path, folder: RecordFolder) -> None:
    """Bring the index up to date, unless a newer program wrote it. Raises OSError.

    It is not flushed to the disk: what a crash takes from it is made again at the next open.
    """
    content = read(path)
    if is_from_later_version(content):
        return
    fresh = {"version": VERSION, RECORDS: entries(folder)}
    kept = {key: value for key, value in (content or {}).items() if key not in fresh}
    write_atomically(path, json.dumps(fresh | kept, indent=2, ensure_ascii=False).encode() + b"\n", durable=False)
