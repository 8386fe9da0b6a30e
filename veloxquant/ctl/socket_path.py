"""Print the path of the daemon's socket; nothing else, so that scripts can use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from veloxquant.ctl.session import Session

SCHEMA = "veloxquant.socket/1"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own."""


def run(session: Session) -> int:
    """Where the configuration puts it. Raises SocketRefused (exit 2) for a path that cannot be one."""
    path = session.client.socket
    if session.terminal.json:
        session.terminal.value(SCHEMA, {"path": str(path), "exists": path.is_socket()})
    else:
        session.terminal.say(str(path))
    return 0
