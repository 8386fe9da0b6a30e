"""Attention over packed caches: where mlx-lm calls it, and how it is computed without a whole score matrix.

mlx-lm sends a cache that has `bits` to `mlx_lm.models.base.quantized_scaled_dot_product_attention`, looked up by name
at each call. `install` puts a function there that serves `Packed` handles, which a packed cache returns in the place
of K and V, and hands everything else to mlx-lm's own.

Keys are taken in blocks (`Blocks`), and the softmax is carried from block to block (Milakov and Gimelshein, arXiv
1805.02867; FlashAttention, 2205.14135), so that only a few blocks are ever unpacked and only their scores exist.
A single query token over codecs whose products read what is stored (`native`) takes all tokens at once: nothing is
unpacked, and its scores are few (`_attend_whole`).
Queries keep their format outside; inside everything is in float32, since scores of 16 bits lose what more bits a number
have won.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.caches.masking import Mask
from veloxquant.errors import EngineUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from veloxquant.caches.codec import Arrays, Codec

NAME = "quantized_scaled_dot_product_attention"
OLDEST = (0, 32)
"""The first mlx-lm whose caches save strings and whole numbers in their state; newer ones must pass the self-test."""

BLOCK_TOKENS = 256
"""Stored tokens in a block, for most caches: see `Blocks`."""
TILE_ROWS = 2**13
"""Rows of scores at a time for one sequence: query heads x query tokens."""
BLOCK_NUMBERS = 2**21
"""Most numbers of one sequence in scores, in unpacked keys or values, and in sums at a time: 8 MiB in float32.

