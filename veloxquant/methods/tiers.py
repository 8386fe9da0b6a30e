"""What a cache in tiers (veloxquant.caches.tiered) keeps beside what it packs: parameters and sums of several methods.

With S sinks, R recent tokens and groups of G, of L tokens G x max(0, (L - S - R) // G) are packed, and S + R + G slots
are held besides, whole from the first token on: sinks in the model's format, the others too or in 8 bits. Only `cache`
needs MLX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.caches.tiered_layout import UNIT, Layout
from veloxquant.methods.method import Parameter, Variant
from veloxquant.methods.workspace import Tiers

if TYPE_CHECKING:
    from collections.abc import Callable

    from veloxquant.profiles.model import CachePart

EIGHT = 8
"""Bits of recent tokens that are not in the model's format."""
_MOST_TOKENS = 2**16

__all__ = ["EIGHT", "UNIT", "Kept", "parameters"]


class Kept(NamedTuple):
    """Parameters of the tiers, in tokens but for the last."""

    sinks: int = 4
    recent: int = 64
    group: int = 64
    """Tokens that are packed together."""
    recent_bits: int = 16
    """16: the model's own format."""

    @classmethod
    def of(cls, variant: Variant) -> Kept:
        """What the variant says, defaults filled in."""
        given = {name: int(variant.params[name]) for name in cls._fields if variant.params.get(name) is not None}
        return cls(**given)

    @property
    def layout(self) -> Layout:
        """As the cache has it, whose buffers grow by a group."""
        return Layout(self.sinks, self.recent, self.group, step=self.group)

    @property
    def in_eight(self) -> bool:
        """Whether recent tokens have 8 bits."""
        return self.recent_bits == EIGHT

    def slots(self, tokens: int) -> int:
        """Room for what is packed of so many tokens: whole groups, no slack."""
        return self.layout.capacity(tokens)

    def fixed_bytes(self, part: CachePart, eight: Callable[[int, int], float]) -> int:
        """Sinks and ring of one sequence; `eight`: (width, itemsize) -> bits of one head's recent K or V in 8 bits."""
        bits = 0.0
        for width, itemsize in ((part.key_width, part.key_itemsize), (part.value_width, part.value_itemsize)):
            plain = 8 * itemsize * width
            bits += self.sinks * plain + self.layout.ring * (eight(width, itemsize) if self.in_eight else plain)
        return round(part.heads * bits / 8)

    def tiers(
        self, part: CachePart, bits: tuple[float, float], *, value_space: int, scale_group: int, **counted: int
    ) -> Tiers:
        """For `in_tiers`: stored bits of a packed number of K and of V, and what differs from format to format."""
        return Tiers(
            sinks=self.sinks,
            ring=self.layout.ring,
            group=self.group,
            key_space=part.key_width,
            value_space=value_space,
            scale_group=scale_group,
            row_bits=bits[0] * part.key_width + bits[1] * part.value_width,
            **counted,
        )

    def cache(self, keys: Any, values: Any, eight: Callable[[int], Any]) -> Any:
        """A fresh TieredKVCache of these codecs; `eight` makes that of recent tokens in 8 bits for a width.

        Raises InvalidParams or MethodRefused for what is refused.
        """
        from veloxquant.caches.tiered import TieredKVCache

        recent = [eight(codec.width) if self.in_eight else None for codec in (keys, values)]
        return TieredKVCache(
            keys,
            values,
            sinks=self.sinks,
            recent=self.recent,
            recent_key_codec=recent[0],
            recent_value_codec=recent[1],
        )


def parameters(multiple: str = f"{UNIT}") -> list[Parameter]:
    """Of all but the group, which a method describes itself; recent tokens are a multiple of `multiple`."""
    least = f"recent tokens that are kept at least, a multiple of {multiple}; up to a group more comes and goes"
    return [
        Parameter(name="sinks", kind="int", default=4, low=0, high=_MOST_TOKENS, help="first tokens that are kept"),
        Parameter(name="recent", kind="int", default=64, low=0, high=_MOST_TOKENS, help=least),
        Parameter(name="recent_bits", kind="int", default=16, choices=(16, EIGHT), help="16: the model's own format"),
    ]
