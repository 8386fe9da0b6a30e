"""What a user sets, as a Variant: by the method's own `parameters()`, and by the variants it offers.

A set of parameters that a variant has gets that Variant, so that its label, prior and records count for it. Any other
set gets a Variant of its own, with a label that is the same for equal sets and no other set has.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from veloxquant.errors import InvalidParams, quoted
from veloxquant.methods.checks import NAME, unfit
from veloxquant.methods.method import Variant

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from veloxquant.methods.method import Method, Param, Parameter

_MAX_LABEL = 64
_DIGEST = 16
_PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_PLAIN_WORD = re.compile(r"[a-z0-9_]*")


def names_of(method: Method) -> tuple[str, ...]:
    """Everything that can be set: declared parameters first, then what only variants name."""
    declared = [parameter.name for parameter in method.parameters()]
    varied = sorted({name for variant in method.variants() for name in variant.params})
    return tuple(dict.fromkeys([*declared, *varied]))


def check_given(method: Method, given: Mapping[str, Param | None]) -> None:
    """Each name is one of the method's and each value one that the parameter takes; None stands for the default.

    Raises InvalidParams naming the parameter.
    """
    known = names_of(method)
    for name, value in given.items():
        if name not in known:
            raise InvalidParams(
                f"method {method.name} has no parameter {quoted(name)}",
                hint=f"it has: {', '.join(known)}" if known else "it has none",
                field=name,
            )
        why = _unfit(method, name, value)
        if why is not None:
            raise InvalidParams(
                f"{name} is {quoted(value)}, {why}", hint=_taken(method, name) or f"set another {name}", field=name
            )


def variant_for(method: Method, given: Mapping[str, Param | None]) -> Variant:
    """The method's Variant with these parameters, defaults in the place of what is not given.

    The registered Variant where one is equal, else one of its own. What only variants name is chosen among them.
    Raises InvalidParams for what `check_given` refuses, and where what is given leaves several variants or none.
    """
    check_given(method, given)
    declared = {parameter.name: parameter for parameter in method.parameters()}
    full = _filled(declared, {**_undeclared(method, declared, given), **given})
    for variant in method.variants():
        if _filled(declared, variant.params) == full:
            return variant
    return Variant(method=method.name, label=_label(method, declared, full), params=full)


def _undeclared(method: Method, declared: Mapping[str, Parameter], given: Mapping[str, Param | None]) -> dict[str, Any]:
    """What only variants name: the one set of values that agrees with what is given."""
    asked = {name: value for name, value in given.items() if name not in declared}
    sets = [(one.label, {n: v for n, v in one.params.items() if n not in declared}) for one in method.variants()]
    fits = {label: values for label, values in sets if asked.items() <= values.items()}
    first = next(iter(fits.values()), None)
    if first is not None and all(values == first for values in fits.values()):
        return first
    told = ", ".join(f"{name} = {value!r}" for name, value in asked.items()) or "what is set"
    names = [name for name in names_of(method) if name not in declared]
    raise InvalidParams(
        f"{len(fits) or 'none'} of the variants of method {method.name} {'agree' if fits else 'agrees'} with {told}",
        hint=f"set {', '.join(names)} as one of these has them: {', '.join(fits or dict(sets))}",
        field=next((name for name in names if name not in asked), names[0]),
    )


def _unfit(method: Method, name: str, value: Any) -> str | None:
    for parameter in method.parameters():
        if parameter.name == name:
            return unfit(parameter, value)
    offered = [variant.params[name] for variant in method.variants() if name in variant.params]
    if any(type(value) is type(one) and value == one for one in offered):
        return None
    return f"and not one of {', '.join(map(str, dict.fromkeys(offered)))}"


def _taken(method: Method, name: str) -> str:
    return next((parameter.help for parameter in method.parameters() if parameter.name == name), "")


def _filled(declared: Mapping[str, Parameter], given: Mapping[str, Param | None]) -> dict[str, Param]:
    """Every parameter that has a value, in the order of declaration; whole numbers as floats where a float is meant."""
    values = {name: parameter.default for name, parameter in declared.items()}
    values |= {name: value for name, value in given.items() if value is not None}
    return {name: _typed(declared.get(name), value) for name, value in values.items() if value is not None}


def _typed(parameter: Parameter | None, value: Param) -> Param:
    if parameter is None or parameter.kind != "float":
        return value
    return float(value) + 0.0  # no negative zero, which would be equal and read otherwise


def _label(method: Method, declared: Mapping[str, Parameter], full: Mapping[str, Param]) -> str:
    """`method-name.value-name.value` of what differs from the default, so written that no two sets read alike.

    A value ends where a dash is followed by a letter: numbers have none, and words with other signs than a-z, 0-9 and
    _ are not written out. A digest stands in where the plain form does not do.
    """
    default = _filled(declared, {}) | _shared(method, declared)
    differing = {name: value for name, value in sorted(full.items()) if default.get(name) != value}
    plain = "-".join([method.name, *(f"{name}.{_written(value)}" for name, value in differing.items())])
    legible = NAME.fullmatch(plain) and all(map(_legible, differing.items()))
    if legible and plain not in {variant.label for variant in method.variants()}:
        return plain
    return _digested(method.name, differing.items())


def _shared(method: Method, declared: Mapping[str, Parameter]) -> dict[str, Param]:
    """What only variants name and all of them have alike."""
    first, *others = (variant.params for variant in method.variants())
    return {n: v for n, v in first.items() if n not in declared and all(other.get(n) == v for other in others)}


def _digested(method: str, differing: Iterable[tuple[str, Param]]) -> str:
    digest = hashlib.sha256(json.dumps([method, *differing]).encode()).hexdigest()[:_DIGEST]
    return f"{method[: _MAX_LABEL - _DIGEST - 1]}-{digest}"


def _legible(item: tuple[str, Param]) -> bool:
    name, value = item
    return bool(_PLAIN_NAME.fullmatch(name)) and (not isinstance(value, str) or bool(_PLAIN_WORD.fullmatch(value)))


def _written(value: Param) -> str:
    return str(value).lower().replace("+", "")
