"""Attention over K and V in three tiers: sinks, packed groups, recent tokens (`tiered_layout` says which is where).

For whoever builds on it, the batch twin first of all: a `Tier` holds one layer's keys, or its values, in arrays of
shape (rows, KV heads, tokens or slots, ...), a `Sight` says for each row which positions its queries have and what the
recent columns hold (`tiered_sight`). Rows may differ in everything; where they are equal, one number serves for all.

The softmax is carried from part to part (Milakov and Gimelshein, arXiv 1805.02867), in base 2 with log2(e) folded into
the scale of the queries: MLX's CPU backend takes a power of 2 three times as fast as one of e. With one query and
codecs whose products read what is stored (with fewer than `MANY_ROWS` query heads over a KV head) the parts are three,
whatever the length. Otherwise packed tokens are taken block by block and queries tile by tile, each query with its own
boundary, so that scores never exist as a whole.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from veloxquant.caches.attention import BLOCK_TOKENS, MANY_ROWS, Packed
from veloxquant.caches.float_codec import FloatCodec
from veloxquant.caches.rotated import RotatedCodec
from veloxquant.caches.tiered_sight import Hiding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from veloxquant.caches.codec import Arrays, Codec
    from veloxquant.caches.tiered_sight import Sight


TILE_ROWS = 2**12
"""Query heads x query tokens that are taken at a time."""
BLOCK_NUMBERS = 2**20
"""Most scores of one sequence at a time: 4 MiB in float32, of which MLX has some six in flight."""
FOLD = 32
"""Divides every group."""
_ALL = 2**30
"""More tokens than there are."""


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
        return attend(queries, self, values, scale, mask)


def attend(queries: Any, keys: Tiered, values: Tiered, scale: float, mask: Any = None) -> Any:
    """Attention of queries (rows, query heads, n, width); (rows, query heads, n, value width) in their format.

    `mask` is None, "causal", or an array over absolute positions that broadcasts to (rows, query heads, n, tokens of
    the longest row): bool (False hides) or numbers added to the scores. Raises ValueError for another mask.
    """
    _, heads, count, _ = queries.shape
    hiding = Hiding(mask, (heads, count), keys.tier.recent[0].shape[1], keys.sight)
    size = max(1, min(count, TILE_ROWS // heads))
    result: list[Any] = []
    for first in range(0, count, size):
        tile = queries if size == count else queries[:, :, first : first + size]
        tile = mx.depends([tile], result[-1:])[0] if result else tile
        result.append(_Tile(tile, keys.tier, values.tier, hiding, first).attend(scale))
    return result[0] if len(result) == 1 else mx.concatenate(result, axis=2)


class _Tile:
    """Some query tokens of a call, the `first` of them and on, over all that they may see."""

    def __init__(self, queries: Any, keys: Tier, values: Tier, hiding: Hiding, first: int) -> None:
        self.queries, self.keys, self.values, self.hiding = queries, keys, values, hiding
        self.rows = first, first + queries.shape[2]
        self.running = _Running()

    def attend(self, scale: float) -> Any:
        """(rows, query heads, n, value width)."""
        batch, heads, count, width = self.queries.shape
        scaled = self.queries.astype(mx.float32) * (scale * math.log2(math.e))
        flat = scaled.reshape(batch, self.keys.recent[0].shape[1], -1, width)
        self._packed(flat)
        self._plain(flat)
        return self.running.mean().astype(self.queries.dtype).reshape(batch, heads, count, -1)

    def _packed(self, flat: Any) -> None:
        """Add what is packed and seen by some query of the tile."""
        keys, values = self.keys, self.values
        _, end = self.hiding.sight.boundaries(*self.rows)
        if not end:
            return
        ready = keys.codec.ready(flat, keys.fixed)
        for span in _spans(0, end, self._step(flat, keys.codec, values.codec)):
            stored = self.running.after(keys.block(*span))
            grouped = None if self.hiding.hides_packed(self.rows, span) else _grouped(keys.codec)
            if grouped is None:
                scores = keys.codec.scores(ready, stored, keys.fixed).astype(mx.float32)
                weights = self.running.weigh(self.hiding.packed(scores, self.rows, span))
            else:
                weights = self.running.weigh_grouped(grouped(ready, stored))
            stored = values.block(*span)
            if not self._at_once(keys.codec, values.codec):
                stored = tuple(mx.depends(list(stored), [weights]))
            self.running.add(values.codec.mix(weights, stored, values.fixed))
        self.running.mixed = values.codec.settle(self.running.mixed, values.fixed).astype(mx.float32)

    def _plain(self, flat: Any) -> None:
        """Add the sinks and the recent columns that some query of the tile sees, the sinks with the first of them."""
        codecs = self.keys.recent_codec, self.values.recent_codec
        columns = self.hiding.sight.recent(*self.rows, causal=self.hiding.causal)
        spans = list(_spans(*columns, self._step(flat, *codecs)))
        sinks = 0 if self.keys.sinks is None else min(self.hiding.sight.longest, self.keys.sinks.shape[2])
        for span in spans or ([(0, 0)] if sinks else []):
            held = [self._first(sinks)] if sinks else []
            held += [self._near(span)] if spans else []  # none: the rest is packed, or not there yet
            scores = _joined([stretch.scores(flat) for stretch in held])
            weights = self.running.weigh(self.hiding.plain(scores, self.rows, span, sinks))
            apart = [weights] if len(held) == 1 else [weights[..., :sinks], weights[..., sinks:]]
            mixed = [stretch.mix(some) for stretch, some in zip(held, apart, strict=True)]
            self.running.add(mixed[0] if len(mixed) == 1 else mixed[0] + mixed[1])
            sinks = 0

    def _first(self, sinks: int) -> _Stretch:
        codecs = FloatCodec(self.keys.codec.width), FloatCodec(self.values.codec.width)
        held = (self.keys.sinks[:, :, :sinks],), (self.values.sinks[:, :, :sinks],)
        return _Stretch(*codecs, *held, (), ())

    def _near(self, span: tuple[int, int]) -> _Stretch:
        keys, values = self.keys, self.values
        held = (tuple(array[:, :, slice(*span)] for array in tier.recent) for tier in (keys, values))
        fixed = keys.recent_fixed, values.recent_fixed
        return _Stretch(keys.recent_codec, values.recent_codec, self.running.after(next(held)), next(held), *fixed)

    def _step(self, flat: Any, *codecs: Codec) -> int:
        """Tokens taken at a time: all for one query where nothing is unpacked, else what keeps blocks small."""
        if self._at_once(*codecs):
            return _ALL
        _, groups, rows, _ = flat.shape
        numbers: int = groups * max(rows, *(codec.space for codec in codecs))
        return max(1, BLOCK_NUMBERS // numbers // BLOCK_TOKENS) * BLOCK_TOKENS

    def _at_once(self, *codecs: Codec) -> bool:
        """Whether nothing is unpacked: then what is packed need not wait, and there may be any amount of it."""
        few = self.queries.shape[1] // self.keys.recent[0].shape[1] < MANY_ROWS
        return self.queries.shape[2] == 1 and few and all(_is_native(codec) for codec in codecs)


class _Stretch(NamedTuple):
    """Some tokens that are not packed, a slot each."""

    key_codec: Codec
    value_codec: Codec
    keys: Arrays
    values: Arrays
    key_fixed: Arrays
    value_fixed: Arrays

    def scores(self, flat: Any) -> Any:
        """Of queries (rows, KV heads, query rows, width)."""
        ready = self.key_codec.ready(flat, self.key_fixed)
        return self.key_codec.scores(ready, self.keys, self.key_fixed).astype(mx.float32)

    def mix(self, weights: Any) -> Any:
        """Of its values, brought back."""
        mixed = self.value_codec.mix(weights, self.values, self.value_fixed)
        return self.value_codec.settle(mixed, self.value_fixed).astype(mx.float32)


class _Running:
    """The softmax carried from part to part: greatest score so far, sum of weights and weighted sum relative to it."""

    def __init__(self) -> None:
        self.top: Any = None
        self.total: Any = None
        self.mixed: Any = None
        self._kept: Any = None

    def after(self, stored: Sequence[Any]) -> Arrays:
        """The same arrays, computed once what was added is: lazy blocks would all be unpacked at once.

        That is the total too: sums that wait for the end would keep the weights of every block until then.
        """
        return tuple(stored) if self.mixed is None else tuple(mx.depends(list(stored), [self.mixed, self.total]))

    def weigh(self, scores: Any) -> Any:
        """Weights of scores (rows, KV heads, query rows, columns), hidden ones at -inf; `add` must follow."""
        self._raise(_folded(scores).max(axis=-2).max(axis=-1, keepdims=True))
        return self._weighed(scores - self.top)

    def weigh_grouped(self, scores: Any) -> Any:
        """The same of scores (rows, KV heads, slots, query rows, tokens of a slot), of which none is hidden."""
        self._raise(scores.max(axis=-1).max(axis=2)[..., None])
        below = scores.swapaxes(2, 3) - self.top[..., None]  # a subtraction that also brings tokens together
        return self._weighed(below.reshape(*below.shape[:3], -1))

    def _raise(self, top: Any) -> None:
        # Of a finite least, so that nothing but -inf gives zeros and not NaN.
        before, least = self.top, mx.finfo(mx.float32).min
        self.top = mx.maximum(top, least if before is None else before)
        self._kept = None if before is None else mx.power(2.0, before - self.top)

    def _weighed(self, below: Any) -> Any:
        weights = mx.power(2.0, below)
        total = _folded(weights).sum(axis=-2).sum(axis=-1, keepdims=True)
        self.total = total if self._kept is None else total + self.total * self._kept
        return weights

    def add(self, mixed: Any) -> None:
        """What those weights make of their values, (rows, KV heads, query rows, ...)."""
        mixed = mixed.astype(mx.float32)
        self.mixed = mixed if self._kept is None else mixed + self.mixed * self._kept

    def mean(self) -> Any:
        """Weighted mean, (rows, KV heads, query rows, width); zeros where all is hidden by -inf."""
        return self.mixed / mx.maximum(self.total, mx.finfo(mx.float32).smallest_normal)


def _folded(x: Any) -> Any:
    """The last axis in rows of FOLD: MLX vectorizes a sum or a maximum down columns.

    What is added at the end, and hidden, leaves a sum as it is to the bit: a row of a batch has its single run's.
    """
    whole = x.shape[-1] % FOLD == 0
    return x.reshape(*x.shape[:-1], *((-1, FOLD) if whole else (1, x.shape[-1])))


def _grouped(codec: Codec) -> Callable[[Any, Arrays], Any] | None:
    """A codec's scores as its kernel leaves them, where it has such."""
    found: Callable[[Any, Arrays], Any] | None = getattr(_within(codec), "grouped_scores", None)
    return found


def _within(codec: Codec) -> Codec:
    """The codec whose kernels compute: a rotation only turns what goes in and comes out."""
    return codec.inner if isinstance(codec, RotatedCodec) else codec


def _joined(scores: Sequence[Any]) -> Any:
    return scores[0] if len(scores) == 1 else mx.concatenate(list(scores), axis=-1)


def _spans(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(start, end, step):
        yield first, min(first + step, end)


def _is_native(codec: Codec) -> bool:
    """Whether its products with a few rows read what is stored, or floats, and unpack nothing: its own word."""
    return bool(getattr(_within(codec), "native", False))
