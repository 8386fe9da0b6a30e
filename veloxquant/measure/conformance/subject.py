"""A variant on an architecture's tiny model: which layers it takes, its caches, and what checks share."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from veloxquant.caches.held import held_bytes
from veloxquant.measure.conformance import models
from veloxquant.measure.conformance.comparing import FLIPS, NOISE, NOISE_TIMES, allowed, flipped, rms
from veloxquant.methods.method import LayerSpec, Variant
from veloxquant.methods.per_layer import for_layer, layer_params
from veloxquant.methods.worker import declared_bytes
from veloxquant.models.exchange import ProbeRequest
from veloxquant.models.trace_worker import engine
from veloxquant.models.trace_worker.probes import Prober

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from veloxquant.measure.conformance.models import Architecture
    from veloxquant.methods.method import Method
    from veloxquant.profiles.model import CachePart, Probe

MORE = 40
"""Tokens with which caches that hold the prompt go on."""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much a run tries."""

    lengths: tuple[int, ...]
    """Prompts, shortest first: the first one on which the method changes anything is used."""
    chunks: tuple[int, ...]
    single_tokens: int
    """Most tokens of a prompt that is called token by token."""
    batches: tuple[int, ...]
    generated: int


SHORT = Effort(lengths=(150, 300), chunks=(7, 64), single_tokens=40, batches=(2,), generated=6)
PLAIN = Effort(lengths=(150, 300), chunks=(1, 7, 64, 513), single_tokens=60, batches=(2, 8), generated=8)
"""The short run's on plain attention, where it costs least."""
FULL = Effort(lengths=(150, 300, 600), chunks=(1, 7, 64, 513), single_tokens=600, batches=(2, 8), generated=24)


