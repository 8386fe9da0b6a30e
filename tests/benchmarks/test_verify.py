"""A directory looked at from end to end, with nothing changed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from veloxquant.benchmarks.verify import verify
from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase


@pytest.fixture
def sound(db: BenchmarkDatabase, fill: Callable[..., list[str]]) -> BenchmarkDatabase:
    """Three records and an index that is up to date."""
    fill(db, 3)
    db.close()
    return db


def contents(directory: Path) -> dict[str, bytes]:
    """Every file with its bytes."""
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_directory_as_it_should_be(sound: BenchmarkDatabase) -> None:
    """Counted in records and in bytes on the disk."""
    verdict = verify(sound.storage_dir)
    sizes = [path.stat().st_size for path in sound.records_dir.iterdir()]
    assert (verdict.sound, verdict.records, verdict.total_bytes) == (True, 3, sum(sizes))
    assert verdict.directory == str(sound.storage_dir)


def test_damage_is_told_and_left(sound: BenchmarkDatabase) -> None:
    """A damaged record and a temporary file are named; not a byte of the directory changes."""
    (sound.records_dir / "bad.json").write_text("{")
    (sound.records_dir / ".vq-a.json-1-00000000.tmp").write_text("")
    before = contents(sound.storage_dir)
    verdict = verify(sound.storage_dir)
    assert not verdict.sound
    assert "not JSON" in verdict.set_aside["records/bad.json"]
    assert verdict.temporary == ("records/.vq-a.json-1-00000000.tmp",)
    assert contents(sound.storage_dir) == before


def test_each_difference_of_the_index_is_told(sound: BenchmarkDatabase) -> None:
    """What it lacks, what it lists too much, and what it says wrongly."""
    path = sound.index_path
    lacking, wrong, _ = sorted(sound.records)
    content = json.loads(path.read_text())
    del content["records"][lacking]
    content["records"][wrong]["method"] = "kivi"
    content["records"]["gone"] = {}
    path.write_text(json.dumps(content))
    verdict = verify(sound.storage_dir)
    assert not verdict.sound
    assert sorted(verdict.index_differs) == sorted(
        [f"it lacks {lacking}", f"it tells something else of {wrong}", "it lists gone, which is not there"]
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no index.json"),
        ("{", "index.json is damaged"),
        ("{}", "its version is None, not 1"),
        ('{"version": 1}', "it has no mapping of records"),
    ],
)
def test_an_index_that_is_none(sound: BenchmarkDatabase, text: str | None, said: str) -> None:
    """Missing, cut off or foreign."""
    sound.index_path.unlink() if text is None else sound.index_path.write_text(text)
    assert verify(sound.storage_dir).index_differs[0] == said


def test_an_index_of_a_later_version_is_its_own_affair(sound: BenchmarkDatabase) -> None:
    """We cannot judge it."""
    sound.index_path.write_text('{"version": 2, "shards": []}')
    assert verify(sound.storage_dir).sound


def test_a_folder_that_is_not_there_is_an_error(directory: Path) -> None:
    """A misspelt name is not a sound directory."""
    with pytest.raises(StoreUnavailable, match="no folder"):
        verify(directory)
