"""The answers of one interpreter to fixed questions in a frozen world: `answers_of.py REPEATS`, a digest for each.

Nothing is read but the world's file and the packaged methods; MLX is not needed. Any interpreter with msgspec, pluggy,
numpy, filelock, psutil, watchdog and tomli-w can run it: `r35_determinism.py` starts it in each it is given,
with PYTHONPATH naming this repository.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import platform
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from veloxquant.benchmarks.record_set import RecordSet
from veloxquant.benchmarks.records import BenchmarkRecord
from veloxquant.planner.explain import explain
from veloxquant.planner.fit import fit
from veloxquant.planner.plan import plan
from veloxquant.planner.request import PlanRequest
from veloxquant.planner.snapshot import Offer, Snapshot
from veloxquant.profiles import HardwareProfile, ModelProfile, WorkloadProfile

ROOT = Path(__file__).parents[2]
WORLD = ROOT / "bench" / "data" / "reliability" / "r35_world.json"


def offers() -> tuple[Offer, ...]:
    """Every variant of every method that pyproject.toml announces: this repository's, whatever is installed."""
    _name_plugins()
    announced = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    values = announced["project"]["entry-points"]["veloxquant.methods"].values()
    methods = [one for value in values for one in importlib.import_module(value).veloxquant_methods()]
    methods.sort(key=lambda method: str(method.name))
    return tuple(Offer(method, variant) for method in methods for variant in method.variants())


def _name_plugins() -> None:
    """The folder `plugins` is the package `veloxquant_plugins`, as pyproject.toml maps it."""
    folder = ROOT / "plugins"
    spec = importlib.util.spec_from_file_location(
        "veloxquant_plugins", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["veloxquant_plugins"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def questions(world: dict[str, Any]) -> list[PlanRequest]:
    """Each model with each workload, on each machine."""
    models = [msgspec.convert(one, ModelProfile) for one in world["models"]]
    workloads = [msgspec.convert(one, WorkloadProfile) for one in world["workloads"]]
    machines = [msgspec.convert(one, HardwareProfile) for one in world["machines"]]
    return [
        PlanRequest(model=model, workload=workload, hardware=machine, engine_version=model.engine_version)
        for model in models
        for workload in workloads
        for machine in machines
    ]


def quick(asked: list[PlanRequest]) -> list[PlanRequest]:
    """Those about the first model that take some ms: a cache that drops tokens is simulated, which takes hundreds."""
    name = asked[0].model.model_id
    return [one for one in asked if one.model.model_id == name and not one.workload.allow_eviction]


def snapshot(world: dict[str, Any]) -> Snapshot:
    """The frozen world, with its records."""
    records = RecordSet([BenchmarkRecord(**one) for one in world["records"]])
    machine = msgspec.convert(world["machines"][0], HardwareProfile)
    return Snapshot(hardware=machine, offers=offers(), records=records, generation=7)


def whole(request: PlanRequest, known: Snapshot) -> bytes:
    """A plan, its explanation and what fits, as bytes."""
    made = plan(request, known)
    return msgspec.json.encode([made, explain(made), fit(request, known)])


def digest(answer: bytes) -> str:
    """Of an answer's bytes."""
    return hashlib.sha256(answer).hexdigest()


def main(repeats: int) -> None:
    """Every question once as a whole, then the first model's plans in turn, `repeats` times in all."""
    world = json.loads(WORLD.read_text(encoding="utf-8"))
    known, asked = snapshot(world), questions(world)
    answers = [{digest(whole(one, known))} for one in asked]
    first = quick(asked)
    plans: list[set[str]] = [set() for _ in first]
    for number in range(repeats):
        at = number % len(first)
        plans[at].add(digest(msgspec.json.encode(plan(first[at], known))))
    told = {
        "python": platform.python_version(),
        "repeats": len(asked) + repeats,
        "offers": len(known.offers),
        "digests": [sorted(one) for one in [*answers, *plans]],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]))
