"""Doctor's checks on the machine: Python, the engine, the device, its memory, open files."""

from __future__ import annotations

import platform
import resource
import sys
from typing import TYPE_CHECKING

from veloxquant.ctl.finding import Finding, failed, note, ok
from veloxquant.units import format_size

if TYPE_CHECKING:
    from veloxquant.config import Config

TESTED_ENGINE = "0.32"
"""The mlx-lm minor version whose caches the test suite compares byte for byte (docs/engine.md)."""
_LEAST_PYTHON = (3, 11)
_LEAST_FILES = 1024
_MOST_WIRED = 0.9
"""Apple's own rule gives the GPU some three quarters. Beyond nine tenths, a full cache leaves the system swapping."""


def python(_config: Config) -> Finding:
    """The interpreter is one that we support."""
    if sys.version_info < _LEAST_PYTHON:
        return failed(f"Python {platform.python_version()} is too old", "install Python 3.11 or newer")
    return ok(f"Python {platform.python_version()}")


def engine(_config: Config) -> Finding:
    """mlx-lm is installed, in the version that was tested."""
    from veloxquant.models.profile import engine_version

    found = engine_version()
    if found is None:
        return failed("mlx-lm is not installed: models can only be read from their configs", "pip install mlx-lm")
    if not found.startswith(f"{TESTED_ENGINE}."):
        return note(f"mlx-lm {found}; {TESTED_ENGINE} was tested", f"pip install 'mlx-lm=={TESTED_ENGINE}.*'")
    return ok(f"mlx-lm {found}, a tested version")


def device(_config: Config) -> Finding:
    """MLX has a device to run on."""
    from veloxquant.hardware.detect import detect

    machine = detect()
    if machine.mlx_version is None or machine.backend is None:
        return failed(f"MLX has no device: {machine.sources.get('backend', 'unknown')}", "pip install --upgrade mlx")
    if machine.backend == "cpu":
        return note(f"MLX {machine.mlx_version} runs on the CPU only: plans hold, generation is slow")
    return ok(f"MLX {machine.mlx_version} runs on {machine.backend} ({machine.chip or 'unknown chip'})")


def working_set(_config: Config) -> Finding:
    """What the GPU may hold is known, so that "it fits" means something."""
    from veloxquant.hardware.detect import detect

    machine = detect()
    if machine.working_set_bytes is not None:
        return ok(f"the GPU may hold {format_size(machine.working_set_bytes)}")
    why = machine.sources.get("working_set_bytes", "unknown")
    if machine.total_memory_bytes is None:
        return failed(f"neither working set nor memory is known: {why}", "plan with --working-set SIZE")
    return note(
        f"no working set ({why}): plans use the total memory, {format_size(machine.total_memory_bytes)}",
        "plan with --working-set SIZE for another machine",
    )


def wired_limit(_config: Config) -> Finding:
    """A limit for the GPU that was raised by hand leaves the system some memory. Apple only: not run on a Mac."""
    from veloxquant.hardware.detect import detect

    machine = detect()
    limit, total = machine.wired_limit_bytes, machine.total_memory_bytes
    if limit is None or total is None:
        return ok(f"the system's own rule ({machine.sources.get('wired_limit_bytes', 'no such limit here')})")
    text = f"the GPU may hold {format_size(limit)} of {format_size(total)}, a limit set by hand"
    back = "sudo sysctl iogpu.wired_limit_mb=0 gives the system's own rule back"
    if limit > total:
        return failed(f"{text}, which is more than there is", back)
    return note(f"{text}: little is left for everything else", back) if limit > _MOST_WIRED * total else ok(text)


def open_files(_config: Config) -> Finding:
    """Enough files may be open for many clients; the daemon raises its soft limit up to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < _LEAST_FILES:
        return failed(f"at most {hard:,} files may be open", f"raise the limit: ulimit -Hn {_LEAST_FILES} as root")
    return ok(f"{'any number of' if hard == resource.RLIM_INFINITY else f'{hard:,}'} files may be open")
