"""The benchmark store beside the public tool's: open, match, add and close in one run, with ratios and our targets.

    python bench/store.py [--sizes 100,2000] [--peer /path/to/python] [--peer-limit 2000]

The peer is VeloxQuant-MLX, called in a python of its own (--peer, or VELOXQUANT_PEER_PYTHON); without it only our
figures are printed, and that is said. Both run on the same records on the same disk, in processes of their own. Above
--peer-limit the peer is left out, as it writes and flushes every record at each add: a minute and more at 100,000.
Times are wall time; CPU time is beside them, as the clock alone says little on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = "100,2000,20000,100000"
ADDS = 20
"""Adds timed at each size; the mean is shown."""
MATCHES = 50
MANY = 100_000
THRESHOLD = 0.6
OPEN_TARGET_S, MATCH_TARGET_S, ADD_TARGET_RATIO = 3.0, 0.001, 100.0
"""At 100,000 records, for each kind of match, and against the peer at 2,000."""

# Runs in either program: {package} is its package, {profiles} where its model and workload profiles are made.
WORK = """
import json, os, statistics, sys, threading, time
from {package}.benchmarks.benchmark_db import BenchmarkDatabase
{profiles}
directory, adds, matches, count = sys.argv[1], *map(int, sys.argv[2:5])

def timed(name, work, times=1):
    wall, cpu = time.perf_counter(), time.process_time()
    for n in range(times):
        work(n)
    answer[name + "_s"] = (time.perf_counter() - wall) / times
    answer[name + "_cpu_s"] = (time.process_time() - cpu) / times

def each(name, work, times):
    spent = []
    for n in range(times):
        began = time.perf_counter()
        work(n)
        spent.append(time.perf_counter() - began)
    answer[name + "_s"], answer[name + "_max_s"] = statistics.median(spent), max(spent)

def resident():
    if os.path.exists("/proc/self/statm"):
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource  # the peak, which is what macOS tells
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)

