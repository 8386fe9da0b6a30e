"""Is what a plugin returned usable? Types first, then every planning figure over a matrix of realistic layers.

All functions raise MethodRefused with a sentence that names the method, the variant and the figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from veloxquant.errors import MAX_WHOLE, MethodRefused, quoted
from veloxquant.methods.method import Method, Parameter, QualityPrior, Variant
from veloxquant.profiles.model import CachePart

NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")
MAX_METHODS = 32
MAX_VARIANTS = 64
MAX_BITS = 256.0
"""Four times the widest number an engine stores, scales and all: more is a mistake of unit."""
MAX_SLOT_STEP = 2**16
MAX_TEXT = 2000
"""Characters of a text that people read: about a screen."""
MAX_WORD = 200
"""Of a name, or a word among parameters."""
REASON_CODES = frozenset({"width_not_divisible", "not_supported_by_engine"})

WIDTHS = (64, 80, 96, 112, 128, 192, 256, 576)
"""Head widths of published models; 576 is DeepSeek's latent with its rope key."""
ITEM_SIZES = (2, 4)
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4095, 4096, 4097, 2**17, 2**27)
"""Tokens of a sequence, up to the longest that may be planned for; round numbers and their neighbours."""
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a word"),
    "bool": ((bool,), "true or false"),
}
_STANDALONE = ("append_key", "append_value", "append", "attend", "memory_bytes", "__len__")
_FLAGS = ("batchable", "trimmable", "drops_tokens", "fused_attention")
_TEXTS = ("name", "version", "summary", "paper", "idea", "keeps")
_ATTRIBUTES: dict[str, type] = dict.fromkeys(_FLAGS, bool) | dict.fromkeys(_TEXTS, str)


class Figures(NamedTuple):
    """What a method says about one variant on one part."""

    refused: tuple[str, str] | None
    key_bits: float = 0.0
    value_bits: float = 0.0
    fixed_bytes: int = 0
    slot_step: int = 1
    slots: tuple[int | None, ...] = ()
    """After each of LENGTHS."""


def check_returned(returned: Any) -> tuple[Method, ...]:
    """The hook's result as method objects of the right types and unlike names."""
    if not isinstance(returned, list | tuple):
        raise _wrong(f"the hook returned {_kind(returned)}, not a list of methods")
    if len(returned) > MAX_METHODS:
        raise _wrong(f"the hook returned {len(returned)} methods; at most {MAX_METHODS} are taken")
    for method in returned:
        _check_method(method)
    _check_unlike([method.name for method in returned], "method name")
    return tuple(returned)


def check_variants(method: Method) -> tuple[Variant, ...]:
    """The method's variants, of the right types and unlike labels."""
    variants: Any = method.variants()
    if not isinstance(variants, Sequence) or isinstance(variants, str | bytes):
        raise _wrong(f"{method.name}: variants() returned {_kind(variants)}, not a list")
    if not 1 <= len(variants) <= MAX_VARIANTS:
        raise _wrong(f"{method.name}: variants() returned {len(variants)}; 1 to {MAX_VARIANTS} are taken")
    for variant in variants:
        _check_variant(method, variant)
    _check_unlike([variant.label for variant in variants], f"{method.name}: label")
    return tuple(variants)


def check_parameters(method: Method) -> tuple[Parameter, ...]:
    """What a user may set, of the right types and unlike names, each default within its own bounds."""
    parameters: Any = method.parameters()
    if not isinstance(parameters, Sequence) or isinstance(parameters, str | bytes):
        raise _wrong(f"{method.name}: parameters() returned {_kind(parameters)}, not a list")
    for parameter in parameters:
        if not isinstance(parameter, Parameter) or not str(parameter.name).isidentifier():
            raise _wrong(f"{method.name}: parameters() holds {quoted(parameter)}, not only named Parameters")
        _check_text(f"{method.name}: the help of {parameter.name}", parameter.help)
        if parameter.default is not None and (why := unfit(parameter, parameter.default)):
            raise _wrong(f"{method.name}: the default of {parameter.name} is {quoted(parameter.default)}, {why}")
    _check_unlike([parameter.name for parameter in parameters], f"{method.name}: parameter")
    return tuple(parameters)