With 32 query heads over 8 KV heads of width 128 a prefill works on 256 x 256 tokens and a decode step on 2,048 stored
ones. MLX has some ten temporary arrays of this size in flight. Larger ones were no faster on the CPU backend.
"""

SPAN_NUMBERS = 2**22
"""Most scores of a single query token of one sequence at a time: 16 MiB in float32."""
SLACK = 1024
"""Slots without a token that are multiplied all the same, to spare a copy of the rest."""
MANY_ROWS = 32
"""Query heads of one KV head from which native codecs unpack what is stored: then a single query token works in blocks
too (`affine_codec.MANY_ROWS` is the same)."""


class Packed:
    """Keys or values of one layer as a model's code passes them from the cache to attention. Not an array.

    Whatever else a model does with them raises AttributeError or TypeError: then the layer cannot be packed.
    """

    def __init__(self, codec: Codec, stored: Sequence[Any], fixed: Arrays, tokens: int) -> None:
        self.codec = codec
        self.buffers = tuple(stored)
        """As the cache holds them, (batch, KV heads, slots, ...)."""
        self.stored = tuple(array[..., :tokens, :] for array in stored)
        """Arrays of shape (batch, KV heads, tokens, ...)."""
        self.fixed = fixed
        self.tokens = tokens

    def attend(self, queries: Any, values: Packed, scale: float, mask: Any = None) -> Any:
        """softmax(scale x queries . keys + mask) . values, where these are the keys: see `attend`."""
        return attend(queries, self, values, scale, mask)

    def blocks(self, start: int, stop: int, size: int, after: Sequence[Any]) -> Arrays:
        """What is stored for some tokens, (batch, KV heads, blocks, size, ...), with zeros after the last token.

        `after` is computed first: lazy blocks would all be unpacked at once.
        """
        import mlx.core as mx

        cut = [array[..., start:stop, :] for array in self.stored]
        missing = max(0, stop - self.tokens)
        if missing:
            cut = [mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) for array in cut]
        cut = [array.reshape(*array.shape[:2], -1, size, array.shape[-1]) for array in cut]
        return tuple(mx.depends(cut, list(after))) if after else tuple(cut)

    def __getattr__(self, name: str) -> Any:
        """Only called for what is not there."""
        raise AttributeError(f"packed K and V have no {name!r}: the model's own code reads them outside attention")


def attend(queries: Any, keys: Packed, values: Packed, scale: float, mask: Any = None) -> Any:
    """Attention of queries (batch, query heads, n, width) over all stored tokens; (batch, query heads, n, value width).

    `mask` is None, "causal" (the queries are the last n tokens), or an array that broadcasts to (batch, query heads, n,
    tokens): bool (False hides) or numbers that are added to the scores; or a `Mask` made for this call. KV heads are
    never repeated. The result has the format of the queries. Raises ValueError for a mask of another shape and for
    heads that do not divide.
    """
    import mlx.core as mx

    groups = keys.stored[0].shape[1]
    masking = mask if isinstance(mask, Mask) else Mask(mask, queries.shape, groups, keys.tokens)
    _, heads, count, _ = queries.shape
    if count == 1 and heads // groups < MANY_ROWS and _is_read(keys) and _is_read(values):
        return _attend_whole(queries, keys, values, scale, masking)
    size = Blocks.of(masking.groups, keys.codec, values.codec).tile_tokens(heads, count)
    if size == count:
        return _attend_tile(queries, keys, values, scale, masking, 0)
    result = mx.zeros((*queries.shape[:3], values.codec.width), dtype=queries.dtype)
    done: tuple[Any, ...] = ()
    for first in range(0, count, size):
        tile = queries[:, :, first : first + size]
        tile = mx.depends([tile], done)[0] if done else tile
        done = (_attend_tile(tile, keys, values, scale, masking, first),)
        result[:, :, first : first + size] = done[0]
    return result


class Blocks(NamedTuple):
    """How work on one cache is divided, so that a query's result does not depend on what else its call brings.

    (But for a query that comes alone over native codecs: that takes another way, equal to rounding and not to the bit.)

    Float sums depend on their order, and a last bit can flip a code in the next layer. So stored tokens fall into
    blocks by position alone, a block is always computed at its full length (what a query may not see, and what is not
    there yet, has a weight of exactly zero), and blocks are added up one after the other. Only how many query rows and
    how many blocks are taken at a time depends on the call. What is left is whether a matrix product gives a row the
    same bits whatever the number of rows: MLX's CPU backend on Linux does.
    """

    tokens: int
    """In a block."""
    unpacked: int
    """Numbers that a token of one sequence is unpacked to."""
    space: int
    """Numbers in a ready query and in a sum."""

    @classmethod
    def of(cls, groups: int, key_codec: Codec, value_codec: Codec) -> Blocks:
        """For so many KV heads."""
        space = max(key_codec.space, value_codec.space)
        return cls(max(1, min(BLOCK_TOKENS, BLOCK_NUMBERS // (groups * space))), groups * space, space)

    def tile_tokens(self, heads: int, queries: int) -> int:
        """Query tokens that are taken at a time."""
        rows = min(TILE_ROWS, BLOCK_NUMBERS // max(self.tokens, self.space))
        return max(1, min(queries, rows // heads))

    def together(self, rows: int) -> int:
        """Blocks that are taken at a time for so many rows of scores."""
        return max(1, BLOCK_NUMBERS // max(self.tokens * max(rows, self.unpacked), rows * self.space))


def _attend_tile(  # noqa: PLR0917 -- what `attend` has, and where the tile is
    queries: Any, keys: Packed, values: Packed, scale: float, masking: Mask, first: int
) -> Any:
    """Some query tokens, the `first` of them and on, over all blocks that they may see."""
    import mlx.core as mx

    batch, heads, count, width = queries.shape
    rows = (batch, masking.groups, heads // masking.groups * count)
    scaled = queries.astype(mx.float32) * scale  # in this order: 16 bits would round what more bits a number have won
    ready = keys.codec.ready(scaled.reshape(*rows, width), keys.fixed)[:, :, None]
    blocks = Blocks.of(masking.groups, keys.codec, values.codec)
    size, step = blocks.tokens, blocks.tokens * blocks.together(heads * count)
    end = -(-masking.seen(first + count) // size) * size
    running = _Running()
    for start in range(0, end, step):
        stop = min(start + step, end)
        scores = keys.codec.scores(ready, keys.blocks(start, stop, size, running.parts), keys.fixed)
        scores = masking.hide(scores.astype(mx.float32), (first, first + count), (start, stop))
        # Of a finite least, so that a block of nothing but -inf gives zeros and not NaN.
        top = mx.maximum(scores.max(axis=-1, keepdims=True), mx.finfo(mx.float32).min)
        weights = mx.exp(scores - top)
        mixed = values.codec.mix(weights, values.blocks(start, stop, size, (weights,)), values.fixed)
        running.add(top, weights.sum(axis=-1, keepdims=True), mixed.astype(mx.float32))
    mixed = values.codec.settle(running.mean(), values.fixed)
    return mixed.astype(queries.dtype).reshape(batch, heads, count, -1)


def _attend_whole(queries: Any, keys: Packed, values: Packed, scale: float, masking: Mask) -> Any:
    """One query token over all stored tokens in one product each: calls do not grow with heads or rows.

    Nor with tokens, up to `SPAN_NUMBERS` scores of a sequence (131,072 tokens of 32 query heads); more come in spans of
    so many. In base 2, which MLX computes faster and more exactly than base e (float32 on the CPU backend: 6e-8
    relative against 2e-6); scores that a mask is added to stay in base e.
    """
    import mlx.core as mx

    batch, heads, _, width = queries.shape
    scale = scale if masking.adds else scale * math.log2(math.e)
    rows = (queries.astype(mx.float32) * scale).reshape(batch, masking.groups, -1, width)
    ready = keys.codec.ready(rows, keys.fixed)[:, :, None]
    size, slots = max(1, SPAN_NUMBERS // heads), keys.buffers[0].shape[2]
    # Buffers as they are: MLX copies a slice of them for its kernels. What is behind the last token is hidden.
    end = slots if slots <= min(size, keys.tokens + SLACK) else keys.tokens
    parts: list[Any] = []
    for start in range(0, end, size):
        after = parts[-1][2:] if parts else ()
        parts.append(_attend_span(ready, keys, values, masking, (start, min(start + size, end)), after))
    if len(parts) == 1:
        _, total, mixed = parts[0]
    else:
        tops = mx.concatenate([part[0] for part in parts], axis=2)
        shares = _raised(tops - tops.max(axis=2, keepdims=True), masking)
        total, mixed = (
            (mx.concatenate([part[at] for part in parts], axis=2) * shares).sum(axis=2, keepdims=True) for at in (1, 2)
        )
    # Weights of nothing but hidden tokens are zeros, and so is their mean.
    mean = (mixed / mx.maximum(total, mx.finfo(mx.float32).smallest_normal))[:, :, 0]
    return values.codec.settle(mean, values.fixed).astype(queries.dtype).reshape(batch, heads, 1, -1)


def _attend_span(  # noqa: PLR0917 -- what a block takes
    ready: Any, keys: Packed, values: Packed, masking: Mask, span: tuple[int, int], after: Sequence[Any]
) -> tuple[Any, Any, Any]:
    """Greatest score, sum of weights and weighted sum of some tokens, (batch, KV heads, 1, rows, ...)."""
    import mlx.core as mx

    stored_keys, stored_values = (
        tuple(array[:, :, None, slice(*span)] for array in packed.buffers) for packed in (keys, values)
    )
    ready = mx.depends([ready], list(after))[0] if after else ready
    scores = masking.hide(keys.codec.scores(ready, stored_keys, keys.fixed).astype(mx.float32), (0, 1), span)
    top = mx.maximum(scores.max(axis=-1, keepdims=True), mx.finfo(mx.float32).min)
    weights = _raised(scores - top, masking)
    mixed = values.codec.mix(weights, stored_values, values.fixed).astype(mx.float32)
    return top, weights.sum(axis=-1, keepdims=True), mixed


def _raised(scores: Any, masking: Mask) -> Any:
    """Weights, in the base that scores are in."""
    import mlx.core as mx

    return mx.exp(scores) if masking.adds else mx.power(2.0, scores)


def _is_read(packed: Packed) -> bool:
    """Whether products with one query read what is stored as it is; floats of 16 bits would be copied to 32."""
    import mlx.core as mx

    return bool(getattr(packed.codec, "native", False)) and packed.stored[0].dtype in (mx.uint32, mx.float32)


class _Running:
    """The softmax carried over blocks: greatest score so far, sum of weights and weighted sum relative to it."""

    def __init__(self) -> None:
        self.parts: tuple[Any, ...] = ()
        """(greatest score, weighted sum with the sum of weights as its last column); empty before the first block."""

    def add(self, tops: Any, totals: Any, mixed: Any) -> None:
        """Some blocks, (batch, KV heads, blocks, rows, ...), each relative to its own greatest score."""
        import mlx.core as mx

        before = [self.parts[0]] if self.parts else []
        greatest = mx.cummax(mx.concatenate([*before, tops], axis=2), axis=2)
        now = greatest[:, :, len(before) :]
        sums = mx.concatenate([mixed, totals], axis=-1) * mx.exp(tops - now)
        kept = mx.exp(greatest[:, :, :-1] - greatest[:, :, 1:])
        total = sums[:, :, :1] if not before else self.parts[1] * kept[:, :, :1] + sums[:, :, :1]
        kept = kept[:, :, len(before) :]
        for at in range(1, tops.shape[2]):
            total = total * kept[:, :, at - 1 : at] + sums[:, :, at : at + 1]
        self.parts = (now[:, :, -1:], total)

    def mean(self) -> Any:
        """Weighted mean, (batch, KV heads, rows, space); zeros where all is hidden by -inf."""
        import mlx.core as mx

        total = self.parts[1][:, :, 0]
        return total[..., :-1] / mx.maximum(total[..., -1:], mx.finfo(mx.float32).smallest_normal)


def install() -> None:
    """Serve `Packed` handles in mlx-lm's attention. Does nothing when it is done already.

    That may be behind another program's function, put around ours since. Raises EngineUnavailable for an mlx-lm that
    is missing, too old, or does not call attention as 0.32 does.
    """
    base = _base()
    current = getattr(base, NAME, None)
    if current is None or _version() < OLDEST:
        raise _unfit("its version has no such function" if current is None else "its version is older than 0.32")
    if isinstance(current, _Served) or _refusal(base) is None:
        return
    setattr(base, NAME, _Served(current))
    refusal = _refusal(base)
    if refusal is not None:
        setattr(base, NAME, current)
        raise _unfit(f"{type(refusal).__name__}: {refusal}") from refusal


def uninstall() -> bool:
    """Put mlx-lm's own function back; False when ours is not there, or another program's stands around it."""
    base = _base()
    current = getattr(base, NAME, None)
    if not isinstance(current, _Served):
        return False
    setattr(base, NAME, current.original)
    return True


class _Served:
    """What stands in the place of mlx-lm's function, and takes whatever that takes."""

    def __init__(self, original: Any) -> None:
        functools.update_wrapper(self, original)
        self.original = original

    def __call__(self, *args: Any, **options: Any) -> Any:
        keys = args[1] if len(args) > 1 else options.get("q_keys")
        return _serve(*args, **options) if isinstance(keys, Packed) else self.original(*args, **options)


