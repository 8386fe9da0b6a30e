"""What methods that hold a bounded number of tokens have in common: arithmetic of bytes, refusals, building.

An author writes what is kept (`policy`) and what that costs in quality. Figures come from the same arithmetic that the
cache runs on (veloxquant.caches.eviction), so that what is planned is what is held.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from veloxquant.caches import eviction
from veloxquant.errors import InvalidParams
from veloxquant.methods.method import LayerSpec, Method, Param, Parameter, QualityPrior, Variant
from veloxquant.methods.priors import from_hard_case
from veloxquant.methods.workspace import query_heads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veloxquant.profiles.model import CachePart

PLAIN = 16
"""`bits` for numbers that stay in the model's own format: 16 bits in a 16-bit model."""
_BITS = (PLAIN, 8, 4)
_MARK_BITS = 32
"""A position, and a sum of attention: int32 for each head and slot."""
_SCORES = 2**22
"""As in veloxquant.caches.evicting_attention."""
_SCORE_ARRAYS, _STORED_ARRAYS = 5, 3
"""Arrays there at once, as counted with MLX's allocator on the CPU backend, rounded up: of scores; of what is stored (a
copy while it is written, and one of what stays)."""
_UNPACK_BYTES = {PLAIN: 8.0, 8: 0.5, 4: 0.5}
"""Bytes moved in decode for each stored number: a float32 copy of 16-bit numbers, written and read; of packed ones the
same for scales and biases, two for 32 or 64 numbers."""

_MEASURED_ON = (
    "SmolLM2-135M at 4,096 tokens (upper end): budgets of 1,024 at 16 bits and h2o's 2,048 at 8 with real caches "
    "(bench/quality.py), other budgets and bits simulated with the cache's own segments, other lengths by the share of "
    "a text that is gone"
)
_MEASURED_TOKENS = 4096
"""Of that text."""
_MOST_KL = math.log(49152)
"""What SmolLM2 would lose by guessing evenly, at most: no extrapolation says more."""


class Measured(NamedTuple):
    """Mean KL in nats a token over all of a text of 4,096 tokens: SmolLM2-135M-Instruct, head width 64, every layer.

    1,024 at 16 bits by bench/quality.py with real caches; the rest was simulated, 8 and 4 bits there moved by as much
    as 16 differ from simulated, so that what packing adds stays. A small model with narrow heads is a hard case. What
    is lost follows from how much of the text is gone, so text over budget is what carries over to other lengths.
    """

    half: float
    """With a budget of 2,048, at 16 bits; h2o's from real caches of 8 bits, less what these add at a quarter."""
    quarter: tuple[float, float, float]
    """1,024, at 16, 8 and 4 bits."""
    eighth: tuple[float, float, float]
    """512."""


