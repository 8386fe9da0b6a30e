"""The benchmark store beside the public tool's: add, open and match in one run, with ratios.

    python bench/store.py [--sizes 100,2000] [--peer /path/to/python]

The peer is VeloxQuant-MLX, called in a python of its own (--peer, or VELOXQUANT_PEER_PYTHON); without it only our
figures are printed, and that is said. Both run on the same records on the same disk, in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = "100,2000"
ADDS = 20
"""Adds timed at each size; the mean is shown, with the writing of the index that falls among them."""
MATCHES = 50

# Runs in either program: {package} is its package, {profiles} where its model and workload profiles are made.
WORK = """
import json, os, sys, time
from {package}.benchmarks.benchmark_db import BenchmarkDatabase
{profiles}
directory, adds, matches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def timed(work, times):
    began = time.perf_counter()
    for n in range(times):
        work(n)
    return (time.perf_counter() - began) / times

def resident():
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)

before = resident()
began = time.perf_counter()
db = BenchmarkDatabase(directory)
opened = time.perf_counter() - began
count, grown = len(db.records), resident() - before
match = lambda n: db.find_best_match(model, workload, ["method-3"])
match(0)
answer = {{"count": count, "open_s": opened, "bytes": grown / max(count, 1), "match_s": timed(match, matches)}}
add = lambda n: db.add("bench", "org/new-1B", context_length=1 + n, chip="M4", memory_bytes=1 << 20)
answer["add_s"] = timed(add, adds)
print(json.dumps(answer))
os._exit(0)
"""
OURS = {
    "package": "veloxquant",
    "profiles": (
        "from veloxquant.profiles import ModelProfile, WorkloadProfile\n"
        "model = ModelProfile(model_id='org/model-7-8B', architecture='llama')\n"
        "workload = WorkloadProfile(context_length=8192)"
    ),
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
}


def fill(directory: Path, count: int) -> None:
    """Write a directory of records in the public layout: 50 models, 20 methods, as many contexts as it takes."""
    records = directory / "records"
    records.mkdir(parents=True)
    index = {}
    for n in range(count):
        record = {
            "id": f"{n:016x}",
            "method": f"method-{n // 50 % 20}",
            "model_id": f"org/model-{n % 50}-8B",
            "architecture": "llama",
            "context_length": 8192 + 256 * (n // 1000),
            "memory_bytes": 300_000_000,
            "memory_reduction": 0.28,
            "throughput_tok_s": 33.1,
            "chip": "M4",
            "mlx_version": "0.32.4",
            "created_at": "2026-01-01T00:00:00.000000+00:00",
            "tags": [],
        }
        (records / f"{record['id']}.json").write_text(json.dumps(record, indent=2))
        path = f"records/{record['id']}.json"
        index[record["id"]] = {"method": record["method"], "model_id": record["model_id"], "path": path}
    (directory / "index.json").write_text(json.dumps({"version": 1, "records": index}, indent=2))


def measure(python: str, words: dict[str, str], count: int, adds: int) -> dict[str, float]:
    """One program on a fresh directory of this many records."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "benchmarks"
        fill(directory, count)
        command = [python, "-c", WORK.format(**words), str(directory), str(adds), str(MATCHES)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{words['package']} failed at {count} records:\n{done.stderr}")
    answer: dict[str, float] = json.loads(done.stdout)
    if answer["count"] != count:
        sys.exit(f"{words['package']} opened {answer['count']} of {count} records")
    return answer


def show(name: str, count: int, figures: dict[str, float]) -> None:
    """One line of the table."""
    milliseconds = "  ".join(f"{figures[key] * 1e3:>10.3f}" for key in ("add_s", "open_s", "match_s"))
    print(f"{count:>8}  {name:<10}{milliseconds}  {figures['bytes']:>10.0f}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sizes", default=SIZES, help=f"record counts, default {SIZES}")
    parser.add_argument("--peer", default=os.environ.get("VELOXQUANT_PEER_PYTHON", ""), help="its python")
    parser.add_argument("--peer-limit", type=int, default=2000, help="largest size the peer is asked for")
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}")
    if not options.peer:
        print("the peer is not installed: its figures and the ratios are missing (--peer PYTHON)")
    print(f"{'records':>8}  {'store':<10}{'add ms':>10}  {'open ms':>10}  {'match ms':>10}  {'B/record':>10}")
    for count in map(int, options.sizes.split(",")):
        ours = measure(sys.executable, OURS, count, ADDS)
        show("veloxquant", count, ours)
        if not options.peer or count > options.peer_limit:
            continue
        theirs = measure(options.peer, PEERS, count, min(ADDS, 5))
        show("peer", count, theirs)
        ratios = "  ".join(f"{theirs[key] / ours[key]:>9.1f}x" for key in ("add_s", "open_s", "match_s"))
        print(f"{count:>8}  {'ratio':<10}{ratios}", flush=True)


if __name__ == "__main__":
    main()
