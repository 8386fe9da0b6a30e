"""What a plan says about layers: the layout it found, what its variant packs, what of the bytes does not grow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from veloxquant.ctl.layers import lines
from veloxquant.planner.result import MemoryTerm

if TYPE_CHECKING:
    from types import SimpleNamespace

    from veloxquant.planner.result import Candidate, Plan

NONE = {"total": 0, "growing": 0, "windowed": 0, "recurrent": 0, "latent": 0, "shared": 0}


def found(plan: Plan, *, bytes_per_token: float = 0.0, state_bytes: int = 0, **counts: int) -> Plan:
    """The plan of a model with this layout."""
    layers = {**NONE, **counts, "bytes_per_token": bytes_per_token, "state_bytes": state_bytes}
    return msgspec.structs.replace(plan, model={**plan.model, "layers": layers})


def choosing(plan: Plan, *, packed: int, kept: int, fixed: int = 0, terms: tuple[MemoryTerm, ...] = ()) -> Plan:
    """The plan whose choice packs so many layers and holds so much that does not grow."""
    assert plan.chosen is not None
    chosen: Candidate = msgspec.structs.replace(
        plan.chosen,
        layers=msgspec.structs.replace(plan.chosen.layers, packed=packed, kept=kept),
        memory=msgspec.structs.replace(plan.chosen.memory, fixed_bytes=fixed, terms=terms),
    )
    return msgspec.structs.replace(plan, chosen=chosen)


def term(kind: str, layers: int, size: int, **changes: Any) -> MemoryTerm:
    """Some layers of one kind that take `size` bytes in one sequence."""
    facts: dict[str, Any] = {"heads": 8, "key_width": 256, "value_width": 256, "key_bits": 16, "value_bits": 16}
    facts |= {"packed": False, "slots": 1024, "fixed_bytes": 0, **changes}
    return MemoryTerm(layers=layers, kind=kind, bytes=size, **facts)


WINDOWS = 40 * 1024 * 8 * 256 * 2 * 2
"""gemma-3-12b: 40 layers of 1,024 slots x 8 heads x 256 x (K, V) x two bytes = 320 MiB."""
STATES = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
"""24 layers of a 32 x 128 x 128 state in four bytes and three rows of 8,192 in two bytes = 49.125 MiB."""


@pytest.mark.parametrize(
    ("counts", "packed", "expected"),
    [
        ({"total": 61, "growing": 61, "latent": 61}, 0, "61: 61 latent; affine4-g64 packs 0, keeps 61"),
        ({"total": 48, "growing": 8, "windowed": 40}, 8, "48: 8 growing, 40 windows; affine4-g64 packs 8, keeps 40"),
        (
            {"total": 64, "growing": 16, "recurrent": 48},
            16,
            "64: 16 growing, 48 recurrent; affine4-g64 packs 16, keeps 48",
        ),
        (
            {"total": 36, "growing": 36, "recurrent": 36},
            0,
            "36: 36 growing, 36 recurrent (36 are both); affine4-g64 packs 0, keeps 36",
        ),
        (
            {"total": 52, "growing": 6, "recurrent": 23},
            6,
            "52: 6 growing, 23 recurrent, 23 without a cache; affine4-g64 packs 6, keeps 46",
        ),
        (
            {"total": 20, "growing": 4, "windowed": 16, "shared": 15},
            4,
            "20: 4 growing, 16 windows, 15 more share another's; affine4-g64 packs 4, keeps 16",
        ),
    ],
)
def test_the_layout_that_was_found_is_said_with_counts(
    example: SimpleNamespace, counts: dict[str, int], packed: int, expected: str
) -> None:
    """Kinds and counts of the engine's layers, and how many of them the choice packs."""
    plan = choosing(found(example.plan, **counts), packed=packed, kept=counts["total"] - packed)
    assert next(iter(lines(plan))) == f"layers     {expected}"


def test_bytes_that_do_not_grow_are_stated_apart_and_by_kind(example: SimpleNamespace) -> None:
    """Windows and states of all sequences beside the growth of one token."""
    terms = (term("kv", 8, 2**20, packed=True), term("window", 40, WINDOWS), term("state", 24, STATES))
    plan = choosing(found(example.plan), packed=8, kept=64, fixed=WINDOWS + STATES, terms=terms)
    assert list(lines(plan))[1] == (
        "bytes      affine4-g64: 36,864 a token; 49.1 MiB of states, 320 MiB of windows that do not grow"
    )
    several = choosing(found(example.plan), packed=8, kept=64, fixed=4 * (WINDOWS + STATES), terms=terms)
    four = {**plan.workload, "batch_size": 2, "num_concurrent_requests": 2}
    assert list(lines(msgspec.structs.replace(several, workload=four)))[1] == (
        "bytes      affine4-g64: 36,864 a token and sequence; 196.5 MiB of states, 1.25 GiB of windows that do not grow"
    )


def test_fixed_bytes_that_the_kinds_do_not_explain_are_one_sum(example: SimpleNamespace) -> None:
    """A method's own fixed part, or a record, changes the sum: then no kind is named."""
    plan = choosing(found(example.plan), packed=8, kept=24, fixed=STATES + 2**20, terms=(term("state", 24, STATES),))
    assert list(lines(plan))[1] == "bytes      affine4-g64: 36,864 a token; 50.1 MiB that do not grow"


def test_without_a_variant_the_engines_own_cache_is_described(example: SimpleNamespace) -> None:
    """Nothing fits: the layout and the 16-bit bytes are still what the answer rests on."""
    plan = found(example.no_fit, total=32, growing=8, recurrent=24, bytes_per_token=32768.0, state_bytes=STATES)
    assert list(lines(plan)) == [
        "layers     32: 8 growing, 24 recurrent",
        "bytes      32,768 a token in 16 bits; 49.1 MiB a sequence that do not grow",
    ]
