"""KIVI: keys quantized channel by channel, values token by token, the first and the last tokens kept.

A few channels of the keys are large in every token, so a group that runs along tokens has a scale that fits its
channel; values have no such channels, and are weighed token by token (arXiv 2402.02750). The first tokens draw
attention in every head and are kept as they are (2309.17453), and so are the last, which matter most and of which no
group is complete. Keys are stored transposed, so that products run on MLX's own quantized kernels.

With S sinks, R recent tokens and groups of G, of L tokens G x max(0, (L - S - R) // G) are packed, at

    bits + 2 x 8 x itemsize / group

bits a number, and a layer holds S + R + G slots besides, whatever L is: sinks in the model's format, the others too or
as 8 bits with a scale and a bias for each group along the width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.methods import LayerSpec, Method, Parameter, QualityPrior, Variant, hookimpl
from veloxquant.methods.priors import REALLY_PACKED, SIMULATED, from_hard_case
from veloxquant.methods.tiers import EIGHT, UNIT, Kept, parameters
from veloxquant.methods.workspace import in_tiers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.methods import CachePart

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
"""What mx.quantize takes."""

_KEY_KL = {8: 0.00002, 6: 0.0003, 5: 0.00107, 4: 0.00364, 3: 0.0188, 2: 0.231}
_VALUE_KL = {8: 0.000002, 6: 0.00003, 5: 0.00013, 4: 0.0005, 3: 0.0021, 2: 0.0153}
"""What keys and what values add to the mean KL in nats a token: SmolLM2-135M-Instruct (head width 64, 4,096 tokens,
groups of 64, 4 sinks, 64 recent tokens, those in 8 bits), simulated as this cache works. The sums are those of the runs
K5V4 0.00157, K4V4 0.00414, K4V3 0.00572, K3V3 0.0209, K3V2 0.0341, K2V2 0.246; 5 bits of values and 6 and 8 of both
were not run and follow the trend of 3.5 to 4 a bit."""

_HARD_KL = {
    (5, 4, 64): 0.001426,
    (4, 4, 64): 0.004466,
    (4, 3, 64): 0.006471,
    (3, 2, 64): 0.037463,
    (4, 4, 128): 0.005084,
}
"""The same by (bits of keys, bits of values, group) with caches really packed and recent tokens in the model's format
(bench/quality.py)."""

_GROUP_COST = {32: 1.0, 64: 1.0, 128: 1.14}
"""Over groups of 64: by those with 4 bits; 32 were not run."""
_NO_SINKS = 2.0
"""No sinks double the KL there; one does as well as four."""
_MORE_RECENT = 1.25
"""What 64 more recent tokens divide the KL by, up to 256; none at all cost 1.7 times."""
_NOTHING_RECENT = 1.7

_PACKING_ARRAYS = 8
"""Arrays of numbers that are being packed, there at once, as counted with MLX's allocator on the CPU backend."""


class _Set(NamedTuple):
    """A variant's bits, defaults filled in."""

    key_bits: int = 4
    value_bits: int = 4


