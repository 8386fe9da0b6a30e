"""What packs and unpacks vectors: the one thing a packed method writes; caches and attention are built around it.

A codec works on arrays of shape (batch, heads, tokens, width) and stores, for each token of each head, a few arrays:
codes, scales, signs. Some codecs also keep arrays that do not grow (`fixed`), chosen from the first token they see, so
that how a prompt is cut into calls never changes the result.
"""

from __future__ import annotations

from typing import Any, Protocol

Arrays = tuple[Any, ...]
"""mx.arrays of shape (batch, heads, slots, ...); the same number for each call of one codec."""


class Codec(Protocol):
    """Keys or values of one width. Immutable and shared; what belongs to one cache is in its arrays.

    A codec whose products with a few rows read what is stored, and unpack nothing, says so by an attribute `native`
    that is true; one without it counts as unpacking.
    """

    @property
    def width(self) -> int:
        """Numbers in one vector."""

    @property
    def space(self) -> int:
        """Numbers in a ready query, a mixed value and a vector unpacked for them; the width for most codecs."""

    @property
    def tokens(self) -> int:
        """Tokens of one slot: 1 for most codecs. With more, whole groups of so many tokens are encoded, never less."""

    def describe(self) -> dict[str, int | float | str]:
        """Name and parameters, from which `codecs.make` builds an equal codec in another process."""

    def start(self, first: Any) -> Arrays:
        """Arrays of one cache that do not grow, from its first token (batch, heads, 1, width); () for most codecs."""

    def encode(self, x: Any, fixed: Arrays) -> Arrays:
        """(batch, heads, tokens, width) -> what is stored, each slot by itself; scales take the dtype of x.

        Slots are counted along axis 2 of every array.
        """

    def decode(self, stored: Arrays, fixed: Arrays, dtype: Any) -> Any:
        """What is stored -> (batch, heads, tokens, width) in `dtype`."""

    def ready(self, queries: Any, fixed: Arrays) -> Any:
        """Queries (batch, heads, n, width), query heads of one KV head together, brought to where codes live."""

    def scores(self, ready: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Products of ready queries with a block of stored keys: (batch, heads, n, block tokens)."""

    def mix(self, weights: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Weights (batch, heads, n, block tokens) times a block of stored values, where codes live."""

    def settle(self, mixed: Any, fixed: Arrays) -> Any:
        """The sum of mixes brought back once a call: (batch, heads, n, width)."""
