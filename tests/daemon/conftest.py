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


@pytest.fixture(scope="session")
def traced() -> Iterator[dict[str, str]]:
    """Where all daemons keep traced models, so that each is traced once."""
    folder = tempfile.mkdtemp(prefix="vq")
    yield {"VELOXQUANT_TRACE_CACHE_DIRECTORY": folder}
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def shared(traced: dict[str, str]) -> Iterator[Daemon]:
    """One daemon for the tests of a module that leave it as it was."""
    home = Path(tempfile.mkdtemp(prefix="vq", dir="/tmp"))
    daemon = Daemon(home, env=traced).ready()
    yield daemon
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log()
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def start(short_folder: Path, traced: dict[str, str]) -> Iterator[Callable[..., Daemon]]:
    """Start daemons of this test's own; they are gone when it ends."""
    started: list[Daemon] = []

    def begin(*args: str, env: dict[str, str] | None = None, **more: Any) -> Daemon:
        started.append(Daemon(short_folder, *args, env=traced | (env or {}), **more))
        return started[-1]

    yield begin
    for daemon in started:
        daemon.stop()
