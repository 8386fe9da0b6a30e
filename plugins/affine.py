"""MLX's own affine format: groups along the head width, bits and group of K and of V chosen apart.

A row of `width` numbers becomes width x bits / 32 words plus a scale and a bias for each group, both in the number
format of the source, so that a number costs bits + 2 x 8 x itemsize / group: what mlx-lm's QuantizedKVCache stores,
word for word, at every width and in batches, where that class fails or does not exist. The cache is packed from the
first token on: converting late would hold the float copy and the packed one together.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.methods import LayerSpec, Method, Parameter, QualityPrior, Variant, hookimpl
from veloxquant.methods.priors import REALLY_PACKED, from_hard_case
from veloxquant.methods.workspace import MANY_ROWS, in_blocks, query_heads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veloxquant.methods import CachePart, Param

BITS = (8, 6, 5, 4, 3, 2)
GROUPS = (32, 64, 128)
"""What mx.quantize takes."""
PAIRS = ((6, 4), (5, 4), (5, 3), (4, 3))
"""Bits of K and of V, in groups of 64, with half or less of the KL that equal bits have at the same bytes (0.0152
against 0.0306 at 5.5 stored bits, 0.038 against 0.103 at 5, 0.170 against 0.502 at 4; simulated 0.065 against 0.129 at
4.5)."""

_MEASURED_KL = {
    (8, 32): 0.000335,
    (8, 64): 0.000487,
    (6, 32): 0.00557,
    (6, 64): 0.00783,
    (5, 32): 0.02098,
    (5, 64): 0.0306,
    (4, 32): 0.10327,
    (4, 64): 0.14081,
    (3, 32): 0.50172,
    (3, 64): 0.7475,
    (2, 32): 2.61109,
    (2, 64): 3.7533,
}
"""Mean KL in nats a token in the hard case of veloxquant.methods.priors, of mlx-lm's own caches, which store the same
words (bench/quality.py). With K and V in float32 and simulated, 8 bits have 0.00028 and 0.00041, 4 have 0.083 and
0.129."""

_PAIR_KL = {(6, 4): 0.01521, (5, 4): 0.03822, (4, 3): 0.16969}
"""The same of K and V apart, in groups of 64."""

_PUBLISHED_KL = {(8, 64): (0.0002, 0.0004), (4, 64): (0.051, 0.148)}
"""(Llama-3.2-3B, Llama-3.2-1B), 4-bit weights: github.com/IonDen/mlx-quant-fidelity."""

_SEEN_ELSEWHERE = {8: 0.0016}
"""Qwen3.5-35B-A3B at llama.cpp's q8_0 (github.com/TheTom/turboquant_plus, docs/benchmarks.md): another 8-bit format,
and above both figures for ours, so that it bounds the range."""

_GROUP_STEP = (1.0, 1.5, 2.8)
"""What a group of 128 may cost over 64 (low, middle, high). No figure was found. From 32 to 64 the hard case grew by
1.36 (4 bits) to 1.49 (3 bits), simulated by 1.26 (2 bits) to 1.67 (3 bits); the high end takes the worst twice."""

_VALUE_SHARE = {2: 0.0747, 3: 0.0527, 4: 0.0596}
"""Of the KL at equal bits, what the values cause: simulated with 8-bit keys beside them, the same model, groups of 64
(0.26062 of 3.48915, 0.03667 of 0.69587, 0.0077 of 0.12926). Keys cause the rest, and both add up: to within 12% of all
nine simulated pairs of unlike bits."""

_OTHER_SHARE = 0.06
"""At bits that were not simulated so."""

_PAIR_SPREAD = 1.12
"""How far that sum was from a simulated pair, at most; from the three of `_PAIR_KL` it is 4% at most."""

_PAIR_SOURCE = "the keys' share of one format and the values' of the other, simulated on SmolLM2-135M; each by: "

_STEP_ARRAYS, _PACKING_ARRAYS = 4, 4
"""float32 arrays that are there at once: scores in a step, pieces being packed. At most, counted over head counts,
widths and bits."""
_ENCODE_NUMBERS, _SPAN_NUMBERS, _SLACK = 2**19, 2**22, 2**10
"""As in veloxquant.caches.attention and packed."""


class _Set(NamedTuple):
    """A variant's parameters, defaults filled in."""

    key_bits: int
    key_group: int
    value_bits: int
    value_group: int

    @property
    def alike(self) -> bool:
        """Whether K and V have one format, as mlx-lm's own flags want it."""
        return (self.key_bits, self.key_group) == (self.value_bits, self.value_group)


