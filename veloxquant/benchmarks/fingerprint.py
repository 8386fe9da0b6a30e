"""Record ids and the default folder: pure functions of what was measured and of the environment."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from veloxquant import paths

if TYPE_CHECKING:
    from pathlib import Path

UNKNOWN = "unknown"
ID_HEX_DIGITS = 16


def known(text: str) -> bool:
    """Whether a chip or version field says anything."""
    return text.strip().casefold() not in ("", UNKNOWN)


def benchmark_fingerprint(method: str, model_id: str, context_length: int, batch_size: int, chip: str = UNKNOWN) -> str:
    """Id of a measurement: first 16 hex digits of SHA-1 over its parts joined by NUL.

    The chip is a part only when it is known, so that ids made without a chip stay what they were and the same
    measurement on two chips gives two records.
    """
    parts = [method, model_id, str(context_length), str(batch_size)]
    if known(chip):
        parts.append(chip)
    digest = hashlib.sha1("\0".join(parts).encode("utf-8", "surrogatepass"), usedforsecurity=False)
    return digest.hexdigest()[:ID_HEX_DIGITS]


def default_benchmark_dir() -> Path:
    """$XDG_CACHE_HOME/veloxquant/benchmarks, or ~/.cache/veloxquant/benchmarks.

    A relative XDG_CACHE_HOME counts as unset, as the XDG base directory specification says. Raises ConfigInvalid when
    there is no home.
    """
    return paths.xdg("XDG_CACHE_HOME", ".cache", os.environ) / paths.APP / "benchmarks"
