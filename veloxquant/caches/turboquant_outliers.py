"""Channels with a few loud ones apart: each group of channels is quantized on its own, with its own bits.

Keys of real models have channels that are loud in every token. Which ones is read off the first token and kept, so
that how a prompt is cut into calls changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from veloxquant.caches.codec import Arrays
    from veloxquant.caches.turboquant_stages import Stage


@dataclass(frozen=True)
class Apart:
    """`loud` quantizes the last channels of the order that `fixed` gives, `quiet` those before them."""

    quiet: Stage
    loud: Stage
    width: int
    channels: int

    def start(self, first: mx.array) -> Arrays:
        """(batch, heads, 1, width) -> the largest magnitudes, ascending: (batch, heads, 1, channels) int32."""
        order = mx.argsort(-mx.abs(first.astype(mx.float32)), axis=-1)
        return (mx.sort(order[..., : self.channels], axis=-1).astype(mx.int32),)

    def encode(self, x: mx.array, fixed: Arrays) -> Arrays:
        """What the quiet stage stores, then what the loud one does."""
        quiet, loud = self._dealt(x, fixed)
        return (*self.quiet.encode(quiet), *self.loud.encode(loud))

    def decode(self, stored: Arrays, fixed: Arrays) -> mx.array:
        """Both, channels back in place."""
        quiet, loud = self._stored(stored)
        return self._gathered(self.quiet.decode(quiet), self.loud.decode(loud), fixed)

    def ready(self, queries: mx.array, fixed: Arrays) -> mx.array:
        """Both stages' ready queries after each other."""
        quiet, loud = self._dealt(queries, fixed)
        return mx.concatenate([self.quiet.ready(quiet), self.loud.ready(loud)], axis=-1)

    def scores(self, ready: mx.array, stored: Arrays) -> mx.array:
        """The sum of both stages' products."""
        quiet, loud = self._stored(stored)
        space = self.quiet.space
        return self.quiet.scores(ready[..., :space], quiet) + self.loud.scores(ready[..., space:], loud)

    def mix(self, weights: mx.array, stored: Arrays) -> mx.array:
        """Both stages' sums after each other."""
        quiet, loud = self._stored(stored)
        return mx.concatenate([self.quiet.mix(weights, quiet), self.loud.mix(weights, loud)], axis=-1)

    def settle(self, mixed: mx.array, fixed: Arrays) -> mx.array:
        """Both settled, channels back in place."""
        space = self.quiet.space
        return self._gathered(self.quiet.settle(mixed[..., :space]), self.loud.settle(mixed[..., space:]), fixed)

    def _stored(self, stored: Arrays) -> tuple[Arrays, Arrays]:
        return stored[: self.quiet.arrays], stored[self.quiet.arrays :]

    def _dealt(self, x: mx.array, fixed: Arrays) -> tuple[mx.array, mx.array]:
        dealt = mx.take_along_axis(x, self._order(fixed), axis=-1)
        return dealt[..., : -self.channels], dealt[..., -self.channels :]

    def _gathered(self, quiet: mx.array, loud: mx.array, fixed: Arrays) -> mx.array:
        back = mx.argsort(self._order(fixed), axis=-1)
        return mx.take_along_axis(mx.concatenate([quiet, loud], axis=-1), back, axis=-1)

    def _order(self, fixed: Arrays) -> mx.array:
        """All channels, the loud ones last, both groups ascending: (batch, heads, 1, width)."""
        (loud,) = fixed
        places = mx.broadcast_to(mx.arange(self.width), (*loud.shape[:-1], self.width))
        return mx.argsort(mx.put_along_axis(places, loud, loud + self.width, axis=-1), axis=-1)
