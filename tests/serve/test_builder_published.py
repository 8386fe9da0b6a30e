"""`for_model` packs the layers that a trace of the same model packs, architecture by architecture.

Models of published configs, made shorter; their weights are never computed. The trace is the other implementation: it
follows calls block by block, where `for_model` halves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from veloxquant.caches.packed import PackedKVCache
from veloxquant.errors import MethodRefused
from veloxquant.methods.registry import load
from veloxquant.methods.worker import Factory
from veloxquant.models.exchange import ProbeRequest
from veloxquant.models.trace_worker import engine, tracing
from veloxquant.models.trace_worker.probes import Prober
from veloxquant.serve.builder import KVCacheBuilder, KVCacheConfig

PARAMS = {"bits": 4, "group": 32}
PUBLISHED = {
    entry["model"]: entry["config"]
    for entry in json.loads((Path(__file__).parents[1] / "data" / "model_configs.json").read_text())["models"]
}
FEW = {"vocab_size": 1000, "num_hidden_layers": 12}
SHORTER: dict[str, dict[str, Any]] = {
    "google/gemma-4-26B-A4B": {
        "num_experts": 4,
        "top_k_experts": 2,
        "num_kv_shared_layers": 6,
        "num_hidden_layers": 30,
    },
    "openai/gpt-oss-120b": {**FEW, "num_local_experts": 4},
    "deepseek-ai/DeepSeek-V3": {**FEW, "n_routed_experts": 16},
    "Qwen/Qwen3.5-122B-A10B": {**FEW, "num_experts": 8},
    "meta-llama/Meta-Llama-3.1-8B": FEW,
}


def shortened(name: str) -> dict[str, Any]:
    """The published config with fewer layers and experts."""
    config = dict(PUBLISHED[name])
    section = config["text_config"] = dict(config["text_config"]) if "text_config" in config else {}
    (section or config).update(SHORTER[name])
    layers = (section or config)["num_hidden_layers"]
    for part in (config, section):
        if "layer_types" in part:
            part["layer_types"] = part["layer_types"][:layers]
    return {key: value for key, value in config.items() if value != {}}


@pytest.mark.parametrize(
    ("name", "packed", "reason"),
    [
        ("google/gemma-4-26B-A4B", 3, ""),  # 24 layers with caches; 5, 11 and 17 are full and read by nobody else
        ("openai/gpt-oss-120b", 0, "layer 1: ValueError: Quantized SDPA does not support attention sinks"),
        ("deepseek-ai/DeepSeek-V3", 0, "layer 0: a latent cache"),
        ("Qwen/Qwen3.5-122B-A10B", 3, ""),
        ("meta-llama/Meta-Llama-3.1-8B", 12, ""),
    ],
)
def test_layers_are_those_of_a_trace(name: str, packed: int, reason: str) -> None:
    """The planner's promise about which layers are packed and what the builder does are the same."""
    config, loaded = shortened(name), load(only=["affine"])
    prober = Prober(engine.build(config, "bfloat16"), tracing.trace(config, "bfloat16"), Factory(loaded))
    traced = prober.probe(ProbeRequest(method="affine", label="affine4-g32", params=PARAMS))
    assert len(traced.packed) == packed
    model = engine.build(config, "bfloat16")
    wanted = KVCacheConfig(method="affine", params=PARAMS)
    if not packed:
        with pytest.raises(MethodRefused, match=reason):
            KVCacheBuilder.for_model(model, wanted, methods=loaded)
        return
    caches = KVCacheBuilder.for_model(model, wanted, methods=loaded)
    assert tuple(index for index, cache in enumerate(caches) if type(cache) is PackedKVCache) == traced.packed
