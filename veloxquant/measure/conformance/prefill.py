"""How a prompt is cut into calls changes nothing: boundaries of groups and evictions are fixed by position."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.measure.conformance import models
from veloxquant.measure.conformance.comparing import farthest, rms
from veloxquant.measure.conformance.outcome import failed, not_applicable, unless
from veloxquant.measure.conformance.subject import MORE, Run

if TYPE_CHECKING:
    from veloxquant.measure.conformance.outcome import Verdict
    from veloxquant.measure.conformance.subject import Subject


def moves_the_logits(subject: Subject) -> Verdict:
    """A method that stores less than the engine changes what the model says; one that does not holds full copies."""
    count = subject.prompt_tokens
    moved, noise = subject.moved(count), subject.noise(count)
    if moved > noise:
        own = models.own_logits(subject.architecture.name, count)
        spread = rms(own - own.mean())
        told = f"logits that differ by {moved:.2g}, and the engine's own vary by {spread:.2g} in all"
        return unless([] if moved < spread else [("logits nearer to the engine's than a constant is", told)])
    indices = subject.probe.packed
    saving = [index for index in indices if subject.declared(index, ((count, 1),)) < _own_bytes(subject, index, count)]
    if not saving:
        return not_applicable(f"{count} tokens are too few: the method declares no fewer bytes than the engine's own")
    bytes_told = subject.declared(saving[0], ((count, 1),))
    return failed(
        f"other logits than the engine's own caches give, as layer {saving[0]} declares {bytes_told} bytes of "
        f"{_own_bytes(subject, saving[0], count)}",
        f"a difference of {moved:.2g}, which is float noise",
    )


def _own_bytes(subject: Subject, index: int, count: int) -> int:
    return count * subject.part(index).slot_bytes


def chunks_are_one_call(subject: Subject) -> Verdict:
    """Logits of every prompt token after chunks of 1, 7, 64 and 513 are those of one call."""
    problems = []
    for size in subject.effort.chunks:
        count = _tokens(subject, size)
        caches = subject.caches()
        seen = Run(subject.logits(caches, subject.text(count=count), size), caches)
        own, cut = (models.own_logits(subject.architecture.name, count, pieces) for pieces in (None, size))
        told = subject.unlike(seen, subject.in_one_call(count), farthest(cut, own))
        if told is not None:
            problems.append((f"logits of {count} tokens in chunks of {size} equal to those of one call", told))
    return unless(problems)


def _tokens(subject: Subject, size: int) -> int:
    """The prompt; more where a chunk would not be full, less where each call is one token."""
    if size == 1:
        return min(subject.prompt_tokens, subject.effort.single_tokens)
    return max(subject.prompt_tokens, size + MORE) if size > subject.effort.lengths[0] else subject.prompt_tokens


def many_tokens_are_many_calls(subject: Subject) -> Verdict:
    """After the prompt, 40 tokens in one call give the logits of 40 calls."""
    caches = subject.filled()
    seen = Run(subject.logits(caches, subject.more, 1), caches)
    own, cut = (
        models.own_continued(subject.architecture.name, subject.prompt_tokens, MORE, pieces) for pieces in (None, 1)
    )
    told = subject.unlike(seen, subject.continued, farthest(cut, own))
    return unless([] if told is None else [(f"{MORE} tokens in one call equal to {MORE} calls", told)])
