"""Where the managers look for a user's own agents: pure functions of the environment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from veloxquant import paths
from veloxquant.service.values import LABEL

if TYPE_CHECKING:
    from pathlib import Path


def launch_agent(env: paths.Env = os.environ) -> Path:
    """~/Library/LaunchAgents/<label>.plist (launchd.plist(5), FILES)."""
    return paths.home(env) / "Library" / "LaunchAgents" / f"{LABEL}.plist"


def crash_log(env: paths.Env = os.environ) -> Path:
    """What launchd keeps of the daemon's stderr."""
    return paths.home(env) / "Library" / "Logs" / f"{LABEL}.log"


def unit_folder(env: paths.Env = os.environ) -> Path:
    """$XDG_CONFIG_HOME/systemd/user, by default under ~/.config (systemd.unit(5), UNIT FILE LOAD PATH)."""
    return paths.xdg("XDG_CONFIG_HOME", ".config", env) / "systemd" / "user"
