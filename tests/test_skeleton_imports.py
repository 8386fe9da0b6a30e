"""What is loaded when: the package is light, the daemon never carries a model library, arrays load on use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODEL_LIBRARIES = {"mlx_lm", "transformers", "torch", "tokenizers", "safetensors", "huggingface_hub"}


def loaded_by(statement: str) -> set[str]:
    """Names of all modules, top level and ours, that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    names = done.stdout.split()
    return set(names) | {name.partition(".")[0] for name in names}


def test_importing_the_package_loads_nothing_else() -> None:
    """`import veloxquant` costs the interpreter and one file."""
    extra = loaded_by("import veloxquant") - loaded_by("import importlib, typing, __future__")
    assert {name for name in extra if not name.startswith("__editable__")} <= {"veloxquant", "pathlib", "encodings"}


def test_the_client_loads_neither_arrays_nor_machine_libraries() -> None:
    """An inference server that imports the client pays for no planner, no mlx and no psutil."""
    found = loaded_by("import veloxquant.client")
    assert found & ({"mlx", "psutil", "watchdog", "pluggy", "numpy"} | MODEL_LIBRARIES) == set()


def test_the_client_loads_no_room_that_only_a_daemon_needs() -> None:
    """What a local plan needs is loaded when a local plan is made."""
    found = loaded_by("import veloxquant.client")
    assert found & {"veloxquant.local", "veloxquant.planner.plan", "veloxquant.daemon", "asyncio"} == set()


def test_the_daemon_carries_no_model_library() -> None:
    """Models are traced in a worker process: the daemon's own process never imports them."""
    found = loaded_by("import veloxquant.daemon.main, veloxquant.daemon.server")
    assert found & (MODEL_LIBRARIES | {"numpy"}) == set()


@pytest.mark.parametrize("room", ["hardware.detect", "planner.plan", "methods.registry", "models.profile", "caches"])
def test_arrays_load_on_use(room: str) -> None:
    """Looking at the machine, planning and listing methods need no mlx before they are called."""
    assert "mlx" not in loaded_by(f"import veloxquant.{room}")


def test_a_cache_config_is_read_and_written_without_arrays() -> None:
    """A program that only hands configs around, or checks one against the methods, pays for no mlx."""
    found = loaded_by(
        "import veloxquant; config = veloxquant.KVCacheBuilder().with_method('affine').with_bit_width(4).config(); "
        "assert veloxquant.KVCacheConfig.from_toml(config.to_toml()) == config"
    )
    assert found & ({"mlx", "numpy"} | MODEL_LIBRARIES) == set()


def test_public_names_are_there() -> None:
    """Every name the package promises can be had, and no other."""
    import veloxquant

    for name in veloxquant.__all__:
        assert getattr(veloxquant, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'stub'"):
        _ = veloxquant.stub
