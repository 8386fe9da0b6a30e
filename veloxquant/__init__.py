"""veloxquant: which KV cache for this model, this workload, on this machine, now.

Public names load on first use, so that importing the package costs neither mlx nor mlx_lm.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "HardwareProfile": "veloxquant.profiles.hardware",
    "ModelProfile": "veloxquant.profiles.model",
    "WorkloadProfile": "veloxquant.profiles.workload",
    "VeloxError": "veloxquant.errors",
    "Client": "veloxquant.client",
    "BenchmarkDatabase": "veloxquant.benchmarks.benchmark_db",
    "BenchmarkRecord": "veloxquant.benchmarks.benchmark_db",
    "Plan": "veloxquant.planner.result",
    "Method": "veloxquant.methods",
    "Variant": "veloxquant.methods",
    "hookimpl": "veloxquant.methods",
    "KVCacheBuilder": "veloxquant.serve.builder",
    "KVCacheConfig": "veloxquant.serve.kv_config",
    "apply": "veloxquant.serve.apply",
    "register_caches": "veloxquant.caches.registration",
    "KVCacheProfiler": "veloxquant.profiling",
    "MLXCacheProfiler": "veloxquant.profiling",
    "LayerProfile": "veloxquant.profiling",
    "ProfileReport": "veloxquant.profiling",
    "profile_layers": "veloxquant.profiling",
    "format_profile_table": "veloxquant.profiling",
}

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604 -- the table above is the one place names are kept


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'veloxquant' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
