"""A Mac and a Linux session for the tests of this room."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launchctl_stand_in import StandIn as LaunchctlStandIn
from service_kit import Linux, Mac
from systemctl_stand_in import StandIn as SystemctlStandIn


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    """A user who is logged in at the screen of a Mac."""
    return Mac(home=tmp_path / "home", launchctl=LaunchctlStandIn(tmp_path))


@pytest.fixture
def linux(tmp_path: Path) -> Linux:
    """A user whose systemd runs."""
    home = tmp_path / "home"
    env = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"), "PATH": "/usr/bin:/bin"}
    return Linux(home, SystemctlStandIn(home / ".config" / "systemd" / "user"), env)
