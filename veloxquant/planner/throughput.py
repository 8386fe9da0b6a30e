"""Tokens a second over all slots that fit: what the objective `throughput` orders by.

A slot is one request. Requests that share a decode step share each reading of the weights, so that caches which can be
batched gain with every slot that memory leaves room for. Caches which cannot be batched are served one request after
another, and more slots gain nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from veloxquant.planner.largest import last_true, most_requests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from veloxquant.planner.option import Option

DECODE_AT_ONCE = 32
"""Sequences that mlx-lm's server decodes together (its --decode-concurrency); beyond it the asked slots count."""


class Served(NamedTuple):
    """What one variant yields over `slots` requests side by side, at least the asked ones."""

    slots: int
    in_one_step: int
    """Requests decoded together: all slots of batchable caches, else one."""
    tok_s: float | None
    """Tokens a second over all sequences; None when unknown."""
    sure_tok_s: float | None
    """By the high end of the time for a token; of the engine's own cache, which is the measure, as estimated."""


def served(option: Option) -> Served:
    """The slots with the most tokens a second among those that fit and keep within max_latency_ms; if unknown, most."""
    asked = option.setting.workload.num_concurrent_requests
    counts = [asked, *_more(option, asked)] if option.shape.batchable else [asked]
    return max((_over(option, slots) for slots in counts), key=_standing)


def _standing(one: Served) -> tuple[float, int]:
    return (0.0, one.slots) if one.sure_tok_s is None else (one.sure_tok_s, -one.slots)


def _over(option: Option, slots: int) -> Served:
    found, sequences = option.decode_of(slots), slots * option.shape.batch
    together = slots if option.shape.batchable else 1
    if found is None:
        return Served(slots, together, None, None)
    sure = found.ms if option.engine_own else found.high
    return Served(slots, together, 1000 * sequences / found.ms, 1000 * sequences / sure)


def _more(option: Option, asked: int) -> list[int]:
    """Numbers of slots above the asked one that can be the best: the most that is allowed, and those with a record.

    By the roofline, and by a record moved with it, more sequences give more tokens a second. A record of just so many
    sequences may say otherwise, so that these are compared one by one; the others are then told apart by size alone.
    With more memory every number that was looked at still is, or a larger one in its place.
    """
    workload, room = option.setting.workload, option.setting.room
    top = DECODE_AT_ONCE // workload.batch_size
    if top <= asked:
        return []
    most = most_requests(option.shape, option.measured, room, workload, top)
    measured = _measured_slots(option)
    plain = [slots for slots in range(asked + 1, most + 1) if slots not in measured]
    known = [slots for slots in sorted(measured) if asked < slots <= most and _quick_enough(option, slots)]
    return [*known, *_largest_quick_enough(option, plain)]


def _measured_slots(option: Option) -> set[int]:
    """Slots at which the variant, or the engine's own cache that bounds its gain, was measured."""
    batch = option.setting.workload.batch_size
    seen = (*option.seen.usable, *option.setting.baseline_seen.usable)
    return {one.record.sequences // batch for one in seen if one.record.sequences % batch == 0}


def _largest_quick_enough(option: Option, plain: Sequence[int]) -> list[int]:
    if not plain:
        return []
    quick = last_true(lambda place: _quick_enough(option, plain[place - 1]), len(plain))
    return [plain[quick - 1]] if quick else []


def _quick_enough(option: Option, slots: int) -> bool:
    """More sequences take longer for each token: the latency ceiling holds for them too."""
    ceiling = option.setting.workload.max_latency_ms
    if ceiling is None:
        return True
    found = option.decode_of(slots)
    return found is None or found.least <= ceiling
