"""A benchmark directory that others may write is not used: whoever adds records there decides what is planned."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.benchmarks.calibrations import Calibrations
from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("which", [".", "records"])
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_directory_that_others_may_write_is_refused(short_folder: Path, which: str, mode: int) -> None:
    """With the sticky bit too, which keeps nobody from adding; the fix is named, and mends it."""
    directory = short_folder / "b"
    database = BenchmarkDatabase(directory)
    record = database.add("fp16", "org/m", context_length=1024, memory_bytes=1000)
    open_one = directory / which
    open_one.chmod(mode)
    for use in (lambda: BenchmarkDatabase(directory), database.load):
        with pytest.raises(StoreUnavailable, match="can be written by others") as caught:
            use()
        assert caught.value.hint.startswith(f"chmod go-w '{open_one}'")
    assert list(database.records) == [record.id]  # what was read before is still there to plan with
    open_one.chmod(0o755)
    assert list(BenchmarkDatabase(directory).records) == [record.id]


def test_calibrations_of_such_a_directory_are_not_read(short_folder: Path) -> None:
    """They say why, and never raise."""
    found = Calibrations(short_folder / "b")
    (short_folder / "b").mkdir()
    (short_folder / "b").chmod(0o777)
    assert not found.look()
    assert "can be written by others" in (found.trouble or "")


def test_folders_that_we_make_are_ours_alone_to_write(short_folder: Path) -> None:
    """Whatever the umask is."""
    before = os.umask(0)
    try:
        BenchmarkDatabase(short_folder / "a" / "b").add("fp16", "org/m", context_length=1024, memory_bytes=1000)
    finally:
        os.umask(before)
    assert BenchmarkDatabase(short_folder / "a" / "b").load() is None
    assert not (short_folder / "a" / "b" / "records").stat().st_mode & 0o022
