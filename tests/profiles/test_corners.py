"""Runs of nothing change nothing."""

from __future__ import annotations

import pytest

from veloxquant.profiles import CachePart
from veloxquant.profiles.slots import part_peak_slots, part_slots


@pytest.mark.parametrize("kind", ["kv", "window", "chunked", "concat"])
def test_runs_of_no_tokens_and_no_calls_hold_nothing(kind: str) -> None:
    """Before, between and after others; alone they hold nothing at all."""
    part = CachePart(kind=kind, engine_class="x", window=64, step=16)  # type: ignore[arg-type]
    runs, nothing = [(40, 2), (1, 30)], [(0, 5), (7, 0)]
    mixed = [nothing[0], runs[0], nothing[1], runs[1], nothing[0]]
    assert part_slots(part, mixed) == part_slots(part, runs) > 0
    assert part_peak_slots(part, mixed) == part_peak_slots(part, runs) > 0
    assert part_slots(part, nothing) == part_peak_slots(part, nothing) == 0


def test_a_state_has_no_slots() -> None:
    """However many tokens come."""
    part = CachePart(kind="state", engine_class="ArraysCache")
    assert part_peak_slots(part, [(4096, 1)]) == 0
