"""Which variants a run tries: all that are planned with and small ones, or for each method two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.errors import InvalidParams, MethodNotFound
from veloxquant.methods.checks import sample_part, unfit
from veloxquant.methods.parameters import variant_for
from veloxquant.profiles.model import ENGINE_OWN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from veloxquant.methods.method import Method, Param, Variant
    from veloxquant.methods.registry import Loaded

SMALL: dict[str, Param] = {"bits": 4, "group": 32, "sinks": 4, "recent": 32, "budget": 96, "window": 16, "stride": 16}
"""Parameters, where a method has them, with which prompts of 150 tokens are packed or cut down."""
_PACKING = ("bits", "group")
_WIDTH, _ITEMSIZE = 64, 4
"""Of the part on which variants are compared: groups of 32 and 64 fit."""


def small(method: Method) -> Variant:
    """A variant with the parameters of SMALL; its first one where they do not go together."""
    return _small(method, SMALL)


def second(method: Method) -> Variant:
    """The planned variant that stores the fewest bits a number at a width of 64.

    Of a method that drops tokens, which no planned one does in a short prompt, a small one that packs nothing.
    """
    if method.drops_tokens:
        return _small(method, {name: value for name, value in SMALL.items() if name not in _PACKING})
    return min(method.variants(), key=lambda variant: _bits(method, variant))


def _small(method: Method, values: Mapping[str, Param]) -> Variant:
    declared = {parameter.name: parameter for parameter in method.parameters()}
    fits = {name for name, value in values.items() if name in declared and unfit(declared[name], value) is None}
    first = method.variants()[0]
    given = {name: value for name, value in first.params.items() if name in declared}
    try:
        variant = variant_for(method, {**given, **{name: values[name] for name in fits}})
    except InvalidParams:
        return first
    refused = method.refuses(variant, sample_part(_WIDTH, _ITEMSIZE))
    return variant if refused is None else first


def _bits(method: Method, variant: Variant) -> float:
    part = sample_part(_WIDTH, _ITEMSIZE)
    if method.refuses(variant, part) is not None:
        return float("inf")
    return method.key_bits(variant, part) + method.value_bits(variant, part)


def packing(loaded: Loaded) -> tuple[Method, ...]:
    """Every method but the engine's own."""
    return tuple(method for method in loaded.methods if method.name != ENGINE_OWN)


def chosen(loaded: Loaded, name: str | None, label: str | None) -> list[tuple[Method, Variant]]:
    """Planned variants of one method or of all, and their small ones; or the one of a label.

    Raises MethodNotFound for a method that is not ready, and for a label that no variant of those has.
    """
    methods = packing(loaded) if name is None else (loaded.method(name),)
    found = [pair for method in methods if method.name != ENGINE_OWN for pair in _all_of(method)]
    if label is None:
        return found
    labelled = [pair for pair in found if pair[1].label == label]
    if not labelled:
        known = ", ".join(variant.label for _, variant in found) or "none"
        raise MethodNotFound(f"no variant {label!r} is ready", hint=f"ready: {known}", field="variant")
    return labelled


def _all_of(method: Method) -> list[tuple[Method, Variant]]:
    variants = {variant.label: variant for variant in (*method.variants(), small(method), second(method))}
    return [(method, variant) for variant in variants.values()]
