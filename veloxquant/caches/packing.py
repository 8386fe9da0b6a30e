"""Codes of a few bits packed without gaps into 32-bit words, the first code in the lowest bits (as mx.quantize packs).

A row of codes is padded to a multiple of 32, so that it fills whole words whatever the bits. The layout has no gaps:
g neighbouring codes of b bits read as one code of g x b bits, which is how `lookup` reads several at once.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import gcd
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx

WORD_BITS = 32


def words(width: int, bits: int) -> int:
    """32-bit words of one packed row: bits x ceil(width / 32)."""
    return bits * padded(width) // WORD_BITS


def padded(width: int) -> int:
    """Codes in a packed row: `width` up to the next multiple of 32."""
    return -(-width // WORD_BITS) * WORD_BITS


def pack(codes: mx.array, bits: int) -> mx.array:
    """Integers below 2**bits, (..., width) -> uint32 words (..., words(width, bits)); bits from 1 to 16."""
    import mlx.core as mx

    count, filled = _unit(bits)
    codes = codes.astype(mx.uint32)
    missing = padded(codes.shape[-1]) - codes.shape[-1]
    if missing:
        codes = mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    units = codes.reshape(*codes.shape[:-1], codes.shape[-1] // count, count)
    packed = [_word(units, bits, index) for index in range(filled)]
    joined = packed[0] if filled == 1 else mx.concatenate(packed, axis=-1)
    return joined.reshape(*codes.shape[:-1], -1)


def unpack(words: mx.array, bits: int, width: int) -> mx.array:
    """The inverse of `pack`: uint32 words (..., words(width, bits)) -> uint32 codes (..., width)."""
    import mlx.core as mx

    _, filled = _unit(bits)
    units = words.reshape(*words.shape[:-1], words.shape[-1] // filled, filled)
    parts = [part for index in range(filled) for part in _codes(units, bits, index)]
    codes = (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)) & (2**bits - 1)
    unpacked: mx.array = codes.reshape(*words.shape[:-1], -1)[..., :width]
    return unpacked


def lookup(words: mx.array, bits: int, values: tuple[float, ...]) -> mx.array:
    """Packed rows -> float32 (..., padded(width)) of values[code]; what the padding holds is values[0]."""
    import mlx.core as mx

    together, table = _table(bits, values)
    if together * bits == 8:  # noqa: PLR2004 -- a byte; MLX runs on little-endian machines only
        indices = mx.view(words, mx.uint8)
    else:
        count = words.shape[-1] * WORD_BITS // (together * bits)
        indices = unpack(words, together * bits, count)
    found = mx.take(table, indices, axis=0)
    return found.reshape(*words.shape[:-1], -1)


def _unit(bits: int) -> tuple[int, int]:
    """The least number of codes that fills whole words, and these words."""
    common = gcd(bits, WORD_BITS)
    return WORD_BITS // common, bits // common


def _word(units: mx.array, bits: int, index: int) -> mx.array:
    """One word of each unit: the codes that reach into it, shifted into place. No two share a bit: a sum is an or."""
    import mlx.core as mx

    first, end = index * WORD_BITS // bits, -(-(index + 1) * WORD_BITS // bits)
    shifts = [at * bits - index * WORD_BITS for at in range(first, end)]
    left = mx.array([max(shift, 0) for shift in shifts], dtype=mx.uint32)
    right = mx.array([max(-shift, 0) for shift in shifts], dtype=mx.uint32)
    return (units[..., first:end] << left >> right).sum(axis=-1, keepdims=True)


def _codes(units: mx.array, bits: int, index: int) -> list[mx.array]:
    """Codes that start in one word of each unit, bits above not masked yet: those within it, and one that leaves it."""
    import mlx.core as mx

    word = units[..., index : index + 1]
    starts = range(-index * WORD_BITS % bits, WORD_BITS, bits)
    inside = [start for start in starts if start + bits <= WORD_BITS]
    parts = [word >> mx.array(inside, dtype=mx.uint32)]
    if len(inside) < len(starts):
        leaving = starts[-1]
        parts.append((word >> leaving) | (units[..., index + 1 : index + 2] << (WORD_BITS - leaving)))
    return parts


@lru_cache(maxsize=256)
def _table(bits: int, values: tuple[float, ...]) -> tuple[int, mx.array]:
    """How many codes one index covers, and the values of all such codes: (2**(bits x together), together) float32."""
    import mlx.core as mx

    # At most 12 bits an index: 4,096 rows, small enough for a first-level processor cache.
    together = {1: 8, 2: 4, 3: 4, 4: 2, 5: 2, 6: 2}.get(bits, 1)
    rows = [row[::-1] for row in product(values, repeat=together)]  # the first code is in the lowest bits
    table = mx.array(rows, dtype=mx.float32)
    mx.eval(table)
    return together, table