class BoundedMethod(Method):
    """At most `budget` tokens a head after each eviction. Parameters `budget`, `stride`, `bits`, `group`."""

    batchable = True
    trimmable = False
    drops_tokens = True
    fused_attention = True

    offered: tuple[tuple[int, int], ...] = ((1024, PLAIN), (1024, 8), (2048, 8))
    """(budget, bits) of the variants that are planned with. 8 bits lose next to nothing, and 2,048 tokens at 8 bits
    lose a seventh of what 1,024 at 16 do in the same bytes; 4 bits lose more than half as many tokens at 8 bits. Heads
    whose width no group divides have 16 bits left."""
    measured: Measured

    def policy(self, params: Mapping[str, Param]) -> dict[str, int | str]:
        """What stays, as veloxquant.caches.eviction describes it, for a variant's parameters."""
        raise NotImplementedError(f"{type(self).__name__} does not implement policy()")

    def variants(self) -> Sequence[Variant]:
        """One for each pair of `offered`."""
        return [
            Variant(
                method=self.name,
                label=f"{self.name}-{budget}" + ("" if bits == PLAIN else f"-{bits}bit"),
                params={"budget": budget, "bits": bits},
            )
            for budget, bits in self.offered
        ]

    def parameters(self) -> Sequence[Parameter]:
        """What every bounded method takes."""
        held = "most tokens that a head holds after an eviction"
        return [
            Parameter(name="budget", kind="int", default=1024, low=1, high=2**24, help=held),
            Parameter(name="stride", kind="int", default=eviction.STRIDE, low=1, high=2**16, help="tokens to the next"),
            Parameter(name="bits", kind="int", default=PLAIN, choices=_BITS, help="16: as the model has them"),
            Parameter(name="group", kind="int", choices=(32, 64, 128), help="numbers that share a scale; 64 or 32"),
        ]

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Groups must divide both widths where numbers are packed; the budget must hold what is always kept."""
        try:
            eviction.make(self.policy(variant.params))
            self._rule(variant)
        except InvalidParams as error:
            return "not_supported_by_engine", str(error)
        for what, width in (("key", part.key_width), ("value", part.value_width)):
            if width <= 0:
                return "not_supported_by_engine", f"the engine keeps no {what}s of their own here"
            group = _group(variant, width)
            if _bits(variant) != PLAIN and width % group:
                return "width_not_divisible", f"groups of {group} do not divide the {what} width {width}"
        return None

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """A key, its position and, where attention is watched, the sum of it."""
        marks = 2 if eviction.make(self.policy(variant.params)).watches else 1
        return _number_bits(variant, part.key_width, part.key_itemsize) + marks * _MARK_BITS / part.key_width

    def value_bits(self, variant: Variant, part: CachePart) -> float:
        """A value alone."""
        return _number_bits(variant, part.value_width, part.value_itemsize)

    def slots(self, variant: Variant, part: CachePart, tokens: int) -> int | None:
        """Whole strides, until there is room for the budget and one stride more."""
        return self._rule(variant).slots(tokens)

    def slot_step(self, variant: Variant, part: CachePart) -> int:
        """The stride."""
        return self._rule(variant).stride

    def workspace_bytes(self, variant: Variant, part: CachePart, queries: int, slots: int) -> int:
        """Scores of one segment, float copies of what is stored, and copies while tokens are dropped."""
        rule = self._rule(variant)
        room = min(slots, rule.budget + rule.stride)
        scores = min(_SCORES, query_heads(part) * min(queries, rule.stride) * room)
        row_bits = self.key_bits(variant, part) * part.key_width + self.value_bits(variant, part) * part.value_width
        stored = part.heads * room * (part.key_width + part.value_width) * 4
        return int(4 * _SCORE_ARRAYS * scores + stored + _STORED_ARRAYS * part.heads * room * row_bits / 8)

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """Of a text of 4,096 tokens, or of two budgets if that is more; nothing while no more than one is read."""
        tokens = max(_MEASURED_TOKENS, 2 * int(variant.params.get("budget", 1024)))
        return msgspec.structs.replace(self.quality_at(variant, tokens), low=0.0)

    def quality_at(self, variant: Variant, tokens: int) -> QualityPrior:
        """Of a text of `tokens` tokens, scaled from the hard case as that of all methods."""
        budgets = tokens / int(variant.params.get("budget", 1024))
        source = f"{_MEASURED_ON}; read are {budgets:.3g} budgets; as for packed numbers"
        return from_hard_case(self._lost(_bits(variant), budgets), source)

    def _lost(self, bits: int, budgets: float) -> float:
        """KL of a text of so many budgets: what the bits cost up to one, a straight line to two, then by logarithms."""
        at = _BITS.index(bits)
        packed = max(0.0, self.measured.quarter[at] - self.measured.quarter[0])
        doublings = math.log2(budgets) if budgets > 1 else 0.0
        if doublings <= 1:
            return packed + (self._at_share(bits, 1) - packed) * doublings
        below = math.floor(doublings)
        one, next_one = self._at_share(bits, below), self._at_share(bits, below + 1)
        return float(one * (next_one / one) ** (doublings - below))

    def _at_share(self, bits: int, halvings: int) -> float:
        """KL with a budget of 1 / 2**halvings of a text.

        Below an eighth it grows as it did from a quarter; at 8 and 4 bits a half adds what these bits add at a quarter.
        """
        at = _BITS.index(bits)
        quarter, eighth = self.measured.quarter[at], self.measured.eighth[at]
        if halvings == 1:
            return self.measured.half + max(0.0, quarter - self.measured.quarter[0])
        return min(_MOST_KL, quarter * (eighth / quarter) ** (halvings - 2))

    def unpack_bytes(self, variant: Variant) -> float:
        """See `_UNPACK_BYTES`."""
        return _UNPACK_BYTES[_bits(variant)]

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        """A fresh EvictingKVCache. Raises InvalidParams and MethodRefused for what is refused."""
        from veloxquant.caches.evicting import EvictingKVCache

        part = layer.part
        keys, values = _codec(variant, part.key_width), _codec(variant, part.value_width)
        return EvictingKVCache(keys, values, eviction.make(self.policy(variant.params)), *self._rule(variant))

    def _rule(self, variant: Variant) -> eviction.Rule:
        params = variant.params
        rule = eviction.Rule(int(params.get("budget", 1024)), int(params.get("stride", eviction.STRIDE)))
        return rule.check(eviction.make(self.policy(params)))


def _bits(variant: Variant) -> int:
    return int(variant.params.get("bits", PLAIN))


def _group(variant: Variant, width: int) -> int:
    """64 where it divides, else 32, unless one is set."""
    group = variant.params.get("group")
    return int(group) if group is not None else 32 if width % 64 else 64


def _number_bits(variant: Variant, width: int, itemsize: int) -> float:
    """Bits of one number; packed: bits + scale and bias in the model's format over the group."""
    bits = _bits(variant)
    return 8.0 * itemsize if bits == PLAIN else bits + 2 * 8 * itemsize / _group(variant, width)


def _codec(variant: Variant, width: int) -> Any:
    from veloxquant.caches.affine_codec import AffineCodec
    from veloxquant.caches.float_codec import FloatCodec

    bits = _bits(variant)
    return FloatCodec(width) if bits == PLAIN else AffineCodec(width, bits, _group(variant, width))
