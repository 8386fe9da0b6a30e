"""Several requests at once by mlx-lm's BatchGenerator: each row as if it were alone, and all of them packed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from veloxquant.caches.held import arrays, held_bytes
from veloxquant.measure.conformance import models
from veloxquant.measure.conformance.generation import PREFILL_STEP, Made, greedy, noise_shown, same_tokens
from veloxquant.measure.conformance.outcome import failed, not_applicable, unless

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from veloxquant.measure.conformance.models import Own
    from veloxquant.measure.conformance.outcome import Verdict
    from veloxquant.measure.conformance.subject import Subject

_SHARES = (1.0, 0.3, 0.65, 0.05, 0.44, 0.73, 0.22, 1.0)
"""Lengths of the prompts, over that of the subject's."""
_BOOKKEEPING_DIMENSIONS = 2
"""Positions and lengths of rows are arrays of so many dimensions at most; K and V have more."""
_BOOKKEEPING_BYTES = 64
"""For each row, at most."""


def rows_are_single_runs(subject: Subject) -> Verdict:
    """2 and 8 prompts of unlike lengths: tokens and logits of each row are those of the prompt alone."""
    stopped = _no_batch(subject)
    if stopped is not None:
        return stopped
    problems: list[tuple[str, str]] = []
    for rows in subject.effort.batches:
        prompts = _prompts(subject, rows)
        counts = tuple(subject.effort.generated - row % 3 for row in range(rows))
        made = _batched(subject, prompts, counts)
        shown = _noise_shown(models.Own(subject.architecture.name), prompts, counts)
        for row, prompt in enumerate(prompts):
            told = same_tokens(subject, made[row], greedy(subject, prompt, counts[row]), shown)
            if told is not None:
                problems.append((f"row {row} of {rows} ({len(prompt)} tokens) as the prompt alone", told))
            problems += _extracted(subject, made[row].caches, len(prompt) + counts[row])
    return unless(problems)


def _extracted(subject: Subject, caches: list[Any], tokens: int) -> Iterator[tuple[str, str]]:
    """A row that has ended is a single cache again, which a server keeps for the next prompt."""
    single = subject.caches()
    for index, cache in subject.packed(caches).items():
        if type(cache) is not type(single[index]):
            yield f"a {type(single[index]).__name__} extracted from layer {index}", type(cache).__name__
        elif int(cache.offset) != tokens or cache.nbytes != held_bytes(cache):
            seen = f"offset {cache.offset}, nbytes {cache.nbytes}, held {held_bytes(cache)}"
            yield f"an extracted row of {tokens} tokens whose nbytes are held in layer {index}", seen


def batches_stay_packed(subject: Subject) -> Verdict:
    """K and V of a batch hold rows x what the method's arithmetic gives for the longest, and `nbytes` is all held."""
    stopped = _no_batch(subject)
    if stopped is not None:
        return stopped
    for rows in subject.effort.batches:
        prompts = _prompts(subject, rows)
        longest = max(map(len, prompts))
        runs = ((longest - 1, 1), (1, 3))
        for index, cache in subject.packed(_live(subject, prompts, decoded=3)).items():
            told = _unlike_bytes(cache, rows, subject.declared(index, runs))
            if told is not None:
                return failed(f"layer {index} of {rows} rows packed, {longest + 2} tokens in the longest", told)
    return unless([])


def _unlike_bytes(cache: Any, rows: int, declared: int) -> str | None:
    found = list(arrays(cache))
    growing = sum(array.nbytes for array in found if array.ndim > _BOOKKEEPING_DIMENSIONS)
    other = sum(array.nbytes for array in found) - growing
    if cache.nbytes != growing + other:
        return f"nbytes {cache.nbytes}, held {growing + other} in a {type(cache).__name__}"
    if growing != rows * declared or other > rows * _BOOKKEEPING_BYTES:
        return f"{growing} bytes and {other} beside them in a {type(cache).__name__}, not {rows} x {declared}"
    return None


def _no_batch(subject: Subject) -> Verdict | None:
    """Why nothing is batched, None where it is."""
    caches = subject.caches()
    if not any(hasattr(cache, "merge") for cache in subject.packed(caches).values()):
        return not_applicable("its caches have no merge")
    stuck = [type(cache).__name__ for cache in caches if not hasattr(cache, "merge")]
    return not_applicable(f"one of the list's caches, a {stuck[0]}, has no merge") if stuck else None


def _prompts(subject: Subject, rows: int) -> tuple[tuple[int, ...], ...]:
    count = subject.prompt_tokens
    return tuple(subject.text(9 * row, max(2, round(share * count))) for row, share in enumerate(_SHARES[:rows]))


@functools.cache
def _noise_shown(own: Own, prompts: tuple[tuple[int, ...], ...], counts: tuple[int, ...]) -> float:
    """How far the engine's own batch is from its own single runs, in any row: which one is hit is chance."""
    made = _batched(own, prompts, counts)
    return max(noise_shown(made[row], greedy(own, prompt, counts[row])) for row, prompt in enumerate(prompts))


def _generator(subject: Subject | Own, prompts: Sequence[tuple[int, ...]], counts: Sequence[int], step: int) -> Any:
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(subject.model, prefill_step_size=step)
    generator.insert(
        [list(prompt) for prompt in prompts], max_tokens=list(counts), caches=[subject.caches() for _ in prompts]
    )
    return generator


def _batched(subject: Subject | Own, prompts: Sequence[tuple[int, ...]], counts: Sequence[int]) -> list[Made]:
    """What each row made, and the caches it left. Rows enter and leave the batch one by one."""
    generator = _generator(subject, prompts, counts, PREFILL_STEP)
    made = [Made([], []) for _ in prompts]
    while responses := generator.next_generated():
        for one in responses:
            made[one.uid].tokens.append((int(one.token), one.logprobs))
            if one.prompt_cache is not None:
                made[one.uid].caches.extend(one.prompt_cache)
    generator.close()
    return made


def _live(subject: Subject, prompts: Sequence[tuple[int, ...]], decoded: int) -> list[Any]:
    """The caches of a batch whose prompts were given in one call, after so many single tokens of each row."""
    generator = _generator(subject, prompts, [decoded + 9] * len(prompts), subject.prompt_tokens)
    responses = 0
    while responses < decoded - 1:  # the engine is one token ahead of what it has told
        responses += bool(generator.next_generated())
    caches: list[Any] = generator._generation_batch.prompt_cache  # noqa: SLF001 -- nothing public shows live caches
    generator.close()
    return caches
