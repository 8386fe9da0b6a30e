"""What a cache says it holds is what it holds, and what its method's arithmetic gives; offsets are positions."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.caches.held import held_bytes
from veloxquant.errors import MethodRefused
from veloxquant.measure.conformance import models
from veloxquant.measure.conformance.outcome import failed, not_applicable, refused, unless
from veloxquant.models.trace_worker import engine

if TYPE_CHECKING:
    from veloxquant.measure.conformance.outcome import Verdict
    from veloxquant.measure.conformance.subject import Subject

_CHUNK, _STEPS = 64, 16
"""Steps enough to complete a group of 32 after 150 tokens, 4 of them sinks."""


def layers_are_the_methods_or_the_engines(subject: Subject) -> Verdict:
    """Each layer that can be packed is, or is refused in the trace; windows, states and latents keep the engine's."""
    takes, packed = subject.architecture.takes, subject.probe.packed
    kept = {layer.index: layer for layer in subject.probe.kept}
    beyond = sorted(set(packed) - set(takes))
    if beyond:
        return failed(f"only layers {list(takes)} packed", f"layers {beyond} packed, too")
    for index in set(takes) - set(packed):
        if index in subject.willing and not kept[index].detail.startswith(MethodRefused.__name__):
            return failed(f"layer {index} packed, or refused by the method", f"the engine raised {kept[index].detail}")
    fresh, own = subject.caches(), engine.fresh_caches(subject.model)
    for index in set(range(len(own))) - set(packed):
        if type(fresh[index]) is not type(own[index]):
            return failed(f"layer {index} with a {type(own[index]).__name__}", type(fresh[index]).__name__)
    return refused(subject.refusal) if subject.refusal is not None else unless([])


def bytes_are_those_held(subject: Subject) -> Verdict:
    """`nbytes` is the bytes of all reachable arrays and the method's arithmetic: empty, after prompt and decode."""
    problems = []
    for seen in _life(subject):
        declared = subject.declared(seen.layer, seen.runs) if seen.runs else 0
        if not seen.nbytes == seen.held == declared:
            told = f"nbytes {seen.nbytes}, held {seen.held}, the method's arithmetic {declared}"
            problems.append((f"one figure of bytes in layer {seen.layer} after {seen.tokens} tokens", told))
    return unless(problems)


def offset_is_the_position(subject: Subject) -> Verdict:
    """Tokens given so far, whatever a cache has packed or dropped; the engine turns it into rotary positions."""
    return unless(
        [
            (f"offset {seen.tokens} in layer {seen.layer}", str(seen.offset))
            for seen in _life(subject)
            if seen.offset != seen.tokens
        ]
    )


class _Seen(NamedTuple):
    """One packed cache at one moment."""

    layer: int
    runs: tuple[tuple[int, int], ...]
    """The calls that it has had, as (tokens, calls)."""
    nbytes: int
    held: int
    offset: int

    @property
    def tokens(self) -> int:
        return sum(tokens * calls for tokens, calls in self.runs)


@functools.lru_cache(maxsize=8)
def _life(subject: Subject) -> tuple[_Seen, ...]:
    """Every packed cache unused, with the prompt in chunks of 64, and some single tokens later."""
    count = subject.prompt_tokens
    chunks = tuple(run for run in ((_CHUNK, count // _CHUNK), (count % _CHUNK, 1)) if all(run))
    caches = subject.caches()
    seen = _look(subject, caches, ())
    subject.logits(caches, subject.text(), _CHUNK)
    seen += _look(subject, caches, chunks)
    subject.logits(caches, subject.text(count, _STEPS), 1)
    return tuple(seen + _look(subject, caches, (*chunks, (1, _STEPS))))


def _look(subject: Subject, caches: list[Any], runs: tuple[tuple[int, int], ...]) -> list[_Seen]:
    return [
        _Seen(index, runs, int(cache.nbytes), held_bytes(cache), int(cache.offset))
        for index, cache in subject.packed(caches).items()
    ]


def masks_are_over_true_positions(subject: Subject) -> Verdict:
    """The mask for the next tokens, with a window and without, is what the engine's KVCache of that offset makes."""
    if subject.method.drops_tokens:
        return not_applicable("a cache that drops tokens may number columns as it likes; its logits are compared")
    import mlx.core as mx

    caches = subject.held
    engine_cache = models.plain_cache(subject.prompt_tokens)
    problems = []
    for index, cache in subject.packed(caches).items():
        for tokens, window in ((1, None), (4, None), (1, 8), (4, 8)):
            asked = {"return_array": True, "window_size": window}
            seen, expected = cache.make_mask(tokens, **asked), engine_cache.make_mask(tokens, **asked)
            if (seen is None) != (expected is None) or not (seen is None or mx.array_equal(seen, expected)):
                what = f"layer {index}: the mask of {tokens} tokens with a window of {window}"
                problems.append((f"{what} as the engine's", "another mask"))
    return unless(problems)
