"""Heads of one layer kept in different ways: one codec for each kind of head, so that bits go where they are needed.

The heads of a kind are packed together. How many calls a step makes depends on how many kinds there are, not on heads.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from veloxquant.errors import InvalidParams, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from veloxquant.caches.codec import Arrays, Codec


@dataclass(frozen=True)
class ByHeadCodec:
    """`heads[i]` is the place of KV head i's codec in `codecs`. All are of one width, and of as many tokens a slot.

    Arrays are those of the first codec, for its heads only, then those of the second, and so on.
    """

    codecs: tuple[Codec, ...]
    heads: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(set(self.heads)) != list(range(len(self.codecs))) or not self.codecs:
            raise InvalidParams(
                f"heads {self.heads} do not use each of {len(self.codecs)} codecs",
                hint="name each codec's place at least once",
                field="heads",
            )
        if len({(codec.width, codec.tokens) for codec in self.codecs}) > 1:
            raise InvalidParams(
                "heads of one layer with codecs of several widths, or of several groups of tokens",
                hint="use codecs that differ in bits",
                field="codecs",
            )

    @property
    def width(self) -> int:
        """That of all codecs."""
        return self.codecs[0].width

    @property
    def tokens(self) -> int:
        """That of all codecs."""
        return self.codecs[0].tokens

    @property
    def space(self) -> int:
        """The largest; the others' have zeros behind them."""
        return max(codec.space for codec in self.codecs)

    @property
    def native(self) -> bool:
        """Whether products with a few rows read what is stored, for all codecs."""
        return all(getattr(codec, "native", False) for codec in self.codecs)

    def describe(self) -> dict[str, int | float | str]:
        """Name, the codecs' descriptions as JSON, the heads as numbers between commas."""
        inner = json.dumps([codec.describe() for codec in self.codecs], sort_keys=True)
        return {"name": "by_head", "codecs": inner, "heads": ",".join(map(str, self.heads))}

    def start(self, first: Any) -> Arrays:
        """All codecs' arrays."""
        return tuple(array for codec, x in self._apart(first) for array in codec.start(x))

    def encode(self, x: Any, fixed: Arrays) -> Arrays:
        """All codecs' arrays. Raises InvalidParams for another number of heads."""
        if x.shape[1] != len(self.heads):
            raise InvalidParams(
                f"{x.shape[1]} KV heads, and codecs for {len(self.heads)}", hint="plan for this model", field="heads"
            )
        kept = self._split(fixed, self._fixed_counts)
        coded = (codec.encode(part, own) for (codec, part), own in zip(self._apart(x), kept, strict=True))
        return tuple(array for arrays in coded for array in arrays)

    def decode(self, stored: Arrays, fixed: Arrays, dtype: Any) -> Any:
        """(batch, heads, tokens, width) in `dtype`."""
        return self._together(lambda codec, at: codec.decode(*at, dtype), stored, fixed)

    def ready(self, queries: Any, fixed: Arrays) -> Any:
        """Each head's queries where its codes live."""
        kept = self._split(fixed, self._fixed_counts)
        parts = [self._wide(codec.ready(x, own)) for (codec, x), own in zip(self._apart(queries), kept, strict=True)]
        return self._ordered(parts)

    def scores(self, ready: Any, stored: Arrays, fixed: Arrays) -> Any:
        """(batch, heads, n, tokens)."""
        parts = iter(self._apart(ready))
        return self._together(lambda codec, at: codec.scores(next(parts)[1][..., : codec.space], *at), stored, fixed)

    def mix(self, weights: Any, stored: Arrays, fixed: Arrays) -> Any:
        """(batch, heads, n, space)."""
        parts = iter(self._apart(weights))
        return self._together(lambda codec, at: self._wide(codec.mix(next(parts)[1], *at)), stored, fixed)

    def settle(self, mixed: Any, fixed: Arrays) -> Any:
        """Each head's brought back."""
        kept = self._split(fixed, self._fixed_counts)
        apart = zip(self._apart(mixed), kept, strict=True)
        return self._ordered([codec.settle(x[..., : codec.space], own) for (codec, x), own in apart])

    @functools.cached_property
    def _of(self) -> tuple[tuple[int, ...], ...]:
        """The heads of each codec."""
        places = range(len(self.codecs))
        return tuple(tuple(head for head, own in enumerate(self.heads) if own == place) for place in places)

    @functools.cached_property
    def _order(self) -> tuple[int, ...]:
        """Where each head is once all codecs' heads stand behind each other."""
        stood = [head for heads in self._of for head in heads]
        return tuple(stood.index(head) for head in range(len(stood)))

    @functools.cached_property
    def _counts(self) -> tuple[int, ...]:
        """Stored arrays of each codec; nothing is computed to know."""
        return tuple(
            len(codec.encode(_nothing(codec), codec.start(_nothing(codec)[:, :, :1]))) for codec in self.codecs
        )

    @functools.cached_property
    def _fixed_counts(self) -> tuple[int, ...]:
        return tuple(len(codec.start(_nothing(codec)[:, :, :1])) for codec in self.codecs)

    def _apart(self, x: Any) -> list[tuple[Codec, Any]]:
        """Each codec with its heads of x, along axis 1."""
        return [(codec, _heads(x, heads)) for codec, heads in zip(self.codecs, self._of, strict=True)]

    def _together(self, work: Callable[[Codec, tuple[Arrays, Arrays]], Any], stored: Arrays, fixed: Arrays) -> Any:
        own = zip(self._split(stored, self._counts), self._split(fixed, self._fixed_counts), strict=True)
        return self._ordered([work(codec, at) for codec, at in zip(self.codecs, own, strict=True)])

    def _ordered(self, parts: Sequence[Any]) -> Any:
        """All codecs' heads in the layer's order again, along axis 1."""
        if len(parts) == 1:
            return parts[0]
        stood = mx.concatenate(list(parts), axis=1)
        return stood if self._order == tuple(range(len(self._order))) else _heads(stood, self._order)

    def _wide(self, x: Any) -> Any:
        missing = self.space - x.shape[-1]
        return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x

    def _split(self, arrays: Arrays, counts: Sequence[int]) -> list[Arrays]:
        ends = [sum(counts[: place + 1]) for place in range(len(counts))]
        return [tuple(arrays[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def described(codecs: str, heads: str) -> ByHeadCodec:
    """The codec that `describe()` described. Raises InvalidParams."""
    from veloxquant.caches.codecs import make

    try:
        made = tuple(make(one) for one in json.loads(codecs))
        return ByHeadCodec(made, tuple(int(place) for place in heads.split(",")))
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        message = f"this describes no codecs of heads: {quoted(codecs)}, {quoted(heads)}"
        raise InvalidParams(message, hint="give a description as describe() writes it", field="codecs") from error


def _heads(x: Any, heads: Sequence[int]) -> Any:
    """Some heads of (batch, heads, ...): a view where they stand side by side."""
    first, last = heads[0], heads[-1] + 1
    if tuple(heads) == tuple(range(first, last)):
        return x if last - first == x.shape[1] else x[:, first:last]
    return mx.take(x, mx.array(list(heads), dtype=mx.int32), axis=1)


def _nothing(codec: Codec) -> Any:
    return mx.zeros((1, 1, codec.tokens, codec.width))
