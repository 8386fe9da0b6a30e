"""R30: SIGTERM while clients ask without pause: every request is answered or its connection closed, and exit is quick.

    python bench/reliability/r30_stop_under_load.py [--full]     200 rounds of 6 clients; without --full 10

A torn line, an internal error or an exit status other than 0 is a failure; so is a request that was sent before the
signal and got neither an answer nor the end of its connection.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, forked, load, questions

CLIENTS = 6
ENDINGS = ("shutting_down", "closed")


def ask(path: str, lines: list[bytes], endings: list[str]) -> None:
    """Ask these in turn until the daemon ends it; how it ended."""
    count = 0
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(path)
        while True:
            try:
                connection.sendall(lines[count % len(lines)])
                answer = _line(connection)
            except OSError as error:
                # What was not read when it closed is told as a reset: the end of a connection all the same.
                endings.append("closed" if isinstance(error, (BrokenPipeError, ConnectionResetError)) else repr(error))
                return
            if not answer.endswith(b"\n"):
                endings.append("torn" if answer else "closed")
                return
            count += 1
            name = json.loads(answer).get("error", {}).get("data", {}).get("name")
            if name is not None:
                endings.append(name)
                return


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        chunk = connection.recv(1 << 18)
        if not chunk:
            break
        data += chunk
    return data


def round_of(home: session.Home, number: int) -> tuple[list[str], float, int]:
    """How each client ended, seconds from the signal to the end of the daemon, and its exit status."""
    daemon = forked.start(home.folder / "log")
    forked.ping(str(home.socket))
    endings: list[str] = []
    kinds = [questions.PING], questions.plans(8), [questions.PING, *questions.plans(1)]
    threads = [
        threading.Thread(target=ask, args=(str(home.socket), kinds[one % len(kinds)], endings))
        for one in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.02 + number % 10 * 0.01)
    began = time.monotonic()
    daemon.signal(signal.SIGTERM)
    code = daemon.wait()
    took = time.monotonic() - began
    for thread in threads:
        thread.join()
    return endings, took, code


def main() -> int:
    """Rounds under load."""
    rounds = 200 if figures.options(__doc__ or "").full else 10
    with session.private_home() as home:
        home.adopt()
        os.environ["VELOXQUANT_DAEMON_LOG_FILE"] = ""
        with session.running(home):
            load.run(str(home.socket), questions.plans(1), 1)  # the model is traced once
        outcomes = [round_of(home, number) for number in range(rounds)]
        tracebacks = (home.folder / "log").read_text().count("Traceback")
    endings = [one for outcome in outcomes for one in outcome[0]]
    odd = [one for one in endings if one not in ENDINGS]
    what = f"{rounds} rounds of SIGTERM under {CLIENTS} clients"
    figures.at_most("R30", f"{what}: clients without an answer or a clean end", len(odd), "clients", 0)
    figures.at_most("R30", f"{what}: clients unaccounted for", rounds * CLIENTS - len(endings), "clients", 0)
    figures.at_most("R30", f"{what}: exits other than 0", sum(outcome[2] != 0 for outcome in outcomes), "exits", 0)
    figures.at_most("R30", f"{what}: tracebacks in the log", tracebacks, "tracebacks", 0)
    figures.at_most("R30", f"{what}: slowest exit", max(outcome[1] for outcome in outcomes), "s", 3.0)
    if odd:
        print(odd[:5], file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
