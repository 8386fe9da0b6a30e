"""R19: a daemon left with 64 descriptors under 200 clients: accepting pauses, one log line a second, then all is well.

The limit is set under the running daemon (prlimit, Linux only), which had counted on more. While it cannot accept,
those who are in are served; when clients leave, those who wait get in, without a restart.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import session
from reliability import figures, questions, wire

FILES = 64
CLIENTS = 200
WATCHED_S = {False: 3.0, True: 12.0}


def pauses(home: session.Home) -> int:
    """Lines about it in the daemon's log so far."""
    told = home.log.read_text(encoding="utf-8", errors="replace").splitlines()
    return sum(1 for line in told if line.startswith("{") and json.loads(line)["event"] == "accept.paused")


def main() -> int:
    """Watched for three seconds, or for twelve."""
    watched_s = WATCHED_S[figures.options(__doc__ or "").full]
    if not hasattr(resource, "prlimit"):
        print("another process's limits can be set on Linux only", file=sys.stderr)
        return 0
    with session.private_home() as home, session.running(home) as daemon:
        path = str(home.socket)
        before = wire.vitals(daemon)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        clients = [wire.Wire(path) for _ in range(CLIENTS)]
        time.sleep(0.5)
        process = psutil.Process(daemon.process.pid)
        spent, began = sum(process.cpu_times()[:2]), time.monotonic()
        served = 0
        while time.monotonic() < began + watched_s:
            served += clients[0].ask(questions.PING)["result"]["pong"]
            time.sleep(0.05)
        elapsed = time.monotonic() - began
        cpu = (sum(process.cpu_times()[:2]) - spent) / elapsed * 100
        lines = pauses(home)
        figures.at_most("R19", "log lines about it a second", lines / (elapsed + 0.5), "/s", 1.2)
        figures.at_most("R19", "processor while it cannot accept", cpu, "%", 10)
        figures.say("R19", "pings answered meanwhile to one who is in", served, "pings", "> 0", met=served > 0)
        for one in clients[: CLIENTS - 20]:
            one.close()
        began = time.monotonic()
        late = sum(1 for one in clients[CLIENTS - 20 :] if one.ask(questions.PING)["result"]["pong"])
        took = time.monotonic() - began
        figures.say("R19", "of 20 who had waited, answered once others left", late, "clients", "20", met=late == 20)
        figures.at_most("R19", "after", took, "s", 1)
        for one in clients[CLIENTS - 20 :]:
            one.close()
        time.sleep(0.3)
        after = wire.vitals(daemon)
        figures.at_most("R19", "descriptors more than before", after.files - before.files, "files", 0)
        told = home.log.read_text(encoding="utf-8", errors="replace")
        figures.at_most("R19", "tracebacks", told.count("Traceback"), "tracebacks", 0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
