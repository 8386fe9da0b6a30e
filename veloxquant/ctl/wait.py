"""Wait until the daemon answers, at most --timeout (30s)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from veloxquant.errors import NotAnswering, NotRunning
from veloxquant.units import format_duration

if TYPE_CHECKING:
    import argparse

    from veloxquant.client import Client
    from veloxquant.ctl.session import Session
    from veloxquant.wire.answers import Pong

SCHEMA = "veloxquant.wait/1"
_PAUSE_S = 0.2


def arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own."""


def run(session: Session) -> int:
    """Ping with patience. Raises NotRunning (exit 3) when nobody came, NotAnswering (exit 4) when one is silent."""
    began, limit = time.monotonic(), session.timeout_s
    if session.options.no_daemon:
        raise NotRunning("--no-daemon asks no daemon, so there is none to wait for", hint="leave --no-daemon out")
    with session.daemon_client(wait_s=limit, fallback=False) as client:
        pong = _pong(client, began + limit)
    waited = time.monotonic() - began
    if session.terminal.json:
        session.terminal.value(SCHEMA, {"pid": pong.pid, "generation": pong.generation, "waited_s": round(waited, 3)})
    else:
        session.terminal.say(f"ready after {format_duration(waited)}: pid {pong.pid}, generation {pong.generation}")
    return 0


def _pong(client: Client, until: float) -> Pong:
    """The first answer; one that is silent (stopped, or a machine that swaps) is asked again until the time is over."""
    while True:
        try:
            return client.ping(timeout_s=max(_PAUSE_S, until - time.monotonic()))
        except NotAnswering:
            if time.monotonic() + _PAUSE_S >= until:
                raise
            time.sleep(_PAUSE_S)
