"""The processor's name on Linux."""

from __future__ import annotations

from pathlib import Path

_MOST_BYTES = 64 * 1024


def name(path: Path = Path("/proc/cpuinfo")) -> str | None:
    """The first "model name" of /proc/cpuinfo; None where there is none (most ARM kernels). Raises OSError."""
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES).decode("utf-8", "replace")
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "model name" and value.strip()), None)
