"""Whether a record was measured on a model like the one that is asked about: same name, same size, same cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.benchmarks.model_name import SAME_SIZE_RATIO, named_parameters, stated_parameters

if TYPE_CHECKING:
    from veloxquant.benchmarks.records import BenchmarkRecord
    from veloxquant.profiles import CachePart, ModelProfile

SAME_CACHE_RATIO = 1.5
"""Slack of 256 slots and the generated tokens make up to a third at 1k; grouped and full heads differ by 4 or 8."""


def is_namesake(record: BenchmarkRecord, model: ModelProfile) -> bool:
    """Whether the record's "parameters:" tag tells another size: two folders called "model" hold different models."""
    stated, size = stated_parameters(record.model_id, record.tags), model.num_parameters
    if stated is None or not size or named_parameters(record.model_id) is not None:
        return False
    return max(stated, size) > SAME_SIZE_RATIO * min(stated, size)


def has_same_cache(record: BenchmarkRecord, model: ModelProfile, sizes: dict[int, int]) -> bool:
    """Whether the record's 16-bit cache, where it tells it, has about the size this model's would have.

    `sizes` remembers that size by context: records of many models share few contexts.
    """
    if not (record.memory_bytes and record.memory_reduction and model.layers):
        return True
    held = record.memory_bytes / record.memory_reduction / record.sequences
    context = record.context_length
    if context not in sizes:
        sizes[context] = sum(_bytes_at(part, context) for layer in model.layers for part in layer.parts)
    expected = sizes[context]
    return expected / SAME_CACHE_RATIO <= held <= expected * SAME_CACHE_RATIO


def _bytes_at(part: CachePart, tokens: int) -> int:
    """Bytes of one part of one sequence at this length, slack left out."""
    if part.kind == "state":
        return part.state_bytes
    held = min(tokens, part.window) if part.kind in ("window", "chunked") else tokens
    return held * part.slot_bytes
