"""R9: the socket is taken over or removed under a running daemon: how soon it is gone, and whether it touched anything.

    python bench/reliability/r09_lost_socket.py [--full]     8 losses; without --full 2

With `daemon.drain_s` at 60 s and a client that has half a request open, so that nothing ends by itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, forked

from veloxquant.daemon.server import SELF_CHECK_S


def lose(home: session.Home, taken: bool) -> tuple[float, float, bool, int]:
    """Seconds from the loss to the end, from noticing to the end, whether the other's socket stayed; exit status."""
    log = home.folder / "log"
    log.unlink(missing_ok=True)
    daemon = forked.start(log)
    forked.ping(str(home.socket))
    with socket.socket(socket.AF_UNIX) as client, socket.socket(socket.AF_UNIX) as other:
        client.connect(str(home.socket))
        client.sendall(forked.PING[:20])
        home.socket.unlink()
        if taken:
            other.bind(str(home.socket))
        began = time.monotonic()
        inode = home.socket.lstat().st_ino if taken else 0
        code = daemon.wait()
        total, ended = time.monotonic() - began, time.time()
        left = home.socket.exists() == taken and (not taken or home.socket.lstat().st_ino == inode)
    home.socket.unlink(missing_ok=True)
    return total, ended - _noticed(log), left, code


def _noticed(log: Path) -> float:
    """The moment of the line that tells of the loss, seconds since 1970."""
    from datetime import datetime

    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    (lost,) = [line for line in lines if line["event"] == "socket.lost"]
    return datetime.fromisoformat(lost["ts"]).timestamp()


def main() -> int:
    """Removed and taken over in turn."""
    losses = 8 if figures.options(__doc__ or "").full else 2
    with session.private_home() as home:
        home.adopt()
        os.environ |= {"VELOXQUANT_DAEMON_LOG_FILE": "", "VELOXQUANT_DAEMON_DRAIN_S": "60"}
        seen = [lose(home, taken=bool(number % 2)) for number in range(losses)]
    what = f"{losses} losses"
    figures.at_most("R9", f"{what}: longest from noticing to the end", max(one[1] for one in seen), "s", 5.0)
    figures.at_most(
        "R9", f"{what}: longest from the loss to the end", max(one[0] for one in seen), "s", SELF_CHECK_S + 5
    )
    figures.at_most("R9", f"{what}: sockets of others that were touched", sum(not one[2] for one in seen), "sockets", 0)
    figures.at_most("R9", f"{what}: ends that did not tell of a failure", sum(one[3] != 1 for one in seen), "ends", 0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
