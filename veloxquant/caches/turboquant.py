"""TurboQuant (arXiv 2504.19874) as codecs: a random rotation, Lloyd-Max levels, a one-bit sketch of what is left."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx

from veloxquant.caches.codebook import MAX_BITS
from veloxquant.caches.limits import whole
from veloxquant.caches.ordered import MAX_WIDTH
from veloxquant.caches.turboquant_stages import MeanSquare
from veloxquant.errors import MAX_WHOLE

if TYPE_CHECKING:
    from veloxquant.caches.codec import Arrays


@dataclass(frozen=True)
class TurboQuantMSE:
    """Least mean squared error: `bits` a number, and one root mean square a vector."""

    width: int
    bits: int
    seed: int = 0

    name: ClassVar[str] = "turboquant_mse"

    def __post_init__(self) -> None:
        whole(self.width, "width", 1, MAX_WIDTH)
        whole(self.bits, "bits", 1, MAX_BITS)
        whole(self.seed, "seed", 0, MAX_WHOLE)

    def describe(self) -> dict[str, int | float | str]:
        """Name and every parameter that is set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": self.name, **{name: value for name, value in values.items() if value is not None}}

    def start(self, first: Any) -> Arrays:
        """Nothing."""
        return ()

    def encode(self, x: Any, fixed: Arrays) -> Arrays:
        """Words (batch, heads, tokens, words) uint32; root mean squares (batch, heads, tokens, 1) in the dtype of x."""
        return self._stage.encode(x)

    def decode(self, stored: Arrays, fixed: Arrays, dtype: Any) -> Any:
        """(batch, heads, tokens, width); what a 16-bit format cannot hold becomes its largest number."""
        limit = mx.finfo(dtype).max
        return mx.clip(self._stage.decode(stored), -limit, limit).astype(dtype)

    def ready(self, queries: Any, fixed: Arrays) -> Any:
        """Queries in rotated space, float32."""
        return self._stage.ready(queries)

    def scores(self, ready: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Products in float32."""
        return self._stage.scores(ready, stored)

    def mix(self, weights: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Weighted sums in rotated space, float32."""
        return self._stage.mix(weights.astype(mx.float32), stored)

    def settle(self, mixed: Any, fixed: Arrays) -> Any:
        """Rotated back, float32."""
        return self._stage.settle(mixed)

    @property
    def _stage(self) -> MeanSquare:
        return MeanSquare(self.width, self.bits, self.seed)
