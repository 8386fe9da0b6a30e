"""Greedy generation by the engine's own loop, and the comparison of two of them token by token."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.measure.conformance.comparing import farthest
from veloxquant.measure.conformance.subject import Run

if TYPE_CHECKING:
    from veloxquant.measure.conformance.models import Own
    from veloxquant.measure.conformance.subject import Subject

PREFILL_STEP = 64


class Made(NamedTuple):
    """Tokens, each with the logarithms of probabilities (vocabulary,) that it was the largest of; the caches after."""

    tokens: list[tuple[int, Any]]
    caches: list[Any]


@functools.lru_cache(maxsize=32)
def greedy(subject: Subject | Own, prompt: tuple[int, ...], count: int) -> Made:
    """`count` tokens after the prompt, on fresh caches. Kept, as several checks compare with it."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    caches = subject.caches()
    made = generate_step(
        mx.array(prompt), subject.model, max_tokens=count, prompt_cache=caches, prefill_step_size=PREFILL_STEP
    )
    return Made([(int(token), logprobs) for token, logprobs in made], caches)


def same_tokens(subject: Subject, seen: Made, expected: Made, shown: float) -> str | None:
    """None where tokens and logits agree up to the first tie within noise, else what differs and where.

    After a tie the two go different ways with equal right, and nothing more is compared. `shown`: the float noise that
    the engine's own caches show in the same two generations.
    """
    if len(seen.tokens) != len(expected.tokens):
        return f"{len(seen.tokens)} tokens, not {len(expected.tokens)}"
    for at, ((token, logprobs), (other, wanted)) in enumerate(zip(seen.tokens, expected.tokens, strict=True)):
        told = subject.unlike(Run(logprobs, seen.caches), Run(wanted, expected.caches), shown)
        if told is not None:
            return f"at token {at} {told}"
        if token != other:
            gap = float(wanted.max() - wanted[token])
            tied = gap <= 2 * float(abs(logprobs - wanted).max())
            return None if tied else f"token {at} is {token}, not {other}"
    return None


def noise_shown(seen: Made, expected: Made) -> float:
    """How far two generations of the same tokens are apart, up to where they part."""
    most = 0.0
    for (token, logprobs), (other, wanted) in zip(seen.tokens, expected.tokens, strict=True):
        most = max(most, farthest(logprobs, wanted))
        if token != other:
            break
    return most
