"""Which layers a variant packs, which keep the engine's own cache, and why: from the trace, else by the method's word.

A probe in the model's trace is proof: the real model was called with the variant's caches in place. Without one, the
method is asked layer by layer, and what only the engine could refuse (sinks, a donor layer) stays unproven.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.errors import MethodError
from veloxquant.methods.method import Param
from veloxquant.methods.per_layer import NOT_CALIBRATED, layer_params, refused_by_layer
from veloxquant.planner.growth import Reader
from veloxquant.planner.result import Layers
from veloxquant.profiles.model import ENGINE_OWN, CachePart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from veloxquant.planner.result import Reason
    from veloxquant.planner.snapshot import Offer
    from veloxquant.profiles import CacheLayer, Calibration, ModelProfile, Probe


class _Cause(NamedTuple):
    """Why a layer keeps the engine's cache: how a sentence about it ends, and what follows for the variant."""

    text: str
    """After "keeps the engine's"."""
    reason: Reason = "not_supported_by_engine"
    """The protocol's code when the variant can pack no layer at all."""
    asked: bool = True
    """The variant was asked, or stands in the way itself; else layers of this kind are passed over."""
    tells_itself: bool = False
    """The method or the engine says it in a sentence of its own."""


_CAUSES = {
    "window": _Cause("sliding window, which does not grow beyond its size", asked=False),
    "state": _Cause("recurrent state, which does not grow", asked=False),
    "composite": _Cause("composite cache", asked=False),
    "latent": _Cause("latent cache, which attention reads directly"),
    "donor": _Cause("cache, which other layers read as it is"),
    "sinks": _Cause("cache: attention sinks, which packed attention refuses"),
    "width": _Cause(
        "cache: the variant's groups do not divide the width", reason="width_not_divisible", tells_itself=True
    ),
    "engine_error": _Cause("cache: the variant was refused", tells_itself=True),
}


def _cause(word: str) -> _Cause:
    return _CAUSES.get(word) or _Cause(f"cache: {word}")


class _PartKind(NamedTuple):
    """What a kind of cache part is called within a layer, and what the layer counts as."""

    name: str
    counts_as: str


_PART_KINDS = {
    "kv": _PartKind("a growing cache", "growing"),
    "concat": _PartKind("a growing cache", "growing"),
    "window": _PartKind("a sliding window", "windowed"),
    "chunked": _PartKind("a chunked window", "windowed"),
    "state": _PartKind("a recurrent state", "recurrent"),
}

Own = tuple[tuple[str, Param], ...]
"""A layer's own parameters beside the variant's, by name."""


class Counted(NamedTuple):
    """A cache part, how many layers hold one like it, and what their parameters are where layers differ."""

    part: CachePart
    layers: int
    params: Own = ()


@dataclass(frozen=True, eq=False)
class Layout:
    """What each layer's cache is under one variant; identical parts are counted, not repeated. Equal to itself."""

    packed: tuple[Counted, ...]
    kept: tuple[Counted, ...]
    packed_layers: tuple[int, ...]
    layers: Layers
    proven: bool
    """The real model was called with these caches, or nothing is replaced."""
    kept_reasons: frozenset[str] = frozenset()
    layer_params: tuple[Own, ...] = ()
    """Of each of packed_layers in order; () where all have the variant's own."""


@dataclass(frozen=True)
class Refusal:
    """The variant cannot run on this model."""

    reason: Reason
    detail: str


class _Kept(NamedTuple):
    """Why layers keep the engine's cache: a stable word, the protocol's reason code for it, one layer's sentence."""

    word: str
    reason: Reason
    detail: str


def lay_out(model: ModelProfile, offer: Offer, calibration: Calibration | None = None) -> Layout | Refusal:
    """The layout of one variant on this model, or why there is none. The same object for the same question."""
    if offer.method.name == ENGINE_OWN:
        return engine_own(model)
    return _laid_out(model, Reader(offer.method, offer.variant), calibration)


