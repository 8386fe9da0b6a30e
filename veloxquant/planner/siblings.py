"""What the variants of one method say about each other's quality.

A published or measured figure of one variant corrects the method's word for its siblings: a model that suffers ten
times what the method says in groups of 64 is not believed to suffer nothing in groups of 128. And a variant that stores
less is never credited with less divergence than one that stores more, unless both were measured. Nothing here knows a
method or a parameter by name: siblings differ in one parameter, and of two siblings the one with fewer stored bits is
the coarser. All variants of the method are looked at, on offer or not, so that no offer changes another's figure.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from veloxquant.errors import MethodError
from veloxquant.planner.evidence import same_context
from veloxquant.planner.quality import PRIOR_CONFIDENCE, by_perplexity, grounded, prior
from veloxquant.planner.result import Evidence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from veloxquant.methods.method import Method, Variant
    from veloxquant.planner.evidence import Sighting
    from veloxquant.planner.result import Quality
    from veloxquant.profiles import CachePart, ModelProfile

_ALIKE = 3.0
"""A figure speaks for siblings whose prior is at most this many times larger or smaller: groups of 32 to 128 at the
same bits are within it (2.4 at most), neighbouring bits at the same group are not (4 or more) and err differently."""
_GUESSED, _SCALED, _PUBLISHED, _MEASURED = range(4)


class _Told(NamedTuple):
    """What is known of a variant by itself: the method's word, and a measured or published figure where there is."""

    variant: Variant
    prior: Quality
    grounded: Quality | None
    usable: Sequence[Sighting]


class _Figure(NamedTuple):
    """A variant's figure; what is trusted more bounds what is trusted less."""

    label: str
    quality: Quality
    trust: int

    @property
    def kl(self) -> float:
        """Mean KL in nats a token."""
        return self.quality.kl_mean


def qualities(
    model: ModelProfile, method: Method, usable: Callable[[str], Sequence[Sighting]], tokens: int
) -> Mapping[str, Quality]:
    """The quality of every variant of one method after `tokens` tokens, by label.

    One that the method cannot answer for is left out.
    """
    told = [one for variant in method.variants() if (one := _tell(model, method, variant, usable, tokens)) is not None]
    anchors = [one for one in told if one.grounded is not None and min(one.grounded.kl_mean, one.prior.kl_mean) > 0]
    found = [_figure(one, anchors) for one in told]
    finer = _finer(method, _first_packable(model))
    capped = {one.label: _capped(one, found, finer) for one in found}
    return {one.label: _raised(one, [capped[f] for f in finer[one.label] if f in capped]) for one in capped.values()}


def _tell(
    model: ModelProfile, method: Method, variant: Variant, usable: Callable[[str], Sequence[Sighting]], tokens: int
) -> _Told | None:
    try:
        word = prior(method, variant, tokens)
    except MethodError:
        return None  # whoever asks for this very variant is told so
    seen = usable(variant.label)
    if method.drops_tokens:
        # A shorter run had dropped less: what it lost says nothing of this one.
        seen = [one for one in seen if one.context >= tokens or same_context(one.context, tokens)]
    return _Told(variant, word, grounded(model, variant.label, seen, word), seen)


def _figure(one: _Told, anchors: Sequence[_Told]) -> _Figure:
    """Measured, else published, else the prior as the nearest sibling's figure corrects it; a perplexity bounds it."""
    if one.grounded is not None:
        estimate, trust = one.grounded, _PUBLISHED
    else:
        anchor = _anchor(one, anchors) if one.prior.kl_mean > 0 else None
        scaled = _scaled(one.prior, anchor) if anchor is not None else None
        estimate, trust = (one.prior, _GUESSED) if scaled is None else (scaled, _SCALED)
    bounded = by_perplexity(estimate, one.usable)
    by_measurement = _measured(one) or bounded.kl_mean != estimate.kl_mean
    return _Figure(one.variant.label, bounded, _MEASURED if by_measurement else trust)


def _anchor(one: _Told, anchors: Sequence[_Told]) -> _Told | None:
    """The sibling whose figure speaks for this one: measured before published, then the nearest prior."""
    siblings = [
        other for other in anchors if _one_apart(one.variant, other.variant) and _apart(one, other) <= math.log(_ALIKE)
    ]
    return min(siblings, key=lambda o: (not _measured(o), round(_apart(one, o), 9), o.variant.label), default=None)