def unfit(parameter: Parameter, value: Any) -> str | None:
    """Why a value is not one that the parameter takes, None when it is."""
    if value is None:
        return None if parameter.default is None else f"and not {_KINDS[parameter.kind][1]}"
    types, name = _KINDS[parameter.kind]
    if type(value) not in types or (isinstance(value, float) and not math.isfinite(value)):
        return f"and not {name}"
    if parameter.choices and value not in parameter.choices:
        return f"and not one of {', '.join(map(str, parameter.choices))}"
    if parameter.low is not None and not isinstance(value, str) and value < parameter.low:
        return f"below {parameter.low:g}"
    if parameter.high is not None and not isinstance(value, str) and value > parameter.high:
        return f"above {parameter.high:g}"
    return None


def check_figures(method: Method, variants: Iterable[Variant]) -> None:
    """Every planning figure over the matrix: finite, not negative, the same when asked twice.

    Stored bits never fall when the source number gets wider. They may fall with the width of a head, since a wider
    head can take a wider group.
    """
    for variant in variants:
        check_prior(method, variant, method.quality_prior(variant))
        _check_lengths(method, variant)
        check_unpack_cost(method, variant, method.unpack_cost(variant))
        check_unpack_bytes(method, variant, method.unpack_bytes(variant))
        check_settings(method, variant, method.engine_settings(variant))
        for width in WIDTHS:
            by_item_size = [_figures_twice(method, variant, sample_part(width, size)) for size in ITEM_SIZES]
            _check_monotone(method, variant, width, by_item_size)


def sample_part(width: int, itemsize: int, heads: int = 8, query_heads: int = 0) -> CachePart:
    """A plain growing layer of the engine: K and V of one width."""
    return CachePart(
        kind="kv",
        engine_class="KVCache",
        heads=heads,
        query_heads=query_heads,
        key_width=width,
        value_width=width,
        key_itemsize=itemsize,
        value_itemsize=itemsize,
        dtype="float32" if itemsize == 4 else "bfloat16",  # noqa: PLR2004 -- bytes of a float32
    )


def figures(method: Method, variant: Variant, part: CachePart) -> Figures:
    """Ask the method once, and check each answer."""
    refused = check_refusal(method, variant, method.refuses(variant, part))
    if refused is not None:
        return Figures(refused)
    return Figures(
        None,
        check_bits(method, variant, "key_bits", method.key_bits(variant, part)),
        check_bits(method, variant, "value_bits", method.value_bits(variant, part)),
        check_bytes(method, variant, "fixed_bytes", method.fixed_bytes(variant, part)),
        check_slot_step(method, variant, method.slot_step(variant, part)),
        _check_growth(method, variant, [method.slots(variant, part, tokens) for tokens in LENGTHS]),
    )


def check_refusal(method: Method, variant: Variant, answer: Any) -> tuple[str, str] | None:
    """None, or (reason code of the protocol, sentence)."""
    if answer is None:
        return None
    if not (isinstance(answer, tuple) and len(answer) == 2 and all(isinstance(a, str) for a in answer)):  # noqa: PLR2004
        raise _wrong(f"{method.name} {variant.label}: refuses() returned {_kind(answer)}, not (code, sentence) or None")
    code, sentence = answer
    if code not in REASON_CODES or not sentence.strip():
        known = ", ".join(sorted(REASON_CODES))
        raise _wrong(f"{method.name} {variant.label}: refuses() gave the code {quoted(code)}; known: {known}")
    return code, _check_text(f"{method.name} {variant.label}: the sentence of refuses()", sentence)


def check_bits(method: Method, variant: Variant, what: str, bits: Any) -> float:
    """Stored bits a number: finite, not negative, not absurd."""
    if not _is_number(bits) or not 0 <= bits <= MAX_BITS:
        raise _wrong(
            f"{method.name} {variant.label}: {what}() returned {quoted(bits)}, not bits from 0 to {MAX_BITS:g}"
        )
    return float(bits)


