"""What a store counts and tells: how far it is, since when, and how often it tries."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock, Timeout

from veloxquant.benchmarks import directory as one_directory
from veloxquant.benchmarks import index
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.eviction import recorded_at
from veloxquant.benchmarks.storage import Signature
from veloxquant.benchmarks.verify import verify
from veloxquant.errors import RecordInvalid, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Steps = list[tuple[int, int]]

RECORDS = [BenchmarkRecord(f"r{n}", "fp16", "m/x", context_length=1 + n) for n in range(5)]


@pytest.mark.usefixtures("zone")
def test_when_a_record_was_made() -> None:
    """In UTC where it does not say, on any machine; what is no time is older than all. 2026 begins 20,454 days in."""
    day = 20_454 * 86_400
    for text, seconds in (
        ("2026-01-01", day),
        ("2026-01-01T00:00:01", day + 1),
        ("2026-01-01T00:00:00-05:00", day + 5 * 3600),
        ("yesterday", 0),
        ("0001-01-01T00:00:00+14:00", -62_135_596_800 - 14 * 3600),
    ):
        assert recorded_at(BenchmarkRecord("a", "fp16", "m/x", created_at=text)) == seconds, text


def test_a_look_counts_the_files_looked_at(db: BenchmarkDatabase) -> None:
    """One more with each, of all, those that are set aside included."""
    for one in RECORDS:
        db.upsert(one)
    (db.records_dir / "odd.json").write_text("{")
    steps: Steps = []
    verify(db.storage_dir, lambda *step: steps.append(step))
    assert steps == [(n, 6) for n in range(1, 7)]


def test_a_merge_counts_what_is_decided_and_what_is_written(db: BenchmarkDatabase) -> None:
    """First the one and then the other, each up to all of it."""
    db.upsert(RECORDS[0])
    steps: Steps = []
    db.merge(RECORDS, on_step=lambda *step: steps.append(step))
    assert steps == [*((n, 5) for n in range(1, 6)), *((n, 4) for n in range(1, 5))]


def test_a_merge_is_decided_while_others_write(db: BenchmarkDatabase) -> None:
    """Deciding takes seconds, and is done without the lock; writing has it."""
    db.save()
    free: list[bool] = []
    db.merge(RECORDS[:1], on_step=lambda *_: free.append(_is_free(db)))
    assert free == [True, False]


def _is_free(db: BenchmarkDatabase) -> bool:
    """Whether another program could write at this moment."""
    other = FileLock(db.storage_dir / ".lock")
    try:
        other.acquire(blocking=False)
    except Timeout:
        return False
    other.release()
    return True


def test_an_index_that_another_keeps_writing(db: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made twice beside the other, then with the other kept out, and then that is said."""
    db.save()
    stamps = iter(range(100))
    free: list[bool] = []
    really = index.render

    def render(*arguments: Any) -> Iterator[bytes]:
        free.append(_is_free(db))
        return really(*arguments)

    monkeypatch.setattr(one_directory.index, "stamp", lambda _: Signature(next(stamps), 0, 0, 0))
    monkeypatch.setattr(one_directory.index, "render", render)
    with pytest.raises(StoreUnavailable) as caught:
        db.save()
    assert caught.value.message == f"another program keeps writing {db.index_path}"
    assert caught.value.hint == "it is made again later; no record is lost"
    assert free == [True, True, False]


def test_an_index_is_not_flushed(db: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be made again, so that nobody waits for the disk: neither its file nor its folder is flushed."""
    db.upsert(RECORDS[0])
    (db.records_dir / "r0.json").unlink()
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    db.save()
    assert (flushed, index.read(db.index_path).listed()) == ([], {})


def test_every_change_counts_up(db: BenchmarkDatabase, fill: Callable[..., list[str]], directory: Path) -> None:
    """What was seen at one count is never taken for what is there at another."""
    folder, counts = db._store.folder, [db._store.folder.version]
    ids = fill(db, 3)
    counts.append(folder.version)
    db.remove(ids[0])
    counts.append(folder.version)
    BenchmarkDatabase(directory).upsert(RECORDS[0])
    db.load()
    counts.append(folder.version)
    assert counts == [0, 3, 4, 5]


@pytest.mark.parametrize("field", ["method", "model_id", "chip", "source", "mlx_version"])
def test_half_a_letter_is_no_text(db: BenchmarkDatabase, field: str) -> None:
    """From the first surrogate to the last, in any text, by the field's name."""
    for letter in ("\ud800", "\udbff", "\udc00", "\udfff"):
        given: dict[str, Any] = {"method": "fp16", "model_id": "m/x", "context_length": 1} | {field: f"a{letter}"}
        with pytest.raises(RecordInvalid, match="which is not text in UTF-8") as caught:
            db.add(**given)
        assert (caught.value.field, caught.value.hint) == (field, "remove the lone surrogate")
    assert db.add("fp16", "m/x", context_length=1, source="a\ud7ff\ue000").source == "a\ud7ff\ue000"
