"""What makes a method's caches in the worker, by plain values, and one variant asked of it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from veloxquant.models.exchange import PROBE_RUNS, ProbeRequest
from veloxquant.models.trace_worker.engine import sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from veloxquant.profiles import CachePart, Calibration
    from veloxquant.profiles.slots import Run

MOST_TOKENS = 1024
"""A method that packs nothing until later is tried with what it holds before: longer prompts cost recurrent layers."""

Params = Mapping[str, Any]
_ALIKE: Params = {}


class Factory(Protocol):
    """What makes method caches in the worker (veloxquant.methods.worker.load gives one)."""

    def refuses(self, method: str, label: str, params: Params, part: CachePart) -> tuple[str, str] | None:
        """Why the part cannot be kept under the variant: (reason code, sentence), or None."""
        ...

    def build(self, method: str, label: str, params: Params, index: int, part: CachePart) -> Any:
        """A fresh servable cache for one layer."""
        ...

    def declared_bytes(
        self, method: str, label: str, params: Params, part: CachePart, runs: Iterable[tuple[int, int]]
    ) -> int:
        """Bytes the method says the cache holds for one sequence after the runs."""
        ...


class LayerFactory(Factory, Protocol):
    """A factory of methods whose layers may differ and that may count their own slots; others need not have these."""

    def layer_params(
        self,
        method: str,
        label: str,
        params: Params,
        parts: Mapping[int, CachePart],
        calibration: Calibration | None,
    ) -> Sequence[Params]:
        """Each packed layer's own parameters in order, () where all are alike.

        Raises MethodRefused with the field "calibration" where it lacks one.
        """
        ...

    def first_slot(self, method: str, label: str, params: Params, part: CachePart) -> int | None:
        """The least number of tokens with a slot that counts; None where the method does not count its slots."""
        ...


def load_factory(dotted: str, tried: Mapping[str, str] | None = None) -> Factory | str:
    """Call "module:callable", with `tried` where it is given; a sentence saying what it raised when it fails.

    The trace itself must go on.
    """
    module, _, name = dotted.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
        return made() if tried is None else made(tried)  # type: ignore[no-any-return]
    except BaseException as error:  # noqa: BLE001 -- plugins run here, and may raise anything
        return f"methods cannot be loaded in the trace: {sentence(error)}"


@dataclass(frozen=True)
class Asked:
    """One variant, asked of a factory; `own` are a layer's parameters beside the variant's."""

    wanted: ProbeRequest
    factory: Factory
    calibration: Calibration | None

    def refuses(self, part: CachePart, own: Params = _ALIKE) -> tuple[str, str] | None:
        """Why the part cannot be kept: (reason code, sentence), or None."""
        return self.factory.refuses(*self._variant(own), part)

    def build(self, index: int, part: CachePart, own: Params) -> Any:
        """A fresh servable cache for one layer."""
        return self.factory.build(*self._variant(own), index, part)

    def declared_bytes(self, part: CachePart, own: Params, runs: Iterable[Run]) -> int:
        """Bytes of one sequence after the runs."""
        return self.factory.declared_bytes(*self._variant(own), part, runs)

    def own(self, packed: Mapping[int, CachePart]) -> dict[int, Params]:
        """Each packed layer's own parameters, none where all are alike."""
        chosen = getattr(self.factory, "layer_params", None)
        params = () if chosen is None else chosen(*self._variant(_ALIKE), packed, self.calibration)
        return dict(zip(sorted(packed), params or [_ALIKE] * len(packed), strict=True))

    def runs(self, packed: Mapping[int, CachePart], own: Mapping[int, Params]) -> tuple[Run, ...]:
        """Calls after which each of these layers has packed some of its tokens, where that takes more than a few."""
        first_slot = getattr(self.factory, "first_slot", None)
        if first_slot is None:
            return PROBE_RUNS
        firsts = {(part, _key(own[index])): index for index, part in packed.items()}
        needed = [first_slot(*self._variant(own[index]), packed[index]) or 0 for index in firsts.values()]
        (tokens, calls), *steps = PROBE_RUNS
        least = max(needed, default=0)
        return PROBE_RUNS if least <= tokens or least > MOST_TOKENS else ((least, calls), *steps)

    def alike(self, packed: Mapping[int, CachePart], own: Mapping[int, Params]) -> dict[int, CachePart]:
        """The first layer of each kind: same part, same parameters."""
        firsts: dict[tuple[Any, ...], int] = {}
        for index in sorted(packed):
            firsts.setdefault((packed[index], _key(own[index])), index)
        return {index: packed[index] for index in firsts.values()}

    def _variant(self, own: Params) -> tuple[str, str, Params]:
        return self.wanted.method, self.wanted.label, {**self.wanted.params, **own}


def _key(own: Params) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(own.items()))