def check_bytes(method: Method, variant: Variant, what: str, counted: Any) -> int:
    """Whole bytes, not negative."""
    if type(counted) is not int or not 0 <= counted <= MAX_WHOLE:
        raise _wrong(f"{method.name} {variant.label}: {what}() returned {quoted(counted)}, not a count of bytes")
    return counted


def check_slot_step(method: Method, variant: Variant, step: Any) -> int:
    """Whole slots, one or more."""
    if type(step) is not int or not 1 <= step <= MAX_SLOT_STEP:
        raise _wrong(f"{method.name} {variant.label}: slot_step() returned {quoted(step)}, not 1 to {MAX_SLOT_STEP}")
    return step


def check_slots(method: Method, variant: Variant, tokens: int, slots: Any) -> int | None:
    """None, or whole slots: not negative, and no more than a growing buffer could have beside the tokens."""
    if slots is not None and (type(slots) is not int or not 0 <= slots <= tokens + MAX_SLOT_STEP):
        most = f"0 to {tokens + MAX_SLOT_STEP} after {tokens} tokens"
        raise _wrong(f"{method.name} {variant.label}: slots() returned {quoted(slots)}, not {most}")
    return slots


def check_prior(method: Method, variant: Variant, prior: Any, what: str = "quality_prior") -> QualityPrior:
    """0 <= low <= kl_mean <= high, all finite, with a source."""
    where = f"{method.name} {variant.label}: {what}()"
    if not isinstance(prior, QualityPrior):
        raise _wrong(f"{where} returned {_kind(prior)}, not a QualityPrior")
    figures_given = (prior.low, prior.kl_mean, prior.high)
    if not all(map(_is_number, figures_given)) or not 0 <= prior.low <= prior.kl_mean <= prior.high:
        raise _wrong(f"{where} must hold 0 <= low <= kl_mean <= high, got {', '.join(map(quoted, figures_given))}")
    if prior.perplexity_delta is not None and not _is_number(prior.perplexity_delta):
        raise _wrong(f"{where}: perplexity_delta is {quoted(prior.perplexity_delta)}")
    if not isinstance(prior.source, str) or not prior.source.strip():
        raise _wrong(f"{where} names no source")
    _check_text(f"{where}: the source", prior.source)
    return prior


def check_unpack_cost(method: Method, variant: Variant, cost: Any) -> float:
    """Picoseconds a number: finite, not negative."""
    if not _is_number(cost) or cost < 0:
        raise _wrong(f"{method.name} {variant.label}: unpack_cost() returned {quoted(cost)}, not picoseconds")
    return float(cost)


def check_unpack_bytes(method: Method, variant: Variant, moved: Any) -> float:
    """Bytes a number: finite, not negative."""
    if not _is_number(moved) or moved < 0:
        raise _wrong(f"{method.name} {variant.label}: unpack_bytes() returned {quoted(moved)}, not bytes a number")
    return float(moved)


def check_settings(method: Method, variant: Variant, settings: Any) -> Mapping[str, Any] | None:
    """None, or the engine's flags by name."""
    if settings is not None:
        _check_params(f"{method.name} {variant.label}: engine_settings()", settings)
    return settings  # type: ignore[no-any-return]


def check_standalone(cache: Any) -> Any:
    """A cache with every function that a standalone cache has."""
    missing = [name for name in _STANDALONE if not callable(getattr(cache, name, None))]
    if missing:
        raise _wrong(f"build_standalone() returned {_kind(cache)}, which has no {', '.join(missing)}")
    return cache


def _check_method(method: Any) -> None:
    if not isinstance(method, Method):
        raise _wrong(f"the hook returned {_kind(method)} among its methods; each must be an instance of Method")
    for attribute, kind in _ATTRIBUTES.items():
        if type(getattr(method, attribute)) is not kind:
            raise _wrong(f"{_kind(method)}: {attribute} is {quoted(getattr(method, attribute))}, not a {kind.__name__}")
    for attribute in _TEXTS:
        _check_text(f"{_kind(method)}: {attribute}", getattr(method, attribute))
    if not NAME.fullmatch(method.name):
        raise _wrong(f"{_kind(method)}: the name {quoted(method.name)} does not match {NAME.pattern}")
    if not method.version.strip():
        raise _wrong(f"{method.name}: the version is empty")


