"""Facts about published models and recorded engine runs, and a worker that can find the stand-in factories."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent.parent / "data"

sys.path.insert(0, str(Path(__file__).parent))  # what these tests share


@pytest.fixture(scope="session")
def published() -> dict[str, dict[str, Any]]:
    """tests/data/model_configs.json by model name."""
    return {entry["model"]: entry for entry in json.loads((DATA / "model_configs.json").read_text())["models"]}


@pytest.fixture(scope="session")
def recorded() -> dict[str, dict[str, Any]]:
    """Runs of tests/data/mlx_lm_archs.json, named by architecture and number."""
    archs = json.loads((DATA / "mlx_lm_archs.json").read_text())["archs"]
    return {f"{name}-{at}": run for name, arch in archs.items() for at, run in enumerate(arch["runs"])}


@pytest.fixture
def llama_8b(published: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The published config of Llama-3.1-8B."""
    return dict(published["meta-llama/Meta-Llama-3.1-8B"]["config"])


@pytest.fixture
def tiny() -> dict[str, Any]:
    """A llama of four layers, 2 KV heads of width 32, that traces in milliseconds."""
    return {
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 1000,
        "torch_dtype": "float16",
    }


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process, and workers it starts, import engine_factory."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
