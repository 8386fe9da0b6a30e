"""What a variant costs in quality, as mean KL in nats a token: records, then published figures, then the method's word.

A number in nats, never a score. The engine's own cache is 0 by definition. Family rules say what is known to break.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from veloxquant.planner import tables
from veloxquant.planner.evidence import evidence, kl_of
from veloxquant.planner.growth import Reader
from veloxquant.planner.result import Evidence, Quality

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.methods.method import Method, Variant
    from veloxquant.planner.evidence import Sighting
    from veloxquant.planner.memory import Shape, Term
    from veloxquant.planner.tables import PublishedQuality
    from veloxquant.profiles import ModelProfile, WorkloadProfile

SOFT_FLOOR_KL = 0.05
SOFT_FLOOR_LONG_KL = 0.02
LONG_CONTEXT_TOKENS = 32768
"""Beyond it an agent's errors add up over many turns, so that less divergence is let pass."""

_NEAR_SIZE = 8
"""A published figure speaks for models up to this many times larger or smaller; beyond, the method's own range does."""
_PLAIN_PERPLEXITY = 40.0
"""No model in use has a higher perplexity on ordinary text (GPT-2 small, WikiText-103: 37.5), so that a rise of d nats
in log perplexity is at least log(1 + delta / 40)."""
PRIOR_CONFIDENCE = 0.3
_DELTA_SPREAD = 2.0
"""KL over rise in log perplexity, 64 quantizers on SmolLM2-135M: 0.5 to 2."""


def soft_floor(context_length: int) -> float:
    """Most KL a variant may have without a warning when the request gives no max_kl."""
    return SOFT_FLOOR_KL if context_length <= LONG_CONTEXT_TOKENS else SOFT_FLOOR_LONG_KL


def floor_for(workload: WorkloadProfile) -> float:
    """The request's hard floor, else the soft one."""
    return workload.max_kl if workload.max_kl is not None else soft_floor(workload.context_length)


def broken_family(model: ModelProfile, shape: Shape, usable: Sequence[Sighting]) -> str | None:
    """Why this family is known not to bear the variant; None when it does or a record of this very model says so."""
    packed = [term for term in shape.terms if term.packed]
    if not packed:
        return None
    bits = min(_nominal_key_bits(term) for term in packed)
    for rule in tables.family_rules():
        if model.architecture in rule.architectures and bits < rule.keys_below_bits and not _measured(usable):
            return f"{rule.family}: {rule.text}; sources: {', '.join(rule.sources)}"
    return None


def _nominal_key_bits(term: Term) -> float:
    """Bits of a key number without its scales, where the parameters say so."""
    params = {} if term.reader is None else term.reader.variant.params
    named = params.get("key_bits", params.get("bits"))
    return min(term.key_bits, float(named)) if isinstance(named, (int, float)) else term.key_bits


def engine_own() -> Quality:
    """The engine's own cache is what the others are held against."""
    own = Evidence(source="traced", notes=("the reference: by definition",))
    return Quality(kl_mean=0.0, perplexity_delta=0.0, low=0.0, high=0.0, evidence=own)


def grounded(model: ModelProfile, label: str, usable: Sequence[Sighting], word: Quality) -> Quality | None:
    """A measured KL, else a published one; None when there is neither. `word`: what the method says of itself."""
    published = _published(model, label)
    judged = next((one for one in usable if kl_of(one.record) is not None), None)
    return published if judged is None else _measured_kl(judged, published or word)


def by_perplexity(estimate: Quality, usable: Sequence[Sighting]) -> Quality:
    """The estimate within what a measured perplexity allows; as it is where its KL was measured or nothing was."""
    weighed = next((one for one in usable if one.record.perplexity_delta is not None), None)
    if weighed is None or estimate.evidence.source == "measured":
        return estimate
    return _measured_perplexity(weighed, estimate)


def prior(method: Method, variant: Variant, tokens: int) -> Quality:
    """The method's own word on a sequence of `tokens` tokens. Raises MethodError from it."""
    return _prior(Reader(method, variant), tokens)


