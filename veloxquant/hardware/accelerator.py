"""The Apple GPU's registry entry: core count and memory in use by all programs. Apple only: not run on a Mac.

`ioreg` is the fast way to both: some 20 ms, where system_profiler takes seconds.
"""

from __future__ import annotations

import re
import subprocess
from collections import deque

import msgspec

_COMMAND = ("/usr/sbin/ioreg", "-rc", "AGXAccelerator", "-d1")
_TIMEOUT_S = 0.1
# A late answer on a busy machine must not make it another chip variant for a minute.
_cores_seen: deque[int] = deque(maxlen=1)
_CORES = re.compile(r'"gpu-core-count"\s*=\s*([0-9]{1,5})\b')
_IN_USE = re.compile(r'"In use system memory"\s*=\s*([0-9]{1,18})\b')


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """None where the entry does not say."""

    gpu_cores: int | None = None
    in_use_bytes: int | None = None
    """GPU memory held by all programs now."""


def read() -> Accelerator:
    """Ask ioreg, for 100 ms at most; when it is late, the core count it gave before, which cannot have changed.

    Raises OSError or subprocess.SubprocessError.
    """
    try:
        done = subprocess.run(_COMMAND, capture_output=True, timeout=_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL)  # noqa: S603 -- fixed words
    except subprocess.TimeoutExpired:
        if not _cores_seen:
            raise
        return Accelerator(gpu_cores=_cores_seen[-1])
    found = parse(done.stdout.decode("utf-8", "replace"))
    if found.gpu_cores is not None:
        _cores_seen.append(found.gpu_cores)
    return found


def parse(text: str) -> Accelerator:
    """Read ioreg's text."""
    cores, in_use = _CORES.search(text), _IN_USE.search(text)
    return Accelerator(
        gpu_cores=int(cores[1]) if cores else None,
        in_use_bytes=int(in_use[1]) if in_use else None,
    )
