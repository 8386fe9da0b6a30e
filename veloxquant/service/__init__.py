"""The background agent: installed into launchd (macOS) or systemd (Linux), and controlled through them."""

from __future__ import annotations

import os
import sys

from veloxquant import paths
from veloxquant.service import places, plist, unit_file
from veloxquant.service.agent import Agent, find, refuse_rival, served
from veloxquant.service.ordering import notes, order
from veloxquant.service.values import Done, Installed, Order, Preview, State

__all__ = [
    "Agent",
    "Done",
    "Installed",
    "Order",
    "Preview",
    "State",
    "find",
    "installed",
    "notes",
    "order",
    "refuse_rival",
    "served",
]


def installed(env: paths.Env = os.environ, platform: str = sys.platform) -> Installed | None:
    """The agent that is installed for this user, as its file says; None where there is none. Runs nothing.

    Raises ServiceRefused when a file of the agent's name is not the agent's, or cannot be read.
    """
    if platform == "darwin":
        return plist.installed(places.launch_agent(env))
    return unit_file.installed(places.unit_folder(env), paths.home(env))
