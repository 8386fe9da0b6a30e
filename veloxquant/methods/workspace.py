"""Bounds of what attention takes for a moment, as arithmetic that several methods share. No MLX.

Sizes of tiles and blocks are those of veloxquant.caches; how many arrays of a size are there at once was counted with
MLX's allocator on the CPU backend, over head counts, widths, bits and lengths, and rounded up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from veloxquant.profiles.model import CachePart

MOST_QUERY_HEADS = 128
"""Of published models whose K and V grow plainly (Llama-3.1-405B): what is assumed where it is not known."""
MANY_ROWS = 32
"""Query heads of one KV head from which codecs unpack what is stored (veloxquant.caches.affine_codec)."""

TILE_ROWS, BLOCK_NUMBERS, ENCODE_NUMBERS = 2**12, 2**20, 2**19
"""As in veloxquant.caches.tiered_attention, and tiered_part."""
PLAIN_TILE_ROWS, PLAIN_BLOCK_NUMBERS, BLOCK_TOKENS = 2**13, 2**21, 2**8
"""As in veloxquant.caches.attention."""
_SCORE_ARRAYS, _UNPACKED_ARRAYS, _QUERY_ARRAYS, _RECENT_ARRAYS = 8, 8, 4, 2
"""Of scores of a tile over a block, of an unpacked block, of the tile's queries and sums, of recent K and V."""
_SUM_ARRAYS = 4
"""Of sums, for each of the blocks that are taken together."""


class Tiers(NamedTuple):
    """What a cache in tiers (veloxquant.caches.tiered) is made of, for one layer."""

    sinks: int
    ring: int
    """Slots of recent tokens."""
    group: int
    """Tokens that are packed together."""
    key_space: int
    """Numbers that a key is unpacked to."""
    value_space: int
    scale_group: int
    """Numbers that share a scale, at least."""
    row_bits: float
    """Stored bits of a packed key and value of one head, scales included."""
    step_arrays: int = 5
    """Of the scores of one query, there at once."""
    packing_arrays: int = 24
    """Of numbers that are being packed, keys and values together."""


def query_heads(part: CachePart) -> int:
    """Query heads that read the part, assumed to be `MOST_QUERY_HEADS` where that is not known."""
    return part.query_heads or max(MOST_QUERY_HEADS, part.heads)


def in_tiers(part: CachePart, tiers: Tiers, queries: int, slots: int) -> int:
    """Most temporary bytes of one layer for one sequence: attention, or packing and buffers being grown.

    `slots` are packed tokens. Also of fewer queries, which may have larger blocks. Never less with more of either.
    """
    recent = part.heads * (queries + tiers.ring)
    packing = 4 * tiers.packing_arrays * _piece(part, tiers, queries)
    growing = math.ceil(part.heads * (slots + queries) * tiers.row_bits / 8)
    if queries == 1:
        return max(_step(part, tiers, slots), packing + growing)
    copied = _RECENT_ARRAYS * recent * (part.key_width * part.key_itemsize + part.value_width * part.value_itemsize)
    return copied + max(_prefill(part, tiers, queries, slots), packing + growing)


def in_blocks(part: CachePart, space: int, queries: int, slots: int) -> int:
    """Most temporary bytes of attention over codecs that unpack (veloxquant.caches.attention.Blocks), packing apart.

    `space` is the numbers that a row of K or V is unpacked to. Also of fewer queries, as `in_tiers`.
    """
    heads, token = query_heads(part), part.heads * space
    size = max(1, min(BLOCK_TOKENS, PLAIN_BLOCK_NUMBERS // token))
    tile = min(PLAIN_TILE_ROWS, PLAIN_BLOCK_NUMBERS // max(size, space))
    rows = heads * max(1, min(queries, tile // heads))
    count = -(-slots // size)
    most = 0
    for some in (rows, min(rows, max(token, PLAIN_BLOCK_NUMBERS // (size * count)))):
        blocks = min(count, max(1, PLAIN_BLOCK_NUMBERS // max(size * max(some, token), some * space)))
        products = _SCORE_ARRAYS * some + _UNPACKED_ARRAYS * token
        most = max(most, blocks * (size * products + _SUM_ARRAYS * some * space))
    return 4 * (most + _QUERY_ARRAYS * rows * space)


def _piece(part: CachePart, tiers: Tiers, queries: int) -> int:
    """Numbers that are packed at a time."""
    token = part.heads * max(tiers.key_space, tiers.value_space)
    return min(max(ENCODE_NUMBERS, token * tiers.group), token * (queries + tiers.ring))


def _step(part: CachePart, tiers: Tiers, slots: int) -> int:
    """One query over all tokens at once: scores, scales widened to float32, recent tokens; many heads unpack it all."""
    heads, spaces = query_heads(part), tiers.key_space + tiers.value_space
    scores = tiers.step_arrays * heads * (slots + tiers.ring + tiers.sinks)
    scales = 2 * part.heads * slots * math.ceil(spaces / tiers.scale_group)
    recent = _RECENT_ARRAYS * part.heads * (tiers.ring + tiers.sinks) * spaces
    unpacked = _UNPACKED_ARRAYS * part.heads * max(tiers.key_space, tiers.value_space) * slots
    many = heads >= MANY_ROWS * part.heads
    return 4 * (scores + scales + recent + _QUERY_ARRAYS * heads * spaces + (unpacked if many else 0))


def _prefill(part: CachePart, tiers: Tiers, queries: int, slots: int) -> int:
    """Tiles of queries over blocks of tokens (tiered_attention), and what the tiles before have for a result.

    A tile of r query rows takes max(256, 2**20 / max(r, k)) of t tokens at a time, where a token is unpacked to k
    numbers. Its scores and unpacked numbers are the most at r = max(k, 2**20 / t), or at the largest tile of all.
    """
    heads = query_heads(part)
    rows = heads * max(1, min(queries, TILE_ROWS // heads))
    token, tokens = part.heads * max(tiers.key_space, tiers.value_space), slots + queries + tiers.ring
    worst = min(rows, max(token, BLOCK_NUMBERS // tokens))
    blocks = max(
        (_SCORE_ARRAYS * some + _UNPACKED_ARRAYS * token)
        * min(tokens, max(BLOCK_TOKENS, BLOCK_NUMBERS // max(some, token)))
        for some in (worst, rows)
    )
    sums = _QUERY_ARRAYS * rows * (tiers.key_space + tiers.value_space)
    tiles = heads * queries * part.value_width * part.value_itemsize
    return 4 * (blocks + sums) + tiles
