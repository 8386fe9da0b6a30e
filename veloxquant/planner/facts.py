"""The facts a plan repeats, as plain mappings in one order, and the plan's id."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.planner.layout import engine_own
from veloxquant.planner.memory import whole_bytes_per_token
from veloxquant.profiles.calibration import digest as calibration_digest

if TYPE_CHECKING:
    from veloxquant.planner.setting import Setting
    from veloxquant.planner.snapshot import Snapshot
    from veloxquant.profiles import HardwareProfile, ModelProfile

_ID_DIGITS = 16


def hardware_facts(hardware: HardwareProfile) -> dict[str, Any]:
    """Every field of the machine, mappings sorted by key."""
    facts: dict[str, Any] = {}
    for name in hardware.__struct_fields__:
        value = getattr(hardware, name)
        facts[name] = value if value is None or isinstance(value, (str, int, float)) else dict(sorted(value.items()))
    return facts


def model_facts(setting: Setting) -> dict[str, Any]:
    """What the plan took the model to be; sizes of one sequence in the engine's own caches."""
    model, layers = setting.model, engine_own(setting.model).layers
    parts = [part for layer in model.layers for part in layer.parts]
    return {
        "model_id": model.model_id,
        "model_type": model.architecture,
        "source": model.source,
        "confidence": model.confidence,
        "config_hash": model.config_hash,
        "dtype": model.dtype,
        "weights_bytes": model.weights_bytes,
        "weights_source": model.weights_source,
        "num_parameters": model.num_parameters,
        "active_parameters": model.active_parameters,
        "max_position": model.max_position,
        "layers": {
            "total": layers.total,
            "growing": layers.growing,
            "windowed": layers.windowed,
            "recurrent": layers.recurrent,
            "latent": layers.latent,
            "shared": layers.shared,
            "bytes_per_token": whole_bytes_per_token(setting.baseline),
            "state_bytes": sum(part.state_bytes for part in parts),
        },
        "notes": list(model.notes),
    }


def workload_facts(setting: Setting) -> dict[str, Any]:
    """The workload as asked."""
    return {name: getattr(setting.workload, name) for name in setting.workload.__struct_fields__}


def engine_facts(setting: Setting) -> dict[str, Any]:
    """The engine planned for."""
    model = setting.model
    return {"name": model.engine_name, "version": setting.request.engine_version or model.engine_version}


def plan_id(setting: Setting, snapshot: Snapshot) -> str:
    """16 hex digits of SHA-256 over the request, the resolved machine, the calibration and the generation."""
    request = setting.request
    asked: tuple[object, ...] = (
        model_digest(setting.model),
        setting.workload,
        setting.hardware,
        (request.engine_version, request.memory_budget_bytes, request.methods),
        (snapshot.generation_for(request), snapshot.reserve_bytes),
    )
    if setting.calibration is not None:
        asked += (calibration_digest(setting.calibration),)
    return hashlib.sha256(msgspec.json.encode(asked, order="deterministic")).hexdigest()[:_ID_DIGITS]


@lru_cache(maxsize=64)
def model_digest(model: ModelProfile) -> str:
    """SHA-256 of the whole profile."""
    return hashlib.sha256(msgspec.json.encode(model, order="deterministic")).hexdigest()
