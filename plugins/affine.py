"""mlx-lm's own quantized cache: affine groups along the head width, one pair of bits and group for K and V.

A row of `width` numbers becomes width x bits / 32 words plus a scale and a bias for each group, both in the number
format of the source, so that a number costs bits + 2 x 8 x itemsize / group (mlx_lm.models.cache.QuantizedKVCache).
The cache is packed from the first token on: converting late would hold the float copy and the packed one together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.methods import LayerSpec, Method, Parameter, QualityPrior, Variant, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from veloxquant.methods import CachePart, Param

BITS = (8, 6, 5, 4, 3, 2)
GROUPS = (32, 64, 128)
"""What mx.quantize takes."""

_MEASURED_KL = {
    (8, 32): 0.00028,
    (8, 64): 0.00041,
    (6, 32): 0.00447,
    (6, 64): 0.00666,
    (5, 32): 0.01809,
    (5, 64): 0.02854,
    (4, 32): 0.08323,
    (4, 64): 0.12926,
    (3, 32): 0.41668,
    (3, 64): 0.69587,
    (2, 32): 2.76687,
    (2, 64): 3.48915,
}
"""Mean KL in nats a token of SmolLM2-135M-Instruct (head width 64, 4,096 tokens, every token of K and V quantized)
against its float32 cache: a hard case, since a small model with narrow heads suffers most."""

_PUBLISHED_KL = {(8, 64): (0.0002, 0.0004), (4, 64): (0.051, 0.148)}
"""(Llama-3.2-3B, Llama-3.2-1B), 4-bit weights: github.com/IonDen/mlx-quant-fidelity."""

_SEEN_ELSEWHERE = {8: 0.0016}
"""Qwen3.5-35B-A3B at llama.cpp's q8_0 (github.com/TheTom/turboquant_plus, docs/benchmarks.md): another 8-bit format,
and above both figures for ours, so that it bounds the range."""

_MIDDLE = 0.44
"""Typical share of the hard case: geometric mean of Llama-3.2-3B over SmolLM2-135M at 4 bits (0.051 / 0.129 = 0.39)
and at 8 bits (0.0002 / 0.00041 = 0.49), both in groups of 64."""

_LOW = 0.06
"""Best share seen: Qwen3.5-35B-A3B at llama.cpp's q4_0 (also 4.5 bits) has 0.0081, over 0.129 of the hard case:
github.com/TheTom/turboquant_plus, docs/benchmarks.md."""

_GROUP_STEP = (1.0, 1.5, 2.8)
"""What a group of 128 may cost over 64 (low, middle, high). No figure was found. From 32 to 64 the hard case grew by
1.26 (2 bits) to 1.67 (3 bits), middle 1.5; the high end takes the worst growth twice (1.67 squared)."""

_SOURCE = "SmolLM2-135M measured (upper end), scaled by published Llama-3.2-3B and Qwen3.5-35B figures"


class Affine(Method):
    """Uniform levels between each group's least and greatest number. Needs no calibration and runs on MLX's kernels."""

    name = "affine"
    version = "1"
    summary = "mlx-lm's own quantized cache, packed from the first token"

    def variants(self) -> Sequence[Variant]:
        """Every pair of bits and group that mx.quantize takes; which of them a model can use is `refuses`'s answer."""
        return [
            Variant(method=self.name, label=f"affine{bits}-g{group}", params={"bits": bits, "group": group})
            for bits in BITS
            for group in GROUPS
        ]

    def parameters(self) -> Sequence[Parameter]:
        """What makes a variant; the defaults are those of mlx-lm's QuantizedKVCache."""
        return [
            Parameter(name="bits", kind="int", default=8, choices=BITS, help="bits a number, scale and bias apart"),
            Parameter(name="group", kind="int", default=64, choices=GROUPS, help="numbers that share a scale"),
        ]

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Groups must divide both widths, and a fresh cache of mlx-lm must make room for what its quantizer writes."""
        bits, group = _pair(variant)
        for what, width in (("key", part.key_width), ("value", part.value_width)):
            if width <= 0:
                return "not_supported_by_engine", f"the engine keeps no {what}s of their own here"
            if width % group:
                return "width_not_divisible", f"groups of {group} do not divide the {what} width {width}"
            words, room = width * bits // 32, width // (32 // bits)
            if words != room:
                sentence = f"{bits} bits of {what} width {width} take {words} words; a fresh mlx-lm cache has {room}"
                return "not_supported_by_engine", sentence
        return None

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Bits + scale and bias: bits + 2 x 8 x itemsize / group."""
        return _stored_bits(variant, part.key_itemsize)

    def value_bits(self, variant: Variant, part: CachePart) -> float:
        """As keys; scales take the format of the keys, which is that of the values too."""
        return _stored_bits(variant, part.key_itemsize)

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """A range from a large model to a small one, with a middle that fits some 3 billion parameters."""
        bits, group = _pair(variant)
        if group not in (32, 64):
            return _wider_group(_prior(bits, 64))
        return _prior(bits, group)

    def engine_settings(self, variant: Variant) -> Mapping[str, Param] | None:
        """mlx-lm's own flags; its default start of 5000 tokens would leave shorter prompts unpacked."""
        bits, group = _pair(variant)
        return {"kv_bits": bits, "kv_group_size": group, "quantized_kv_start": 0}

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        """A fresh mlx_lm QuantizedKVCache."""
        from veloxquant.caches.engine import quantized_kv_cache

        bits, group = _pair(variant)
        widths = {"key_width": layer.part.key_width, "value_width": layer.part.value_width}
        return quantized_kv_cache(bits=bits, group_size=group, **widths)

    def build_standalone(self, head_dim: int, variant: Variant) -> Any:
        """One head in the same format, grown without the engine's fresh buffer, so that its odd widths work too."""
        from veloxquant.caches.affine_codec import AffineCodec
        from veloxquant.caches.standalone import StandaloneCache

        bits, group = _pair(variant)
        return StandaloneCache(AffineCodec(head_dim, bits, group), AffineCodec(head_dim, bits, group))


def _pair(variant: Variant) -> tuple[int, int]:
    return int(variant.params["bits"]), int(variant.params["group"])


def _stored_bits(variant: Variant, itemsize: int) -> float:
    bits, group = _pair(variant)
    return bits + 2 * 8 * itemsize / group


def _prior(bits: int, group: int) -> QualityPrior:
    hard = _MEASURED_KL[bits, group]
    middle, small = _PUBLISHED_KL.get((bits, group), (hard * _MIDDLE, hard))
    return QualityPrior(
        kl_mean=middle, low=hard * _LOW, high=max(hard, small, _SEEN_ELSEWHERE.get(bits, 0.0)), source=_SOURCE
    )


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
    """The engine's own packed format."""
    return [Affine()]
