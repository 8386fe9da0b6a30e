"""Keys whose channels have unlike bits: the few that scores hang on get many, the rest few, at the same bytes.

What an error in a channel costs differs by orders of magnitude from channel to channel of one head, far more than from
head to head or layer to layer: some carry most of the products with queries, and RoPE keeps them apart. So channels
are ordered, by head, from the one that matters most on, and the order is cut into classes as wide for every head; a
class has its own bits. A slot is a group of tokens, stored transposed as by `PerChannelCodec`: a class is some rows of
that matrix, so that products are one native kernel for each width of codes.
"""

from __future__ import annotations

import base64
import binascii
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from veloxquant.caches import refit
from veloxquant.caches.affine_codec import BITS, GROUPS, MANY_ROWS
from veloxquant.caches.limits import one_of, whole
from veloxquant.errors import InvalidParams, MethodRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.caches.codec import Arrays

WIDEST = 256
"""A channel's number takes a byte."""
CLASSES = 4
_PLACE_BITS = 2


class _Run(NamedTuple):
    """Neighbouring channels, in order, with as many bits."""

    first: int
    stop: int
    bits: int


@dataclass(frozen=True)
class ChannelClassesCodec:
    """`classes` are bits of classes of as many channels each, between commas, those that matter most first.

    `order` has the place in `classes` of each channel of each KV head, heads after each other, two bits each, the first
    in the lowest bits, in base64 (`written`). Each cache holds the order of its channels, as bytes that its figures
    count: a class's channels side by side.
    """

    width: int
    classes: str
    order: str
    group: int = 64

    native = True
    """Products with a few rows read what is stored."""

    def __post_init__(self) -> None:
        whole(self.width, "width", CLASSES, WIDEST)
        one_of(self.group, "group", GROUPS)
        for bits in self._classes:
            one_of(bits, "classes", BITS)
        if len(self._classes) > CLASSES or self.width % len(self._classes):
            message = f"{len(self._classes)} classes for the width {self.width}, of at most four that divide it"
            raise MethodRefused(message, hint="use four classes, or two", field="classes")
        wanted = np.repeat(np.arange(len(self._classes)), self.width // len(self._classes))
        if not len(self._places) or (np.sort(self._places, axis=1) != wanted).any():
            message = f"the order does not put as many of {self.width} channels into each class, for every head"
            raise InvalidParams(message, hint="calibrate the model again", field="order")

    @property
    def tokens(self) -> int:
        """The group."""
        return self.group

    @property
    def space(self) -> int:
        """The width."""
        return self.width

    def describe(self) -> dict[str, int | float | str]:
        """Name, width, classes, order, group."""
        return {
            "name": "channel_classes",
            "width": self.width,
            "classes": self.classes,
            "order": self.order,
            "group": self.group,
        }

    def start(self, first: Any) -> Arrays:
        """The order, (batch, heads, width) bytes. Raises InvalidParams for another number of heads."""
        if first.shape[1] != len(self._places):
            raise InvalidParams(
                f"{first.shape[1]} KV heads, and an order of channels for {len(self._places)}",
                hint="plan for this model",
                field="order",
            )
        # Multiplied, not broadcast: a view of one row would be counted, and saved, as if it were all rows.
        return (mx.array(self._order)[None] * mx.ones((first.shape[0], 1, 1), dtype=mx.uint8),)

    def encode(self, x: Any, fixed: Arrays) -> Arrays:
        """Words, scales and biases of whole groups for each width of codes, slots along axis 2.

        Raises MethodRefused for tokens that fill no whole groups.
        """
        if x.shape[-2] % self.group:
            message = f"{x.shape[-2]} tokens are no whole groups of {self.group}"
            raise MethodRefused(message, hint="keep the rest of a group in another tier")
        ordered = _picked(x, fixed[0])
        apart = ordered.reshape(*x.shape[:-2], -1, self.group, self.width).swapaxes(-1, -2)
        coded = (refit.affine(apart[..., run.first : run.stop, :], run.bits) for run in self._runs)
        return tuple(array for arrays in coded for array in arrays)

    def decode(self, stored: Arrays, fixed: Arrays, dtype: Any) -> Any:
        """Tokens x width again, channels in their own places, in `dtype`."""
        parts = [self._unpacked(run, at) for run, at in self._stored(stored)]
        apart = (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-2)).swapaxes(-1, -2)
        ordered = apart.reshape(*apart.shape[:-3], -1, self.width)
        return _picked(ordered, mx.argsort(fixed[0], axis=-1)).astype(dtype)

    def ready(self, queries: Any, fixed: Arrays) -> Any:
        """Queries in float32, channels in order."""
        return _picked(queries.astype(mx.float32), fixed[0])

    def scores(self, ready: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Products in float32, (..., n, tokens)."""
        rows = ready[..., None, :, :]
        apart = sum(
            self._product(rows[..., run.first : run.stop], run, at, transpose=False) for run, at in self._stored(stored)
        ).swapaxes(-3, -2)
        return apart.reshape(*apart.shape[:-2], -1)

    def mix(self, weights: Any, stored: Arrays, fixed: Arrays) -> Any:
        """Weighted sums in float32, (..., n, width), channels in order."""
        apart = weights.astype(mx.float32).reshape(*weights.shape[:-1], -1, self.group).swapaxes(-3, -2)
        parts = [self._product(apart, run, at, transpose=True).sum(axis=-3) for run, at in self._stored(stored)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def settle(self, mixed: Any, fixed: Arrays) -> Any:
        """Channels in their own places."""
        return _picked(mixed, mx.argsort(fixed[0], axis=-1))

    @functools.cached_property
    def _classes(self) -> tuple[int, ...]:
        try:
            return tuple(int(bits) for bits in self.classes.split(","))
        except (AttributeError, ValueError) as error:
            message = f"these are no bits of classes: {self.classes!r}"
            raise InvalidParams(message, hint="give bits between commas: 6,4,3,3", field="classes") from error

    @functools.cached_property
    def _places(self) -> np.ndarray[Any, Any]:
        """(heads, width), the place of each channel's class."""
        try:
            read = np.frombuffer(base64.b64decode(self.order, validate=True), dtype=np.uint8)
        except (TypeError, ValueError, binascii.Error) as error:
            message = f"the order of channels cannot be read: {error}"
            raise InvalidParams(message, hint="calibrate the model again", field="order") from error
        places = (read[:, None] >> np.arange(0, 8, _PLACE_BITS)) & (CLASSES - 1)
        heads = places.size // self.width
        return places.reshape(-1)[: heads * self.width].reshape(heads, self.width)

    @functools.cached_property
    def _order(self) -> np.ndarray[Any, Any]:
        """(heads, width), bytes: channels of the first class, then those of the next."""
        return np.argsort(self._places, axis=1, kind="stable").astype(np.uint8)

    @functools.cached_property
    def _runs(self) -> tuple[_Run, ...]:
        """Classes, those side by side that have the same bits as one."""
        each = self.width // len(self._classes)
        runs: list[_Run] = []
        for at, bits in enumerate(self._classes):
            if runs and runs[-1].bits == bits:
                runs[-1] = runs[-1]._replace(stop=(at + 1) * each)
            else:
                runs.append(_Run(at * each, (at + 1) * each, bits))
        return tuple(runs)

    def _stored(self, stored: Arrays) -> list[tuple[_Run, Arrays]]:
        return [(run, tuple(stored[3 * at : 3 * at + 3])) for at, run in enumerate(self._runs)]

    def _unpacked(self, run: _Run, stored: Arrays) -> Any:
        words, scales, biases = stored
        wide = (scales.astype(mx.float32), biases.astype(mx.float32))
        return mx.dequantize(words, *wide, group_size=self.group, bits=run.bits)

    def _product(self, rows: Any, run: _Run, stored: Arrays, *, transpose: bool) -> Any:
        if rows.shape[-2] >= MANY_ROWS:
            unpacked = self._unpacked(run, stored)
            return rows @ (unpacked.swapaxes(-1, -2) if transpose else unpacked)
        words, scales, biases = stored
        wide = (scales.astype(mx.float32), biases.astype(mx.float32))
        return mx.quantized_matmul(rows, words, *wide, transpose=transpose, group_size=self.group, bits=run.bits)


def written(order: Sequence[Sequence[int]], classes: int) -> str:
    """A description's `order`, from each head's channels, those that matter most first."""
    ranks = np.argsort(np.array(order), axis=1).reshape(-1)
    places = np.zeros(-(-ranks.size // 4) * 4, dtype=np.uint8)
    places[: ranks.size] = ranks // (len(order[0]) // classes)
    packed = (places.reshape(-1, 4) << np.arange(0, 8, _PLACE_BITS)).sum(axis=1)
    return base64.b64encode(packed.astype(np.uint8).tobytes()).decode()


def _picked(x: Any, order: Any) -> Any:
    """Channels of x (batch, heads, n, width) in an order (batch, heads, width)."""
    return mx.take_along_axis(x, mx.broadcast_to(order[:, :, None], x.shape), axis=-1)