def _check_variant(method: Method, variant: Any) -> None:
    if not isinstance(variant, Variant):
        raise _wrong(f"{method.name}: variants() holds {_kind(variant)}, not only Variants")
    if variant.method != method.name:
        raise _wrong(f"{method.name}: the variant {quoted(variant.label)} says it is of {quoted(variant.method)}")
    if not isinstance(variant.label, str) or not NAME.fullmatch(variant.label):
        raise _wrong(f"{method.name}: the label {quoted(variant.label)} does not match {NAME.pattern}")
    _check_params(f"{method.name} {variant.label}: params", variant.params)


def _check_params(what: str, params: Any) -> None:
    if not isinstance(params, Mapping) or not all(isinstance(key, str) and key for key in params):
        raise _wrong(f"{what} must be a mapping by name, got {_kind(params)}")
    for key, value in params.items():
        _check_text(f"{what}: a name", key, MAX_WORD)
        if isinstance(value, str):
            _check_text(f"{what}: {key}", value, MAX_WORD)
        elif not isinstance(value, bool) and not _is_number(value):
            raise _wrong(f"{what}: {key} is {quoted(value)}; whole and finite numbers, words and flags are taken")


def _check_text(what: str, text: Any, most: int = MAX_TEXT) -> str:
    """Text that a terminal and a log may show: no control characters, no line breaks, no lone surrogates, bounded."""
    if not isinstance(text, str):
        raise _wrong(f"{what} is {_kind(text)}, not text")
    if len(text) > most:
        raise _wrong(f"{what} has {len(text)} characters; {most} are taken")
    if not text.isprintable():
        raise _wrong(f"{what} holds a line break or a control character: {quoted(text)}")
    return text


def _check_growth(method: Method, variant: Variant, answers: Sequence[Any]) -> tuple[int | None, ...]:
    """What `slots` says after each of LENGTHS: all or none, and never fewer with more tokens."""
    found = tuple(check_slots(method, variant, *pair) for pair in zip(LENGTHS, answers, strict=True))
    counted = [slots for slots in found if slots is not None]
    if counted and len(counted) < len(found):
        raise _wrong(f"{method.name} {variant.label}: slots() counts at some lengths and returns None at others")
    if counted != sorted(counted):
        raise _wrong(f"{method.name} {variant.label}: slots() returned fewer slots for more tokens")
    return found


def _check_lengths(method: Method, variant: Variant) -> None:
    """What `quality_at` says after each of LENGTHS: never less divergence with more tokens."""
    said = [check_prior(method, variant, method.quality_at(variant, tokens), "quality_at") for tokens in LENGTHS]
    divergence = [prior.kl_mean for prior in said]
    if divergence != sorted(divergence):
        raise _wrong(f"{method.name} {variant.label}: quality_at() claims less divergence for more tokens")


def _figures_twice(method: Method, variant: Variant, part: CachePart) -> Figures:
    first, second = figures(method, variant, part), figures(method, variant, part)
    if first != second:
        raise _wrong(
            f"{method.name} {variant.label}: two equal questions had different answers at width {part.key_width}"
        )
    return first


def _check_monotone(method: Method, variant: Variant, width: int, by_item_size: list[Figures]) -> None:
    narrow, wide = by_item_size
    if narrow.refused is not None or wide.refused is not None:
        return
    if (wide.key_bits, wide.value_bits) < (narrow.key_bits, narrow.value_bits) or wide.fixed_bytes < narrow.fixed_bytes:
        raise _wrong(f"{method.name} {variant.label}: stores less for 32-bit than for 16-bit sources at width {width}")


def _check_unlike(names: Sequence[str], what: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _wrong(f"{what} {twice[0]!r} is used twice")


def _is_number(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= MAX_WHOLE
    return isinstance(value, float) and math.isfinite(value)


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"


def _wrong(message: str) -> MethodRefused:
    return MethodRefused(message, hint="help(veloxquant.methods.Method) says what each function returns")
