"""Putting a method's caches in place of the engine's own and letting the real model call them.

A layer whose packed cache makes the engine raise keeps the engine's own, and the rest is tried again, until the model
runs or nothing is packed. In the run that passes, each packed cache must hold exactly the bytes its method declares.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from veloxquant.caches.held import held_bytes
from veloxquant.models.exchange import PROBE_RUNS, ProbeRequest
from veloxquant.models.trace_worker.engine import call, fresh_caches, sentence
from veloxquant.profiles.model import CacheLayer, CachePart, KeptLayer, ModelProfile, Probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_ALIKE = 3
"""So many layers of one shape failing in the same words stand for all of that shape, if the last of them fails too."""

_REASON_OF_KIND = {"window": "window", "chunked": "window", "state": "state", "concat": "composite"}


class Factory(Protocol):
    """What makes method caches in the worker (veloxquant.methods.worker.load gives one)."""

    def refuses(self, method: str, label: str, params: Mapping[str, Any], part: CachePart) -> tuple[str, str] | None:
        """Why the part cannot be kept under the variant: (reason code, sentence), or None."""
        ...

    def build(self, method: str, label: str, params: Mapping[str, Any], index: int, part: CachePart) -> Any:
        """A fresh servable cache for one layer."""
        ...

    def declared_bytes(
        self, method: str, label: str, params: Mapping[str, Any], part: CachePart, runs: Iterable[tuple[int, int]]
    ) -> int:
        """Bytes the method says the cache holds for one sequence after the runs."""
        ...


def load_factory(dotted: str) -> Factory | str:
    """Call "module:callable"; a sentence saying what it raised when it fails, since the trace itself must go on."""
    module, _, name = dotted.partition(":")
    try:
        return getattr(importlib.import_module(module), name)()  # type: ignore[no-any-return]
    except BaseException as error:  # noqa: BLE001 -- plugins run here, and may raise anything
        return f"methods cannot be loaded in the trace: {sentence(error)}"


@dataclass
class _Failure:
    """The engine raised in `block`, after the packed cache of `layer` was called last, in the block `called_in`.

    None: outside all blocks, or no packed cache was called.
    """

    error: str
    layer: int | None
    called_in: int | None
    block: int | None

    def reason(self, part: CachePart) -> str:
        if part.latent:
            return "latent"
        if "sink" in self.error.lower() and not self.error.startswith("TypeError"):
            return "sinks"  # MLX spells out whole signatures, sinks included, in its TypeErrors
        if self.block is not None and self.called_in is not None and self.block != self.called_in:
            return "donor"  # another block read this layer's K and V
        return "engine_error"


class Prober:
    """Tries variants on one model, one after the other."""

    def __init__(self, model: Any, profile: ModelProfile, factory: Factory | str) -> None:
        self._model = model
        self._layers = profile.layers
        self._factory = factory

    def probe(self, wanted: ProbeRequest) -> Probe:
        """What the engine does with one variant's caches. Never raises for what a method or the engine does."""
        if isinstance(self._factory, str):
            return self._refused(wanted, {}, self._factory)
        try:
            return self._tried(wanted, self._factory)
        except BaseException as error:  # noqa: BLE001 -- a method's planning half raised
            return self._refused(wanted, {}, f"the method failed: {sentence(error)}")

    def _tried(self, wanted: ProbeRequest, factory: Factory) -> Probe:
        kept = dict(_kept_by_kind(self._layers))
        packed: dict[int, CachePart] = {}
        for layer in self._layers:
            part = layer.packable
            if part is None:
                continue
            if refusal := factory.refuses(wanted.method, wanted.label, wanted.params, part):
                kept[layer.index] = _refusal(layer, *refusal)
            else:
                packed[layer.index] = part
        first_error = ""
        while packed:
            failure, caches = self._run(wanted, factory, packed)
            if failure is None:
                return self._passed(wanted, factory, packed, kept, caches)
            first_error = first_error or failure.error
            for index in self._culprits(wanted, factory, packed, kept, failure):
                kept[index] = KeptLayer(index=index, reason=failure.reason(packed.pop(index)), detail=failure.error)
        return self._refused(wanted, kept, first_error or _why_none(self._layers, kept))

    def _culprits(
        self,
        wanted: ProbeRequest,
        factory: Factory,
        packed: Mapping[int, CachePart],
        kept: Mapping[int, KeptLayer],
        failure: _Failure,
    ) -> list[int]:
        """The layer to keep; all left of its shape when enough failed alike and the last one fails alone too."""
        if failure.layer is None:
            return list(packed)
        part = packed[failure.layer]
        alike = [index for index, layer in kept.items() if layer.detail == failure.error]
        shape = [index for index, other in packed.items() if other == part]
        if len(alike) + 1 < _ALIKE or len(shape) < _ALIKE:
            return [failure.layer]
        last, _ = self._run(wanted, factory, {shape[-1]: part})
        return shape if last is not None and last.error == failure.error else [failure.layer]

    def _run(
        self, wanted: ProbeRequest, factory: Factory, packed: Mapping[int, CachePart]
    ) -> tuple[_Failure | None, list[Any]]:
        caches = fresh_caches(self._model)
        for index, part in packed.items():
            try:
                caches[index] = factory.build(wanted.method, wanted.label, wanted.params, index, part)
            except BaseException as error:  # noqa: BLE001 -- a plugin's code
                return _Failure(sentence(error), index, None, None), caches
        with _Following(self._model, {index: caches[index] for index in packed}) as followed:
            try:
                call(self._model, caches, PROBE_RUNS)
            except BaseException as error:  # noqa: BLE001 -- the engine's code, with a stranger's cache in it
                return _Failure(sentence(error), followed.layer, followed.called_in, followed.block), caches
        return None, caches

    def _passed(
        self,
        wanted: ProbeRequest,
        factory: Factory,
        packed: Mapping[int, CachePart],
        kept: Mapping[int, KeptLayer],
        caches: list[Any],
    ) -> Probe:
        for index, part in packed.items():
            declared = factory.declared_bytes(wanted.method, wanted.label, wanted.params, part, PROBE_RUNS)
            held = held_bytes(caches[index])
            if held != declared:
                text = f"the cache of layer {index} holds {held} bytes and its method declares {declared}"
                return self._refused(wanted, kept, text)
        return Probe(method=wanted.method, label=wanted.label, packed=tuple(sorted(packed)), kept=_sorted(kept))

    def _refused(self, wanted: ProbeRequest, kept: Mapping[int, KeptLayer], why: str) -> Probe:
        by_kind = dict(_kept_by_kind(self._layers))
        all_kept = {
            layer.index: kept.get(layer.index)
            or by_kind.get(layer.index)
            or KeptLayer(index=layer.index, reason="engine_error", detail=why)
            for layer in self._layers
            if layer.parts
        }
        return Probe(method=wanted.method, label=wanted.label, kept=_sorted(all_kept), refused=why)


