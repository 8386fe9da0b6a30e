"""Versions: of this program, of what it stands on, and of the daemon when one runs."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from veloxquant import __version__
from veloxquant.errors import ConfigInvalid, DaemonError
from veloxquant.hardware import versions

if TYPE_CHECKING:
    import argparse

    from veloxquant.ctl.session import Session

SCHEMA = "veloxquant.version/1"
_PARTS = ("mlx", "mlx-lm", "msgspec", "pluggy", "watchdog", "psutil")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own."""


def run(session: Session) -> int:
    """Show; that no daemon runs is no error here. Raises ProtocolUnsupported (exit 4) when we cannot talk to it."""
    found = {name: versions.installed(name) for name in _PARTS}
    daemon = _daemon(session)
    if session.terminal.json:
        value = {"veloxquant": __version__, "python": platform.python_version(), "packages": found, "daemon": daemon}
        session.terminal.value(SCHEMA, value)
        return 0
    session.terminal.say(f"veloxquant {__version__}  Python {platform.python_version()}")
    session.terminal.say("  ".join(f"{name} {version or 'missing'}" for name, version in found.items()))
    running = "not running" if daemon is None else "{version}, protocol {protocol}, pid {pid}".format(**daemon)
    session.terminal.say(f"daemon {running}")
    return 0


def _daemon(session: Session) -> dict[str, object] | None:
    try:
        found = session.client.hello()
    except (DaemonError, ConfigInvalid):
        # Versions are what a report of such trouble needs; the trouble itself is doctor's to tell.
        return None
    return {"version": found.version, "protocol": found.protocol, "pid": found.pid}
