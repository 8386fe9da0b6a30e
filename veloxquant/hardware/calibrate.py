"""Memory bandwidth as measured on this machine: on demand, stored, read back by detection.

A reduction reads each byte of a buffer once and writes next to nothing, so bytes / time is the read bandwidth that
decoding is bound by. The buffer is larger than the caches. Two reductions are tried, since on some backends one of
them is bound by arithmetic; the faster counts. The figure is an achieved one, a little below nominal.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import math
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant import ownership, paths, plain_file
from veloxquant.errors import EngineUnavailable, InvalidParams

if TYPE_CHECKING:
    from collections.abc import Callable

_MIN_BUFFER_BYTES = 64 * 2**20
_ITEM_BYTES, _ROW = 4, 4096
# No single machine here reads faster; a stored figure above it is damage.
_MOST_GBPS = 100_000.0
_MOST_BYTES = 4096


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. GB/s are 1e9 bytes a second; `date` is a day in ISO form."""

    chip: str
    mlx_version: str
    bandwidth_gbps: float
    date: str
    backend: str = "cpu"


def measure(
    *, chip: str, mlx_version: str, buffer_bytes: int = 256 * 2**20, seconds: float = 0.3, cache_dir: Path | None = None
) -> Calibration:
    """Measure for about `seconds` and store the figure for this chip and MLX version.

    The best run counts: others on the machine only ever slow a run down. Raises EngineUnavailable without MLX,
    InvalidParams for a buffer that would fit a cache or a time out of 0.01 to 60 s; a full disk loses the storing only.
    """
    if buffer_bytes < _MIN_BUFFER_BYTES:
        raise InvalidParams(
            f"buffer_bytes is {buffer_bytes}, which could lie in a cache",
            hint=f"give at least {_MIN_BUFFER_BYTES}",
            field="buffer_bytes",
        )
    if not 0.01 <= seconds <= 60:  # noqa: PLR2004 -- stated in the docstring
        raise InvalidParams(f"seconds is {seconds}", hint="give 0.01 to 60", field="seconds")
    backend, gbps = _read_bandwidth(buffer_bytes, seconds)
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    made = Calibration(chip=chip, mlx_version=mlx_version, bandwidth_gbps=gbps, date=today, backend=backend)
    with contextlib.suppress(OSError):
        _store(made, _file(chip, mlx_version, cache_dir))
    return made


def stored(chip: str, mlx_version: str, cache_dir: Path | None = None) -> Calibration | None:
    """The stored figure for this chip and MLX version; None without one, for a damaged file and for somebody else's."""
    path = _file(chip, mlx_version, cache_dir)
    try:
        facts = path.stat()
        if facts.st_uid not in (os.geteuid(), 0) or ownership.others(facts) is not None:
            return None
        found = msgspec.json.decode(plain_file.read(path, _MOST_BYTES), type=Calibration)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    right = found.chip == chip and found.mlx_version == mlx_version
    return found if right and math.isfinite(found.bandwidth_gbps) and 0 < found.bandwidth_gbps < _MOST_GBPS else None


def _file(chip: str, mlx_version: str, cache_dir: Path | None) -> Path:
    """One file for each pair; the name is a hash, since chip names hold anything."""
    digest = hashlib.sha256(f"{chip}\0{mlx_version}".encode("utf-8", "replace")).hexdigest()[:16]
    return (cache_dir or paths.cache_dir()) / "calibration" / f"{digest}.json"


def _store(made: Calibration, place: Path) -> None:
    """Written beside its place and renamed, so that no reader sees half a file."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=place.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(made))
        Path(draft).replace(place)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise


def _read_bandwidth(buffer_bytes: int, seconds: float) -> tuple[str, float]:
    """(backend, GB/s) of the best of at least four reductions."""
    try:
        import mlx.core as mx
    except ImportError as error:
        raise EngineUnavailable(f"MLX cannot be imported: {error}", hint="pip install mlx") from error
    from veloxquant.hardware.mlx_device import device_of

    buffer = mx.zeros((buffer_bytes // (_ITEM_BYTES * _ROW), _ROW), dtype=mx.float32) + 1
    mx.eval(buffer)
    reductions = (lambda: mx.sum(buffer, axis=0), lambda: mx.max(buffer))
    for reduction in reductions:
        _timed(mx, reduction)
    end = time.perf_counter() + seconds
    times = [_timed(mx, reduction) for reduction in reductions for _ in range(2)]
    while time.perf_counter() < end:
        times += [_timed(mx, reduction) for reduction in reductions]
    return device_of(mx).backend, round(buffer.nbytes / min(times) / 1e9, 1)


def _timed(mx: Any, reduction: Callable[[], Any]) -> float:
    start = time.perf_counter()
    mx.eval(reduction())
    return time.perf_counter() - start
