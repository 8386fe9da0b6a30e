"""R15: 500 clients that sent half a line: a fresh client is served as ever, and they are closed after 30 s.

The wait for that is part of `--full`. Idle clients are closed after `daemon.idle_timeout_s`, here 2 s instead of ten
minutes, unless they subscribed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, load, questions, wire

HALF_OPEN = 500
PINGS = 1000
HALF = questions.plans(1)[0][:300]
SUBSCRIBE = b'{"jsonrpc":"2.0","id":1,"method":"subscribe"}\n'
IDLE_S = 2.0


def half_open(full: bool) -> None:
    """Half a line, 500 times over."""
    with session.private_home() as home, session.running(home) as daemon:
        path = str(home.socket)
        load.run(path, questions.plans(1), 20)
        alone = wire.fresh_pings_ms(path, PINGS)
        held = [wire.Wire(path) for _ in range(HALF_OPEN)]
        began = time.monotonic()
        for one in held:
            one.send(HALF)
        beside = wire.fresh_pings_ms(path, PINGS)
        label = f"a fresh client's ping beside {HALF_OPEN} half-open ones"
        for what, times in (("a fresh client's ping alone", alone), (label, beside)):
            figures.say("R15", f"{what}: p50", figures.percentile(times, 50), "ms", "none", met=True)
            figures.at_most("R15", f"{what}: p99", figures.percentile(times, 99), "ms", 10)
        if full:
            closed = [one.is_closed(max(0.001, began + 40 - time.monotonic())) for one in held]
            took = time.monotonic() - began
            figures.at_most("R15", "half-open clients not closed within 40 s", closed.count(False), "clients", 0)
            in_time = 29 <= took <= 32
            figures.say(
                "R15", "the last half-open client was closed after", took, "s", "30 s, give or take 2", met=in_time
            )
            figures.at_most("R15", "connections left", daemon.client().status().clients.now - 1, "clients", 0)
        for one in held:
            one.close()


def idle() -> None:
    """One that asks nothing, and one that listens."""
    with session.private_home() as home:
        home.environment["VELOXQUANT_DAEMON_IDLE_TIMEOUT_S"] = str(IDLE_S)
        with session.running(home):
            silent, listener = wire.Wire(str(home.socket)), wire.Wire(str(home.socket))
            listener.send(SUBSCRIBE)
            listener.lines(2)  # the answer and the first notice
            began = time.monotonic()
            closed = silent.is_closed(IDLE_S * 3)
            took = time.monotonic() - began
            figures.say("R15", "an idle client is closed after", took, "s", f"{IDLE_S:g} s, as configured", met=closed)
            kept = not listener.is_closed(IDLE_S)
            figures.say("R15", "a subscriber is kept beyond it", float(kept), "yes", "1", met=kept)
            silent.close()
            listener.close()


def main() -> int:
    """Short: without the wait of 30 s."""
    half_open(figures.options(__doc__ or "").full)
    idle()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
