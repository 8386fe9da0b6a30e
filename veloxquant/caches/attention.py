"""Attention over packed caches: where mlx-lm calls it, and how it is computed without a whole score matrix.

mlx-lm sends a cache that has `bits` to `mlx_lm.models.base.quantized_scaled_dot_product_attention`, looked up by name
at each call. `install` puts a function there that serves `Packed` handles, which a packed cache returns in the place
of K and V, and hands everything else to mlx-lm's own.

Keys are taken in blocks, and the softmax is carried from block to block (Milakov and Gimelshein, arXiv 1805.02867;
FlashAttention, 2205.14135), so that only one block is ever unpacked and only one block of scores exists. Queries keep
their format outside; inside everything is in float32, since scores of 16 bits lose what more bits a number have won.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.errors import EngineUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from veloxquant.caches.codec import Arrays, Codec

NAME = "quantized_scaled_dot_product_attention"
OLDEST = (0, 32)
"""The first mlx-lm whose caches save strings and whole numbers in their state; newer ones must pass the self-test."""

TILE_ROWS = 2**13
"""Rows of scores at a time for one sequence: query heads x query tokens."""
BLOCK_NUMBERS = 2**21
"""Most numbers of one sequence in a block of scores, and in a block of unpacked keys or values: 8 MiB in float32.

With 32 query heads over 8 KV heads of width 128 a prefill works on 256 x 256 tokens and a decode step on 2,048 stored
ones. MLX has some ten temporary arrays of this size in flight. Larger blocks were no faster on the CPU backend.
"""


class Packed:
    """Keys or values of one layer as a model's code passes them from the cache to attention. Not an array.

    Whatever else a model does with them raises AttributeError or TypeError: then the layer cannot be packed.
    """

    def __init__(self, codec: Codec, stored: Sequence[Any], fixed: Arrays, tokens: int) -> None:
        self.codec = codec
        self.stored = tuple(array[..., :tokens, :] for array in stored)
        """Arrays of shape (batch, KV heads, tokens, ...)."""
        self.fixed = fixed
        self.tokens = tokens

    def attend(self, queries: Any, values: Packed, scale: float, mask: Any = None) -> Any:
        """softmax(scale x queries . keys + mask) . values, where these are the keys: see `attend`."""
        return attend(queries, self, values, scale, mask)

    def block(self, start: int, stop: int, after: Sequence[Any]) -> Arrays:
        """What is stored for some tokens. `after` is computed first: lazy blocks would all be unpacked at once."""
        import mlx.core as mx

        cut = [array[..., start:stop, :] for array in self.stored]
        return tuple(mx.depends(cut, list(after))) if after else tuple(cut)

    def __getattr__(self, name: str) -> Any:
        """Only called for what is not there."""
        raise AttributeError(f"packed K and V have no {name!r}: the model's own code reads them outside attention")


def attend(queries: Any, keys: Packed, values: Packed, scale: float, mask: Any = None) -> Any:
    """Attention of queries (batch, query heads, n, width) over all stored tokens; (batch, query heads, n, value width).

    `mask` is None, "causal" (the queries are the last n tokens), or an array that broadcasts to (batch, query heads, n,
    tokens): bool (False hides) or numbers that are added to the scores. KV heads are never repeated. The result has
    the format of the queries. Raises ValueError for a mask of another shape and for heads that do not divide.
    """
    import mlx.core as mx

    masking = _Mask(mask, queries.shape, keys)
    count = queries.shape[2]
    size = tile_tokens(queries.shape[1], count)
    if size == count:
        return _attend_tile(queries * scale, keys, values, masking, 0)
    result = mx.zeros((*queries.shape[:3], values.codec.width), dtype=queries.dtype)
    done: tuple[Any, ...] = ()
    for first in range(0, count, size):
        tile = queries[:, :, first : first + size]
        tile = mx.depends([tile], done)[0] if done else tile
        done = (_attend_tile(tile * scale, keys, values, masking, first),)
        result[:, :, first : first + size] = done[0]
    return result


def tile_tokens(heads: int, queries: int) -> int:
    """Query tokens that are taken at a time."""
    return max(1, min(queries, TILE_ROWS // heads))


def block_tokens(rows: int, numbers: int) -> int:
    """Stored tokens that are taken at a time for so many rows of scores, and numbers of K or V a token."""
    return max(1, BLOCK_NUMBERS // max(rows, numbers))


def _attend_tile(queries: Any, keys: Packed, values: Packed, masking: _Mask, first: int) -> Any:
    """Some scaled query tokens, the `first` of them and on, over all blocks that they may see."""
    import mlx.core as mx

    batch, heads, count, width = queries.shape
    rows = (batch, masking.groups, heads // masking.groups * count)
    ready = keys.codec.ready(queries.astype(mx.float32).reshape(*rows, width), keys.fixed)
    step = block_tokens(heads * count, masking.groups * max(keys.codec.width, values.codec.width))
    running = _Running()
    for start in range(0, masking.seen(first + count), step):
        stop = min(start + step, keys.tokens)
        block = keys.block(start, stop, running.parts)
        scores = keys.codec.scores(ready, block, keys.fixed).astype(mx.float32)
        weights = running.weigh(masking.hide(scores, (first, first + count), (start, stop)))
        block = values.block(start, stop, (weights,))
        running.add(weights, values.codec.mix(weights, block, values.fixed).astype(mx.float32))
    mixed = values.codec.settle(running.mean(), values.fixed)
    return mixed.astype(queries.dtype).reshape(batch, heads, count, -1)


class _Running:
    """The softmax carried over blocks: greatest score so far, sum of weights and weighted sum relative to it."""

    def __init__(self) -> None:
        self.parts: tuple[Any, ...] = ()
        """(sum of weights, weighted sum); empty before the first block."""
        self._top: Any = None
        self._kept: Any = None

    def weigh(self, scores: Any) -> Any:
        """Weights of one block, and what those so far are still worth."""
        import mlx.core as mx

        # Of a finite least, so that a block of nothing but -inf gives zeros and not NaN.
        top = mx.maximum(scores.max(axis=-1, keepdims=True), mx.finfo(mx.float32).min)
        if self.parts:
            top = mx.maximum(top, self._top)
            self._kept = mx.exp(self._top - top)
        self._top = top
        return mx.exp(scores - top)

    def add(self, weights: Any, mixed: Any) -> None:
        """The block's weights, and values under them."""
        total = weights.sum(axis=-1, keepdims=True)
        if self.parts:
            total = self.parts[0] * self._kept + total
            mixed = self.parts[1] * self._kept + mixed
        self.parts = (total, mixed)

    def mean(self) -> Any:
        """Weighted mean; zeros where all is hidden by -inf."""
        import mlx.core as mx

        total, mixed = self.parts
        return mixed / mx.maximum(total, mx.finfo(mx.float32).smallest_normal)