def _serve(  # noqa: PLR0917 -- mlx-lm's own list
    queries: Any,
    q_keys: Packed,
    q_values: Any,
    scale: float,
    mask: Any = None,
    group_size: Any = None,  # noqa: ARG001
    bits: Any = None,  # noqa: ARG001
    **later: Any,
) -> Any:
    """mlx-lm's parameters, of which the last two say nothing here. Raises TypeError for what attention lacks."""
    lacking = [name for name, value in later.items() if value is not None]
    if lacking:
        raise TypeError(f"attention over packed K and V has no {', '.join(lacking)}")
    return q_keys.attend(queries, q_values, scale, mask)


class _Seen(Packed):
    """Stands for packed keys in the self-test: gives back what it was asked."""

    bits = group_size = "none"

    def __init__(self) -> None:
        """Holds nothing."""

    def attend(self, queries: Any, values: Any, scale: float, mask: Any = None) -> Any:
        return queries, values, scale, mask


def _refusal(base: ModuleType) -> Exception | None:
    """None where mlx-lm's dispatcher brings queries, values, scale and mask to the handle, and its answer back."""
    seen = _Seen()
    asked = (object(), object(), 0.5, "causal")
    try:
        answer = base.scaled_dot_product_attention(asked[0], seen, asked[1], cache=seen, scale=asked[2], mask=asked[3])
    except Exception as error:  # noqa: BLE001 -- mlx-lm's code, or another program's: whatever it raises is the reason
        return error
    return None if answer == asked else RuntimeError(f"attention was asked {asked} and the handle saw {answer}")


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
