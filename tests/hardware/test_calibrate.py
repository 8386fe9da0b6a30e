"""Calibration: measured on demand, stored by chip and MLX version, read back; damage is ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from veloxquant import paths
from veloxquant.errors import InvalidParams
from veloxquant.hardware import calibrate
from veloxquant.hardware.calibrate import Calibration, measure, stored

if TYPE_CHECKING:
    from pathlib import Path


def _only_file(folder: Path) -> Path:
    (place,) = (folder / "calibration").iterdir()
    return place


def test_measured_figure_is_stored_and_read_back(short_folder: Path) -> None:
    """A positive figure with its day, found again under the same chip and version only."""
    made = measure(chip="X", mlx_version="1", buffer_bytes=2**26, seconds=0.01, cache_dir=short_folder)
    assert made.bandwidth_gbps > 0
    assert len(made.date) == 10
    assert stored("X", "1", short_folder) == made
    assert stored("X", "2", short_folder) is None
    assert stored("Y", "1", short_folder) is None


def test_default_place_is_the_cache_folder() -> None:
    """Without a folder the figure lies under the cache folder of the environment."""
    measure(chip="X", mlx_version="1", buffer_bytes=2**26, seconds=0.01)
    assert (paths.cache_dir() / "calibration").is_dir()
    assert stored("X", "1") is not None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b'{"chip":"X","mlx_version":"1","bandwidth_gbps":-1,"date":"2026-01-01"}',
        b'{"chip":"X","mlx_version":"1","bandwidth_gbps":1e300,"date":"2026-01-01"}',
        b'{"chip":"X","mlx_version":"1","bandwidth_gbps":"9","date":"2026-01-01"}',
        b'{"chip":"other","mlx_version":"1","bandwidth_gbps":9,"date":"2026-01-01"}',
    ],
)
def test_damaged_file_is_ignored(short_folder: Path, damage: bytes) -> None:
    """Cut, not JSON, impossible, or another chip's: as if nothing had been measured."""
    calibrate._store(
        Calibration(chip="X", mlx_version="1", bandwidth_gbps=9, date="2026-01-01"),
        calibrate._file("X", "1", short_folder),
    )
    assert stored("X", "1", short_folder) is not None
    _only_file(short_folder).write_bytes(damage)
    assert stored("X", "1", short_folder) is None


def test_a_file_that_others_may_write_is_ignored(short_folder: Path) -> None:
    """A bandwidth decides which plan is the fastest."""
    made = Calibration(chip="X", mlx_version="1", bandwidth_gbps=9, date="2026-01-01")
    calibrate._store(made, calibrate._file("X", "1", short_folder))
    assert stored("X", "1", short_folder) == made
    _only_file(short_folder).chmod(0o666)
    assert stored("X", "1", short_folder) is None


def test_unwritable_cache_loses_the_storing_only(short_folder: Path) -> None:
    """A file where the folder should be: the figure is still given."""
    (short_folder / "calibration").write_text("in the way")
    assert (
        measure(chip="X", mlx_version="1", buffer_bytes=2**26, seconds=0.01, cache_dir=short_folder).bandwidth_gbps > 0
    )


@pytest.mark.parametrize(("buffer_bytes", "seconds"), [(2**20, 0.1), (2**28, 0.0), (2**28, float("nan")), (2**28, 1e9)])
def test_senseless_measurements_are_refused(buffer_bytes: int, seconds: float) -> None:
    """A buffer that fits a cache, or a time that is none."""
    with pytest.raises(InvalidParams):
        measure(chip="X", mlx_version="1", buffer_bytes=buffer_bytes, seconds=seconds)
