"""Greedy generation by the engine's own loop, and the comparison of two of them token by token."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veloxquant.measure.conformance.subject import Subject

PREFILL_STEP = 64

Made = list[tuple[int, Any]]
"""Tokens with the logarithms of probabilities (vocabulary,) that they were the largest of."""


@functools.lru_cache(maxsize=64)
def greedy(subject: Subject, prompt: tuple[int, ...], count: int) -> Made:
    """`count` tokens after the prompt, on fresh caches. Kept, as several checks compare with it."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    caches = subject.caches()
    made = generate_step(
        mx.array(prompt), subject.model, max_tokens=count, prompt_cache=caches, prefill_step_size=PREFILL_STEP
    )
    return [(int(token), logprobs) for token, logprobs in made]


def same_tokens(subject: Subject, seen: Made, expected: Made) -> str | None:
    """None where tokens and logits agree up to the first tie within noise, else what differs and where.

    After a tie the two go different ways with equal right, and nothing more is compared.
    """
    if len(seen) != len(expected):
        return f"{len(seen)} tokens, not {len(expected)}"
    for at, ((token, logprobs), (other, wanted)) in enumerate(zip(seen, expected, strict=True)):
        told = subject.unlike(logprobs, wanted, PREFILL_STEP)
        if told is not None:
            return f"at token {at} {told}"
        if token != other:
            gap = float(wanted.max() - wanted[token])
            tied = gap <= 2 * float(abs(logprobs - wanted).max())
            return None if tied else f"token {at} is {token}, not {other}"
    return None