class _Following:
    """Follows a forward call: which packed cache was called last, in which block, and in which block the call is."""

    def __init__(self, model: Any, caches: Mapping[int, Any]) -> None:
        self._caches = caches
        self._blocks = {id(block): at for at, block in enumerate(getattr(model, "layers", ()))}
        self._classes = {type(block) for block in getattr(model, "layers", ())}
        self._originals: dict[type, Any] = {}
        self.layer: int | None = None
        self.called_in: int | None = None
        self.block: int | None = None

    def __enter__(self) -> Self:
        for index, cache in self._caches.items():
            with contextlib.suppress(AttributeError, TypeError):  # a class with slots cannot be followed
                cache.update_and_fetch = self._noting(index, cache.update_and_fetch)
        for cls in self._classes:
            if "__call__" in vars(cls):
                self._originals[cls] = cls.__call__
                setattr(cls, "__call__", self._entering(cls.__call__))  # noqa: B010 -- mypy forbids the plain form
        return self

    def __exit__(self, *_: object) -> None:
        for cls, original in self._originals.items():
            setattr(cls, "__call__", original)  # noqa: B010 -- as above
        for cache in self._caches.values():
            with contextlib.suppress(AttributeError):
                del cache.update_and_fetch

    def _noting(self, index: int, update: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            self.layer, self.called_in = index, self.block
            return update(*args, **options)

        return noted

    def _entering(self, original: Any) -> Any:
        def entered(block: Any, *args: Any, **options: Any) -> Any:
            at = self._blocks.get(id(block))
            if at is None:
                return original(block, *args, **options)
            self.block = at
            result = original(block, *args, **options)
            self.block = None
            return result

        return entered


def _kept_by_kind(layers: Iterable[CacheLayer]) -> Iterator[tuple[int, KeptLayer]]:
    """Layers no method replaces: all that are not one plain growing cache."""
    for layer in layers:
        if layer.packable is None and layer.parts:
            reason = _REASON_OF_KIND.get(layer.parts[0].kind, "composite") if len(layer.parts) == 1 else "composite"
            latent = any(part.latent for part in layer.parts)
            yield layer.index, KeptLayer(index=layer.index, reason="latent" if latent else reason)


def _refusal(layer: CacheLayer, code: str, text: str) -> KeptLayer:
    reason = {"width_not_divisible": "width"}.get(code, "engine_error")
    return KeptLayer(index=layer.index, reason=reason, detail=text)


def _why_none(layers: Iterable[CacheLayer], kept: Mapping[int, KeptLayer]) -> str:
    refusals = [layer.detail for layer in kept.values() if layer.detail]
    if refusals:
        return refusals[0]
    return "no layer is a plain growing cache" if any(layer.parts for layer in layers) else "the model keeps no cache"


def _sorted(kept: Mapping[int, KeptLayer]) -> tuple[KeptLayer, ...]:
    return tuple(kept[index] for index in sorted(kept))
