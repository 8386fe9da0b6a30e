"""Have the daemon read its configuration, plugins and records again; a bad configuration leaves the old one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from veloxquant.ctl.session import Session

SCHEMA = "veloxquant.reload/1"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own."""


def run(session: Session) -> int:
    """Ask and show; 1 when something was wrong. Raises NotRunning (exit 3)."""
    done = session.client.reload()
    if session.terminal.json:
        session.terminal.value(SCHEMA, done)
    else:
        session.terminal.say(f"generation {done.generation}, {'changed' if done.changed else 'nothing changed'}")
        for warning in done.warnings:
            session.terminal.say(session.terminal.warning(warning))
    return 1 if done.warnings else 0
