"""A cache of one head for use without a model: keys and values go in packed, queries attend to all of them.

What is appended is packed and evaluated at once, so that nothing but the packed arrays stays, and `memory_bytes` is
what is held, slack included. Numbers are not looked at: a token with a NaN or an infinity makes the results of every
query NaN, as in attention over floats.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from veloxquant.caches.float_codec import DTYPES
from veloxquant.caches.held import held_bytes
from veloxquant.errors import InvalidParams, quoted

if TYPE_CHECKING:
    from veloxquant.caches.codec import Arrays, Codec

STEP = 256
"""Slots by which the buffers grow."""

_BLOCK = 4096
"""Tokens that are unpacked at a time."""


class StandaloneCache:
    """Keys under one codec, values under another. Not for several threads at once."""

    def __init__(self, key_codec: Codec, value_codec: Codec) -> None:
        self._keys = _Packed(key_codec, "keys")
        self._values = _Packed(value_codec, "values")

    @property
    def head_dim(self) -> int:
        """Width of a key and of a query."""
        return self._keys.codec.width

    _d = head_dim

    def append_key(self, k: Any) -> None:
        """Store a key (width,) or several (n, width). Raises InvalidParams for another shape or number format."""
        self._keys.add(self._keys.rows(k))

    def append_value(self, v: Any) -> None:
        """Store a value (width,) or several (n, width). Raises InvalidParams for another shape or number format."""
        self._values.add(self._values.rows(v))

    def append(self, k: Any, v: Any) -> None:
        """Store as many keys as values; neither when one of them is refused. Raises what check_pair raises."""
        keys, values = self._pair(k, v)
        self._keys.add(keys)
        self._values.add(values)

    def check_pair(self, k: Any, v: Any) -> None:
        """Raise the InvalidParams that `append(k, v)` would, and store nothing.

        For who must store the two one after the other: what passes here, append_key(k) and append_value(v) take.
        """
        self._pair(k, v)

    def attend(self, q: Any) -> mx.array:
        """softmax(q k / sqrt(width)) v over all tokens, for (width,) or (n, width) -> the same with the value width.

        In the dtype of q; computed in float32. Raises InvalidParams for a wrong shape, for an empty cache, and while
        there are more keys than values or the reverse.
        """
        queries = _vectors(q, self.head_dim, "q")
        self._check_complete()
        rows = queries.reshape(-1, self.head_dim).astype(mx.float32) / math.sqrt(self.head_dim)
        attended = self._values.mixed(mx.softmax(self._keys.scores(rows), axis=-1))
        return attended.reshape(*queries.shape[:-1], self._values.codec.width).astype(queries.dtype)

    def memory_bytes(self) -> int:
        """Bytes of all arrays this cache holds, slack included; random matrices are the process's, not its own."""
        return held_bytes(self)

    def __len__(self) -> int:
        """Tokens with a key and a value."""
        return min(self._keys.count, self._values.count)

    def __bool__(self) -> bool:
        """True, also while empty."""
        return True

    def _pair(self, k: Any, v: Any) -> tuple[mx.array, mx.array]:
        keys, values = self._keys.rows(k), self._values.rows(v)
        if len(keys) != len(values):
            message = f"{len(keys)} keys and {len(values)} values were given"
            raise InvalidParams(message, hint="give a value for each key", field="v")
        return keys, values

    def _check_complete(self) -> None:
        keys, values = self._keys.count, self._values.count
        if keys != values:
            message = f"there are {keys} keys and {values} values"
            raise InvalidParams(message, hint="append what is missing, then attend")
        if keys == 0:
            raise InvalidParams("there are no tokens to attend to", hint="append keys and values first")


class _Packed:
    """Keys or values of one head: buffers (1, 1, slots, ...) of which the first `count` are filled."""

    def __init__(self, codec: Codec, what: str) -> None:
        self.codec = codec
        self.count = 0
        self._what = what
        self._format: str | None = None
        self._fixed: Arrays = ()
        self._buffers: Arrays = ()

    def rows(self, x: Any) -> mx.array:
        """What was given as (n, width). Raises InvalidParams."""
        rows = _vectors(x, self.codec.width, self._what).reshape(-1, self.codec.width)
        if self._format not in (None, _named(rows.dtype)):
            message = f"{self._what} are {self._format} so far, and these are {_named(rows.dtype)}"
            raise InvalidParams(message, hint=f"cast to {self._format}", field=self._what)
        return rows

    def add(self, rows: mx.array) -> None:
        """Pack and evaluate."""
        if len(rows) == 0:
            return
        x = rows[None, None]
        if self.count == 0:
            self._format = _named(rows.dtype)
            self._fixed = self.codec.start(x[:, :, :1])
        self._write(self.codec.encode(x, self._fixed), len(rows))
        mx.eval(self._buffers, self._fixed)

    def scores(self, queries: mx.array) -> mx.array:
        """(n, width) -> (1, 1, n, count)."""
        ready = self.codec.ready(queries[None, None], self._fixed)
        return mx.concatenate([self.codec.scores(ready, block, self._fixed) for block in self._blocks()], axis=-1)

    def mixed(self, weights: mx.array) -> mx.array:
        """(1, 1, n, count) -> (n, width)."""
        parts = mx.split(weights, range(_BLOCK, self.count, _BLOCK), axis=-1)
        mixes = [self.codec.mix(part, block, self._fixed) for part, block in zip(parts, self._blocks(), strict=True)]
        settled: mx.array = self.codec.settle(sum(mixes[1:], mixes[0]), self._fixed)
        return settled[0, 0]

    def _blocks(self) -> list[Arrays]:
        spans = [slice(start, min(start + _BLOCK, self.count)) for start in range(0, self.count, _BLOCK)]
        return [tuple(buffer[:, :, span] for buffer in self._buffers) for span in spans]

    def _write(self, stored: Arrays, tokens: int) -> None:
        end = self.count + tokens
        slots = self._buffers[0].shape[2] if self._buffers else 0
        if end > slots:
            self._grow(stored, -(-end // STEP) * STEP - slots)
        for buffer, new in zip(self._buffers, stored, strict=True):
            buffer[:, :, self.count : end] = new
        self.count = end

    def _grow(self, like: Arrays, slots: int) -> None:
        room = [mx.zeros((1, 1, slots, *array.shape[3:]), dtype=array.dtype) for array in like]
        if self._buffers:
            room = [mx.concatenate([old, new], axis=2) for old, new in zip(self._buffers, room, strict=True)]
        self._buffers = tuple(room)


def _vectors(x: Any, width: int, what: str) -> mx.array:
    """(width,) or (n, width) in a float format. Raises InvalidParams that names what it is."""
    try:
        vectors = x if isinstance(x, mx.array) else mx.array(x)
    except (TypeError, ValueError) as error:
        message = f"{what} must be an array of numbers, not {quoted(x)}"
        raise InvalidParams(message, hint=f"give vectors of width {width}", field=what) from error
    if vectors.ndim not in (1, 2) or vectors.shape[-1] != width:
        message = f"{what} must have the shape ({width},) or (n, {width}), not {tuple(vectors.shape)}"
        raise InvalidParams(message, hint=f"give vectors of width {width}", field=what)
    if vectors.dtype not in DTYPES.values():
        message = f"{what} must be float16, bfloat16 or float32, not {_named(vectors.dtype)}"
        raise InvalidParams(message, hint="cast them to a float format", field=what)
    return vectors


def _named(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
