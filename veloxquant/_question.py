"""What a caller says in Python, as the protocol's params: plain mappings that become JSON."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from veloxquant.errors import InvalidParams, quoted
from veloxquant.profiles import WorkloadProfile

Model = str | os.PathLike[str] | Mapping[str, Any]
Workload = WorkloadProfile | Mapping[str, Any] | None

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WAYS = frozenset({"path", "id", "config"})
_MODEL_FIELDS = _WAYS | {"model_id", "weights_bytes"}


def question(  # noqa: PLR0917 -- in the order in which Client.plan and Client.fit have them
    model: Model,
    workload: Workload,
    workload_fields: Mapping[str, Any],
    hardware: Mapping[str, Any] | None,
    engine: Mapping[str, Any] | None,
    memory_budget_bytes: int | None,
    methods: Sequence[str] | None,
) -> dict[str, Any]:
    """The params of `plan` and `fit` as the protocol has them, what was not given left out."""
    fields = msgspec.to_builtins(workload) if isinstance(workload, WorkloadProfile) else dict(workload or {})
    optional = {
        "workload": {**fields, **workload_fields},
        "hardware": None if hardware is None else dict(hardware),
        "engine": None if engine is None else dict(engine),
        "memory_budget_bytes": memory_budget_bytes,
        "methods": [methods] if isinstance(methods, str) else None if methods is None else list(methods),
    }
    return {"model": model_params(model), **{name: value for name, value in optional.items() if value is not None}}


def model_params(model: Model) -> dict[str, Any]:
    """The protocol's `model`. Paths become absolute, since the daemon has a current folder of its own."""
    if isinstance(model, Mapping):
        if not (model.keys() <= _MODEL_FIELDS and model.keys() & _WAYS):
            return {"config": dict(model)}
        if isinstance(model.get("path"), (str, os.PathLike)):
            return {**model, "path": _absolute(model["path"])}
        return dict(model)
    if isinstance(model, str) and _HUB_ID.fullmatch(model) and not Path(model).exists():
        return {"id": model}
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
        raise InvalidParams(
            f"model is {quoted(model)}, which names no model",
            hint="give a folder, an id such as org/name, or a config as a mapping",
            field="model",
        )
    return {"path": _absolute(model)}


def _absolute(path: str | os.PathLike[str]) -> str:
    return str(Path(path).expanduser().absolute())


def finite(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The params, refused when a number is not finite: JSON has no word for it, and the encoder would write null."""
    stack: list[tuple[str, Any]] = [("", params)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidParams(
                f"{path} is {value!r}, which is not finite", hint="leave it out for no limit", field=path
            )
        if isinstance(value, Mapping):
            stack.extend((f"{path}.{key}".lstrip("."), child) for key, child in value.items())
        elif isinstance(value, (list, tuple)):
            stack.extend((f"{path}[{index}]", child) for index, child in enumerate(value))
    return params