class Affine(Method):
    """Uniform levels between each group's least and greatest number. Needs no calibration and runs on MLX's kernels."""

    name = "affine"
    version = "2"
    summary = "MLX's own quantized format, packed from the first token, K and V chosen apart"
    idea = "Numbers beside each other are near in size, so that a few even levels between their ends tell them apart."
    keeps = "Nothing but a scale and a bias of each group."
    batchable = True
    fused_attention = True

    def variants(self) -> Sequence[Variant]:
        """Every pair of bits and group that mx.quantize takes, then unlike bits that beat a pair of the same bytes.

        Which of them a model can use is `refuses`'s answer.
        """
        alike = [
            Variant(method=self.name, label=f"affine{bits}-g{group}", params={"bits": bits, "group": group})
            for bits in BITS
            for group in GROUPS
        ]
        apart = [
            Variant(
                method=self.name,
                label=f"affine-k{keys}v{values}-g64",
                params={"group": 64, "key_bits": keys, "value_bits": values},
            )
            for keys, values in PAIRS
        ]
        return [*alike, *apart]

    def parameters(self) -> Sequence[Parameter]:
        """What makes a variant; the defaults are those of mlx-lm's QuantizedKVCache."""

        def also(name: str, what: str, choices: tuple[int, ...]) -> Parameter:
            return Parameter(name=name, kind="int", choices=choices, help=f"{what}, where they are to differ")

        return [
            Parameter(name="bits", kind="int", default=8, choices=BITS, help="bits a number, scale and bias apart"),
            Parameter(name="group", kind="int", default=64, choices=GROUPS, help="numbers that share a scale"),
            also("key_bits", "bits of keys", BITS),
            also("value_bits", "bits of values", BITS),
            also("key_group", "group of keys", GROUPS),
            also("value_group", "group of values", GROUPS),
        ]

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Groups must divide the widths."""
        chosen = _chosen(variant)
        sides = (("key", part.key_width, chosen.key_group), ("value", part.value_width, chosen.value_group))
        for what, width, group in sides:
            if width <= 0:
                return "not_supported_by_engine", f"the engine keeps no {what}s of their own here"
            if width % group:
                return "width_not_divisible", f"groups of {group} do not divide the {what} width {width}"
        return None

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Bits + scale and bias: bits + 2 x 8 x itemsize / group."""
        chosen = _chosen(variant)
        return chosen.key_bits + 2 * 8 * part.key_itemsize / chosen.key_group

    def value_bits(self, variant: Variant, part: CachePart) -> float:
        """As keys."""
        chosen = _chosen(variant)
        return chosen.value_bits + 2 * 8 * part.value_itemsize / chosen.value_group

    def workspace_bytes(self, variant: Variant, part: CachePart, queries: int, slots: int) -> int:
        """An upper bound of the temporary arrays of attention and of packing, which never overlap.

        One query takes all tokens at once, unless many heads share its keys; several work in blocks
        (veloxquant.caches.attention).
        """
        width = max(part.key_width, part.value_width)
        numbers = part.heads * width
        piece = min(max(_ENCODE_NUMBERS, numbers), numbers * queries)
        row_bits = self.key_bits(variant, part) * part.key_width + self.value_bits(variant, part) * part.value_width
        packing = 4 * _PACKING_ARRAYS * piece + 2 * math.ceil(part.heads * queries * row_bits / 8)
        at_once = _step(_chosen(variant), part, slots, row_bits) if queries == 1 else 0
        unpacks = queries > 1 or query_heads(part) >= MANY_ROWS * part.heads
        return max(packing, at_once, in_blocks(part, width, queries, slots) if unpacks else 0)

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """A range from a large model to a small one, with a middle that fits some 3 billion parameters."""
        chosen = _chosen(variant)
        keys, values = _side(chosen.key_bits, chosen.key_group), _side(chosen.value_bits, chosen.value_group)
        if chosen.alike:
            return keys
        measured = _PAIR_KL.get((chosen.key_bits, chosen.value_bits)) if _narrow(chosen) else None
        return _apart(chosen, keys, values) if measured is None else from_hard_case(measured, REALLY_PACKED)

    def engine_settings(self, variant: Variant) -> Mapping[str, Param] | None:
        """mlx-lm's own flags; its default start of 5000 tokens would leave shorter prompts unpacked.

        The engine packs what its float cache holds after the first call, which works at every legal width. None where
        K and V are not alike.
        """
        chosen = _chosen(variant)
        if not chosen.alike:
            return None
        return {"kv_bits": chosen.key_bits, "kv_group_size": chosen.key_group, "quantized_kv_start": 0}

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        """A fresh PackedKVCache. Raises MethodRefused for what is refused."""
        from veloxquant.caches.affine_codec import AffineCodec
        from veloxquant.caches.packed import PackedKVCache

        part, chosen = layer.part, _chosen(variant)
        keys = AffineCodec(part.key_width, chosen.key_bits, chosen.key_group)
        return PackedKVCache(keys, AffineCodec(part.value_width, chosen.value_bits, chosen.value_group), part.step)

    def build_standalone(self, head_dim: int, variant: Variant) -> Any:
        """One head in the same format. Raises MethodRefused for a width that groups do not divide."""
        from veloxquant.caches.affine_codec import AffineCodec
        from veloxquant.caches.standalone import StandaloneCache

        chosen = _chosen(variant)
        keys = AffineCodec(head_dim, chosen.key_bits, chosen.key_group)
        return StandaloneCache(keys, AffineCodec(head_dim, chosen.value_bits, chosen.value_group))


