"""A Mac and a Linux session as the agents see them: a home folder, and a stand-in for the manager's program."""

from __future__ import annotations

import os
import plistlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launchctl_stand_in import UID
from launchctl_stand_in import StandIn as LaunchctlStandIn

from veloxquant.service.command import Answer, Command
from veloxquant.service.launchctl import Launchctl
from veloxquant.service.launchd import LaunchdAgent
from veloxquant.service.systemctl import Systemctl
from veloxquant.service.systemd import SystemdAgent
from veloxquant.service.values import LABEL, Order

if TYPE_CHECKING:
    from pathlib import Path

    from systemctl_stand_in import StandIn as SystemctlStandIn

PROGRAM = "/opt/tools/bin/veloxquantd"
GUI, USER = f"gui/{UID}", f"user/{UID}"


@dataclass
class InProcess(Command):
    """A command whose program is a stand-in in this process."""

    stand_in: Any = None

    def ask(self, *words: str) -> Answer:
        """As the program would answer."""
        return Answer(*self.stand_in.call([*self.always, *words]))


@dataclass
class Mac:
    """One user's home on a Mac, and its launchd. `waited`: the pauses that were made, in seconds."""

    home: Path
    launchctl: LaunchctlStandIn
    waited: list[float] = field(default_factory=list)

    @property
    def state(self) -> dict[str, Any]:
        """What the stand-in knows and does."""
        return self.launchctl.state

    @property
    def path(self) -> Path:
        """Where the agent's file belongs."""
        return self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def agent(self) -> LaunchdAgent:
        """As one run of the command line has it."""
        command = InProcess("/bin/launchctl", stand_in=self.launchctl)
        return LaunchdAgent({"HOME": str(self.home)}, UID, Launchctl(command, self.waited.append))

    def job(self, domain: str = GUI) -> dict[str, Any]:
        """The loaded job."""
        found: dict[str, Any] = self.state["jobs"][f"{domain}/{LABEL}"]
        return found

    def changes(self) -> list[str]:
        """The verbs that were called to change something, so far; then forgotten."""
        verbs = [words[0] for words in self.state["calls"] if not words[0].startswith("print")]
        self.state["calls"].clear()
        return verbs

    def written(self) -> dict[str, Any]:
        """The agent's file."""
        found: dict[str, Any] = plistlib.loads(self.path.read_bytes())
        return found


@dataclass
class Linux:
    """One user's home under systemd."""

    home: Path
    systemctl: SystemctlStandIn
    env: dict[str, str]

    @property
    def folder(self) -> Path:
        """Where the units belong."""
        return self.home / ".config" / "systemd" / "user"

    def agent(self) -> SystemdAgent:
        """As one run of the command line has it."""
        command = InProcess("/usr/bin/systemctl", always=("--user",), stand_in=self.systemctl)
        return SystemdAgent(self.env, Systemctl(command, self.env))

    def changes(self) -> list[str]:
        """The calls that were made to change something, so far; then forgotten."""
        made = [" ".join(words[1:]) for words in self.systemctl.calls if words[1] not in ("show", "reset-failed")]
        self.systemctl.calls.clear()
        return made

    @property
    def activated(self) -> Order:
        """An order with a socket of systemd's."""
        return Order((PROGRAM,), activated=self.home / "run" / "veloxquant" / "d.sock")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file and link below, with what it holds."""
    found = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)  # noqa: PTH118 -- a link is not followed
            found[path] = os.readlink(path).encode() if os.path.islink(path) else _read(path)  # noqa: PTH114, PTH115
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as stream:  # noqa: PTH123
        return stream.read()
