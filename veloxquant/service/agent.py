"""The one door to both managers: which one this user has, and who may be asked for an agent."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from veloxquant import config
from veloxquant.errors import AlreadyRunning, ConfigInvalid, ServiceRefused, ServiceUnavailable, SocketRefused
from veloxquant.paths import SOCKET_VARIABLE
from veloxquant.service.command import Command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from veloxquant.service.values import Done, Installed, Order, Preview, State

_SOCKET_FLAG = "--socket"


class Agent(Protocol):
    """What both managers' agents do. Every call raises ServiceError."""

    def preview(self, order: Order) -> Preview:
        """What `install` would write and run."""

    def install(self, order: Order) -> Done:
        """There, loaded and running as ordered; nothing is done where that is so already."""

    def uninstall(self) -> Done:
        """Gone, and nothing else is."""

    def start(self) -> Done:
        """It runs."""

    def stop(self) -> Done:
        """It does not run, until the next login."""

    def restart(self) -> Done:
        """Another process runs."""

    def state(self) -> State:
        """How it is."""


def find(
    env: Mapping[str, str] = os.environ,
    platform: str = sys.platform,
    launchctl: str | None = None,
    uid: int | None = None,
) -> Agent:
    """The agent of this user, under launchd on macOS and systemd elsewhere. `launchctl`: the program to ask.

    Raises ServiceUnavailable without a manager, ServiceRefused for root on behalf of somebody else.
    """
    uid = os.getuid() if uid is None else uid
    if uid == 0 and (platform == "darwin" or env.get("SUDO_USER")):
        raise ServiceRefused(
            "the agent is a user's own, and this is root", hint="the same without sudo, as the user who plans"
        )
    return _under_launchd(env, uid, launchctl) if platform == "darwin" else _under_systemd(env)


def served(installed: Installed | None, env: Mapping[str, str] = os.environ) -> Path | None:
    """The socket of the agent's daemon: what its arguments name, else what it finds without this shell's variable.

    None without an agent, and where its configuration is broken or names a socket that cannot be.
    """
    if installed is None:
        return None
    for flag, value in itertools.pairwise(installed.program):
        if flag == _SOCKET_FLAG:
            return Path(value)
    try:
        return config.socket_of(
            config.load(env={name: text for name, text in env.items() if name != SOCKET_VARIABLE}), env
        )
    except (ConfigInvalid, SocketRefused):
        return None


def refuse_rival(state: State, serving: int | None) -> None:
    """Raises AlreadyRunning when pid `serving`, which answers on the socket, is not the manager's: two cannot serve."""
    if serving is not None and serving != state.pid:
        raise AlreadyRunning(
            f"a daemon that {state.manager} did not start serves the socket: pid {serving}",
            hint=f"stop it first (kill {serving}), then try again",
        )


def _under_launchd(env: Mapping[str, str], uid: int, program: str | None) -> Agent:
    from veloxquant.service.launchctl import PROGRAM, Launchctl
    from veloxquant.service.launchd import LaunchdAgent

    return LaunchdAgent(env, uid, Launchctl(Command(program or PROGRAM, env=env)))


def _under_systemd(env: Mapping[str, str]) -> Agent:
    from veloxquant.service.systemctl import PROGRAM, Systemctl
    from veloxquant.service.systemd import SystemdAgent

    program = shutil.which(PROGRAM, path=env.get("PATH", ""))
    if program is None:
        raise ServiceUnavailable(
            "there is no systemctl on PATH, so no systemd that could run an agent",
            hint="let what starts your processes (a container's entry point, supervisord) run veloxquantd",
        )
    return SystemdAgent(env, Systemctl(Command(program, always=("--user",), env=env), env))
