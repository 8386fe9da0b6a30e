"""R35: the same question in the same world gives the same bytes, in every interpreter, whatever its hash seed.

`r35_determinism.py [--full] [--python PATH ...]`. Without paths this interpreter alone. `--freeze` traces the models
anew and writes the world's file, which needs mlx-lm; it is only for when the shape of a profile changes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reliability import figures

HERE = Path(__file__).resolve().parent
WORLD = HERE.parent / "data" / "reliability" / "r35_world.json"
CONFIGS = HERE.parents[1] / "tests" / "data" / "model_configs.json"
SEEDS = ("0", "1", "4294967295")
REPEATS, FULL_REPEATS, _FEW = 64, 10_000, 8
MODELS = (
    "meta-llama/Meta-Llama-3.1-8B",
    "google/gemma-3-12b-it",
    "deepseek-ai/DeepSeek-V2-Lite",
    "Qwen/Qwen3.5-4B",
)
WORKLOADS = (
    {"context_length": 4096},
    {"context_length": 131_072, "objective": "memory", "batch_size": 4},
    {"context_length": 32_768, "objective": "quality", "max_kl": 0.02},
    {"context_length": 65_536, "objective": "throughput", "num_concurrent_requests": 8, "allow_eviction": True},
)
GIB = 2**30
MACHINES: tuple[dict[str, Any], ...] = (
    {
        "chip": "Apple M2",
        "generation": 2,
        "tier": "base",
        "gpu_cores": 10,
        "total_memory_bytes": 16 * GIB,
        "working_set_bytes": 11 * GIB,
        "active_bytes": GIB,
        "bandwidth_gbps": 100.0,
        "mlx_version": "0.32.4",
        "macos_version": "26.1",
        "sources": {"chip": "given", "bandwidth_gbps": "chip table"},
    },
    {"total_memory_bytes": 8 * GIB, "sources": {"total_memory_bytes": "given"}},
)


def records() -> list[dict[str, Any]]:
    """Measured figures that plans of the first model rest on."""
    made = []
    for number, label in enumerate(("fp16", "kivi-k5v4", "kivi-k4v3", "rotated-k5v4")):
        made.append(
            {
                "id": f"record-{number}",
                "method": label,
                "model_id": MODELS[0],
                "architecture": "llama",
                "context_length": 4096,
                "throughput_tok_s": 10.0 - number,
                "latency_ms_per_token": 1000 / (10.0 - number),
                "chip": "Apple M2",
                "mlx_version": "0.32.4",
                "macos_version": "26.1",
                "created_at": f"2026-01-0{number + 1}T00:00:00+00:00",
            }
        )
    return made


def freeze() -> None:
    """Trace the models with the installed engine, and write everything an answer depends on."""
    import msgspec

    from veloxquant import local
    from veloxquant.config import load
    from veloxquant.planner.snapshot import NoRecords
    from veloxquant.wire.messages import PlanParams, convert_params

    world = local.open_world(load(flags={"trace.timeout_s": 120.0}), records=NoRecords(), calibrations={})
    configs = {one["model"]: one["config"] for one in json.loads(CONFIGS.read_text(encoding="utf-8"))["models"]}
    traced = []
    for name in MODELS:
        model = {"config": configs[name], "model_id": name, "weights_bytes": 8 * GIB}
        params = convert_params("plan", {"model": model})
        assert isinstance(params, PlanParams)
        source = local.model_source(params)
        traced.append(msgspec.to_builtins(local.cached_profile(source, world) or local.trace_profile(source, world)))
    parts = {"models": traced, "workloads": WORKLOADS, "machines": MACHINES, "records": records()}
    WORLD.parent.mkdir(parents=True, exist_ok=True)
    WORLD.write_text(json.dumps(parts, separators=(",", ":")) + "\n", encoding="utf-8")


def told(python: str, seed: str, repeats: int) -> dict[str, Any]:
    """What one interpreter answered."""
    command = [python, "-P", "-W", "ignore", str(HERE / "answers_of.py"), str(repeats)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{python} failed:\n{done.stderr[-2000:]}")
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def main() -> int:
    """0 when it ran."""
    parser = argparse.ArgumentParser(description="The same question in the same world gives the same bytes.")
    parser.add_argument("--full", action="store_true", help="10,000 repeats in each interpreter")
    parser.add_argument("--python", action="append", help="an interpreter; may be given several times")
    parser.add_argument("--freeze", action="store_true", help="write the world's file anew")
    options: Any = parser.parse_args()
    if options.freeze:
        freeze()
    repeats = FULL_REPEATS if options.full else REPEATS
    pythons = options.python or [sys.executable]
    answers = [
        # Many repeats under one seed; with the others a few.
        told(python, seed, repeats if seed == SEEDS[0] else _FEW)
        for python in pythons
        for seed in SEEDS
    ]
    kinds = [set().union(*(one["digests"][at] for one in answers)) for at in range(len(answers[0]["digests"]))]
    versions = ", ".join(sorted({one["python"] for one in answers}))
    what = f"questions with more than one answer ({len(kinds)} questions, {answers[0]['offers']} variants, {versions})"
    figures.at_most("R35", what, sum(len(one) > 1 for one in kinds), "questions", 0)
    figures.say(
        "R35", "answers compared", sum(one["repeats"] for one in answers), "answers", "10,000", met=options.full
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
