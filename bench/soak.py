"""The daemon under mixed load for some minutes: `make soak`, or `python bench/soak.py --minutes 60`.

Clients ask old and new questions, send broken frames and hang up half way; records appear and go; the configuration is
reloaded. Memory, open files and threads are watched. It fails when an answer is wrong or missing, when the daemon's
memory or threads grow, or when a file stays open.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import socket
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import session

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parent / "data"
LLAMA = json.loads((DATA / "llama-3.1-8b" / "config.json").read_text(encoding="utf-8"))
LLAMA_ID = "meta-llama/Meta-Llama-3.1-8B"
MODEL = {"config": LLAMA, "model_id": LLAMA_ID, "weights_bytes": 9 * 2**29}
HARDWARE = {"chip": "Apple M2", "gpu_cores": 10, "total_memory_bytes": 16 * 2**30, "working_set_bytes": 11 * 2**30}
BROKEN = (
    b"\n",
    b"{\n",
    b"\xff\xfe\n",
    b'{"jsonrpc":"2.0","id":1,"method":"nope"}\n',
    b"GET / HTTP/1.1\n",
    b"[" * 9000 + b"\n",
)
GROWTH_MIB, GROWTH_MIB_PER_HOUR = 4.0, 0.5
"""Allocators settle: 4 MiB are no leak however short the run; beyond that, half a MiB an hour."""


@dataclass
class Load:
    """Work that goes on until `over`; each worker counts what it did, and the first trouble ends the soak."""

    home: session.Home
    over: threading.Event = field(default_factory=threading.Event)
    counts: dict[str, int] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)

    def keep(self, name: str, work: Callable[[int], None], pause_s: float) -> threading.Thread:
        """Repeat `work`, with the number of the round, in a thread of its own."""

        def rounds() -> None:
            for number in itertools.count():
                if self.over.wait(pause_s):
                    return
                try:
                    work(number)
                except Exception as error:  # noqa: BLE001 -- whatever a worker meets is what the soak is for
                    self.trouble.append(f"{name}, round {number}: {type(error).__name__}: {error}")
                    self.over.set()
                self.counts[name] = number + 1

        thread = threading.Thread(target=rounds, name=name)
        thread.start()
        return thread


def ask(daemon: session.Daemon, new: bool) -> Callable[[int], None]:
    """A client that keeps its connection; `new` asks for another context each time."""
    client = daemon.client()

    def work(number: int) -> None:
        context = 4096 + (number % 50_000 if new else 0)
        plan = client.plan(MODEL, hardware=HARDWARE, context_length=context)
        if plan.chosen is None or plan.workload["context_length"] != context:
            raise session.SessionError(f"a wrong answer for {context} tokens: {plan.decision}")

    return work


def misbehave(home: session.Home) -> Callable[[int], None]:
    """Broken frames, half frames and sudden ends."""

    def work(number: int) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(home.socket))
            if number % 2:
                connection.sendall(b'{"jsonrpc":"2.0","id":1,"me')
                return
            connection.sendall(BROKEN[number // 2 % len(BROKEN)])
            if not connection.recv(1 << 16):
                raise session.SessionError("a broken frame got no answer")

    return work


def publish(database: BenchmarkDatabase) -> Callable[[int], None]:
    """Records appear and go."""

    def work(number: int) -> None:
        record = database.add("fp16", f"org/soak-{number % 20}", context_length=4096, throughput_tok_s=50.0)
        if number % 3 == 0:
            database.remove(record.id)

    return work


def reload(daemon: session.Daemon) -> Callable[[int], None]:
    """SIGHUP, as an editor's hook or a person would send it."""

    def work(_: int) -> None:
        daemon.process.send_signal(signal.SIGHUP)

    return work


@dataclass(frozen=True)
class Reading:
    """The daemon process at one moment."""

    at_s: float
    resident_mib: float
    files: int
    threads: int


def read(process: psutil.Process, began: float) -> Reading:
    """Memory, open descriptors and threads now."""
    with process.oneshot():
        return Reading(
            time.monotonic() - began, process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()
        )


def watch(daemon: session.Daemon, load: Load, minutes: float) -> list[Reading]:
    """A reading every few seconds until the time is over or something went wrong."""
    began, process, readings = time.monotonic(), psutil.Process(daemon.process.pid), []
    while not load.over.wait(min(5.0, minutes * 6)):
        readings.append(read(process, began))
        if len(readings) % 12 == 1:
            print(
                f"{readings[-1].at_s:6.0f} s  {readings[-1].resident_mib:6.1f} MiB  {readings[-1].files} files",
                flush=True,
            )
        if readings[-1].at_s > minutes * 60:
            load.over.set()
    return readings


def verdict(readings: list[Reading], minutes: float) -> list[str]:
    """What grew: the last quarter of the run against the second."""
    if len(readings) < 8:  # two a quarter
        return ["the run was too short to say anything"]
    quarter = len(readings) // 4
    early, late = readings[quarter : 2 * quarter], readings[-quarter:]
    limits = {"resident_mib": max(GROWTH_MIB, GROWTH_MIB_PER_HOUR * minutes / 60), "files": 4, "threads": 2}
    grown = {name: median(late, name) - median(early, name) for name in limits}
    return [
        f"{name} grew by {grown[name]:.1f}, allowed are {most:g}" for name, most in limits.items() if grown[name] > most
    ]


def median(readings: list[Reading], name: str) -> float:
    """The median of one field."""
    return statistics.median(float(getattr(one, name)) for one in readings)


def soak(home: session.Home, minutes: float) -> list[str]:
    """Run, stop the daemon, and list what was wrong."""
    home.adopt()
    with session.running(home) as daemon:
        ask(daemon, new=False)(0)  # traced once, so that the load starts warm
        load = Load(home)
        workers = [load.keep(f"old questions {n}", ask(daemon, new=False), 0.002) for n in range(4)]
        workers += [load.keep(f"new questions {n}", ask(daemon, new=True), 0.005) for n in range(2)]
        workers += [
            load.keep("broken frames", misbehave(home), 0.02),
            load.keep("records", publish(BenchmarkDatabase()), 0.2),
            load.keep("reloads", reload(daemon), 3.0),
        ]
        readings = watch(daemon, load, minutes)
        for worker in workers:
            worker.join()
        code = daemon.stop()
    print(", ".join(f"{name}: {count}" for name, count in sorted(load.counts.items())))
    return load.trouble + verdict(readings, minutes) + ([] if code == 0 else [f"the daemon ended with {code}"])


def main() -> int:
    """0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description="The daemon under mixed load.")
    parser.add_argument("--minutes", type=float, default=10.0)
    options: Any = parser.parse_args()
    with session.private_home() as home:
        wrong = soak(home, options.minutes)
    print("\n".join(wrong) or "nothing grew, nothing was lost", file=sys.stderr if wrong else sys.stdout)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