def _chosen(variant: Variant) -> _Set:
    given = variant.params

    def whole(name: str, otherwise: int) -> int:
        return otherwise if given.get(name) is None else int(given[name])

    bits, group = whole("bits", 8), whole("group", 64)
    return _Set(
        whole("key_bits", bits), whole("key_group", group), whole("value_bits", bits), whole("value_group", group)
    )


def _step(chosen: _Set, part: CachePart, slots: int, row_bits: float) -> int:
    """Bytes of scores of one query token, of scales that are widened to float32, and of a copy where spans are cut."""
    scales = part.key_width // chosen.key_group + part.value_width // chosen.value_group
    numbers = min(_SPAN_NUMBERS, part.heads * (slots + _SLACK))
    heads = query_heads(part)
    scores = min(_SPAN_NUMBERS, heads * (slots + _SLACK))
    copied = numbers * row_bits / 8 if heads * slots > _SPAN_NUMBERS else 0
    return 4 * (_STEP_ARRAYS * scores + 2 * scales * numbers) + math.ceil(copied)


def _side(bits: int, group: int) -> QualityPrior:
    """With K and V both in this format."""
    return _prior(bits, group) if group in (32, 64) else _wider_group(_prior(bits, 64))


def _apart(chosen: _Set, keys: QualityPrior, values: QualityPrior) -> QualityPrior:
    """The keys' share of one format and the values' of the other, the range widened by what that may be off."""
    of_keys = 1 - _VALUE_SHARE.get(chosen.key_bits, _OTHER_SHARE)
    of_values = _VALUE_SHARE.get(chosen.value_bits, _OTHER_SHARE)
    return QualityPrior(
        kl_mean=of_keys * keys.kl_mean + of_values * values.kl_mean,
        low=(of_keys * keys.low + of_values * values.low) / _PAIR_SPREAD,
        high=(of_keys * keys.high + of_values * values.high) * _PAIR_SPREAD,
        source=_PAIR_SOURCE + _longer(keys.source, values.source),
    )


def _narrow(chosen: _Set) -> bool:
    """Whether both have the groups that pairs were measured with."""
    return chosen.key_group == chosen.value_group == 64  # noqa: PLR2004 -- numbers


def _longer(one: str, other: str) -> str:
    """Of two sources, of which one may say more."""
    return one if len(one) >= len(other) else other


def _prior(bits: int, group: int) -> QualityPrior:
    hard = _MEASURED_KL[bits, group]
    word = from_hard_case(hard, REALLY_PACKED)
    middle, small = _PUBLISHED_KL.get((bits, group), (word.kl_mean, hard))
    high = max(hard, small, _SEEN_ELSEWHERE.get(bits, 0.0))
    return QualityPrior(kl_mean=middle, low=word.low, high=high, source=word.source)


def _wider_group(prior: QualityPrior) -> QualityPrior:
    low, middle, high = _GROUP_STEP
    return QualityPrior(
        kl_mean=prior.kl_mean * middle,
        low=prior.low * low,
        high=prior.high * high,
        source=f"{prior.source}; groups of 128 were not measured: extrapolated from 32 and 64, range widened",
    )


@hookimpl
def veloxquant_methods() -> list[Method]:
    """MLX's own packed format."""
    return [Affine()]
