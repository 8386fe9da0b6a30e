"""Putting a method's caches in place of the engine's own and letting the real model call them.

A layer whose packed cache makes the engine raise keeps the engine's own, and the rest is tried again, until the model
runs or nothing is packed. In the run that passes, each packed cache must hold exactly the bytes its method declares.

What the engine's code does with a cache depends on its class, not on how many bits are in it. So the first variant of a
method goes through the whole model, and the next ones of the same classes through as much of it as holds one layer of
each kind: these must run and hold what is declared, and every kind of refusal must come again in the same words. Where
anything differs, that variant goes through the whole model too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from veloxquant.caches.held import held_bytes
from veloxquant.errors import MethodRefused
from veloxquant.models.exchange import PROBE_RUNS, ProbeRequest
from veloxquant.models.trace_worker.engine import call, fresh_caches, sentence
from veloxquant.models.trace_worker.factory import Asked, Factory
from veloxquant.models.trace_worker.following import Enough, Following
from veloxquant.profiles.model import CacheLayer, CachePart, KeptLayer, ModelProfile, Probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from veloxquant.models.trace_worker.factory import Params
    from veloxquant.profiles import Calibration
    from veloxquant.profiles.slots import Run

_ALIKE = 3
"""So many layers of one shape failing in the same words stand for all of that shape, if the last of them fails too."""

_REASON_OF_KIND = {"window": "window", "chunked": "window", "state": "state", "concat": "composite"}


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


@dataclass
class _Trial:
    """One variant on its way through the model: layers still packed, with their own parameters, and the others."""

    asked: Asked
    packed: dict[int, CachePart]
    kept: dict[int, KeptLayer]
    own: dict[int, Params] = field(default_factory=dict)
    refused_by_engine: dict[int, KeptLayer] = field(default_factory=dict)

    def settle(self) -> None:
        """Choose parameters for the layers that are packed now; one that its method then refuses is kept."""
        while self.packed:
            self.own = self.asked.own(self.packed)
            answers = {
                index: self.asked.refuses(part, self.own[index])
                for index, part in self.packed.items()
                if self.own[index]
            }
            refused = {index: answer for index, answer in answers.items() if answer is not None}
            for index, answer in refused.items():
                del self.packed[index]
                self.kept[index] = _refusal(index, *answer)
            if not refused:
                return

    def keep(self, index: int, layer: KeptLayer) -> None:
        """The engine refused what this layer had."""
        del self.packed[index]
        self.kept[index] = self.refused_by_engine[index] = layer


@dataclass(frozen=True)
class _Known:
    """What the engine did with the first variant of a method that went through the whole model."""

    classes: Mapping[int, type]
    """Of the caches it took, by layer."""
    refused: Mapping[int, KeptLayer]


class Prober:
    """Tries variants on one model, one after the other."""

    def __init__(
        self, model: Any, profile: ModelProfile, factory: Factory | str, calibration: Calibration | None = None
    ) -> None:
        self._model = model
        self._layers = profile.layers
        self._factory = factory
        self._calibration = calibration
        self._known: dict[str, _Known] = {}

    def probe(self, wanted: ProbeRequest) -> Probe:
        """What the engine does with one variant's caches. Never raises for what a method or the engine does."""
        if isinstance(self._factory, str):
            return self._refused(wanted, {}, self._factory)
        try:
            return self._tried(Asked(wanted, self._factory, self._calibration))
        except BaseException as error:  # noqa: BLE001 -- a method's planning half raised
            if isinstance(error, MethodRefused) and error.field == "calibration":
                return Probe(method=wanted.method, label=wanted.label, untried=error.message)
            return self._refused(wanted, {}, f"the method failed: {sentence(error)}")

    def _tried(self, asked: Asked) -> Probe:
        trial = _Trial(asked, {}, dict(_kept_by_kind(self._layers)))
        for layer in self._layers:
            part = layer.packable
            if part is None:
                continue
            if refusal := asked.refuses(part):
                trial.kept[layer.index] = _refusal(layer.index, *refusal)
            else:
                trial.packed[layer.index] = part
        trial.settle()
        known = self._known.get(asked.wanted.method)
        again = None if known is None else self._as_known(trial, known)
        return self._in_full(trial) if again is None else again

    def _in_full(self, trial: _Trial) -> Probe:
        """Through the whole model, with fewer layers packed each time the engine raises."""
        first_error, method = "", trial.asked.wanted.method
        while trial.packed:
            failure, caches = self._run(trial, trial.packed)
            if failure is None:
                classes = {index: type(caches[index]) for index in trial.packed}
                self._known[method] = _Known(classes, trial.refused_by_engine)
                return self._with_slots(trial, self._passed(trial, trial.packed, caches, PROBE_RUNS))
            first_error = first_error or failure.error
            for index in self._culprits(trial, failure):
                reason = failure.reason(trial.packed[index])
                trial.keep(index, KeptLayer(index=index, reason=reason, detail=failure.error))
            trial.settle()
        if trial.refused_by_engine:
            self._known[method] = _Known({}, trial.refused_by_engine)
        return self._refused(trial.asked.wanted, trial.kept, first_error or _why_none(self._layers, trial.kept))

    def _as_known(self, trial: _Trial, known: _Known) -> Probe | None:
        """The outcome of the method's first variant, where one layer of each kind behaves as it did; else None."""
        if not trial.packed or not trial.packed.keys() <= known.classes.keys() | known.refused.keys():
            return None
        refused = {index: known.refused[index] for index in trial.packed if index in known.refused}
        groups = {(trial.packed[index], layer.detail): index for index, layer in reversed(refused.items())}
        for (part, detail), index in groups.items():
            failure, _ = self._run(trial, {index: part})
            if failure is None or failure.error != detail:
                return None
        tried = _Trial(trial.asked, dict(trial.packed), dict(trial.kept))
        for index, layer in refused.items():
            tried.keep(index, layer)
        tried.settle()
        if not tried.packed:
            return self._refused(trial.asked.wanted, tried.kept, next(iter(refused.values())).detail)
        kinds = trial.asked.alike(tried.packed, tried.own)
        runs = trial.asked.runs(kinds, tried.own)
        failure, caches = self._run(tried, kinds, runs, early=True)
        if failure is not None or any(type(caches[index]) is not known.classes[index] for index in kinds):
            return None
        return self._passed(tried, kinds, caches, runs)

    def _with_slots(self, trial: _Trial, found: Probe) -> Probe:
        """The probe, once one layer of each kind has packed tokens too, where that takes more than a few."""
        kinds = trial.asked.alike(trial.packed, trial.own)
        runs = trial.asked.runs(kinds, trial.own)
        if found.refused is not None or runs == PROBE_RUNS:
            return found
        failure, caches = self._run(trial, kinds, runs, early=True)
        if failure is None:
            return self._passed(trial, kinds, caches, runs)
        return self._refused(trial.asked.wanted, trial.kept, f"after {runs[0][0]} tokens: {failure.error}")

    def _culprits(self, trial: _Trial, failure: _Failure) -> list[int]:
        """The layer to keep; all left of its shape when enough failed alike and the last one fails alone too."""
        if failure.layer is None:
            return list(trial.packed)
        part = trial.packed[failure.layer]
        alike = [index for index, layer in trial.kept.items() if layer.detail == failure.error]
        shape = [index for index, other in trial.packed.items() if other == part]
        if len(alike) + 1 < _ALIKE or len(shape) < _ALIKE:
            return [failure.layer]
        last, _ = self._run(trial, {shape[-1]: part})
        return shape if last is not None and last.error == failure.error else [failure.layer]

    def _run(
        self, trial: _Trial, packed: Mapping[int, CachePart], runs: tuple[Run, ...] = PROBE_RUNS, *, early: bool = False
    ) -> tuple[_Failure | None, list[Any]]:
        caches = fresh_caches(self._model)
        for index, part in packed.items():
            try:
                caches[index] = trial.asked.build(index, part, trial.own[index])
            except BaseException as error:  # noqa: BLE001 -- a plugin's code
                return _Failure(sentence(error), index, None, None), caches
        with Following(self._model, {index: caches[index] for index in packed}, packed if early else ()) as followed:
            for tokens in (tokens for tokens, calls in runs for _ in range(calls)):
                try:
                    call(self._model, caches, ((tokens, 1),))
                except Enough:
                    continue
                except BaseException as error:  # noqa: BLE001 -- the engine's code, with a stranger's cache in it
                    return _Failure(sentence(error), followed.layer, followed.called_in, followed.block), caches
        return None, caches

    def _passed(
        self, trial: _Trial, checked: Mapping[int, CachePart], caches: list[Any], runs: tuple[Run, ...]
    ) -> Probe:
        """The probe of a variant that ran, if the caches of the layers checked hold what is declared."""
        wanted = trial.asked.wanted
        for index, part in checked.items():
            declared = trial.asked.declared_bytes(part, trial.own[index], runs)
            held = held_bytes(caches[index])
            if held != declared:
                text = f"the cache of layer {index} holds {held} bytes and its method declares {declared}"
                return self._refused(wanted, trial.kept, text)
        order = tuple(sorted(trial.packed))
        own = tuple(tuple(sorted(trial.own[index].items())) for index in order)
        return Probe(
            method=wanted.method,
            label=wanted.label,
            packed=order,
            kept=_sorted(trial.kept),
            layer_params=own if any(own) else (),
        )

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


def _kept_by_kind(layers: Iterable[CacheLayer]) -> Iterator[tuple[int, KeptLayer]]:
    """Layers no method replaces: all that are not one plain growing cache."""
    for layer in layers:
        if layer.packable is None and layer.parts:
            reason = _REASON_OF_KIND.get(layer.parts[0].kind, "composite") if len(layer.parts) == 1 else "composite"
            latent = any(part.latent for part in layer.parts)
            yield layer.index, KeptLayer(index=layer.index, reason="latent" if latent else reason)


def _refusal(index: int, code: str, text: str) -> KeptLayer:
    reason = {"width_not_divisible": "width"}.get(code, "engine_error")
    return KeptLayer(index=index, reason=reason, detail=text)


def _why_none(layers: Iterable[CacheLayer], kept: Mapping[int, KeptLayer]) -> str:
    refusals = [layer.detail for layer in kept.values() if layer.detail]
    if refusals:
        return refusals[0]
    return "no layer is a plain growing cache" if any(layer.parts for layer in layers) else "the model keeps no cache"


def _sorted(kept: Mapping[int, KeptLayer]) -> tuple[KeptLayer, ...]:
    return tuple(kept[index] for index in sorted(kept))
