"""The whole way on real models: a checkpoint on disk, a plan, its caches on the model, bytes promised and held."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, save_model

import veloxquant
from veloxquant import local
from veloxquant.caches.held import held_bytes
from veloxquant.config import load
from veloxquant.models.trace_worker import engine
from veloxquant.planner.snapshot import NoRecords
from veloxquant.profiles import HardwareProfile
from veloxquant.profiles.slots import schedule
from veloxquant.wire.messages import PlanParams, convert_params

if TYPE_CHECKING:
    from veloxquant.planner.result import Plan

_ARCHS = json.loads((Path(__file__).parents[1] / "data" / "mlx_lm_archs.json").read_text())["archs"]
MACHINE = HardwareProfile(total_memory_bytes=2**34, working_set_bytes=2**33, active_bytes=0, backend="cpu")
CONTEXT, GENERATED, STEP = 300, 20, 128
"""299 prompt tokens in chunks of 128, 128 and 43, then 21 single ones: windows are passed, buffers cut and grown."""

Checkpoint = Callable[[str], Path]

SMALL = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "rms_norm_eps": 1e-5}


def recorded(name: str, **changes: Any) -> dict[str, Any]:
    """The tiny config of a recorded run, with changes."""
    return {**_ARCHS[name]["runs"][0]["config"], **changes}


MODELS: dict[str, dict[str, Any]] = {
    "plain": {**SMALL, "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2},
    "windows": recorded(
        "gemma3_text", vocab_size=128, num_hidden_layers=6, sliding_window=64, sliding_window_pattern=3
    ),
    "states": recorded("qwen3_next"),
    "latents": recorded("deepseek_v3", kv_lora_rank=64),
    "shared": recorded("gemma4_text", layer_types=["sliding_attention", "full_attention"] * 5),
    "composite": recorded("falcon_h1", **SMALL, mamba_d_ssm=128, mamba_n_heads=2),
    "width 96": recorded("phi3", num_attention_heads=2, num_key_value_heads=2, hidden_size=192),
}
PACKED = {
    "plain": ("affine4-g32", 2),
    "windows": ("affine8-g32", 2),
    "states": ("affine4-g64", 1),
    "shared": ("affine4-g64", 2),  # full layers 1 and 3; layer 5 is read by those that share it
    "width 96": ("affine8-g32", 2),
}
"""Where a layer takes a packed cache: the variant that is forced, and the layers it packs."""

REFUSED = {"latents": "have no 'swapaxes'", "composite": "no layer is a plain growing cache"}
"""Where none does: the engine's own error, or what there is instead."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A function that gives the folder of a model with random float32 weights, saved by mlx-lm itself."""

    @cache
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint")
        config = {**MODELS[name], "torch_dtype": "float32"}
        mx.random.seed(3)
        model = engine.build(config, "float32")
        mx.eval(model.parameters())
        save_model(folder, model)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return save


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> local.World:
    """A machine with room for anything, and traces kept for all tests of this file."""
    config = load(flags={"trace.cache_directory": str(tmp_path_factory.mktemp("traces"))})
    return local.open_world(config, hardware=MACHINE, records=NoRecords())


def planned(world: local.World, folder: Path, label: str, batch: int = 1) -> Plan:
    """The plan for a checkpoint with one variant forced, from a trace in a real worker."""
    workload = {"context_length": CONTEXT, "generation_length": GENERATED, "prefill_step_size": STEP, "max_kl": 100}
    params = convert_params(
        "plan", {"model": {"path": str(folder)}, "workload": {**workload, "batch_size": batch}, "methods": [label]}
    )
    assert isinstance(params, PlanParams)
    return local.plan(params, world)


def generated(model: Any, batch: int, step: int) -> list[Any]:
    """The model's caches after a real generation: mlx-lm's own loop, or its calls with several rows."""
    caches: list[Any] = make_prompt_cache(model)
    if batch == 1:
        prompt = mx.arange(CONTEXT) % 100
        made = generate_step(prompt, model, max_tokens=GENERATED, prompt_cache=caches, prefill_step_size=step)
        assert len(list(made)) == GENERATED
        return caches
    for tokens, calls in schedule(CONTEXT, GENERATED, step):
        for _ in range(calls):
            mx.eval(model(mx.ones((batch, tokens), mx.int32), cache=caches))
    return caches


CELLS = [(name, "fp16", 0) for name in MODELS] + [(name, label, count) for name, (label, count) in PACKED.items()]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("name", "label", "count"), CELLS)
def test_bytes_promised_are_bytes_held(  # noqa: PLR0917 -- two fixtures and the cells of a table
    world: local.World, checkpoint: Checkpoint, name: str, label: str, count: int, batch: int
) -> None:
    """Equal, not close: the plan's stored bytes and weights, and what a real generation holds on the planned model."""
    plan = planned(world, checkpoint(name), label, batch)
    assert plan.chosen is not None
    assert (plan.model["source"], plan.chosen.label, plan.chosen.layers.packed) == ("traced", label, count)
    model, _ = load_model(checkpoint(name))
    assert plan.model["weights_bytes"] == held_bytes(model.parameters())
    applied = veloxquant.apply(model, plan, methods=world.loaded)
    assert applied.packed == count
    caches = generated(model, batch, applied.prefill_step_size)
    assert held_bytes(caches) == plan.chosen.memory.stored_bytes


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_layer_takes_is_not_promised(world: local.World, checkpoint: Checkpoint, name: str) -> None:
    """The forced variant is rejected with what the trace met, and nothing else is chosen in its place."""
    plan = planned(world, checkpoint(name), "affine4-g32")
    assert plan.chosen is None
    (rejected,) = [one for one in plan.rejected if one.label == "affine4-g32"]
    assert rejected.reason == "not_supported_by_engine"
    assert REFUSED[name] in rejected.detail
