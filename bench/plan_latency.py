"""How long a plan takes, against the targets and against the peer's planner, all in one run: `make bench`.

One client and 32 clients ask a daemon that holds 1,000 records; each client is a process of its own on a plain socket.
Its memory is read at the start, after that, and after 256 clients that all asked something new at once, then at rest.
The peer (PyPI `veloxquant-mlx`) is timed in its own environment when VELOXQUANT_PEER_PYTHON names its interpreter.
Figures move with what else the machine does: nothing here fails, each target stands beside its figure.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import plan_client
import psutil
import session

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.ctl import figures
from veloxquant.wire.messages import encode_request

HERE = Path(__file__).parent
DATA = HERE / "data"
LLAMA = json.loads((DATA / "llama-3.1-8b" / "config.json").read_text(encoding="utf-8"))
LLAMA_ID = "meta-llama/Meta-Llama-3.1-8B"
PEER_PYTHON = os.environ.get("VELOXQUANT_PEER_PYTHON")
RECORDS = 1000
ONE_CLIENT_PLANS = 4000
MANY_CLIENTS, PLANS_EACH = 32, 250
BURST_CLIENTS, BURST_PLANS = 256, 16
REST_S = 15.0
"""What a daemon holds at work it gives back soon after (R2 is for one at rest)."""
STARTS = 9


@dataclass(frozen=True)
class Figure:
    """One measured value and its target, in the same unit."""

    name: str
    value: float
    unit: str
    target: float | None = None

    def line(self) -> str:
        """The value, and whether the target is met."""
        text = f"{self.name:58} {figures.short(self.value):>10} {self.unit:8}"
        if self.target is None:
            return text
        return f"{text} target {self.target:g} {self.unit}: {'met' if self.value <= self.target else 'MISSED'}"


def show(*figures: Figure) -> None:
    """Print figures as they come."""
    for figure in figures:
        print(figure.line(), flush=True)


def wall_ms(*words: str, environment: dict[str, str] | None = None) -> float:
    """Best wall time of a fresh interpreter in milliseconds: whatever else the machine does can only add to it."""
    seconds = []
    for _ in range(STARTS):
        began = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, capture_output=True, env=environment)
        seconds.append(time.perf_counter() - began)
    return min(seconds) * 1000


def starts(home: session.Home) -> None:
    """What a program pays before it does anything."""
    environment = home.environment
    bare = wall_ms("-c", "pass", environment=environment)
    show(
        Figure(f"interpreter alone, best of {STARTS}", bare, "ms"),
        Figure(
            "import veloxquant, above that",
            wall_ms("-c", "import veloxquant", environment=environment) - bare,
            "ms",
            60,
        ),
        Figure(
            "import veloxquant.client, above that",
            wall_ms("-c", "import veloxquant.client", environment=environment) - bare,
            "ms",
        ),
        Figure(
            "veloxquantctl --help, whole",
            wall_ms(console("veloxquantctl"), "--help", environment=environment),
            "ms",
            80,
        ),
    )


def console(name: str) -> str:
    """The console script beside this interpreter."""
    return str(Path(sys.executable).with_name(name))


def fill(home: session.Home) -> None:
    """1,000 records as a user's directory would hold: models, variants and contexts mixed."""
    home.adopt()
    database = BenchmarkDatabase()
    for number in range(RECORDS):
        database.add(
            ("fp16", "affine8-g64", "affine4-g64", "affine4-g32")[number % 4],
            f"org/model-{number % 50}",
            context_length=1024 * (1 + number // 50),
            memory_bytes=1_000_000 + number,
            throughput_tok_s=10.0 + number % 90,
            chip="Apple M4",
            mlx_version="0.32.4",
            architecture="llama",
        )
    database.close()


def ready_and_resident(home: session.Home) -> None:
    """From starting the process to its first answer, and what it then holds."""
    ready, resident = [], []
    for _ in range(STARTS):
        with session.running(home) as daemon:
            ready.append(daemon.ready_s * 1000)
            resident.append(resident_mib(daemon))
    show(
        Figure(f"daemon ready with {RECORDS:,} records, median of {STARTS}", statistics.median(ready), "ms", 400),
        Figure(f"daemon resident at the start, {RECORDS:,} records", max(resident), "MiB", 60),
    )


def resident_mib(daemon: session.Daemon) -> float:
    """What the daemon's process holds in memory now."""
    return float(psutil.Process(daemon.process.pid).memory_info().rss) / 2**20


def requests(count: int) -> bytes:
    """Lines that a client sends: the same model, each line another context."""
    model = {"config": LLAMA, "model_id": LLAMA_ID, "weights_bytes": 9 * 2**29}
    hardware = {"chip": "Apple M2", "gpu_cores": 10, "total_memory_bytes": 16 * 2**30, "working_set_bytes": 11 * 2**30}
    asked = ({"model": model, "hardware": hardware, "workload": {"context_length": 4096 + n}} for n in range(count))
    return b"".join(encode_request(1, "plan", one) for one in asked)


def write_requests(home: session.Home) -> tuple[Path, Path]:
    """A file with one question, and one with as many as one client asks."""
    same, new = home.folder / "same.json", home.folder / "new.json"
    same.write_bytes(requests(1))
    new.write_bytes(requests(ONE_CLIENT_PLANS))
    return same, new


def traces(home: session.Home, same: Path) -> None:
    """The first plan for a model ever, and the first of a daemon that finds the trace on disk."""
    show(
        Figure("first plan for a model, traced in a worker", first_plan_ms(home, same), "ms"),
        Figure("first plan of a new daemon, trace on disk", first_plan_ms(home, same), "ms"),
    )


def first_plan_ms(home: session.Home, same: Path) -> float:
    """A new daemon's first answer to this request."""
    with session.running(home):
        return plan_client.times(str(home.socket), [same.read_bytes()], 1)[0] * 1000


def clients(home: session.Home, lines: Path, count: int, plans: int) -> tuple[list[float], float]:
    """Seconds of every answer of so many client processes, and plans a second over all of them."""
    words = [sys.executable, str(HERE / "plan_client.py"), str(home.socket), str(lines), str(plans)]
    processes = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=home.environment)
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise session.SessionError("a client process did not get a plan")
    began = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate()[0] for process in processes]
    elapsed = time.perf_counter() - began
    return [seconds for answer in answers for seconds in json.loads(answer)], count * plans / elapsed


