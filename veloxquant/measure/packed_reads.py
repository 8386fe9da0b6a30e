"""Attention in which only what would be packed by then is read with something added: dense, and differentiable.

A query reads its own neighbourhood from the recent tier as it is, and only older tokens packed. Channels that serve
short distances alone are quantized for nothing, so gradients must not count what queries read of recent tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.caches.attention import Packed
from veloxquant.caches.masking import Mask
from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from veloxquant.caches.tiered_layout import Layout


class Read(Packed):
    """K or V of a whole text in one call, (1, KV heads, tokens, width), and what is added to packed tokens."""

    def __init__(self, x: Any, added: Any, layout: Layout) -> None:
        self.x, self.layout = x, layout
        self.bent = x if added is None else (x.astype(added.dtype) + added).astype(x.dtype)

    def attend(self, queries: Any, values: Packed, scale: float, mask: Any = None) -> Any:
        """As `Packed.attend`, scores and all: (1, query heads, tokens, value width)."""
        import mlx.core as mx

        if not isinstance(values, Read):
            raise TypeError("keys of a text with values of none")
        _, heads, tokens, _ = queries.shape
        groups = self.x.shape[1]
        far = self._far(tokens)
        rows = (queries.astype(mx.float32) * scale).reshape(1, groups, heads // groups, tokens, -1)
        scores = mx.where(far, rows @ _turned(self.bent), rows @ _turned(self.x))
        scores = _masked(scores.reshape(1, groups, 1, -1, tokens), mask, queries.shape).reshape(scores.shape)
        weights = mx.softmax(scores, axis=-1)
        near = mx.where(far, 0.0, weights)
        mixed = (weights - near) @ _wide(values.bent) + near @ _wide(values.x)
        return mixed.reshape(1, heads, tokens, -1).astype(queries.dtype)

    def _far(self, tokens: int) -> Any:
        """(tokens, tokens): whether the query of a row reads the token of a column packed."""
        import mlx.core as mx

        sinks = self.layout.sinks
        ends = mx.array([sinks + self.layout.packed(at + 1) for at in range(tokens)])[:, None]
        places = mx.arange(tokens)[None]
        return (places >= sinks) & (places < ends)


def watch(cache: Any, added: tuple[Any, Any] | None, layout: Layout) -> None:
    """Let a plain cache of the engine's hand out `Read`s. It takes one call. Raises MethodRefused at a second one."""
    cache.bits = cache.group_size = "read"
    keys_added, values_added = added or (None, None)
    told: list[bool] = []

    def update_and_fetch(keys: Any, values: Any) -> tuple[Read, Read]:
        if told:
            raise MethodRefused("a text is read in one call", hint="calibrate with a model that takes one")
        told.append(True)
        cache.offset += keys.shape[2]
        return Read(keys, keys_added, layout), Read(values, values_added, layout)

    cache.update_and_fetch = update_and_fetch


def _masked(scores: Any, mask: Any, queries: Any) -> Any:
    """Scores (1, KV heads, 1, queries a KV head x tokens, tokens) without what the mask hides, or what is to come."""
    groups, tokens = scores.shape[1], scores.shape[-1]
    hidden = scores if mask is None else Mask(mask, queries, groups, tokens).hide(scores, (0, tokens), (0, tokens))
    return Mask("causal", queries, groups, tokens).hide(hidden, (0, tokens), (0, tokens))


def _turned(x: Any) -> Any:
    return _wide(x).swapaxes(-1, -2)


def _wide(x: Any) -> Any:
    """Float32, with an axis for the query heads of each KV head."""
    import mlx.core as mx

    return x.astype(mx.float32)[:, :, None]
