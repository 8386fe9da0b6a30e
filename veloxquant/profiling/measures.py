"""Looking at a cache from outside: bytes it holds, bytes it claims, tokens it has seen. Never changes or fails it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from veloxquant.caches.held import held_bytes

_HALF = 2  # bytes of a 16-bit number


class Sight(NamedTuple):
    """One look at a cache."""

    resident_bytes: int
    reported_bytes: int | None
    sequence_tokens: int


def look(cache: Any, claims: tuple[str, ...]) -> Sight:
    """What a cache holds, says and has seen now. `claims`: attributes or functions of the cache that give its bytes."""
    return Sight(held_bytes(cache), reported_bytes(cache, claims), sequence_tokens(cache))


def reported_bytes(cache: Any, claims: tuple[str, ...]) -> int | None:
    """What the first of these attributes says; None where there is none, it raises, or says what are no bytes."""
    for name in claims:
        claim = _said(cache, name)
        if claim is not None:
            return claim
    return None


def _said(cache: Any, name: str) -> int | None:
    try:
        value = getattr(cache, name)
        return _whole(value() if callable(value) else value)
    except Exception:  # noqa: BLE001 -- a stranger's property; mlx-lm's own quantized cache raises while it is empty
        return None


def _whole(value: Any) -> int | None:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return int(value)


def sequence_tokens(cache: Any) -> int:
    """Tokens a cache has seen: its offset, of the longest row in a batch; of the parts' the largest; else its len()."""
    try:
        return max(0, _tokens(cache))
    except Exception:  # noqa: BLE001 -- a stranger's property, which must not end a generation
        return 0


def _tokens(cache: Any) -> int:
    offset = getattr(cache, "offset", None)
    if offset is not None:
        return int(offset.max().item()) if hasattr(offset, "max") else int(offset)
    parts = getattr(cache, "caches", None)
    if parts is not None:
        return max(sequence_tokens(part) for part in parts)
    return len(cache) if hasattr(type(cache), "__len__") else 0


def fp16_bytes(*given: Any) -> int:
    """Bytes of these arrays if each number took 16 bits: all heads, all rows, whole widths."""
    return _HALF * sum(_numbers(one) for one in given)


def _numbers(value: Any) -> int:
    size = getattr(value, "size", None)
    if isinstance(size, int):
        return size
    if isinstance(value, list | tuple):
        return sum(_numbers(one) for one in value)
    return int(isinstance(value, int | float))


def tokens_and_width(keys: Any) -> tuple[int, int]:
    """The last two dimensions of keys (batch, heads, tokens, width); (1, width) of a single vector."""
    shape = tuple(getattr(keys, "shape", ()))
    width = int(shape[-1]) if shape else 0
    return (int(shape[-2]), width) if len(shape) > 1 else (1, width)