def rates(home: session.Home, same: Path, new: Path) -> float:
    """Plans over the socket; returns the median seconds of a question that was not asked before."""
    with session.running(home) as daemon:
        fresh, fresh_rate = clients(home, new, 1, ONE_CLIENT_PLANS)
        asked, asked_rate = clients(home, same, 1, ONE_CLIENT_PLANS)
        many, many_rate = clients(home, same, MANY_CLIENTS, PLANS_EACH)
        asked_mib = resident_mib(daemon)
        burst(home, new)
        burst_mib = resident_mib(daemon)
        time.sleep(REST_S)
        rested_mib = resident_mib(daemon)
    show(
        Figure("one client, each question new: plan, p50", percentile(fresh, 50) * 1e6, "us"),
        Figure("one client, each question new: plan, p99", percentile(fresh, 99) * 1e6, "us"),
        Figure("one client, each question new: plans a second", fresh_rate, "/s"),
        Figure("one client, question asked before: plan, p50", percentile(asked, 50) * 1e6, "us", 150),
        Figure("one client, question asked before: plan, p99", percentile(asked, 99) * 1e6, "us", 2000),
        Figure("one client, question asked before: plans a second", asked_rate, "/s"),
        Figure(f"{MANY_CLIENTS} client processes: plan, p50", percentile(many, 50) * 1e3, "ms"),
        Figure(f"{MANY_CLIENTS} client processes: plan, p99", percentile(many, 99) * 1e3, "ms"),
        Figure(f"{MANY_CLIENTS} client processes: plans a second, all together", many_rate, "/s"),
        Figure(f"daemon resident after {ONE_CLIENT_PLANS:,} new questions", asked_mib, "MiB", 60),
        Figure(f"daemon resident after a burst of {BURST_CLIENTS} clients", burst_mib, "MiB"),
        Figure(f"daemon resident {REST_S:g} s after that", rested_mib, "MiB", 60),
    )
    return percentile(fresh, 50)


def burst(home: session.Home, new: Path) -> None:
    """256 connections at once, each with questions of its own; threads of this process, since only memory is read."""
    lines = new.read_bytes().splitlines(keepends=True)
    parts = [lines[n * BURST_PLANS % len(lines) :][:BURST_PLANS] for n in range(BURST_CLIENTS)]
    with ThreadPoolExecutor(BURST_CLIENTS) as pool:
        for _ in pool.map(lambda part: plan_client.times(str(home.socket), part, BURST_PLANS), parts):
            pass


def percentile(seconds: list[float], rank: int) -> float:
    """The rank-th percentile."""
    return statistics.quantiles(seconds, n=100, method="inclusive")[rank - 1]


def peer(home: session.Home, ours_s: float) -> None:
    """The peer's planner on the same config, in its own environment."""
    if not PEER_PYTHON:
        print("peer: not timed; name the interpreter of its environment in VELOXQUANT_PEER_PYTHON")
        return
    config = home.folder / "config.json"
    config.write_text(json.dumps(LLAMA), encoding="utf-8")
    words = [PEER_PYTHON, str(HERE / "peer_plan.py"), str(config)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=home.environment)
    found = json.loads(done.stdout.splitlines()[-1])
    theirs = statistics.median(found["plan_s"])
    show(
        Figure(f"peer {found['version']}: import", found["import_s"] * 1000, "ms"),
        Figure(f"peer {found['version']}: plan in its own process, p50", theirs * 1e6, "us"),
    )
    print(f"a new question over our socket is answered {theirs / ours_s:,.0f} times faster than in the peer's process")


def main() -> int:
    """All figures, in the order a daemon lives."""
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, load {load}, Python {sys.version.split()[0]}")
    with session.private_home() as home:
        starts(home)
        fill(home)
        ready_and_resident(home)
        same, new = write_requests(home)
        traces(home, same)
        peer(home, rates(home, same, new))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
