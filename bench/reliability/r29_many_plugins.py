"""R29: 200 plugins load within 1 s beyond the time their own imports take, tried out first or remembered."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reliability import figures, plugins

COUNT = 200
_IMPORTING = """
import importlib, json, sys, time
sys.path.insert(0, sys.argv[1])
import veloxquant.methods
began = time.perf_counter()
for at in range(int(sys.argv[2])):
    importlib.import_module(f"vqmany{at}_module")
print(json.dumps([time.perf_counter() - began, 0, int(sys.argv[2])]))
"""
_LOADING = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
from veloxquant.methods import registry
before = time.process_time()
began = time.perf_counter()
loaded = registry.load()
spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
cpu = sum(one.ru_utime + one.ru_stime for one in spent) - before
print(json.dumps([time.perf_counter() - began, cpu, sum(m.name.startswith("vqmany") for m in loaded.methods)]))
"""


def main() -> int:
    """Each in a process of its own, with verdicts kept in a folder of its own."""
    rounds = 5 if figures.options(__doc__ or "").full else 2
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        for at in range(COUNT):
            name = f"vqmany{at}"
            plugins.lay_out(site, name, plugins.sound(name, {f"{name}-{bits}": bits for bits in (2, 4, 6, 8)}))
        _seconds(_IMPORTING, site, Path(folder) / "bytecode")  # as installed: byte code is there
        own = statistics.median(_seconds(_IMPORTING, site, Path(folder) / "none")[0] for _ in range(rounds))
        first = [_seconds(_LOADING, site, Path(folder) / f"first{at}") for at in range(rounds)]
        again = [_seconds(_LOADING, site, Path(folder) / "first0") for _ in range(rounds)]
    figures.say("R29", f"{COUNT} plugins: their own imports", own, "s", "none", met=True)
    for what, found in (("all tried out", first), ("verdicts remembered", again)):
        seconds, cpu = (statistics.median(values) for values in zip(*found, strict=True))
        figures.at_most("R29", f"{COUNT} plugins, {what}: beyond their imports", seconds - own, "s", 1.0)
        figures.say("R29", f"{COUNT} plugins, {what}: processor time, all cores", cpu, "s", "none", met=True)
    return 0


def _seconds(code: str, site: Path, cache: Path) -> tuple[float, float]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "HOME": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", code, str(site), str(COUNT)], capture_output=True, check=True, env=environment
    )
    seconds, cpu, loaded = json.loads(done.stdout)
    if loaded != COUNT:
        raise SystemExit(f"{loaded} of {COUNT} plugins were loaded")
    return float(seconds), float(cpu)


if __name__ == "__main__":
    raise SystemExit(main())
