"""One method in plain values, for people and for JSON: its parameters, and what each variant takes on a sample layer.

The sample is a layer of published models that most methods can keep: 8 KV heads of width 128 in 16 bits (Llama-3.1-8B);
a variant that refuses it is told on the first width that it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from veloxquant.errors import MethodError
from veloxquant.methods.checks import WIDTHS, sample_part
from veloxquant.methods.per_layer import NOT_CALIBRATED, for_layer, layer_params
from veloxquant.methods.worker import declared_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from veloxquant.methods.method import Method, Variant
    from veloxquant.profiles.model import CachePart

LENGTHS = (4096, 32768)
"""Tokens at which everything that is resident is counted."""
_WIDTH, _ITEM_BYTES, _LAYERS = 128, 2, 4


def parameters(method: Method) -> tuple[Mapping[str, Any], ...]:
    """What a user may set, in the order of the method."""
    return tuple(msgspec.to_builtins(one) | {"choices": list(one.choices)} for one in method.parameters())


def variants(method: Method) -> tuple[Mapping[str, Any], ...]:
    """Each variant with its figures; one that the method cannot answer for has `failed` in their place."""
    return tuple(_variant(method, variant) for variant in method.variants())


def _variant(method: Method, variant: Variant) -> dict[str, Any]:
    named = {"label": variant.label, "params": dict(variant.params)}
    try:
        return named | _quality(method, variant) | _stored(method, variant)
    except MethodError as error:
        return named | {"failed": error.message}


def _quality(method: Method, variant: Variant) -> dict[str, Any]:
    prior = method.quality_prior(variant)
    return {"kl_mean": prior.kl_mean, "kl_low": prior.low, "kl_high": prior.high, "kl_source": prior.source}


def _stored(method: Method, variant: Variant) -> dict[str, Any]:
    """Widths of a head that it takes, and what a sequence of a sample layer stores."""
    widths = [width for width in WIDTHS if method.refuses(variant, sample_part(width, _ITEM_BYTES)) is None]
    if not widths:
        return {"widths": widths}
    part = sample_part(_WIDTH if _WIDTH in widths else widths[0], _ITEM_BYTES)
    layers, own = _by_layer(method, variant, part)
    return {
        "widths": widths,
        "layers": layers,
        "sample": {"heads": part.heads, "width": part.key_width, "itemsize": part.key_itemsize},
        "key_bits": method.key_bits(own, part),
        "value_bits": method.value_bits(own, part),
        "fixed_bytes": method.fixed_bytes(own, part),
        "bits_at": {str(tokens): _all_bits(method, own, part, tokens) for tokens in LENGTHS},
    }


def _by_layer(method: Method, variant: Variant, part: CachePart) -> tuple[str, Variant]:
    """Whether layers are "alike", "differ" or need a "calibration"; and the first one's variant of four."""
    try:
        chosen = layer_params(method, variant, dict.fromkeys(range(_LAYERS), part), None)
    except MethodError as error:
        if error.field != NOT_CALIBRATED:
            raise
        return "calibration", variant
    return ("differ", for_layer(variant, chosen[0])) if chosen else ("alike", variant)


def _all_bits(method: Method, variant: Variant, part: CachePart, tokens: int) -> float:
    """Everything resident for one sequence, in bits for each number of K and V that its tokens have."""
    numbers = tokens * part.heads * (part.key_width + part.value_width)
    return 8 * declared_bytes(method, variant, part, ((tokens, 1),)) / numbers
