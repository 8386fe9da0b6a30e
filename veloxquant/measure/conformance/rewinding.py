"""Taking tokens back: by trim, and by speculative decoding, whose engine ignores how many tokens went."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from veloxquant.errors import VeloxError
from veloxquant.measure.conformance import models
from veloxquant.measure.conformance.generation import Made, greedy, noise_shown, same_tokens
from veloxquant.measure.conformance.outcome import failed, not_applicable, refused, unless
from veloxquant.measure.conformance.subject import MORE, Run

if TYPE_CHECKING:
    from veloxquant.measure.conformance.models import Own
    from veloxquant.measure.conformance.outcome import Verdict
    from veloxquant.measure.conformance.subject import Subject

FEW, MANY = 3, 40
"""What speculative decoding takes back, and what a prompt cache of the server may."""
DRAFT_TOKENS = 3


def trimming_is_never_having_added(subject: Subject) -> Verdict:
    """trim(n), then go on: as if the n tokens had never been; or `is_trimmable` is false, or many are refused typed."""
    stopped = _cannot_rewind(subject)
    if stopped is not None:
        return stopped
    count = subject.prompt_tokens
    told_of_many = ""
    for taken in (FEW, MANY):
        caches = subject.filled()
        subject.logits(caches, subject.text(count + MORE, taken))
        if not all(cache.is_trimmable() for cache in caches):
            return refused(f"after {count + taken} tokens is_trimmable() is false")
        try:
            gone = [cache.trim(taken) for cache in caches]
        except VeloxError as error:
            if taken == FEW:
                return failed(f"trim({taken}) of a cache that says it can", f"{type(error).__name__}: {error.message}")
            told_of_many = f"trim({taken}) is refused: {error.message}"
            continue
        if set(gone) != {taken}:
            return failed(f"{taken} tokens trimmed, as is_trimmable() promises", f"trim returned {gone}")
        told = subject.unlike(Run(subject.logits(caches, subject.more)), subject.continued)
        if told is not None:
            return failed(f"{MORE} tokens after trim({taken}) as if those had never been added", told)
    return refused(told_of_many) if told_of_many else unless([])


def _cannot_rewind(subject: Subject) -> Verdict | None:
    """Why nothing can be taken back from a list that holds the prompt; None where it can."""
    mine = [index for index, cache in subject.packed(subject.held).items() if not cache.is_trimmable()]
    if mine:
        return refused(f"is_trimmable() is false in layer {mine[0]}")
    return _engine_cannot(subject)


def _engine_cannot(subject: Subject) -> Verdict | None:
    """Why the engine's own caches of the list keep it from rewinding, None where they do not."""
    others = [cache for index, cache in enumerate(subject.held) if index not in subject.probe.packed]
    stuck = [type(cache).__name__ for cache in others if not cache.is_trimmable()]
    return not_applicable(f"the engine's own {stuck[0]} cannot take tokens back") if stuck else None


def speculation_changes_nothing(subject: Subject) -> Verdict:
    """With a draft that is mostly wrong, the greedy tokens and logits of plain generation; rewinds are counted.

    mlx-lm asks empty caches whether they can be trimmed, refuses those that cannot, and later looks at nothing.
    """
    caches = subject.caches()
    if not all(cache.is_trimmable() for cache in subject.packed(caches).values()):
        return _refused_by_the_engine(subject, caches)
    stopped = _engine_cannot(subject)
    if stopped is not None:
        return stopped
    if len(caches) != len(subject.model.layers):
        return not_applicable("mlx-lm splits the list at the number of layers, and this model has fewer caches")
    rewinds = [_Counted(cache) for cache in subject.packed(caches).values()]
    prompt, count = subject.text(), subject.effort.generated
    shown = _noise_shown(models.Own(subject.architecture.name), prompt, count)
    told = same_tokens(subject, _speculated(subject, caches, prompt, count), greedy(subject, prompt, count), shown)
    if told is not None:
        return failed("the greedy tokens of plain generation", told)
    return unless([] if all(one.rewinds for one in rewinds) else [("a rewind in every layer", "the draft was right")])


def _refused_by_the_engine(subject: Subject, caches: list[Any]) -> Verdict:
    try:
        _speculated(subject, caches, subject.text(), subject.effort.generated)
    except ValueError as error:
        if any(cache.offset for cache in subject.packed(caches).values()):
            return failed("a refusal before any token", f"{error}, with tokens in the caches")
        return refused(f"mlx-lm refuses before any token: {error}")
    return failed("a refusal of caches that cannot be trimmed", "speculative decoding ran")


@functools.cache
def _noise_shown(own: Own, prompt: tuple[int, ...], count: int) -> float:
    """How far the engine's own caches are from plain generation when they are rewound."""
    return noise_shown(_speculated(own, own.caches(), prompt, count), greedy(own, prompt, count))


def _speculated(subject: Subject | Own, caches: list[Any], prompt: tuple[int, ...], count: int) -> Made:
    import mlx.core as mx
    from mlx_lm.generate import speculative_generate_step

    made = speculative_generate_step(
        mx.array(prompt),
        subject.model,
        models.draft(),
        max_tokens=count,
        prompt_cache=[*caches, *models.draft_caches()],
        num_draft_tokens=DRAFT_TOKENS,
    )
    return Made([(int(token), logprobs) for token, logprobs, _ in made], [])


class _Counted:
    """Counts the rewinds of one cache."""

    def __init__(self, cache: Any) -> None:
        self.rewinds = 0
        self._trim = cache.trim
        cache.trim = self._counted

    def _counted(self, n: int) -> int:
        self.rewinds += n > 0
        return int(self._trim(n))
