"""The daemon's numbers in Prometheus' text format, for the textfile collector of node_exporter.

A cron line or a timer each 15 s: veloxquantctl metrics > D/veloxquant.tmp && mv D/veloxquant.tmp D/veloxquant.prom
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from veloxquant.ctl.session import Session

SCHEMA = "veloxquant.metrics/1"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own."""


def run(session: Session) -> int:
    """Ask and print. Raises NotRunning (exit 3), NotAnswering (exit 4)."""
    metrics = session.client.metrics()
    if session.terminal.json:
        session.terminal.value(SCHEMA, metrics)
    else:
        session.terminal.say(metrics.text.removesuffix("\n"))
    return 0