answer, made, before = {{}}, [], resident()
timed("open", lambda n: made.append(BenchmarkDatabase(directory{limits})))
db = made[0]
answer["count"] = len(db.records)
timed("first", lambda n: db.find_best_match(model, workload, ["method-3"]))
answer["bytes"] = (resident() - before) / max(answer["count"], 1)
timed("match", lambda n: db.find_best_match(model, workload, ["method-3"]), matches)
each("all", lambda n: db.find_best_match(model, workload), matches)
{beside}
add = lambda n: db.add("bench", "org/new-1B", context_length=1 + n, chip="M4", memory_bytes=1 << 20)
timed("add", add, adds)
{full}
timed("close", lambda n: {close})
print(json.dumps(answer))
os._exit(0)
"""
OURS = {
    "package": "veloxquant",
    "profiles": (
        "from veloxquant.profiles import ModelProfile, WorkloadProfile\n"
        "from veloxquant.benchmarks.eviction import Limits\n"
        "model = ModelProfile(model_id='org/model-7-8B', architecture='llama')\n"
        "workload = WorkloadProfile(context_length=8192)"
    ),
    "limits": ", limits=Limits(max_records=count + adds)",
    # Another thread looks at the directory again, where some thousands of files have to be read again.
    "beside": (
        "assert len(db.find_best_match(model, workload)) == min(50, count // 50)\n"
        "for number, path in zip(range(5000), db.records_dir.iterdir()):\n"
        "    os.utime(path)\n"
        "looking = threading.Thread(target=db.load)\n"
        "looking.start()\n"
        "spent = []\n"
        "while looking.is_alive():\n"
        "    began = time.perf_counter()\n"
        "    db.find_best_match(model, workload, ['method-3'])\n"
        "    spent.append(time.perf_counter() - began)\n"
        "    time.sleep(0.001)\n"
        "answer['beside_s'], answer['beside_max_s'] = statistics.median(spent), max(spent)"
    ),
    # Single adds until the index was written among them, and then adds to a store that is full.
    "full": (
        "before, spent = os.stat(db.index_path).st_ino, []\n"
        "while len(spent) < 500 or os.stat(db.index_path).st_ino == before:\n"
        "    began = time.perf_counter()\n"
        "    add(len(spent) % adds)\n"
        "    spent.append(time.perf_counter() - began)\n"
        "    time.sleep(0.002)\n"
        "answer['single_max_s'], answer['singles'] = max(spent), len(spent)\n"
        "timed('first_full', lambda n: add(adds))\n"
        "timed('full', lambda n: add(adds + 1 + n), adds)\n"
        "assert len(db.records) == count + adds"
    ),
    "close": "db.close()",
}
# Its profiles are stood in for by objects with the fields it documents.
PEERS = {
    "package": "veloxquant_mlx",
    "profiles": (
        "from types import SimpleNamespace\n"
        "model = SimpleNamespace(model_id='org/model-7-8B', architecture='llama')\n"
        "workload = SimpleNamespace(context_length=8192, generation_length=512, batch_size=1,\n"
        "    num_concurrent_requests=1, objective='balanced', max_latency_ms=None)"
    ),
    "limits": "",
    "beside": "",
    "full": "",
    "close": "None",
}
_COLUMNS = ("add", "full", "open", "first", "match")


def fill(directory: Path, count: int) -> None:
    """Write a directory of records in the public layout: 50 models, 50 methods, as many contexts as it takes."""
    records = directory / "records"
    records.mkdir(parents=True)
    index = {}
    for n in range(count):
        record = {
            "id": f"{n:016x}",
            "method": f"method-{n // 50 % 50}",
            "model_id": f"org/model-{n % 50}-8B",
            "architecture": "llama",
            "context_length": 8192 + 256 * (n // 2500),
            "memory_bytes": 300_000_000,
            "memory_reduction": 0.28,
            "throughput_tok_s": 33.1,
            "chip": "M4",
            "mlx_version": "0.32.4",
            "workload": {
                "context_length": 8192 + 256 * (n // 2500),
                "generation_length": 512,
                "batch_size": 1,
                "num_concurrent_requests": 1,
                "objective": "balanced",
                "max_latency_ms": None,
            },
            "created_at": "2026-01-01T00:00:00.000000+00:00",
            "tags": [],
        }
        (records / f"{record['id']}.json").write_text(json.dumps(record, indent=2))
        path = f"records/{record['id']}.json"
        index[record["id"]] = {"method": record["method"], "model_id": record["model_id"], "path": path}
    (directory / "index.json").write_text(json.dumps({"version": 1, "records": index}, indent=2))


def shapes() -> dict[str, list[float]]:
    """Seconds of each match of 40 methods among 100,000 records of many machines, versions and sizes."""
    from veloxquant.benchmarks.record_set import RecordGroups, query
    from veloxquant.benchmarks.records import BenchmarkRecord
    from veloxquant.profiles import HardwareProfile, ModelProfile, WorkloadProfile

    chips = [f"Apple M{generation}{tier}" for generation in range(1, 6) for tier in ("", " Pro", " Max", " Ultra")]
    kinds: dict[str, Callable[[int], dict[str, Any]]] = {
        "1,000 machines": lambda n: {
            "chip": chips[n % 20],
            "mlx_version": f"0.{30 + n // 20 % 3}.{n // 60 % 4}",
            "batch_size": 2 ** (n // 240 % 4),
        },
        "2,500 builds": lambda n: {"chip": "Apple M4", "mlx_version": f"0.32.0.dev{n}"},
        "200 model sizes": lambda n: {"model_id": f"org/{n}", "tags": [f"parameters:{1 + n % 200}00000000"]},
    }
    model = ModelProfile(model_id="org/model", architecture="llama", num_parameters=8 * 10**9)
    asked = query(
        "", model, WorkloadProfile(context_length=8192), HardwareProfile(chip="Apple M4", mlx_version="0.32.4")
    )
    plain = {"model_id": "org/model", "architecture": "llama", "chip": "Apple M4", "mlx_version": "0.32.4"}
    spent: dict[str, list[float]] = {}
    for name, kind in kinds.items():
        groups = RecordGroups(
            BenchmarkRecord(
                id=f"{n}",
                method=f"method-{n % 40}",
                context_length=1 + n * 7919 % 131_072,
                **(plain | kind(n // 40)),
            )
            for n in range(MANY)
        )
        spent[name] = []
        for _ in range(MATCHES):
            began = time.perf_counter()
            found = groups.best(model, asked, THRESHOLD, None)
            spent[name].append(time.perf_counter() - began)
        print(
            f"{MANY:>8}  {name}: match of {len(found)} methods: "
            f"median {statistics.median(spent[name]) * 1e3:.3f} ms, most {max(spent[name]) * 1e3:.3f}",
            flush=True,
        )
    return spent


def measure(python: str, words: dict[str, str], count: int, adds: int) -> dict[str, float]:
    """One program on a fresh directory of this many records."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "benchmarks"
        fill(directory, count)
        os.sync()  # what was just written is not to compete for the disk with what is measured
        command = [python, "-c", WORK.format(**words), str(directory), str(adds), str(MATCHES), str(count)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{words['package']} failed at {count} records:\n{done.stderr}")
    answer: dict[str, float] = json.loads(done.stdout)
    if answer["count"] != count:
        sys.exit(f"{words['package']} opened {answer['count']} of {count} records")
    return answer


def show(name: str, count: int, figures: dict[str, float]) -> None:
    """One line of the table: wall and CPU milliseconds of each operation."""
    cells = []
    for key in _COLUMNS:
        wall, cpu = figures.get(f"{key}_s"), figures.get(f"{key}_cpu_s")
        cells.append(f"{'-':>18}" if wall is None or cpu is None else f"{wall * 1e3:>9.3f}{cpu * 1e3:>9.3f}")
    print(f"{count:>8}  {name:<10}{'  '.join(cells)}  {figures['bytes']:>8.0f}", flush=True)


def further(count: int, ours: dict[str, float]) -> None:
    """What only our store is asked: single adds, a match beside a load, every method at once, close."""
    ms = {key: value * 1e3 for key, value in ours.items()}
    print(
        f"{'':>8}  all {min(50, count // 50)} methods: median {ms['all_s']:.3f} ms, most {ms['all_max_s']:.3f}; "
        f"match while another thread loads: median {ms['beside_s']:.3f} ms, most {ms['beside_max_s']:.3f}\n"
        f"{'':>8}  the slowest of {ours['singles']:.0f} adds, with the index: {ms['single_max_s']:.1f} ms; "
        f"the first add when full: {ms['first_full_s']:.1f} ms; close: {ms['close_s']:.1f} ms",
        flush=True,
    )


def ratio_line(count: int, ours: dict[str, float], theirs: dict[str, float]) -> None:
    """How many times longer the peer takes, by wall time."""
    cells = [f"{theirs[f'{key}_s'] / ours[f'{key}_s']:>17.1f}x" if key != "full" else f"{'':18}" for key in _COLUMNS]
    print(f"{count:>8}  {'ratio':<10}{'  '.join(cells)}", flush=True)


def verdicts(
    ours: dict[int, dict[str, float]], theirs: dict[int, dict[str, float]], shaped: dict[str, list[float]]
) -> bool:
    """Each target with its figure; whether all are met."""
    found = []
    for name, all_spent in shaped.items():
        middle = statistics.median(all_spent)
        text = f"match among {name} (median): {middle * 1e3:.3f} ms (at most {MATCH_TARGET_S * 1e3:g})"
        found.append((middle <= MATCH_TARGET_S, text))
    if MANY in ours:
        opened = ours[MANY]["open_s"]
        found.append((opened <= OPEN_TARGET_S, f"open {MANY:,} records: {opened:.2f} s (at most {OPEN_TARGET_S:g})"))
        kinds = {"first": "first match", "match": "match", "all": "match of 50 methods (median)"}
        for key, kind in kinds.items():
            spent = ours[MANY][f"{key}_s"]
            text = f"{kind} among {MANY:,}: {spent * 1e3:.3f} ms (at most {MATCH_TARGET_S * 1e3:g})"
            found.append((spent <= MATCH_TARGET_S, text))
    if 2000 in theirs:
        times = theirs[2000]["add_s"] / ours[2000]["add_s"]
        found.append((times >= ADD_TARGET_RATIO, f"add at 2,000: {times:.0f}x faster (at least {ADD_TARGET_RATIO:g})"))
    for is_met, text in found:
        print(f"{'met   ' if is_met else 'MISSED'}  {text}")
    return all(is_met for is_met, _ in found)


def main() -> int:
    """Print the table; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sizes", default=SIZES, help=f"record counts, default {SIZES}")
    parser.add_argument("--peer", default=os.environ.get("VELOXQUANT_PEER_PYTHON", ""), help="its python")
    parser.add_argument("--peer-limit", type=int, default=2000, help="largest size the peer is asked for")
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}")
    if not options.peer:
        print("the peer is not installed: its figures and the ratios are missing (--peer PYTHON)")
    titles = "  ".join(f"{f'{name} ms':>9}{'CPU':>9}" for name in _COLUMNS)
    print(f"{'records':>8}  {'store':<10}{titles}  {'B/record':>8}")
    ours: dict[int, dict[str, float]] = {}
    theirs: dict[int, dict[str, float]] = {}
    for count in map(int, options.sizes.split(",")):
        ours[count] = measure(sys.executable, OURS, count, ADDS)
        show("veloxquant", count, ours[count])
        further(count, ours[count])
        if not options.peer or count > options.peer_limit:
            continue
        theirs[count] = measure(options.peer, PEERS, count, 5 if count <= MANY // 50 else 1)
        show("peer", count, theirs[count])
        ratio_line(count, ours[count], theirs[count])
    print("full: an add to a store that is full, which evicts one; B/record: growth of the process at opening")
    return 0 if verdicts(ours, theirs, shapes() if MANY in ours else {}) else 1


if __name__ == "__main__":
    sys.exit(main())
