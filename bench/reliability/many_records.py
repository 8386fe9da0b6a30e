"""A benchmark directory as a user's would be, made in a second: models, variants and contexts mixed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord, benchmark_fingerprint
from veloxquant.benchmarks.record_text import encode

if TYPE_CHECKING:
    from pathlib import Path

_METHODS = ("fp16", "affine8-g64", "affine4-g64", "affine4-g32")
_CHIP = "Apple M4"


def fill(directory: Path, count: int) -> None:
    """Write so many records there, without the flushes of the store's own writes, and let the store index them."""
    folder = directory / "records"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        name, data = encoded(number)
        (folder / name).write_bytes(data)
    BenchmarkDatabase(directory).close()


def encoded(number: int) -> tuple[str, bytes]:
    """File name and content of one of them."""
    made = _record(number)
    return f"{made.id}.json", encode(made)


def _record(number: int) -> BenchmarkRecord:
    method, model_id, context = _METHODS[number % 4], f"org/model-{number % 50}", 1024 * (1 + number // 50)
    return BenchmarkRecord(
        id=benchmark_fingerprint(method, model_id, context, 1, _CHIP),
        method=method,
        model_id=model_id,
        architecture="llama",
        context_length=context,
        memory_bytes=1_000_000 + number,
        throughput_tok_s=10.0 + number % 90,
        chip=_CHIP,
        mlx_version="0.32.4",
    )
