"""Records for reading only: the store's own objects, without a copy of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase

if TYPE_CHECKING:
    from pathlib import Path


def test_the_mapping_is_of_this_moment_and_changes_with_the_file(short_folder: Path) -> None:
    """The same object for as long as its file stays the same, another one after; what is handed out is apart."""
    database = BenchmarkDatabase(short_folder / "b")
    record = database.add("fp16", "org/m", context_length=1024, memory_bytes=1000)
    before = database.as_held()
    assert before[record.id] == record
    assert before[record.id] is not database.records[record.id]
    database.load()
    assert database.as_held()[record.id] is before[record.id]
    database.add("fp16", "org/m", context_length=1024, memory_bytes=2000)
    assert database.as_held()[record.id] is not before[record.id]
    assert (before[record.id].memory_bytes, database.as_held()[record.id].memory_bytes) == (1000, 2000)
