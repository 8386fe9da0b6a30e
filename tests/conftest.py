"""Every test runs in a home of its own: nothing reads or writes the user's real folders."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# No time limit for one example: a busy machine is no counterexample.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

if TYPE_CHECKING:
    from collections.abc import Iterator

_HOME_VARIABLES = {
    "HOME": "home",
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "XDG_STATE_HOME": "state",
    "XDG_RUNTIME_DIR": "run",
}


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A private folder whose path is short enough for a Unix socket (pytest's own is not on macOS)."""
    folder = Path(tempfile.mkdtemp(prefix="vq", dir="/tmp"))  # short on purpose, 0700 by mkdtemp
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def isolated_home(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point HOME and the XDG folders into a fresh folder, and forget our own environment variables."""
    for variable, name in _HOME_VARIABLES.items():
        folder = short_folder / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(folder))
    for variable in ("VELOXQUANT_SOCKET", "VELOXQUANT_CONFIG", "VELOXQUANT_PLUGINS", "VELOXQUANT_RECORDS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return short_folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the tests of the conformance matrix recorded, in whichever process they ran.

    Here and not in their folder: the process that spreads tests over others loads no conftest below this one.
    """
    reports = [one for many in terminalreporter.stats.values() for one in many if getattr(one, "when", "") == "call"]
    recorded = [value for one in reports for name, value in one.user_properties if name == "conformance"]
    if not recorded:
        return
    from veloxquant.ctl.terminal import columns
    from veloxquant.measure.conformance import Outcome, report

    outcomes = [Outcome(**value) for value in recorded]
    terminalreporter.section(f"conformance ({report.LEGEND})")
    for line in columns(report.rows(outcomes)):
        terminalreporter.write_line(line)


@pytest.fixture(params=["UTC0", "EST5"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine's own zone, in POSIX's spelling."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()
