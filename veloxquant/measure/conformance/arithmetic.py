"""What a cache says it holds is what it holds, and what its method's arithmetic gives; offsets are positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.caches.held import held_bytes
from veloxquant.measure.conformance import models
from veloxquant.measure.conformance.outcome import failed, not_applicable, refused, unless
from veloxquant.models.trace_worker import engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from veloxquant.measure.conformance.outcome import Verdict
    from veloxquant.measure.conformance.subject import Subject

STEPS = 12


def layers_are_the_methods_or_the_engines(subject: Subject) -> Verdict:
    """Each layer that can be packed is, or the method refuses it; windows, states and latents keep the engine's."""
    takes, packed = subject.architecture.takes, subject.probe.packed
    kept = {layer.index: layer for layer in subject.probe.kept}
    beyond = sorted(set(packed) - set(takes))
    if beyond:
        return failed(f"only layers {list(takes)} packed", f"layers {beyond} packed, too")
    for index in set(takes) - set(packed):
        if index in subject.willing:
            return failed(f"layer {index} packed, or refused by the method", f"the engine raised {kept[index].detail}")
    fresh, own = subject.caches(), engine.fresh_caches(subject.model)
    for index in set(range(len(own))) - set(packed):
        if type(fresh[index]) is not type(own[index]):
            return failed(f"layer {index} with a {type(own[index]).__name__}", type(fresh[index]).__name__)
    return refused(subject.refusal) if subject.refusal is not None else unless([])


def bytes_are_those_held(subject: Subject) -> Verdict:
    """`nbytes` is the bytes of all reachable arrays and the method's arithmetic: empty, after prompt and decode."""
    count = subject.prompt_tokens
    caches = subject.caches()
    problems = [
        (f"nbytes 0 of an unused cache in layer {index}", f"nbytes {cache.nbytes}, held {held_bytes(cache)}")
        for index, cache in subject.packed(caches).items()
        if cache.nbytes or held_bytes(cache)
    ]
    subject.logits(caches, subject.text(), 64)
    cut = ((64, count // 64), (count % 64, 1))
    problems += _bytes(subject, caches, cut, f"after {count} tokens in chunks of 64")
    subject.logits(caches, subject.text(count, STEPS), 1)
    problems += _bytes(subject, caches, (*cut, (1, STEPS)), f"after {STEPS} tokens more")
    return unless(problems)


def _bytes(
    subject: Subject, caches: list[Any], runs: tuple[tuple[int, int], ...], when: str
) -> Iterator[tuple[str, str]]:
    runs = tuple(run for run in runs if all(run))
    for index, cache in subject.packed(caches).items():
        held, declared = held_bytes(cache), subject.declared(index, runs)
        if not cache.nbytes == held == declared:
            yield (
                f"one figure of bytes for layer {index} {when}",
                f"nbytes {cache.nbytes}, held {held}, method {declared}",
            )


def offset_is_the_position(subject: Subject) -> Verdict:
    """Tokens given so far, whatever a cache has packed or dropped; the engine turns it into rotary positions."""
    count = subject.prompt_tokens
    caches = subject.filled()
    problems = _offsets(subject, caches, count)
    subject.logits(caches, subject.text(count, STEPS), 1)
    return unless([*problems, *_offsets(subject, caches, count + STEPS)])


def _offsets(subject: Subject, caches: list[Any], count: int) -> list[tuple[str, str]]:
    packed = subject.packed(caches)
    return [
        (f"offset {count} in layer {index}", str(cache.offset))
        for index, cache in packed.items()
        if int(cache.offset) != count
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
