"""Daemons for the tests of this room."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

sys.path.insert(0, str(Path(__file__).parent))

from daemon_kit import Daemon


@pytest.fixture(scope="module")
def module_home() -> Iterator[Path]:
    """A short private folder that a module's tests share."""
    folder = Path(tempfile.mkdtemp(prefix="vq", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def shared(module_home: Path) -> Iterator[Daemon]:
    """One daemon for the tests of a module that leave it as it was."""
    daemon = Daemon(module_home).ready()
    yield daemon
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log()


@pytest.fixture
def start(short_folder: Path) -> Iterator[Callable[..., Daemon]]:
    """Start daemons of this test's own; they are gone when it ends."""
    started: list[Daemon] = []

    def begin(*args: str, **more: Any) -> Daemon:
        started.append(Daemon(short_folder, *args, **more))
        return started[-1]

    yield begin
    for daemon in started:
        daemon.stop()
