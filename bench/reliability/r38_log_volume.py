"""R38: how much the daemon writes down: at rest, asked by a monitor, and flooded.

    python bench/reliability/r38_log_volume.py [--full]

At rest and monitored: bytes of log over a minute (`--full`: ten), as a day's. Flooded: reloads as fast as they are
answered, on a real daemon; and 60 MB of lines that no thinning holds back, through the real handlers.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures

from veloxquant.daemon import log

DAY_S = 86400.0
SCRAPE_S = 15.0
LINE = "x" * 4000


def on_disk(home: session.Home) -> int:
    """Bytes of the log, of its older files, and of what went to stderr."""
    folder = home.folder / "state" / "veloxquant"
    return sum(file.stat().st_size for file in (*folder.glob("daemon*.log*"), *home.folder.glob("daemon.log")))


def a_day(home: session.Home, seconds: float, daemon: session.Daemon | None) -> float:
    """Bytes a day by what this time brought, with a monitor that asks, when there is a daemon to ask."""
    before, ends = on_disk(home), time.monotonic() + seconds
    while time.monotonic() < ends:
        if daemon is not None:
            with daemon.client() as client:
                client.metrics()
                client.status()
        time.sleep(min(SCRAPE_S, max(0.0, ends - time.monotonic())))
    return (on_disk(home) - before) / seconds * DAY_S


def flooded_handlers(folder: Path) -> int:
    """Bytes on disk after 60 MB of lines, each another event, to the log and to a stderr that is a file."""
    logging.getLogger("veloxquant").handlers.clear()
    with (folder / "stderr").open("w") as stream:
        log.start("info", folder / "daemon.log", stream=stream)
        for number in range(15_000):
            log.event(f"flood.{number}", text=LINE)
        log.stop()
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> int:
    """Four figures."""
    full = figures.options(__doc__ or "").full
    seconds, reloads = (600.0, 2000) if full else (60.0, 200)
    with session.private_home() as home, session.running(home) as daemon:
        time.sleep(5.0)
        figures.at_most("R38", "a start", on_disk(home) / 1e6, "MB", 1.0)
        figures.at_most("R38", "a day at rest", a_day(home, seconds, None) / 1e6, "MB", 1.0)
        asked = f"a day at rest, metrics and status asked each {SCRAPE_S:.0f} s"
        figures.at_most("R38", asked, a_day(home, seconds, daemon) / 1e6, "MB", 1.0)
        before = on_disk(home)
        with daemon.client() as client:
            for _ in range(reloads):
                client.reload()
        figures.at_most("R38", f"{reloads:,} reloads in a row", (on_disk(home) - before) / 1e6, "MB", 20.0)
    with session.private_home() as home:
        flood = home.folder / "flood"
        flood.mkdir(mode=0o700)
        figures.at_most("R38", "on disk after 2 x 60 MB of lines", flooded_handlers(flood) / 1e6, "MB", 20.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