def _measured(one: _Told) -> bool:
    return one.grounded is not None and one.grounded.evidence.source == "measured"


def _apart(one: _Told, other: _Told) -> float:
    return abs(math.log(one.prior.kl_mean / other.prior.kl_mean))


def _scaled(word: Quality, anchor: _Told) -> Quality | None:
    """The prior times the anchor's figure over the anchor's own prior; None when that is no number."""
    figure = anchor.grounded
    if figure is None:
        return None
    times = figure.kl_mean / anchor.prior.kl_mean
    if not math.isfinite(word.high * times):
        return None
    note = (
        f"scaled from {anchor.variant.label}: {figure.kl_mean:.3g} nats ({figure.evidence.source}) where the method "
        f"says {anchor.prior.kl_mean:.3g}"
    )
    return msgspec.structs.replace(
        word,
        kl_mean=word.kl_mean * times,
        perplexity_delta=None,
        low=word.low * times,
        high=word.high * times,
        evidence=_inferred(word, figure, note, *figure.evidence.notes, *word.evidence.notes),
    )


def _capped(one: _Figure, found: Sequence[_Figure], finer: Mapping[str, frozenset[str]]) -> _Figure:
    """No more than what a coarser sibling is known to have on better grounds."""
    bounds = [c for c in found if c.trust > one.trust and one.label in finer[c.label]]
    least = min(bounds, key=_order, default=one)
    return one if least.kl >= one.kl else _moved(one, least, f"no more than {least.label}, which is coarser")


def _raised(one: _Figure, bounds: Sequence[_Figure]) -> Quality:
    """No less than any finer sibling, unless this one was measured."""
    most = max(bounds, key=_order, default=one)
    if one.trust == _MEASURED or most.kl <= one.kl:
        return one.quality
    return _moved(one, most, f"no less than {most.label}, which is finer").quality


def _order(one: _Figure) -> tuple[float, str]:
    return one.kl, one.label


def _moved(one: _Figure, bound: _Figure, note: str) -> _Figure:
    """A figure moved to its sibling's, with a range that holds both."""
    own, other = one.quality, bound.quality
    note = f"{note} ({other.kl_mean:.3g} nats, {other.evidence.source})"
    moved = msgspec.structs.replace(
        own,
        kl_mean=other.kl_mean,
        low=min(own.low, other.low),
        high=max(own.high, other.high),
        evidence=_inferred(own, other, note, *own.evidence.notes),
    )
    return one._replace(quality=moved)


def _inferred(own: Quality, other: Quality, *notes: str) -> Evidence:
    """Grounds of a figure that a sibling's was turned into: a guess still, with the records of both named."""
    records = (*own.evidence.record_ids, *other.evidence.record_ids)
    return Evidence(
        source="prior",
        record_ids=tuple(dict.fromkeys(records)),
        confidence=min(PRIOR_CONFIDENCE, other.evidence.confidence),
        notes=tuple(dict.fromkeys(notes)),
    )


def _first_packable(model: ModelProfile) -> CachePart | None:
    return next((part for layer in model.layers if (part := layer.packable) is not None), None)


@lru_cache(maxsize=64)
def _finer(method: Method, part: CachePart | None) -> Mapping[str, frozenset[str]]:
    """Of each variant, the labels of those that are finer: from sibling to sibling with more stored bits each time."""
    bits = {v.label: _stored_bits(method, v, part) for v in method.variants()}
    finer: dict[str, frozenset[str]] = {}
    for one in sorted(method.variants(), key=lambda v: -(bits[v.label] or 0)):
        above = [v.label for v in method.variants() if _one_apart(one, v) and _more(bits[v.label], bits[one.label])]
        finer[one.label] = frozenset(above).union(*(finer[label] for label in above))
    return finer


def _stored_bits(method: Method, variant: Variant, part: CachePart | None) -> float | None:
    """Bits of a key and a value number together; None for a variant that cannot keep this part."""
    try:
        if part is None or method.refuses(variant, part) is not None:
            return None
        return method.key_bits(variant, part) + method.value_bits(variant, part)
    except MethodError:
        return None


def _more(bits: float | None, than: float | None) -> bool:
    return bits is not None and than is not None and bits > than


def _one_apart(one: Variant, other: Variant) -> bool:
    """Siblings: the same parameters, with one value that differs."""
    if one.params.keys() != other.params.keys():
        return False
    return sum(one.params[name] != other.params[name] for name in one.params) == 1