@lru_cache(maxsize=1024)
def _laid_out(model: ModelProfile, reader: Reader, calibration: Calibration | None) -> Layout | Refusal:
    probe = model.probe(reader.variant.label)
    if probe is None or probe.untried:
        layout, tried = _unproven(model, reader), None
    else:
        layout, tried = _probed(model, probe), probe.layer_params
    return layout if isinstance(layout, Refusal) else _by_layer(model, layout, reader, calibration, tried)


def _by_layer(
    model: ModelProfile, layout: Layout, reader: Reader, calibration: Calibration | None, tried: tuple[Own, ...] | None
) -> Layout | Refusal:
    """The layout with each packed layer's own parameters; proven where `tried`, those of the trace, are the same."""
    packed = {index: part for index in layout.packed_layers if (part := model.layers[index].packable) is not None}
    try:
        chosen = layer_params(reader.method, reader.variant, packed, calibration)
        refused = refused_by_layer(reader.method, reader.variant, packed, chosen)
    except MethodError as error:
        if error.field != NOT_CALIBRATED:
            return Refusal("quarantined", error.message)
        return Refusal("not_calibrated", f"{error.message}: {error.hint}" if error.hint else error.message)
    if refused:
        kept = tuple((index, _refusal(*answer)) for index, answer in refused.items())
        return _nothing_packed(kept)
    own = tuple(tuple(sorted(params.items())) for params in chosen)
    if own == (tried or ()):
        return layout if not own else replace(layout, packed=_counted(packed, own), layer_params=own)
    return replace(layout, packed=_counted(packed, own), layer_params=own, proven=False)


def _counted(packed: Mapping[int, CachePart], own: tuple[Own, ...]) -> tuple[Counted, ...]:
    """Layers that are alike in their part and in their own parameters, counted."""
    each = own or ((),) * len(packed)
    alike = Counter((packed[index], params) for index, params in zip(sorted(packed), each, strict=True))
    return tuple(Counted(part, count, params) for (part, params), count in alike.items())


@lru_cache(maxsize=64)
def engine_own(model: ModelProfile) -> Layout:
    """Nothing replaced; layers that are more than one plain growing cache are named all the same."""
    special = [(alike, indices) for alike, indices in _alike(model) if not _plain(alike)]
    kept = tuple((index, _structural(alike)) for alike, indices in special for index in indices)
    return replace(_layout(model, (), kept, proven=True), kept_reasons=frozenset())


def _probed(model: ModelProfile, probe: Probe) -> Layout | Refusal:
    inside = {layer.index: _inside(layer) for layer in model.layers if len(layer.parts) > 1}
    kept = tuple((k.index, _kept(k.reason, k.detail or inside.get(k.index, ""))) for k in probe.kept)
    if probe.packed and probe.refused is None:
        return _layout(model, probe.packed, kept, proven=True)
    nothing = _nothing_packed(kept)
    if probe.refused is None or nothing.reason != "not_supported_by_engine":
        return nothing
    told = nothing.detail if probe.refused in nothing.detail else probe.refused
    if kept and told != nothing.detail:
        told = f"{told}; {nothing.detail}"
    return Refusal(nothing.reason, f"refused in the trace of this model: {told}")


def _kept(word: str, detail: str) -> _Kept:
    return _Kept(word, _cause(word).reason, detail)


def _unproven(model: ModelProfile, reader: Reader) -> Layout | Refusal:
    packed: list[int] = []
    kept: list[tuple[int, _Kept]] = []
    for alike, indices in _alike(model):
        part = alike.packable
        answer = _structural(alike) if part is None or part.latent else _ask(reader, part)
        if answer is None:
            packed += indices
        else:
            kept += [(index, answer) for index in indices]
    return _layout(model, tuple(packed), tuple(kept), proven=False) if packed else _nothing_packed(tuple(kept))


@lru_cache(maxsize=64)
def _alike(model: ModelProfile) -> tuple[tuple[CacheLayer, tuple[int, ...]], ...]:
    """One of each kind of layer, with the places of all that are like it."""
    found: dict[tuple[str, tuple[CachePart, ...]], list[CacheLayer]] = {}
    for layer in model.layers:
        found.setdefault((layer.engine_class, layer.parts), []).append(layer)
    return tuple((layers[0], tuple(layer.index for layer in layers)) for layers in found.values())