class _Mask:
    """Which scores of a call count, cut to a tile of queries and a block of keys."""

    def __init__(self, mask: Any, queries: Sequence[int], keys: Packed) -> None:
        _, heads, self.count, _ = queries
        self.groups: int = keys.stored[0].shape[1]
        self.tokens = keys.tokens
        self._causal = isinstance(mask, str)
        self._array = None
        if heads % self.groups:
            raise ValueError(f"{heads} query heads over {self.groups} KV heads: not a multiple")
        if self._causal and mask != "causal":
            raise ValueError(f"the mask {mask!r} is not known")
        if mask is not None and not self._causal:
            self._array = self._grouped(mask, heads)

    def _grouped(self, mask: Any, heads: int) -> Any:
        """(batch or 1, KV heads or 1, queries a KV head or 1, n or 1, tokens or 1)."""
        shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        _, given, rows, columns = shape
        if given not in (1, heads) or rows not in (1, self.count) or columns not in (1, self.tokens):
            raise ValueError(f"a mask of shape {mask.shape} for {heads} x {self.count} x {self.tokens} scores")
        groups, repeats = (self.groups, heads // self.groups) if given == heads else (1, 1)
        return mask.reshape(shape[0], groups, repeats, rows, columns)

    def seen(self, last: int) -> int:
        """Stored tokens that query tokens before `last` may see at all."""
        return self.tokens - self.count + last if self._causal else self.tokens

    def hide(self, scores: Any, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
        """Scores (batch, KV heads, queries a KV head x n, block) with the mask on them.

        `rows` are first and last + 1 of the call's query tokens, `columns` of the stored ones.
        """
        import mlx.core as mx

        mask = self._cut(*rows, *columns)
        if mask is None:
            return scores
        shape = scores.shape
        apart = scores.reshape(*shape[:2], -1, rows[1] - rows[0], shape[-1])
        if mask.dtype == mx.bool_:
            apart = mx.where(mask, apart, mx.finfo(mx.float32).min)
        else:
            apart = apart + mask.astype(mx.float32)
        return apart.reshape(shape)

    def _cut(self, first: int, last: int, start: int, stop: int) -> Any:
        import mlx.core as mx

        if self._causal:
            seen = self.tokens - self.count
            if stop <= seen + first + 1:
                return None
            return mx.arange(seen + first, seen + last)[:, None] >= mx.arange(start, stop)[None]
        if self._array is None:
            return None
        rows = slice(first, last) if self._array.shape[-2] > 1 else slice(None)
        columns = slice(start, stop) if self._array.shape[-1] > 1 else slice(None)
        return self._array[..., rows, columns]


def install() -> None:
    """Serve `Packed` handles in mlx-lm's attention. Does nothing when it is done already.

    Raises EngineUnavailable for an mlx-lm that is missing, too old, or does not call attention as 0.32 does.
    """
    base = _base()
    current = getattr(base, NAME, None)
    if isinstance(current, _Served):
        return
    if current is None or _version() < OLDEST:
        raise _unfit("its version has no such function" if current is None else "its version is older than 0.32")
    served = _Served(current)
    setattr(base, NAME, served)
    try:
        _check(base)
    except Exception as error:
        setattr(base, NAME, current)
        raise _unfit(f"{type(error).__name__}: {error}") from error


def uninstall() -> bool:
    """Put mlx-lm's own function back; False when it was there."""
    base = _base()
    current = getattr(base, NAME, None)
    if not isinstance(current, _Served):
        return False
    setattr(base, NAME, current.original)
    return True


class _Served:
    """What stands in the place of mlx-lm's function."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, queries: Any, q_keys: Any, q_values: Any, scale: float, mask: Any, **options: Any) -> Any:
        if isinstance(q_keys, Packed):
            return q_keys.attend(queries, q_values, scale, mask)
        return self.original(queries, q_keys, q_values, scale=scale, mask=mask, **options)


class _Seen(Packed):
    """Stands for packed keys in the self-test: gives back what it was asked."""

    bits = group_size = "none"

    def __init__(self) -> None:
        """Holds nothing."""

    def attend(self, queries: Any, values: Any, scale: float, mask: Any = None) -> Any:
        return queries, values, scale, mask


def _check(base: ModuleType) -> None:
    """mlx-lm's dispatcher must bring queries, values, scale and mask to the handle, and its answer back."""
    seen = _Seen()
    asked = (object(), object(), 0.5, "causal")
    answer = base.scaled_dot_product_attention(asked[0], seen, asked[1], cache=seen, scale=asked[2], mask=asked[3])
    if answer != asked:
        raise RuntimeError(f"attention was asked {asked} and the handle saw {answer}")


def _base() -> ModuleType:
    try:
        from mlx_lm.models import base
    except ImportError as error:
        raise EngineUnavailable(f"mlx-lm cannot be imported: {error}", hint="pip install mlx-lm") from error
    return base  # type: ignore[no-any-return]


def _version() -> tuple[int, ...]:
    """(major, minor); an unreadable version passes for the newest, and the self-test decides."""
    import mlx_lm

    try:
        return tuple(int(number) for number in str(mlx_lm.__version__).split(".")[:2])
    except ValueError:
        return OLDEST


def _unfit(why: str) -> EngineUnavailable:
    return EngineUnavailable(
        f"this mlx-lm cannot serve packed caches: {why}",
        hint="`veloxquantctl doctor` names the mlx-lm version that was tested: install that one",
    )
