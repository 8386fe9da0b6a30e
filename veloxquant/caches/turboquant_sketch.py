"""TurboQuant's second algorithm (arXiv 2504.19874): one bit less for levels, one bit to make inner products unbiased.

What the levels leave, r, is stored as the signs of S r, S a Gaussian matrix of m rows, and the length of r. Then
sqrt(pi / 2) / m x |r| x S^T sign(S r) has r as its mean over S (QJL, arXiv 2406.03482), so that products with queries
are right on average. S is applied in rotated space, where it is as Gaussian as in any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import mlx.core as mx

from veloxquant.caches import ordered, packing
from veloxquant.caches.rotation import gaussian, rotation, sketch_parts
from veloxquant.caches.turboquant_stages import MeanSquare, as_row, level_table, nearest, to_rotated, widened

if TYPE_CHECKING:
    from veloxquant.caches.codec import Arrays

_SIGNS = (-1.0, 1.0)


@dataclass(frozen=True)
class Sketch:
    """Signs of a sketch and the root mean square of what was sketched. On its own, TurboQuant of one bit."""

    width: int
    rows: int
    seed: int

    arrays: ClassVar[int] = 2

    @property
    def space(self) -> int:
        """The rows of the sketch, padded."""
        return packing.padded(self.rows)

    def encode(self, x: mx.array) -> Arrays:
        """Words of signs uint32, root mean square (..., 1) in the dtype of x."""
        rotated, scale = to_rotated(x, self.width, self.seed)
        return self.signs(ordered.normalized(rotated)[0]), scale

    def signs(self, rows: mx.array) -> mx.array:
        """Rotated rows of root mean square 1 -> packed signs of their sketch; a zero counts as positive."""
        positive = ordered.product(rows, sketch_parts(self.rows, self.width, self.seed)) >= 0
        return packing.pack(positive, 1)

    def decode(self, stored: Arrays) -> mx.array:
        """The estimate of what was sketched, its size last."""
        words, scale = stored
        decoded: mx.array = self.settle(self.values(words)) * scale.astype(mx.float32)
        return decoded

    def values(self, words: mx.array) -> mx.array:
        """Packed signs -> -1 and 1, (..., space)."""
        return packing.lookup(words, 1, _SIGNS)

    def ready(self, queries: mx.array) -> mx.array:
        """Queries rotated and sketched, with the factor of the estimate; zero in the padding."""
        return self.sketched(queries.astype(mx.float32) @ rotation(self.width, self.seed).T)

    def sketched(self, rotated: mx.array) -> mx.array:
        """Rotated rows times S^T and the factor, (..., space)."""
        return widened((rotated @ gaussian(self.rows, self.width, self.seed).T) * self._factor, self.space)

    def scores(self, ready: mx.array, stored: Arrays) -> mx.array:
        """Products with signs, each times its token's root mean square."""
        words, scale = stored
        return (ready @ self.values(words).swapaxes(-1, -2)) * as_row(scale)

    def mix(self, weights: mx.array, stored: Arrays) -> mx.array:
        """Root mean squares go into the weights."""
        words, scale = stored
        return (weights * as_row(scale)) @ self.values(words)

    def settle(self, mixed: mx.array) -> mx.array:
        """Out of the sketch, then rotated back."""
        return self.unsketched(mixed) @ rotation(self.width, self.seed)

    def unsketched(self, mixed: mx.array) -> mx.array:
        """(..., space) times S and the factor: rotated rows."""
        return (mixed[..., : self.rows] @ gaussian(self.rows, self.width, self.seed)) * self._factor

    @property
    def _factor(self) -> float:
        """sqrt(pi / 2) / m, and sqrt(width) from a root mean square to a length."""
        return math.sqrt(math.pi / 2 * self.width) / self.rows


@dataclass(frozen=True)
class InnerProduct:
    """Algorithm 2 for two bits and more: levels of one bit less, and a sketch of what they leave."""

    main: MeanSquare
    sketch: Sketch

    arrays: ClassVar[int] = 4

    @property
    def space(self) -> int:
        """Both spaces after each other."""
        return self.main.space + self.sketch.space

    def encode(self, x: mx.array) -> Arrays:
        """Words, root mean square; words of signs, root mean square of what the levels leave."""
        width, bits = self.main.width, self.main.bits
        rotated, scale = to_rotated(x, width, self.main.seed)
        codes = nearest(rotated, bits, width)
        left = rotated - mx.take(level_table(bits, width), codes)
        rows, size = ordered.normalized(left)
        left_scale = (size * scale.astype(mx.float32)).astype(x.dtype)
        return packing.pack(codes, bits), scale, self.sketch.signs(rows), left_scale

    def decode(self, stored: Arrays) -> mx.array:
        """In units of the root mean square, which comes last."""
        words, scale, signs, left_scale = stored
        unit: mx.array = scale.astype(mx.float32)
        share = left_scale.astype(mx.float32) / mx.where(unit == 0, 1.0, unit)
        return self.settle(mx.concatenate([self.main.levels(words), self.sketch.values(signs) * share], axis=-1)) * unit

    def ready(self, queries: mx.array) -> mx.array:
        """Rotated queries, and these sketched."""
        rotated = queries.astype(mx.float32) @ rotation(self.main.width, self.main.seed).T
        return mx.concatenate([widened(rotated, self.main.space), self.sketch.sketched(rotated)], axis=-1)

    def scores(self, ready: mx.array, stored: Arrays) -> mx.array:
        """The sum of both parts' products."""
        main, sketch = ready[..., : self.main.space], ready[..., self.main.space :]
        return self.main.scores(main, stored[:2]) + self.sketch.scores(sketch, stored[2:])

    def mix(self, weights: mx.array, stored: Arrays) -> mx.array:
        """Both parts' sums after each other."""
        return mx.concatenate([self.main.mix(weights, stored[:2]), self.sketch.mix(weights, stored[2:])], axis=-1)

    def settle(self, mixed: mx.array) -> mx.array:
        """Both parts together, rotated back once."""
        rotated = mixed[..., : self.main.width] + self.sketch.unsketched(mixed[..., self.main.space :])
        return rotated @ rotation(self.main.width, self.main.seed)