def _ask(reader: Reader, part: CachePart) -> _Kept | None:
    try:
        refusal = reader.method.refuses(reader.variant, part)
    except MethodError as error:
        return _kept("engine_error", error.message)
    return None if refusal is None else _refusal(*refusal)


def _refusal(code: str, sentence: str) -> _Kept:
    """A layer that the method itself refuses."""
    if code == "width_not_divisible":
        return _kept("width", sentence)
    if code == "quarantined":
        return _Kept("engine_error", "quarantined", sentence)
    return _kept("engine_error", sentence)


def _nothing_packed(kept: tuple[tuple[int, _Kept], ...]) -> Refusal:
    """The code of the layers that came closest to being packed: a width the variant itself refused comes first."""
    reasons = [k for _, k in kept]
    closest = [k for k in reasons if k.reason in ("width_not_divisible", "quarantined")]
    closest = closest or [k for k in reasons if _cause(k.word).asked] or reasons
    reason: Reason = closest[0].reason if closest else "not_supported_by_engine"
    counts = Counter(closest)
    details = dict.fromkeys(
        k.detail if k.detail and _cause(k.word).tells_itself else _sentence(k.word, counts[k], k.detail)
        for k in closest
    )
    return Refusal(reason, "; ".join(details) or "the model has no cache that could be packed")


def _plain(layer: CacheLayer) -> bool:
    part = layer.packable
    return part is not None and not part.latent


def _structural(layer: CacheLayer) -> _Kept:
    """A layer that no variant is asked about, by its kind."""
    return _kept(_kind(layer), _inside(layer) if len(layer.parts) > 1 else "")


def _inside(layer: CacheLayer) -> str:
    names = dict.fromkeys("a latent cache" if part.latent else _PART_KINDS[part.kind].name for part in layer.parts)
    return " and ".join(names) + " in one"


def _kind(layer: CacheLayer) -> str:
    """Why a layer is not one plain growing cache."""
    if len(layer.parts) > 1:
        return "composite"
    part = layer.parts[0] if layer.parts else None
    if part is None or part.kind == "state":
        return "state"
    if part.kind in ("window", "chunked"):
        return "window"
    return "latent" if part.latent else "composite"


def _layout(
    model: ModelProfile, packed: tuple[int, ...], kept: tuple[tuple[int, _Kept], ...], *, proven: bool
) -> Layout:
    chosen = frozenset(packed)
    parts = {True: Counter[CachePart](), False: Counter[CachePart]()}
    kinds: Counter[str] = Counter()
    for layer in model.layers:
        parts[layer.index in chosen].update(layer.parts)
        kinds.update(_classes(layer.parts))
    reasons = Counter(k.word for _, k in kept)
    details = {k.word: k.detail for _, k in reversed(kept)}
    layers = Layers(
        total=len(model.layers),
        growing=kinds["growing"],
        windowed=kinds["windowed"],
        recurrent=kinds["recurrent"],
        latent=kinds["latent"],
        shared=model.shared_layers,
        packed=len(packed),
        kept=len(model.layers) - len(packed),
        reasons={word: _sentence(word, reasons[word], details[word]) for word in sorted(reasons)},
    )
    return Layout(
        packed=tuple(Counted(*pair) for pair in parts[True].items()),
        kept=tuple(Counted(*pair) for pair in parts[False].items()),
        packed_layers=tuple(sorted(packed)),
        layers=layers,
        proven=proven,
        kept_reasons=frozenset(reasons),
    )


def _classes(parts: tuple[CachePart, ...]) -> set[str]:
    """Every class a layer belongs to; a composite one belongs to several."""
    return {_PART_KINDS[part.kind].counts_as for part in parts} | {"latent" for part in parts if part.latent}


def _sentence(word: str, count: int, detail: str) -> str:
    layers = "1 layer keeps" if count == 1 else f"{count} layers keep"
    return f"{layers} the engine's {_cause(word).text}" + (f" ({detail})" if detail else "")
