"""A record as the bytes of its file, and back."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from veloxquant.benchmarks.plain_record import read_plain
from veloxquant.benchmarks.records import BenchmarkRecord
from veloxquant.benchmarks.storage import MAX_RECORD_BYTES
from veloxquant.benchmarks.validation import invalid
from veloxquant.errors import RecordInvalid


def encode(record: BenchmarkRecord) -> bytes:
    """The record as it stands on disk. Raises RecordInvalid when it would be too large to be read back."""
    try:
        data = json.dumps(record.to_dict(), indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (ValueError, RecursionError) as error:
        raise invalid("record", record.id, "made of finite numbers and text in UTF-8", str(error)) from error
    if len(data) > MAX_RECORD_BYTES:
        longest = max(record.to_dict().items(), key=lambda item: len(repr(item[1])))[0]
        raise invalid(longest, len(data), f"a record of at most {MAX_RECORD_BYTES} bytes", f"shorten {longest}")
    return data


def decode(data: bytes) -> BenchmarkRecord:
    """The record in a file's bytes. Raises RecordInvalid. Of equal keys the last counts, as in every JSON reader."""
    plain = read_plain(data)
    if plain is not None:
        return plain
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        content = _leniently(data)
        if content is None:
            raise RecordInvalid(f"it is not JSON: {error}", hint="write it again, or delete it") from error
        BenchmarkRecord.from_dict(content)  # names the field that strict JSON cannot hold
        raise RecordInvalid(f"it is not strict JSON: {error}", hint="write NaN and infinities as null") from error
    return BenchmarkRecord.from_dict(content)


def _leniently(data: bytes) -> Any:
    """NaN and infinities, which other writers let through; None where that does not help."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
