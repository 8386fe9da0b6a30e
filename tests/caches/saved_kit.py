"""Caches saved by mlx-lm here and loaded by mlx-lm in another process, where only `register` was called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import save_prompt_cache

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOADING = """
import json, sys
from veloxquant.caches.registration import register
register()
from mlx_lm.models.cache import load_prompt_cache
folder, kit, rows, tokens, *names = sys.argv[1:]
sys.path.insert(0, kit)
from saved_kit import answer
files = {name: f"{folder}/{name}.safetensors" for name in names}
found = {name: answer(load_prompt_cache(file)[0], int(rows), int(tokens)) for name, file in files.items()}
print(json.dumps(found))
"""


def answer(cache: Any, rows: int, tokens: int) -> list[Any]:
    """Its offsets and its bytes after so many more tokens, and its attention for them."""
    queries, new = (mx.random.normal((rows, heads, tokens, 32), key=mx.random.key(heads)) for heads in (4, 2))
    keys, values = cache.update_and_fetch(new, new)
    offsets = (
        [cache.offset] if rows == 1 else [cache.offset.tolist(), *(cache.extract(at).offset for at in range(rows))]
    )
    return [offsets, cache.nbytes, keys.attend(queries, values, 0.2).flatten().tolist()]


def survives(folder: Path, caches: Mapping[str, Any], rows: int = 1, tokens: int = 1) -> None:
    """Each gives the same answer there, a whole process for all of them. Raises AssertionError."""
    expected = {}
    for name, cache in caches.items():
        save_prompt_cache(str(folder / f"{name}.safetensors"), [cache])
        expected[name] = answer(cache, rows, tokens)
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", _LOADING, str(folder), here, str(rows), str(tokens), *caches]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected
