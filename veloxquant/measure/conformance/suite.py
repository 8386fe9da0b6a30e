"""The checks by name, and a run of them: what every cache must do that stands in for one of mlx-lm's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.measure.conformance import arithmetic, batches, keeping, numbers, prefill, rewinding, surface
from veloxquant.measure.conformance.outcome import Outcome, Verdict, failed, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from veloxquant.measure.conformance.subject import Subject

CHECKS: Mapping[str, Callable[[Subject], Verdict]] = {
    "layers": arithmetic.layers_are_the_methods_or_the_engines,
    "surface": surface.attributes_are_the_engines,
    "flags": surface.flags_are_kept,
    "fresh_list": surface.each_request_gets_its_own,
    "refusal": surface.refusals_come_first,
    "moves": prefill.moves_the_logits,
    "chunks": prefill.chunks_are_one_call,
    "steps": prefill.many_tokens_are_many_calls,
    "bytes": arithmetic.bytes_are_those_held,
    "offset": arithmetic.offset_is_the_position,
    "masks": arithmetic.masks_are_over_true_positions,
    "trim": rewinding.trimming_is_never_having_added,
    "speculative": rewinding.speculation_changes_nothing,
    "state": keeping.state_is_all_and_restores,
    "saved": keeping.saved_and_loaded_elsewhere,
    "deep_copy": keeping.deep_copy_goes_its_own_way,
    "batch": batches.rows_are_single_runs,
    "batch_bytes": batches.batches_stay_packed,
    "finite": numbers.attention_stays_finite,
}
"""Check -> what it asks; its docstring is the promise."""

_WITHOUT_CACHES = ("layers", "surface", "refusal")
"""Asked of a variant that is refused on every layer, too."""


def check(subject: Subject, names: Iterable[str] = tuple(CHECKS)) -> Iterator[Outcome]:
    """Run checks one after the other. Never raises for what a method, a cache or the engine does."""
    for name in names:
        verdict = _verdict(subject, name)
        yield Outcome(
            method=subject.method.name,
            label=subject.variant.label,
            architecture=subject.architecture.name,
            check=name,
            status=verdict.status,
            reason=verdict.reason,
            expected=verdict.expected,
            seen=verdict.seen,
        )


def _verdict(subject: Subject, name: str) -> Verdict:
    try:
        refusal = subject.refusal
        if refusal is not None and name not in _WITHOUT_CACHES:
            return refused(refusal)
        return CHECKS[name](subject)
    except Exception as error:  # noqa: BLE001 -- fence: a cache under test may raise anything
        return failed((CHECKS[name].__doc__ or name).partition("\n")[0], f"{type(error).__name__}: {error}")
