"""Times the peer's planner through its public door; run by the interpreter of the peer's own environment.

Prints one JSON object: the version, the import time and the seconds of each plan. Its first plan also detects the
machine, so it is kept apart.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

PLANS = 8


def main() -> int:
    """Argument: a config.json. All plans are for the same model and context."""
    with open(sys.argv[1], encoding="utf-8") as file:  # noqa: PTH123 -- the peer may run on any Python
        config = json.load(file)
    began = time.perf_counter()
    from veloxquant_mlx.planning import AutoOptimizer, WorkloadProfile

    imported = time.perf_counter() - began
    optimizer = AutoOptimizer()
    seconds = []
    for _ in range(PLANS + 1):
        began = time.perf_counter()
        optimizer.recommend_strategy(model_config=config, workload=WorkloadProfile(context_length=8192))
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"version": version("veloxquant-mlx"), "import_s": imported, "plan_s": seconds[1:]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
