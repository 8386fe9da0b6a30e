"""What the room takes and gives: names of the agent, what to install, what is installed, how it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LABEL = "io.veloxquant.daemon"
"""launchd's name of the agent; its file is named after it, as launchd.plist(5) asks."""
UNIT = "veloxquant.service"
SOCKET_UNIT = "veloxquant.socket"
LAST_WORDS = {
    "2": "its configuration is wrong, see veloxquantctl config check; then veloxquantctl service restart",
    "75": "another daemon serves its socket, see veloxquantctl doctor; then veloxquantctl service restart",
}
"""Exit status -> what to do, for those that the daemon gives with a reason of its own."""

INSTALL = "veloxquantctl service install"
"""What writes the agent's files anew and loads them, for hints."""

Manager = Literal["launchd", "systemd"]


@dataclass(frozen=True)
class Installed:
    """An agent as its file describes it: `program` is what the manager executes, word by word."""

    manager: Manager
    path: Path
    program: tuple[str, ...]
    socket_unit: Path | None = None


@dataclass(frozen=True)
class Order:
    """What to install. `activated`: the socket that the manager opens for the daemon; None: the daemon opens one."""

    program: tuple[str, ...]
    activated: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """What an order led to: whether anything changed, the commands that changed it, and what a person should know."""

    changed: bool
    summary: str
    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """How the agent is. `target` is its name at the manager; `last_exit` is as the manager words it.

    `listening`: the manager holds the socket, so that a call starts the daemon where it does not run.
    """

    manager: Manager
    target: str
    installed: Installed | None
    loaded: bool
    running: bool
    pid: int | None = None
    last_exit: str | None = None
    listening: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preview:
    """What an installation would write (path -> text), and the commands that would load it where nothing is loaded."""

    files: Mapping[Path, str]
    commands: tuple[str, ...]
