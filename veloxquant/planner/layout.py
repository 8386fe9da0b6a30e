"""Which layers a variant packs, which keep the engine's own cache, and why: from the trace, else by the method's word.

A probe in the model's trace is proof: the real model was called with the variant's caches in place. Without one, the
method is asked layer by layer, and what only the engine could refuse (sinks, a donor layer) stays unproven.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from veloxquant.errors import MethodError
from veloxquant.planner.result import Layers
from veloxquant.profiles import CachePart

if TYPE_CHECKING:
    from veloxquant.planner.result import Reason
    from veloxquant.planner.snapshot import Offer
    from veloxquant.profiles import CacheLayer, ModelProfile, Probe

ENGINE_OWN = "fp16"
"""Name of the method that leaves the engine's own caches in place."""

_WORDS = {
    "window": "keep the engine's sliding window",
    "state": "keep the engine's recurrent state, which does not grow",
    "latent": "keep the engine's latent cache, which attention reads directly",
    "composite": "keep the engine's composite cache",
    "donor": "are read by other layers as they are",
    "sinks": "use attention sinks, which packed attention refuses",
    "width": "have a width that the variant's groups do not divide",
    "engine_error": "are refused by the engine",
}

Counted = tuple[CachePart, int]
"""A cache part and how many layers hold one like it."""


@dataclass(frozen=True)
class Layout:
    """What each layer's cache is under one variant; identical parts are counted, not repeated."""

    packed: tuple[Counted, ...]
    kept: tuple[Counted, ...]
    packed_layers: tuple[int, ...]
    layers: Layers
    proven: bool
    """The real model was called with these caches, or nothing is replaced."""
    kept_reasons: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Refusal:
    """The variant cannot run on this model."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class _Kept:
    """Why layers keep the engine's cache: a stable word, the protocol's reason code for it, one layer's sentence."""

    word: str
    reason: Reason
    detail: str


def lay_out(model: ModelProfile, offer: Offer) -> Layout | Refusal:
    """The layout of one variant on this model, or why there is none."""
    if offer.method.name == ENGINE_OWN:
        return engine_own(model)
    probe = model.probe(offer.variant.label)
    return _unproven(model, offer) if probe is None else _probed(model, probe)


@lru_cache(maxsize=64)
def engine_own(model: ModelProfile) -> Layout:
    """Nothing replaced."""
    return _layout(model, (), (), proven=True)


@lru_cache(maxsize=1024)
def _probed(model: ModelProfile, probe: Probe) -> Layout | Refusal:
    kept = tuple((k.index, _kept(k.reason, k.detail)) for k in probe.kept)
    if probe.packed and probe.refused is None:
        return _layout(model, probe.packed, kept, proven=True)
    nothing = _nothing_packed(kept)
    if probe.refused is None or nothing.reason != "not_supported_by_engine":
        return nothing
    return Refusal(nothing.reason, f"refused in the trace of this model: {probe.refused}")


def _kept(word: str, detail: str) -> _Kept:
    return _Kept(word, "width_not_divisible" if word == "width" else "not_supported_by_engine", detail)


def _unproven(model: ModelProfile, offer: Offer) -> Layout | Refusal:
    packed: list[int] = []
    kept: list[tuple[int, _Kept]] = []
    for alike, indices in _alike(model):
        part = alike.packable
        answer = _kept(_kind(alike), "") if part is None or part.latent else _ask(offer, part)
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


def _ask(offer: Offer, part: CachePart) -> _Kept | None:
    try:
        refusal = offer.method.refuses(offer.variant, part)
    except MethodError as error:
        return _Kept("engine_error", "not_supported_by_engine", error.message)
    if refusal is None:
        return None
    code, sentence = refusal
    if code == "width_not_divisible":
        return _Kept("width", "width_not_divisible", sentence)
    if code == "quarantined":
        return _Kept("engine_error", "quarantined", sentence)
    return _Kept("engine_error", "not_supported_by_engine", sentence)


def _nothing_packed(kept: tuple[tuple[int, _Kept], ...]) -> Refusal:
    """The code of the layers that came closest to being packed: a width the variant itself refused comes first."""
    reasons = [k for _, k in kept]
    asked = [k for k in reasons if k.reason in ("width_not_divisible", "quarantined")]
    reason: Reason = asked[0].reason if asked else "not_supported_by_engine"
    details = dict.fromkeys(k.detail or f"layers {_WORDS.get(k.word, k.word)}" for k in (asked or reasons))
    return Refusal(reason, "; ".join(details) or "the model has no cache that could be packed")


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


@lru_cache(maxsize=1024)
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
        packed=tuple(parts[True].items()),
        kept=tuple(parts[False].items()),
        packed_layers=tuple(sorted(packed)),
        layers=layers,
        proven=proven,
        kept_reasons=frozenset(reasons),
    )


_CLASS_OF_KIND = {
    "kv": "growing",
    "concat": "growing",
    "window": "windowed",
    "chunked": "windowed",
    "state": "recurrent",
}


def _classes(parts: tuple[CachePart, ...]) -> set[str]:
    """Every class a layer belongs to; a composite one belongs to several."""
    return {_CLASS_OF_KIND[part.kind] for part in parts} | {"latent" for part in parts if part.latent}


def _sentence(word: str, count: int, detail: str) -> str:
    layers = "1 layer" if count == 1 else f"{count} layers"
    return f"{layers}: {_WORDS.get(word, word)}" + (f" ({detail})" if detail else "")
