"""A method with a fence around every call: the planner sees checked answers or a typed refusal, nothing else.

The probe has seen a foreign method behave on sample layers; it may still fail on a real one, and so may one of ours.
Then it is quarantined for the life of this process: `refuses` answers for it from there on, and everything else raises
MethodRefused.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from veloxquant.errors import MethodRefused, VeloxError
from veloxquant.methods import checks
from veloxquant.methods.fence import one_line, reason_of
from veloxquant.methods.method import LayerPlace, LayerSpec, Method, Param, Parameter, QualityPrior, Variant
from veloxquant.methods.per_layer import NOT_CALIBRATED, check_layer_params
from veloxquant.methods.timed import NoThread, within

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from veloxquant.profiles.calibration import Calibration
    from veloxquant.profiles.model import CachePart

SLOW_S = 0.005
TOO_SLOW_S = 0.050
TOO_SLOW_TIMES = 3
LIMIT_S = 1.0
"""A planning call that takes longer is left to itself, and the method with it."""
MAX_ANSWERS = 4096
QUARANTINED = "quarantined"
"""The protocol's reason code."""

_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


class Guarded(Method):
    """Delegates to a method and checks each answer; one that is not `trusted` has a time limit, and a thread for it.

    `tripped` says why it is quarantined, else None. `noted` gives what surrounds each call of such a method.
    """

    def __init__(
        self,
        inner: Method,
        variants: Sequence[Variant],
        parameters: Sequence[Parameter] = (),
        *,
        trusted: bool = False,
        noted: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.name, self.version, self.summary, self.paper = inner.name, inner.version, inner.summary, inner.paper
        self.batchable, self.trimmable = inner.batchable, inner.trimmable
        self.idea, self.keeps = inner.idea, inner.keeps
        self.drops_tokens, self.fused_attention = inner.drops_tokens, inner.fused_attention
        self.tripped: str | None = None
        self._inner = inner
        self._trusted = trusted
        self._noted = noted
        self._variants = tuple(variants)
        self._parameters = tuple(parameters)
        self._answers: dict[tuple[Any, ...], Any] = {}
        self._slow = 0
        self._warned = False

    def variants(self) -> Sequence[Variant]:
        """The variants learnt at load; the method is not asked again."""
        return self._variants

    def parameters(self) -> Sequence[Parameter]:
        """The parameters learnt at load."""
        return self._parameters

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """The method's answer, or ("quarantined", why) once a call has failed."""
        if self.tripped is None:
            try:
                return self._ask("refuses", lambda a: checks.check_refusal(self, variant, a), variant, part)
            except MethodRefused as error:
                _log.warning("%s", error.message)
        return QUARANTINED, str(self.tripped)

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Checked. Raises MethodRefused."""
        return self._ask("key_bits", lambda a: checks.check_bits(self, variant, "key_bits", a), variant, part)

    def value_bits(self, variant: Variant, part: CachePart) -> float:
        """Checked. Raises MethodRefused."""
        return self._ask("value_bits", lambda a: checks.check_bits(self, variant, "value_bits", a), variant, part)

    def fixed_bytes(self, variant: Variant, part: CachePart) -> int:
        """Checked. Raises MethodRefused."""
        return self._ask("fixed_bytes", lambda a: checks.check_bytes(self, variant, "fixed_bytes", a), variant, part)

    def workspace_bytes(self, variant: Variant, part: CachePart, queries: int, slots: int) -> int:
        """Checked. Raises MethodRefused."""
        return self._ask(
            "workspace_bytes",
            lambda a: checks.check_bytes(self, variant, "workspace_bytes", a),
            variant,
            part,
            queries,
            slots,
        )

    def slot_step(self, variant: Variant, part: CachePart) -> int:
        """Checked. Raises MethodRefused."""
        return self._ask("slot_step", lambda a: checks.check_slot_step(self, variant, a), variant, part)

    def slots(self, variant: Variant, part: CachePart, tokens: int) -> int | None:
        """Checked. Raises MethodRefused."""
        return self._ask("slots", lambda a: checks.check_slots(self, variant, tokens, a), variant, part, tokens)

    def layer_params(
        self, variant: Variant, places: Sequence[LayerPlace], calibration: Calibration | None
    ) -> Sequence[Mapping[str, Param]] | None:
        """Checked. Raises MethodRefused; one that the method itself raises names the calibration and fences nothing."""
        asked = tuple(places)

        def check(said: Any) -> Sequence[Mapping[str, Param]] | MethodRefused | None:
            return said if isinstance(said, MethodRefused) else check_layer_params(self, variant, asked, said)

        answer = self._ask("layer_params", check, variant, asked, calibration)
        if isinstance(answer, MethodRefused):
            raise MethodRefused(
                reason_of(answer), hint=one_line(answer.hint) or "calibrate this model", field=NOT_CALIBRATED
            ) from answer
        return answer

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """Checked. Raises MethodRefused."""
        return self._ask("quality_prior", lambda a: checks.check_prior(self, variant, a), variant)

    def quality_at(self, variant: Variant, tokens: int) -> QualityPrior:
        """Checked. Raises MethodRefused."""
        return self._ask("quality_at", lambda a: checks.check_prior(self, variant, a, "quality_at"), variant, tokens)

    def unpack_cost(self, variant: Variant) -> float:
        """Checked. Raises MethodRefused."""
        return self._ask("unpack_cost", lambda a: checks.check_unpack_cost(self, variant, a), variant)

    def unpack_bytes(self, variant: Variant) -> float:
        """Checked. Raises MethodRefused."""
        return self._ask("unpack_bytes", lambda a: checks.check_unpack_bytes(self, variant, a), variant)

    def engine_settings(self, variant: Variant) -> Mapping[str, Param] | None:
        """Checked. Raises MethodRefused."""
        return self._ask("engine_settings", lambda a: checks.check_settings(self, variant, a), variant)

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        """The method's cache. Raises MethodRefused whatever the method raises; takes the time it takes."""
        return _built(f"for layer {layer.index}", variant, lambda: self._inner.build(layer, variant))

    def build_standalone(self, head_dim: int, variant: Variant) -> Any:
        """The method's single-head cache, complete. Raises MethodRefused whatever the method raises."""
        what = f"standalone at width {head_dim}"
        return _built(what, variant, lambda: checks.check_standalone(self._inner.build_standalone(head_dim, variant)))

    def _ask(self, what: str, check: Callable[[Any], _Answer], variant: Variant, *rest: Any) -> _Answer:
        """The checked answer. Equal questions have equal answers (the probe asks twice), so each is asked once.

        One of ours answers sooner than an answer is looked up.
        """
        if self.tripped is not None:
            raise _refused(self.tripped)
        if self._trusted:
            return self._fenced(what, lambda: check(self._said(what, variant, *rest)))
        question = (what, variant.label, *variant.params.items(), *rest)
        if question in self._answers:
            return self._answers[question]  # type: ignore[no-any-return]
        began = time.perf_counter()
        with self._noted():
            answer = self._fenced(what, lambda: within(LIMIT_S, "it", lambda: check(self._said(what, variant, *rest))))
        if len(self._answers) >= MAX_ANSWERS:
            self._answers.clear()
        self._answers[question] = answer
        self._time(what, time.perf_counter() - began)
        return answer

    def _said(self, what: str, *question: Any) -> Any:
        """The method's own answer; that it cannot choose parameters for layers is one, and no failure."""
        try:
            return getattr(self._inner, what)(*question)
        except MethodRefused as error:
            if what != "layer_params":
                raise
            return error

    def _fenced(self, what: str, ask: Callable[[], _Answer]) -> _Answer:
        try:
            return ask()
        except (KeyboardInterrupt, NoThread):
            raise
        except BaseException as error:
            self._trip(f"{what}() failed: {reason_of(error)}")
            raise _refused(str(self.tripped)) from error

    def _time(self, what: str, seconds: float) -> None:
        if seconds <= SLOW_S:
            return
        if not self._warned:
            self._warned = True
            _log.warning(
                "method %s: %s() took %.0f ms; planning calls should take under 5", self.name, what, seconds * 1e3
            )
        self._slow += seconds > TOO_SLOW_S
        if self._slow >= TOO_SLOW_TIMES:
            self._trip(f"{what}() took more than {TOO_SLOW_S * 1e3:.0f} ms {TOO_SLOW_TIMES} times")

    def _trip(self, why: str) -> None:
        self.tripped = f"method {self.name}: {why}"


def _built(what: str, variant: Variant, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        hint, field = (error.hint, error.field) if isinstance(error, VeloxError) else ("", None)
        raise MethodRefused(
            f"{variant.label} cannot be built {what}: {reason_of(error)}",
            hint=one_line(hint) or "choose another method, or tell its author",
            field=field,
        ) from error


def _refused(reason: str) -> MethodRefused:
    return MethodRefused(reason, hint="the method stays quarantined until the process restarts or reloads")
