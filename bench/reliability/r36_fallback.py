"""R36: how long a plan takes when no daemon answers, as a program and as a person at a terminal sees it.

`r36_fallback.py [--full]`. A model that was planned for before (its trace is on the disk); with --full also the wait of
15 s for a daemon that never comes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
import soak_load
from reliability import figures

from veloxquant import paths
from veloxquant.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 7
TARGET_S = 1.0


def asked(client: Client) -> tuple[float, float, str]:
    """(seconds, CPU seconds, the reason's stable name) of one plan that this process must have made."""
    began, worked = time.perf_counter(), time.process_time()
    plan = client.plan(soak_load.MODEL, hardware=soak_load.HARDWARE, context_length=4096)
    took_s, worked_s = time.perf_counter() - began, time.process_time() - worked
    if plan.source != "local" or client.fallback_reason is None:
        raise SystemExit(f"the plan came from {plan.source}")
    return took_s, worked_s, client.fallback_reason.name


@contextlib.contextmanager
def stale(path: Path) -> Iterator[None]:
    """A socket file that nobody listens on."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    yield
    path.unlink()


@contextlib.contextmanager
def starting(path: Path) -> Iterator[None]:
    """A daemon that holds its lock and never listens."""
    with paths.lock_path(path).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def stopped(home: session.Home) -> Iterator[None]:
    """A real daemon after SIGSTOP."""
    daemon = session.start(home)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.process.kill()
        daemon.process.wait()
        home.socket.unlink(missing_ok=True)


def rounds(what: str, path: Path, target_s: float = TARGET_S, **settings: Any) -> None:
    """The median and the worst of some clients' first plans, in a process that has planned before."""
    times, worked, reasons = [], [], set()
    for _ in range(ROUNDS):
        with Client(path, **settings) as client:
            took_s, worked_s, reason = asked(client)
        times.append(took_s)
        worked.append(worked_s)
        reasons.add(reason)
    figures.at_most("R36", f"{what} ({'/'.join(reasons)}), median of {ROUNDS}", statistics.median(times), "s", target_s)
    figures.at_most("R36", f"{what}, worst of {ROUNDS}", max(times), "s", target_s)
    # What a busy machine does to the times above, it does not do to this one.
    figures.at_most("R36", f"{what}, CPU time, median", statistics.median(worked), "s", target_s)


def terminal(path: Path, *words: str) -> float:
    """Seconds of `veloxquantctl plan` as a process of its own, start and all."""
    config = str(soak_load.DATA / "llama-3.1-8b" / "config.json")
    command = [sys.executable, "-m", "veloxquant.ctl.main", "plan", "--config", config, "--socket", str(path)]
    began = time.perf_counter()
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    took_s = time.perf_counter() - began
    if "answered in this process" not in done.stderr:
        raise SystemExit(f"veloxquantctl plan: {done.stderr}")
    return took_s


def of_a_terminal(path: Path) -> None:
    """The command line without a daemon; once beforehand, so that the model's trace is there."""
    terminal(path, "--timeout", "2m")
    before = os.times().children_user + os.times().children_system
    times = [terminal(path) for _ in range(ROUNDS)]
    worked_s = (os.times().children_user + os.times().children_system - before) / ROUNDS
    figures.at_most("R36", "veloxquantctl plan, CPU time of the whole process, mean", worked_s, "s", TARGET_S)
    figures.at_most(
        "R36",
        f"veloxquantctl plan, process start included, median of {ROUNDS}",
        statistics.median(times),
        "s",
        TARGET_S,
    )


def main() -> int:
    """0 when it ran."""
    options = figures.options("How long a plan takes when no daemon answers.")
    with session.private_home() as home:
        home.adopt()
        path = home.socket
        with Client(path, timeout_s=120.0) as first:
            traced_s, _, _ = asked(first)
        figures.say("R36", "a model's very first plan, traced here", traced_s, "s", "none", met=True)
        rounds("plan without a daemon", path)
        kinds: list[tuple[str, Callable[[], Any]]] = [
            ("plan beside a socket that a killed daemon left", lambda: stale(path)),
            ("plan beside a daemon that holds its lock and never listens", lambda: starting(path)),
        ]
        for what, absent in kinds:
            with absent():
                rounds(what, path)
        # R36 speaks of an absent daemon: one that hangs is doubted after half a second, for a second and a half.
        with stopped(home):
            rounds("plan beside a stopped daemon", path, target_s=3.0)
        of_a_terminal(path)
        if options.full:
            took_s = terminal(path, "--wait", "15s")
            figures.at_most("R36", "veloxquantctl plan --wait 15s, nobody comes", took_s, "s", 15.0 + TARGET_S)
    print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
