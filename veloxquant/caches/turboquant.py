"""TurboQuant (arXiv 2504.19874) as codecs: a random rotation, Lloyd-Max levels, a one-bit sketch of what is left.

Stored for each token of each head, m = jl_dim, n channels in a group (all of them without outliers), words of 32 bits:

    mse            bits x ceil(n / 32) words, one root mean square in the input's format
    prod, 1 bit    ceil(m / 32) words, one root mean square
    prod, 2 to 8   (bits - 1) x ceil(n / 32) + ceil(m / 32) words, two root mean squares

With outliers both groups store so, and each head of each sequence keeps the indices of its loud channels, 4 bytes each.
A token with a NaN or an infinity decodes to NaN, as attention over floats would. Matrices are constants of the process
(`rotation`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx

from veloxquant.caches.codebook import MAX_BITS
from veloxquant.caches.limits import flag, whole
from veloxquant.caches.ordered import MAX_WIDTH
from veloxquant.caches.turboquant_outliers import Apart
from veloxquant.caches.turboquant_sketch import InnerProduct, Sketch
from veloxquant.caches.turboquant_stages import MeanSquare
from veloxquant.errors import MAX_WHOLE, InvalidParams

if TYPE_CHECKING:
    from veloxquant.caches.codec import Arrays
    from veloxquant.caches.turboquant_stages import Stage

MAX_SKETCH = 8192
"""Most rows of a sketch; at width 128 its matrix takes 4 MiB."""


class _TurboQuant:
    """What both codecs share: parameters checked, channels dealt out, and results in the dtypes of the protocol."""

    name: ClassVar[str]
    width: int
    bits: int
    seed: int
    outlier_bits: int | None
    outlier_channels: int

    tokens = 1
    """Each token is a slot of its own."""

    @property
    def space(self) -> int:
        """Coordinates of rotated space with its padding, and rows of a sketch, of both groups of channels."""
        return self._apart.quiet.space + self._apart.loud.space if self._apart else self._all.space

    def describe(self) -> dict[str, int | float | str]:
        """Name and every parameter that is set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {"name": self.name, **{name: value for name, value in values.items() if value is not None}}

    def start(self, first: Any) -> Arrays:
        """Indices of the loud channels, (batch, heads, 1, outlier_channels) int32; nothing without outliers."""
        return self._apart.start(first) if self._apart else ()

    def encode(self, x: Any, fixed: Arrays) -> Arrays:
        """Words uint32 and root mean squares in the dtype of x, each (batch, heads, tokens, ...)."""
        return self._apart.encode(x, fixed) if self._apart else self._all.encode(x)

    def decode(self, stored: Arrays, fixed: Arrays, dtype: Any) -> Any:
        """(batch, heads, tokens, width); what `dtype` cannot hold becomes its largest number."""
        decoded = self._apart.decode(stored, fixed) if self._apart else self._all.decode(stored)
        limit = mx.finfo(dtype).max
        return mx.clip(decoded, -limit, limit).astype(dtype)

    def ready(self, queries: Any, fixed: Arrays) -> Any:
        """Queries in rotated space, float32."""
        return self._apart.ready(queries, fixed) if self._apart else self._all.ready(queries)

    def scores(self, ready: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Products in float32."""
        return (self._apart or self._all).scores(ready, stored)

    def mix(self, weights: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Weighted sums in rotated space, float32."""
        return (self._apart or self._all).mix(weights.astype(mx.float32), stored)

    def settle(self, mixed: Any, fixed: Arrays) -> Any:
        """Rotated back, float32."""
        return self._apart.settle(mixed, fixed) if self._apart else self._all.settle(mixed)

    def _check(self) -> None:
        whole(self.width, "width", 1, MAX_WIDTH)
        whole(self.bits, "bits", 1, MAX_BITS)
        whole(self.seed, "seed", 0, MAX_WHOLE)
        whole(self.outlier_channels, "outlier_channels", 0, self.width - 1)
        if self.outlier_bits is not None:
            whole(self.outlier_bits, "outlier_bits", 1, MAX_BITS)
        if (self.outlier_bits is None) != (self.outlier_channels == 0):
            missing = "outlier_bits" if self.outlier_bits is None else "outlier_channels"
            message = f"outlier_bits and outlier_channels go together, and {missing} is not set"
            raise InvalidParams(message, hint=f"set {missing}, or neither", field=missing)

    @cached_property
    def _apart(self) -> Apart | None:
        if self.outlier_bits is None:
            return None
        quiet = self._stage(self.width - self.outlier_channels, self.bits)
        return Apart(quiet, self._loud(self.outlier_bits), self.width, self.outlier_channels)

    @cached_property
    def _all(self) -> Stage:
        return self._stage(self.width, self.bits)

    @property
    def _loud_seed(self) -> int:
        """Beyond all seeds a user can give, so that both groups' matrices are independent."""
        return self.seed + MAX_WHOLE + 1

    def _stage(self, width: int, bits: int) -> Stage:
        raise NotImplementedError

    def _loud(self, bits: int) -> Stage:
        raise NotImplementedError


@dataclass(frozen=True)
class TurboQuantMSE(_TurboQuant):
    """Least mean squared error (algorithm 1), or with the size stretched so that nothing is shrunk: `unbiased`."""

    width: int
    bits: int
    seed: int = 0
    outlier_bits: int | None = None
    outlier_channels: int = 0
    unbiased: bool = False

    name: ClassVar[str] = "turboquant_mse"

    def __post_init__(self) -> None:
        self._check()
        flag(self.unbiased, "unbiased")

    def _stage(self, width: int, bits: int) -> Stage:
        return MeanSquare(width, bits, self.seed, self.unbiased)

    def _loud(self, bits: int) -> Stage:
        return MeanSquare(self.outlier_channels, bits, self._loud_seed, self.unbiased)


@dataclass(frozen=True)
class TurboQuantProd(_TurboQuant):
    """Unbiased inner products (algorithm 2): `bits` - 1 for levels, and `jl_dim` signs of a sketch of what is left.

    `jl_dim` None is as many as there are channels; with outliers it is of the quiet channels, and loud ones have as
    many signs as channels. More signs than channels lower the error, and cost more than `bits`.
    """

    width: int
    bits: int
    jl_dim: int | None = None
    seed: int = 0
    outlier_bits: int | None = None
    outlier_channels: int = 0

    name: ClassVar[str] = "turboquant_prod"

    def __post_init__(self) -> None:
        self._check()
        if self.jl_dim is not None:
            whole(self.jl_dim, "jl_dim", 1, MAX_SKETCH)

    def _stage(self, width: int, bits: int) -> Stage:
        return _inner_product(width, bits, self.jl_dim or width, self.seed)

    def _loud(self, bits: int) -> Stage:
        return _inner_product(self.outlier_channels, bits, self.outlier_channels, self._loud_seed)


def _inner_product(width: int, bits: int, rows: int, seed: int) -> Stage:
    sketch = Sketch(width, rows, seed)
    return sketch if bits == 1 else InnerProduct(MeanSquare(width, bits - 1, seed), sketch)