@lru_cache(maxsize=1024)
def _prior(reader: Reader, tokens: int) -> Quality:
    said = reader.method.quality_at(reader.variant, tokens)
    return Quality(
        kl_mean=float(said.kl_mean),
        perplexity_delta=_maybe(said.perplexity_delta),
        low=float(said.low),
        high=float(said.high),
        evidence=Evidence(source="prior", confidence=PRIOR_CONFIDENCE, notes=(said.source,)),
    )


def _measured(usable: Sequence[Sighting]) -> bool:
    """A record of this very model tells its quality."""
    return any(
        one.same_model and (kl_of(one.record) is not None or one.record.perplexity_delta is not None) for one in usable
    )


def _measured_kl(one: Sighting, estimate: Quality) -> Quality:
    kl, grounds = kl_of(one.record) or 0.0, evidence("measured", [one])
    spread = 1.1 + (1 - grounds.confidence)
    delta = _maybe(one.record.perplexity_delta)
    return Quality(
        kl_mean=kl,
        perplexity_delta=delta if delta is not None else estimate.perplexity_delta,
        low=kl / spread,
        high=kl * spread,
        evidence=grounds,
    )


def _measured_perplexity(one: Sighting, estimate: Quality) -> Quality:
    """A perplexity bounds the KL without giving it: the base perplexity is not in the record.

    The rise in log perplexity lies between log(1 + delta / 40) and log(1 + delta), since no base is above 40 or
    below 1. The estimate is kept where it lies within these bounds (with the spread seen between the two measures),
    and moved to the nearer bound where it does not.
    """
    delta = float(one.record.perplexity_delta or 0.0)
    least = math.log1p(max(0.0, delta) / _PLAIN_PERPLEXITY) / _DELTA_SPREAD
    most = math.log1p(max(0.0, delta)) * _DELTA_SPREAD
    kl = max(estimate.kl_mean, least)
    if one.same_model and delta > 0:
        kl = min(kl, most)
    note = "perplexity measured; KL bounded by it" if kl != estimate.kl_mean else "perplexity measured; KL is not"
    grounds = evidence("measured", [one], (note, *estimate.evidence.notes))
    return Quality(
        kl_mean=kl,
        perplexity_delta=delta,
        low=min(estimate.low, kl),
        high=max(kl, min(estimate.high, most) if delta > 0 and one.same_model else estimate.high),
        evidence=grounds,
    )


def _published(model: ModelProfile, label: str) -> Quality | None:
    """Published figures of this family for this variant, interpolated by size: log KL over log parameters.

    Outside the sizes that were measured the nearest figure is kept, since KL falls with size and a larger model is
    not to be promised more than was seen.
    """
    rows = tables.published_quality().get((model.architecture, label), ())
    size = model.num_parameters
    if not rows or not size:
        return None
    nearest = min(rows, key=lambda r: (abs(math.log(r.parameters / size)), r.model))
    if abs(math.log(nearest.parameters / size)) > math.log(_NEAR_SIZE):
        return None
    below = max((r for r in rows if r.parameters <= size), key=lambda r: r.parameters, default=None)
    above = min((r for r in rows if r.parameters >= size), key=lambda r: r.parameters, default=None)
    if below is None or above is None or below is above:
        used: tuple[PublishedQuality, ...] = (nearest,)
        kl = nearest.kl_mean
    else:
        share = math.log(size / below.parameters) / math.log(above.parameters / below.parameters)
        used, kl = (below, above), below.kl_mean ** (1 - share) * above.kl_mean**share
    spread = max(row.spread for row in used)
    return Quality(
        kl_mean=kl,
        perplexity_delta=nearest.perplexity_delta if nearest.parameters == size else None,
        low=kl / spread,
        high=kl * spread,
        evidence=Evidence(
            source="published",
            confidence=min(row.confidence for row in used),
            notes=tuple(_cite(row) for row in used),
        ),
    )


def _cite(row: PublishedQuality) -> str:
    return f"{row.model}: {row.kl_mean:g} nats ({row.source})" + (f"; {row.note}" if row.note else "")


def _maybe(number: float | None) -> float | None:
    """A whole number from JSON or an author becomes the float that a plan shows."""
    return None if number is None else float(number)
