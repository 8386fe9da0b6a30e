"""Directories, databases and a stand-in model for the tests of the benchmark room."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase

sys.path.insert(0, str(Path(__file__).parent))

from watch_kit import Seen, Start

if TYPE_CHECKING:
    from veloxquant.benchmarks.watch import Watcher

Fill = Callable[..., list[str]]
RECORDED = Path(__file__).parents[1] / "data" / "peer_benchmarks"
"""Written by the public tool (VeloxQuant-MLX 0.94.15) itself, through its add and upsert."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A place for a benchmark directory that does not exist yet."""
    return tmp_path / "benchmarks"


@pytest.fixture
def db(directory: Path) -> BenchmarkDatabase:
    """An empty database."""
    return BenchmarkDatabase(directory)


@pytest.fixture
def recorded(directory: Path) -> Path:
    """A copy of a directory that the public tool wrote."""
    shutil.copytree(RECORDED, directory)
    return directory


@pytest.fixture
def fill() -> Fill:
    """Adds this many records that differ in context; gives their ids."""

    def fill(db: BenchmarkDatabase, count: int, **fields: Any) -> list[str]:
        given = {"chip": "Apple M4", "mlx_version": "0.32.4"} | fields
        return [db.add("affine4-g64", "m/x-1B", context_length=1024 + n, **given).id for n in range(count)]

    return fill


@pytest.fixture
def in_index() -> Callable[[Path], set[str]]:
    """The ids that a directory's index.json lists, read with nothing of ours."""
    return lambda directory: set(json.loads((directory / "index.json").read_text())["records"])


@pytest.fixture
def temporaries() -> Callable[[Path], list[Path]]:
    """Every hidden temporary file below a directory."""
    return lambda directory: [path for path in directory.rglob(".*") if path.name.endswith(".tmp")]


@pytest.fixture
def started() -> Iterator[Start]:
    """Starts watchers, and at the end of the test stops them and finds no thread left."""
    before = set(threading.enumerate())
    running: list[Watcher] = []

    def start(directory: Path, **options: float) -> Seen:
        seen = Seen(directory, **options)
        running.append(seen.watcher)
        seen.watcher.start()
        return seen

    yield start
    for watcher in running:
        watcher.stop()
    left = [thread for thread in set(threading.enumerate()) - before if not isinstance(thread, threading.Timer)]
    assert left == []
