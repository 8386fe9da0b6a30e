"""What mlx-lm reads off a cache, and what a list of caches must be before the first token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from veloxquant.caches.held import arrays, held_bytes
from veloxquant.errors import VeloxError
from veloxquant.measure.conformance.outcome import failed, refused, unless
from veloxquant.methods.method import LayerSpec

if TYPE_CHECKING:
    from veloxquant.measure.conformance.outcome import Verdict
    from veloxquant.measure.conformance.subject import Subject
    from veloxquant.profiles.model import CachePart

_UNLIKELY_WIDTHS = (7, 80, 100, 2049)
"""Of which at least some cannot be kept in groups, words or rotations."""
_NEEDED = ("update_and_fetch", "make_mask", "is_trimmable", "trim", "size", "empty", "from_state")


def attributes_are_the_engines(subject: Subject) -> Verdict:
    """No length and no truth value, `bits` and `group_size` together or not at all, all that mlx-lm calls."""
    fresh = {index: subject.build(index, subject.part(index)) for index in subject.willing}
    if not fresh:
        return refused(str(subject.refusal))
    used = subject.packed(subject.held) if subject.probe.packed else {}
    problems: list[tuple[str, str]] = []
    for index, cache in (*fresh.items(), *used.items()):
        where = f"layer {index}, a {type(cache).__name__}"
        falsy = [name for name in ("__len__", "__bool__") if hasattr(type(cache), name)]
        problems += [(f"no {name} in {where}: `cache or default` would drop it", "there is one") for name in falsy]
        if hasattr(cache, "bits") != hasattr(cache, "group_size"):
            problems.append((f"bits and group_size together in {where}", "one of them alone"))
        missing = [name for name in _NEEDED if not callable(getattr(cache, name, None))]
        problems += [(f"{where} with {name}()", "none") for name in missing]
    return unless(problems)


def flags_are_kept(subject: Subject) -> Verdict:
    """`batchable` is whether the caches have a `merge`, `trimmable` what `is_trimmable()` says, empty and filled.

    mlx-lm takes a `merge` for the promise that a batch works, and asks an empty cache whether it can be trimmed.
    """
    problems = []
    for caches, when in ((subject.caches(), "empty"), (subject.held, "filled")):
        for index, cache in subject.packed(caches).items():
            found = {"batchable": hasattr(cache, "merge"), "trimmable": cache.is_trimmable()}
            problems += [
                (f"{flag} = {not value} in layer {index}, as the method says", f"{value} of the cache, {when}")
                for flag, value in found.items()
                if value is not getattr(subject.method, flag)
            ]
    return unless(problems)


def each_request_gets_its_own(subject: Subject) -> Verdict:
    """Two lists share nothing: using one leaves the other empty."""
    first, second = subject.caches(), subject.caches()
    subject.logits(first, subject.text(count=9))
    for index, cache in subject.packed(second).items():
        if cache is first[index]:
            return failed(f"a fresh cache for each request in layer {index}", "the same object twice")
        if not cache.empty() or cache.offset or held_bytes(cache):
            return failed(f"an empty cache in layer {index} after another request", f"offset {cache.offset}")
        shared = {id(array) for array in arrays(cache)} & {id(array) for array in arrays(first[index])}
        if shared:
            return failed(f"arrays of its own in layer {index}", f"{len(shared)} shared with another request")
    inside = [id(cache) for cache in subject.packed(second).values()]
    return unless([] if len(set(inside)) == len(inside) else [("a cache for each layer", "one for several")])


def refusals_come_first(subject: Subject) -> Verdict:
    """A width that the planning half refuses, `build` refuses, typed; one that it takes, is built."""
    index = subject.architecture.takes[0] if subject.architecture.takes else 0
    part = subject.layers[index].packable
    assert part is not None  # noqa: S101 -- every architecture of the table keeps K and V that grow
    for width in _UNLIKELY_WIDTHS:
        changed = msgspec.structs.replace(part, key_width=width, value_width=width)
        told = _planned_refusal(subject, index, changed)
        error = _error_of(subject, index, changed)
        if told is not None and error is None:
            return failed(f"a refusal from build at width {width}: {told}", "a cache")
        if told is None and error is not None:
            return failed(f"a cache at width {width}, which refuses() takes", f"{type(error).__name__}: {error}")
        if error is not None and not isinstance(error, VeloxError):
            return failed(f"a typed refusal of width {width}", f"{type(error).__name__}: {error}")
    return unless([])


def _planned_refusal(subject: Subject, index: int, part: CachePart) -> str | None:
    """What the planning half says of a part, parameters of its own included."""
    told = subject.method.refuses(subject.variant, part)
    if told is not None:
        return told[1]
    try:
        told = subject.method.refuses(subject.fitted({index: part})[index], part)
    except VeloxError as error:
        return error.message
    return None if told is None else told[1]


def _error_of(subject: Subject, index: int, part: CachePart) -> Exception | None:
    """What building for a part raises, or the first tokens through it."""
    import mlx.core as mx

    try:
        cache = subject.method.build(LayerSpec(index=index, part=part), subject.fitted({index: part})[index])
        cache.update_and_fetch(
            mx.ones((1, part.heads, 3, part.key_width)), mx.ones((1, part.heads, 3, part.value_width))
        )
        mx.eval(cache.state)
    except Exception as error:  # noqa: BLE001 -- a stranger's cache: its kind is what is asked
        return error
    return None