class Subject:
    """One variant on one architecture. Raises nothing where the variant is refused: `refusal` says so."""

    def __init__(self, method: Method, variant: Variant, architecture: Architecture, effort: Effort = FULL) -> None:
        self.method, self.variant, self.architecture, self.effort = method, variant, architecture, effort
        self.model = models.model(architecture.name)
        self.layers = models.profile(architecture.name).layers
        self._runs: dict[int, Run] = {}

    @functools.cached_property
    def probe(self) -> Probe:
        """What the trace says of the variant: the layers it packs, and why each other layer keeps the engine's."""
        wanted = ProbeRequest(method=self.method.name, label=self.variant.label, params=self.variant.params)
        profile = models.profile(self.architecture.name)
        return Prober(self.model, profile, _Builder(self)).probe(wanted)

    @property
    def refusal(self) -> str | None:
        """Why no layer is packed, layer by layer; None where one is."""
        if self.probe.packed:
            return None
        told = [f"layer {layer.index}: {layer.detail or layer.reason}" for layer in self.probe.kept]
        return "; ".join(told) or str(self.probe.refused)

    def part(self, index: int) -> CachePart:
        """The growing part that the variant keeps in a layer."""
        part = self.layers[index].packable
        assert part is not None  # noqa: S101 -- a trace packs nothing else
        return part

    def variant_of(self, index: int) -> Variant:
        """What a layer is built and sized with: the variant, and the layer's own parameters where it has any."""
        return self._by_layer.get(index, self.variant)

    @functools.cached_property
    def willing(self) -> tuple[int, ...]:
        """Layers that a cache can stand in for, all that grow where none can, less those that the method refuses."""
        takes = self.architecture.takes or [layer.index for layer in self.layers if layer.packable is not None]
        return tuple(index for index in takes if self.method.refuses(self.variant, self.part(index)) is None)

    @functools.cached_property
    def _by_layer(self) -> dict[int, Variant]:
        return self.fitted({index: self.part(index) for index in self.willing})

    def fitted(self, parts: Mapping[int, CachePart]) -> dict[int, Variant]:
        """The variant of each of these layers, with parameters of its own where the method chooses some.

        Raises MethodRefused where it cannot.
        """
        chosen = layer_params(self.method, self.variant, parts, models.calibration(self.architecture.name))
        if not chosen:
            return dict.fromkeys(parts, self.variant)
        return {index: for_layer(self.variant, params) for index, params in zip(sorted(parts), chosen, strict=True)}

    def build(self, index: int, part: CachePart) -> Any:
        """A fresh cache of one layer."""
        return self.method.build(LayerSpec(index=index, part=part), self.variant_of(index))

    def caches(self) -> list[Any]:
        """What one request gets: the method's caches where the trace packs, the engine's own elsewhere."""
        caches = engine.fresh_caches(self.model)
        for index in self.probe.packed:
            caches[index] = self.build(index, self.part(index))
        return caches

    def packed(self, caches: list[Any]) -> dict[int, Any]:
        """Those of a list that are the method's."""
        return {index: caches[index] for index in self.probe.packed}

    def declared(self, index: int, runs: Iterable[tuple[int, int]]) -> int:
        """Bytes by the method's own arithmetic, for one sequence after `runs`."""
        return declared_bytes(self.method, self.variant_of(index), self.part(index), runs)

    def text(self, start: int = 0, count: int | None = None) -> tuple[int, ...]:
        """Token ids from a position on; the prompt without arguments."""
        return models.text()[start : start + (self.prompt_tokens if count is None else count)]

    def logits(self, caches: list[Any], tokens: tuple[int, ...], chunk: int | None = None) -> Any:
        """Logits (tokens, vocabulary)."""
        return models.logits(self.model, caches, tokens, chunk)

    def filled(self, count: int | None = None) -> list[Any]:
        """Fresh caches with the prompt in them, in one call."""
        caches = self.caches()
        self.logits(caches, self.text(count=count))
        return caches

    @property
    def held(self) -> list[Any]:
        """Caches with the prompt in them that nobody changes: for checks that only look."""
        return self.in_one_call(self.prompt_tokens).caches

    @functools.cached_property
    def continued(self) -> Run:
        """The tokens after the prompt, `more`, in one call."""
        caches = self.filled()
        return Run(self.logits(caches, self.more), caches)

    @property
    def more(self) -> tuple[int, ...]:
        """What follows the prompt."""
        return self.text(self.prompt_tokens, MORE)

    @functools.cached_property
    def prompt_tokens(self) -> int:
        """The shortest prompt on which the method changes anything, the longest where it changes nothing."""
        fitting = (count for count in self.effort.lengths if self.moved(count) > self.noise(count))
        return next(fitting, self.effort.lengths[-1])

    def in_one_call(self, count: int) -> Run:
        """The first `count` tokens in one call."""
        if count not in self._runs:
            caches = self.caches()
            self._runs[count] = Run(self.logits(caches, self.text(count=count)), caches)
        return self._runs[count]

    def moved(self, count: int) -> float:
        """Root mean square of what the method moves the logits by, against the engine's own caches."""
        return rms(self.in_one_call(count).logits - models.own_logits(self.architecture.name, count))

    def noise(self, count: int, shown: float = 0.0) -> float:
        """Largest difference of logits that is float noise: ten times what the engine's own caches have `shown`.

        What they show is measured where the very same is done with them: as many tokens in the same pieces.
        """
        least = NOISE * float(abs(models.own_logits(self.architecture.name, count)).max())
        return max(least, NOISE_TIMES * shown)

    def unlike(self, seen: Run, expected: Run, shown: float = 0.0) -> str | None:
        """None where logits are equal but for float noise and the few codes it flips, else by how much they are not.

        Caches are compared where both runs still have theirs. `shown` as `noise` takes it.
        """
        difference = seen.logits - expected.logits
        worst, typical = float(abs(difference).max()), rms(difference)
        moved, noise = self.moved(self.prompt_tokens), self.noise(self.prompt_tokens, shown)
        if worst <= noise or typical <= FLIPS * moved:
            return None
        flips = flipped((seen.caches[at], expected.caches[at]) for at in self._both_packed(seen, expected))
        if typical <= allowed(flips) * moved:
            return None
        return (
            f"logits that differ by {typical:.2g} (worst {worst:.2g}) with {flips.words} of {flips.of} words unlike; "
            f"the method itself moves them by {moved:.2g}, float noise by {noise:.2g}"
        )

    def _both_packed(self, seen: Run, expected: Run) -> tuple[int, ...]:
        return self.probe.packed if seen.caches and expected.caches else ()


class Run(NamedTuple):
    """Logits (tokens, vocabulary), and the caches as they are after these tokens; none where they have gone on."""

    logits: Any
    caches: list[Any] = []  # noqa: RUF012 -- never changed


class _Builder:
    """What the trace asks for caches. Bytes are the matter of a check: here what is held is what was declared."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._built: dict[int, Any] = {}

    def refuses(self, method: str, label: str, params: Mapping[str, Any], part: CachePart) -> tuple[str, str] | None:
        return self._subject.method.refuses(self._subject.variant, part)

    def build(self, method: str, label: str, params: Mapping[str, Any], index: int, part: CachePart) -> Any:
        self._built[id(part)] = self._subject.build(index, part)
        return self._built[id(part)]

    def declared_bytes(
        self, method: str, label: str, params: Mapping[str, Any], part: CachePart, runs: Iterable[tuple[int, int]]
    ) -> int:
        return held_bytes(self._built[id(part)])
