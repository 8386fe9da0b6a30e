"""Which layers a plan found, how many of them its variant packs, and what of their bytes grows with the context."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from veloxquant.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from veloxquant.planner.result import Candidate, Plan

_KINDS = (("windowed", "windows"), ("recurrent", "recurrent"), ("latent", "latent"))
_FIXED = {"window": "windows", "chunked": "windows", "state": "states"}
"""Kinds of cache parts that do not grow once they are full, as people call them."""


def lines(plan: Plan) -> Iterator[str]:
    """The layout, then the bytes: of what was chosen, else of what comes next, else of the engine's own cache."""
    found = plan.model.get("layers")
    if not found:
        return
    shown = plan.chosen or next(iter(plan.alternatives), None)
    yield f"layers     {found['total']:,}: {_counts(found)}{_packing(shown)}"
    if shown is None:
        states = f"; {format_size(found['state_bytes'])} a sequence that do not grow" if found["state_bytes"] else ""
        yield f"bytes      {found['bytes_per_token']:,.0f} a token in 16 bits{states}"
        return
    sequences = _sequences(plan)
    each = " and sequence" if sequences > 1 else ""
    yield f"bytes      {shown.label}: {shown.memory.bytes_per_token:,.0f} a token{each}{_fixed(shown, sequences)}"


def _counts(found: Mapping[str, int]) -> str:
    """The kinds of layers with their counts; a layer of several parts counts as each of them."""
    # What is latent grows, too; layers that share another's cache are not among the total.
    counts = [(found["growing"] - found["latent"], "growing"), *((found[key], word) for key, word in _KINDS)]
    other = found["total"] - sum(count for count, _ in counts)
    listed = ", ".join(f"{count:,} {word}" for count, word in [*counts, (other, "without a cache")] if count > 0)
    both = f" ({-other:,} are both)" if other < 0 else ""
    shared = f", {found['shared']:,} more share another's" if found["shared"] else ""
    return f"{listed}{both}{shared}"


def _packing(shown: Candidate | None) -> str:
    if shown is None:
        return ""
    return f"; {shown.label} packs {shown.layers.packed:,}, keeps {shown.layers.kept:,}"


def _fixed(shown: Candidate, sequences: int) -> str:
    """What does not grow, stated apart; by kind where the arithmetic says all of it."""
    fixed = shown.memory.fixed_bytes
    if not fixed:
        return ""
    kinds: Counter[str] = Counter()
    for term in shown.memory.terms:
        if term.kind in _FIXED:
            kinds[_FIXED[term.kind]] += term.bytes * sequences
    named = ", ".join(f"{format_size(size)} of {kind}" for kind, size in sorted(kinds.items()) if size)
    return f"; {named if kinds.total() == fixed else format_size(fixed)} that do not grow"


def _sequences(plan: Plan) -> int:
    work = plan.workload
    return int(work["batch_size"]) * int(work["num_concurrent_requests"])