class Kivi(Method):
    """Keys in groups along tokens, values in groups along the width. Needs no calibration."""

    name = "kivi"
    version = "1"
    summary = "per-channel keys and per-token values on MLX's own kernels, sinks and recent tokens kept"
    paper = "2402.02750"
    idea = "Channels that are loud in every key get a scale of their own, so that they do not spoil the quiet ones."
    keeps = "The first tokens and the most recent ones, in the model's format (or the recent ones in 8 bits)."
    batchable = True
    trimmable = False
    fused_attention = True

    def variants(self) -> Sequence[Variant]:
        """Keys get no fewer bits than values: the softmax magnifies an error in a score, and values are averaged.

        Groups of 128 for long contexts: a quarter of a bit less, faster, and a longer ring.
        """
        plain = [self._variant(keys, values) for keys, values in ((5, 4), (4, 4), (4, 3), (3, 2))]
        return [*plain, self._variant(4, 4, group=128)]

    def _variant(self, keys: int, values: int, **more: int) -> Variant:
        label = "-".join([f"{self.name}-k{keys}v{values}", *(f"{name[0]}{value}" for name, value in more.items())])
        return Variant(method=self.name, label=label, params={"key_bits": keys, "value_bits": values, **more})

    def parameters(self) -> Sequence[Parameter]:
        """Bits of both, the group, and what is kept."""
        group = "tokens of a group of keys; values have groups as wide along the width, or the widest that fit"
        return [
            Parameter(name="key_bits", kind="int", default=4, choices=_BITS, help="bits a key number, scales apart"),
            Parameter(name="value_bits", kind="int", default=4, choices=_BITS, help="the same of values"),
            Parameter(name="group", kind="int", default=64, choices=_GROUPS, help=group),
            *parameters(),
        ]

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Values need a width that some group divides, keys too where the recent ones have 8 bits."""
        kept = Kept.of(variant)
        if kept.recent % UNIT:
            return "not_supported_by_engine", f"{kept.recent} recent tokens are no multiple of {UNIT}"
        for what, width in (("key", part.key_width), ("value", part.value_width)):
            if width <= 0:
                return "not_supported_by_engine", f"the engine keeps no {what}s of their own here"
            grouped = what == "value" or kept.in_eight
            if grouped and not _fitting(kept.group, width):
                return "width_not_divisible", f"groups of 32, 64 or 128 do not divide the {what} width {width}"
        return None

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Codes, and a scale and a bias for each channel of a group of tokens."""
        return _stored_bits(_chosen(variant).key_bits, Kept.of(variant).group, part.key_itemsize)

    def value_bits(self, variant: Variant, part: CachePart) -> float:
        """Codes, and a scale and a bias for each group along the width."""
        group = _fitting(Kept.of(variant).group, part.value_width)
        return _stored_bits(_chosen(variant).value_bits, group, part.value_itemsize)

    def fixed_bytes(self, variant: Variant, part: CachePart) -> int:
        """Sinks and the ring of recent tokens, both whole from the first token on."""
        kept = Kept.of(variant)
        return kept.fixed_bytes(
            part, lambda width, itemsize: width * _stored_bits(EIGHT, _fitting(kept.group, width), itemsize)
        )

    def slots(self, variant: Variant, part: CachePart, tokens: int) -> int | None:
        """Room for what is packed of so many tokens: whole groups, no slack."""
        return Kept.of(variant).slots(tokens)

    def workspace_bytes(self, variant: Variant, part: CachePart, queries: int, slots: int) -> int:
        """An upper bound, by veloxquant.methods.workspace."""
        kept = Kept.of(variant)
        tiers = kept.tiers(
            part,
            (self.key_bits(variant, part), self.value_bits(variant, part)),
            value_space=part.value_width,
            scale_group=_fitting(kept.group, part.value_width) or min(_GROUPS),
            packing_arrays=_PACKING_ARRAYS,
        )
        return in_tiers(part, tiers, queries, slots)

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """A range from a large model to a small one, with a middle that fits some 3 billion parameters."""
        chosen, kept = _chosen(variant), Kept.of(variant)
        asked = (chosen.key_bits, chosen.value_bits, kept.group)
        simulated = (_KEY_KL[chosen.key_bits] + _VALUE_KL[chosen.value_bits]) * _GROUP_COST[kept.group]
        times = 1.0 if kept.sinks else _NO_SINKS
        times /= _MORE_RECENT ** ((min(kept.recent, 256) - 64) / 64)
        times *= 1 if kept.recent else _NOTHING_RECENT / _MORE_RECENT
        if asked in _HARD_KL and times == 1 and not kept.in_eight:
            return from_hard_case(_HARD_KL[asked], REALLY_PACKED)
        return from_hard_case(_HARD_KL.get(asked, simulated) * times, SIMULATED)

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        """A fresh TieredKVCache. Raises InvalidParams or MethodRefused for what is refused."""
        from veloxquant.caches.affine_codec import AffineCodec
        from veloxquant.caches.per_channel import PerChannelCodec

        chosen, kept, part = _chosen(variant), Kept.of(variant), layer.part

        def by_token(width: int, bits: int = EIGHT) -> Any:
            return AffineCodec(width, bits, _fitting(kept.group, width) or kept.group)

        keys = PerChannelCodec(part.key_width, chosen.key_bits, kept.group)
        return kept.cache(keys, by_token(part.value_width, chosen.value_bits), by_token)


def _chosen(variant: Variant) -> _Set:
    return _Set(**{name: int(variant.params[name]) for name in _Set._fields if variant.params.get(name) is not None})


def _fitting(group: int, width: int) -> int:
    """The widest group, at most `group`, that divides the width; 0 where none does."""
    return max((one for one in _GROUPS if one <= group and width % one == 0), default=0)


def _stored_bits(bits: int, group: int, itemsize: int) -> float:
    return bits + 2 * 8 * itemsize / group


@hookimpl
def veloxquant_methods() -> list[Method]:
    """Per-channel keys, per-token values."""
    return [Kivi()]
