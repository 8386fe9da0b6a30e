"""Attention over K and V in three tiers: sinks, packed groups, recent tokens (`tiered_layout` says which is where).

For whoever builds on it, the batch twin first of all: a `Tier` holds one layer's keys, or its values, in arrays of
shape (rows, KV heads, tokens or slots, ...), a `Sight` says for each row which positions its queries have and what the
recent columns hold (`tiered_sight`). Rows may differ in everything; where they are equal, one number serves for all.

The softmax is carried from part to part (Milakov and Gimelshein, arXiv 1805.02867), in base 2 with log2(e) folded into
the scale of the queries: MLX's CPU backend takes a power of 2 three times as fast as one of e. With one query and
codecs whose products read what is stored the parts are three, whatever the length. Otherwise packed tokens are taken
block by block and queries tile by tile, each query with its own boundary, so that scores never exist as a whole.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from veloxquant.caches.attention import BLOCK_NUMBERS, BLOCK_TOKENS, TILE_ROWS, Packed
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.caches.tiered_sight import Hiding, Sight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from veloxquant.caches.codec import Arrays, Codec


class Tier(NamedTuple):
    """Keys or values of one layer."""

    codec: Codec
    packed: Arrays
    """Token S + p is in slot p // codec.tokens; () before the first group."""
    fixed: Arrays
    recent_codec: Codec
    recent: Arrays
    """The ring, or a row's tokens in order (`Sight.starts`)."""
    recent_fixed: Arrays
    sinks: Any
    """Token p is in slot p; None without sinks."""

    def block(self, start: int, stop: int) -> Arrays:
        """What is stored for some packed tokens; whole slots."""
        slots = slice(start // self.codec.tokens, stop // self.codec.tokens)
        return tuple(array[:, :, slots] for array in self.packed)


class Tiered(Packed):
    """Keys or values as attention takes them."""

    def __init__(self, tier: Tier, sight: Sight) -> None:
        self.tier, self.sight = tier, sight

    def attend(self, queries: Any, values: Packed, scale: float, mask: Any = None) -> Any:
        """As `Packed.attend`. Raises TypeError for values that are not in tiers."""
        if not isinstance(values, Tiered):
            raise TypeError("keys in tiers with values that are not")
        return attend(queries, self.tier, values.tier, self.sight, scale, mask)


def attend(queries: Any, keys: Tier, values: Tier, sight: Sight, scale: float, mask: Any = None) -> Any:
    """Attention of queries (rows, query heads, n, width); (rows, query heads, n, value width) in their format.

    `mask` is None, "causal", or an array over absolute positions that broadcasts to (rows, query heads, n, tokens of
    the longest row): bool (False hides) or numbers added to the scores. Raises ValueError for another mask.
    """
    _, heads, count, _ = queries.shape
    hiding = Hiding(mask, heads, count, keys.recent[0].shape[1], sight)
    size = max(1, min(count, TILE_ROWS // heads))
    result: list[Any] = []
    for first in range(0, count, size):
        tile = queries if size == count else queries[:, :, first : first + size]
        tile = mx.depends([tile], result[-1:])[0] if result else tile
        result.append(_tile(tile, keys, values, hiding, scale, first))
    return result[0] if len(result) == 1 else mx.concatenate(result, axis=2)


def _tile(queries: Any, keys: Tier, values: Tier, hiding: Hiding, scale: float, first: int) -> Any:
    """Some query tokens, the `first` of them and on, over all that they may see."""
    batch, heads, count, width = queries.shape
    groups, rows = keys.recent[0].shape[1], (first, first + count)
    flat = (queries.astype(mx.float32) * (scale * math.log2(math.e))).reshape(batch, groups, -1, width)
    running = _Running()
    _packed(flat, keys, values, hiding, rows, running)
    if keys.sinks is not None:
        held = min(hiding.sight.longest, keys.sinks.shape[2])
        floats = FloatCodec(width), FloatCodec(values.sinks.shape[-1])
        sinks = (keys.sinks[:, :, :held],), (values.sinks[:, :, :held],)
        scores = hiding.sinks(floats[0].scores(flat, sinks[0], ()), rows)
        running.add(scores, lambda weights: floats[1].mix(weights, sinks[1], ()))
    _recent(flat, keys, values, hiding, rows, running)
    return running.mean().astype(queries.dtype).reshape(batch, heads, count, -1)


def _packed(flat: Any, keys: Tier, values: Tier, hiding: Hiding, rows: tuple[int, int], running: _Running) -> None:
    """Add what is packed and seen by some query of the tile."""
    _, end = hiding.sight.boundaries(*rows)
    if not end:
        return
    ready = keys.codec.ready(flat, keys.fixed)
    for start, stop in _spans(0, end, _step(flat, rows, (keys.codec, values.codec))):
        stored = running.after(keys.block(start, stop))
        scores = keys.codec.scores(ready, stored, keys.fixed).astype(mx.float32)
        running.add(hiding.packed(scores, rows, (start, stop)), _mixing(values, start, stop))
    running.mixed = values.codec.settle(running.mixed, values.fixed).astype(mx.float32)


def _mixing(values: Tier, start: int, stop: int) -> Callable[[Any], Any]:
    def mix(weights: Any) -> Any:
        stored = values.block(start, stop)
        if not _is_native(values.codec):
            stored = tuple(mx.depends(list(stored), [weights]))
        return values.codec.mix(weights, stored, values.fixed).astype(mx.float32)

    return mix


def _recent(flat: Any, keys: Tier, values: Tier, hiding: Hiding, rows: tuple[int, int], running: _Running) -> None:
    """Add the recent columns that some query of the tile sees."""
    codec, value_codec = keys.recent_codec, values.recent_codec
    low, high = hiding.sight.recent(*rows, causal=hiding.causal)
    ready = codec.ready(flat, keys.recent_fixed)
    for start, stop in _spans(low, high, _step(flat, rows, (codec, value_codec))):
        stored = running.after(tuple(array[:, :, start:stop] for array in keys.recent))
        held = tuple(array[:, :, start:stop] for array in values.recent)
        scores = codec.scores(ready, stored, keys.recent_fixed).astype(mx.float32)

        def mix(weights: Any, held: Arrays = held) -> Any:
            mixed = value_codec.mix(weights, held, values.recent_fixed)
            return value_codec.settle(mixed, values.recent_fixed).astype(mx.float32)

        running.add(hiding.recent(scores, rows, (start, stop)), mix)


class _Running:
    """The softmax carried from part to part: greatest score so far, sum of weights and weighted sum relative to it."""

    def __init__(self) -> None:
        self.top: Any = None
        self.total: Any = None
        self.mixed: Any = None

    def after(self, stored: Sequence[Any]) -> Arrays:
        """The same arrays, computed once what was added is: lazy blocks would all be unpacked at once."""
        return tuple(stored) if self.top is None else tuple(mx.depends(list(stored), [self.mixed]))

    def add(self, scores: Any, mix: Callable[[Any], Any]) -> None:
        """Scores (rows, KV heads, query rows, columns), hidden ones at -inf, and what weighs their values."""
        # Of a finite least, so that nothing but -inf gives zeros and not NaN.
        before = mx.finfo(mx.float32).min if self.top is None else self.top
        top = mx.maximum(scores.max(axis=-1, keepdims=True), before)
        weights = mx.power(2.0, scores - top)
        total, mixed = weights.sum(axis=-1, keepdims=True), mix(weights)
        if self.top is not None:
            kept = mx.power(2.0, self.top - top)
            total, mixed = total + self.total * kept, mixed + self.mixed * kept
        self.top, self.total, self.mixed = top, total, mixed

    def mean(self) -> Any:
        """Weighted mean, (rows, KV heads, query rows, width); zeros where all is hidden by -inf."""
        return self.mixed / mx.maximum(self.total, mx.finfo(mx.float32).smallest_normal)


def _step(flat: Any, rows: tuple[int, int], codecs: Sequence[Codec]) -> int:
    """Tokens taken at a time: all for one query where nothing is unpacked, else what keeps blocks small."""
    native = all(_is_native(codec) for codec in codecs)
    if native and rows[1] - rows[0] == 1:
        return 2**30
    unpacked = flat.shape[1] * max(codec.space for codec in codecs)
    numbers = max(flat.shape[1] * flat.shape[2], unpacked)
    return max(1, BLOCK_NUMBERS // numbers // BLOCK_TOKENS) * BLOCK_TOKENS


def _spans(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(start, end, step):
        yield first, min(first + step, end)


def _is_native(codec: Codec) -> bool:
    """Whether its products read what is stored, or floats, and unpack nothing beside a few query rows."""
    return bool(getattr(codec, "native", False))
