"""Parameters that differ from layer to layer: asked of a method once for all packed layers, checked, and filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from veloxquant.errors import MethodRefused, quoted
from veloxquant.methods.checks import unfit
from veloxquant.methods.method import LayerPlace, Variant

if TYPE_CHECKING:
    from veloxquant.methods.method import Method, Param
    from veloxquant.profiles.calibration import Calibration
    from veloxquant.profiles.model import CachePart

NOT_CALIBRATED = "calibration"
"""`field` of the MethodRefused that says what a method lacks to choose parameters for each layer."""


def places_of(parts: Mapping[int, CachePart]) -> tuple[LayerPlace, ...]:
    """The packed layers as a method is told of them, in the order of the engine's cache list."""
    count = len(parts)
    return tuple(
        LayerPlace(index=index, order=order, count=count, part=parts[index])
        for order, index in enumerate(sorted(parts))
    )


def layer_params(
    method: Method, variant: Variant, parts: Mapping[int, CachePart], calibration: Calibration | None
) -> tuple[Mapping[str, Param], ...]:
    """One mapping for each packed layer in order; () where all are alike.

    Raises MethodRefused, with the field "calibration" where the method needs another calibration or one at all.
    """
    chosen = method.layer_params(variant, places_of(parts), calibration) if parts else None
    return () if chosen is None else tuple(chosen)


def for_layer(variant: Variant, params: Mapping[str, Param]) -> Variant:
    """The variant that one layer is built, sized and asked with: the same label, its own parameters on top."""
    return (
        Variant(method=variant.method, label=variant.label, params={**variant.params, **params}) if params else variant
    )


def refused_by_layer(
    method: Method, variant: Variant, parts: Mapping[int, CachePart], chosen: Sequence[Mapping[str, Param]]
) -> dict[int, tuple[str, str]]:
    """(reason code, sentence) of each layer that the method refuses under its own parameters. Raises MethodError."""
    asked = ((index, for_layer(variant, params)) for index, params in zip(sorted(parts), chosen, strict=bool(chosen)))
    answers = ((index, method.refuses(own, parts[index])) for index, own in asked)
    return {index: answer for index, answer in answers if answer is not None}


def check_layer_params(
    method: Method, variant: Variant, places: Sequence[LayerPlace], answer: Any
) -> Sequence[Mapping[str, Param]] | None:
    """None, or one mapping a place of values that the method's own parameters take. Raises MethodRefused."""
    if answer is None:
        return None
    where = f"{method.name} {variant.label}: layer_params()"
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise _wrong(f"{where} returned an object of type {type(answer).__name__}, not a list")
    if len(answer) != len(places):
        raise _wrong(f"{where} returned {len(answer)} mappings for {len(places)} layers")
    declared = {parameter.name: parameter for parameter in method.parameters()}
    checked: list[Mapping[str, Param]] = []
    for place, given in zip(places, answer, strict=True):
        if not isinstance(given, Mapping):
            raise _wrong(f"{where} gave layer {place.index} an object of type {type(given).__name__}, not a mapping")
        for name, value in given.items():
            if name not in declared:
                raise _wrong(f"{where} gave layer {place.index} {quoted(name)}, which is none of its parameters")
            why = unfit(declared[name], value) or ("and means the default" if value is None else None)
            if why is not None:
                raise _wrong(f"{where} gave layer {place.index} {name} {quoted(value)}, {why}")
        checked.append(dict(given))
    return tuple(checked)


def _wrong(message: str) -> MethodRefused:
    return MethodRefused(message, hint="help(veloxquant.methods.Method) says what each function returns")
