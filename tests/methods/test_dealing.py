"""Bits dealt out under a budget, against every way there is on small cases."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.errors import MethodRefused
from veloxquant.methods.dealing import Unit, deal, unit

BITS = (2, 3, 4, 6)
curves = st.lists(
    st.lists(st.floats(0, 10, allow_nan=False), min_size=len(BITS), max_size=len(BITS)), min_size=1, max_size=4
)
sizes = st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=4, max_size=4)


def units_of(tables: list[list[float]], numbers: list[float]) -> list[Unit]:
    """A quarter of a bit goes with each number."""
    return [
        unit(size, list(zip(BITS, table, strict=True)), lambda bits: bits + 0.25)
        for table, size in zip(tables, numbers, strict=False)
    ]


def spent(units: list[Unit], bits: list[int]) -> float:
    """Stored bits for each token."""
    return sum(one.numbers * (chosen + 0.25) for one, chosen in zip(units, bits, strict=True))


def kl(units: list[Unit], bits: list[int]) -> float:
    """What the curves say of these bits."""
    return sum(one.kl[one.bits.index(chosen)] for one, chosen in zip(units, bits, strict=True))


def best(units: list[Unit], budget: float) -> float:
    """The least divergence of all ways to stay in the budget, in bits for each token."""
    ways = (list(way) for way in itertools.product(*(one.bits for one in units)))
    return min((kl(units, way) for way in ways if spent(units, way) <= budget + 1e-9), default=math.inf)


@given(curves, sizes, st.floats(2.25, 7))
@settings(max_examples=150, deadline=None)
def test_what_is_dealt_is_within_the_budget_and_within_a_step_of_the_best(
    tables: list[list[float]], numbers: list[float], budget: float
) -> None:
    """Never over it; and no way with the largest step less to spend has less divergence."""
    units = units_of(tables, numbers)
    dealt = deal(units, budget)
    total = budget * sum(one.numbers for one in units)
    assert spent(units, dealt) <= total + 1e-6
    largest = max((one.cost(step) for one in units for step in range(len(one.bits) - 1)), default=0.0)
    assert best(units, total) - 1e-9 <= kl(units, dealt)
    assert kl(units, dealt) <= best(units, total - largest) + 1e-9


@given(curves, st.floats(2.25, 5))
@settings(max_examples=150, deadline=None)
def test_where_all_steps_cost_alike_nothing_is_better(tables: list[list[float]], budget: float) -> None:
    """Units as large as each other, and a bit a step: the best of all ways."""
    units = [
        unit(3.0, list(zip(range(2, 6), sorted(table, reverse=True), strict=True)), lambda bits: bits + 0.25)
        for table in tables
    ]
    units = [one for one in units if one.bits == (2, 3, 4, 5)]
    if units:
        assert math.isclose(
            kl(units, deal(units, budget)), best(units, budget * 3 * len(units)), rel_tol=1e-9, abs_tol=1e-9
        )


@given(curves, sizes, st.floats(2.25, 7), st.floats(0, 3))
@settings(max_examples=150, deadline=None)
def test_more_budget_never_leaves_more_divergence(
    tables: list[list[float]], numbers: list[float], budget: float, more: float
) -> None:
    """Although a dear step may take the place of several cheap ones."""
    units = units_of(tables, numbers)
    assert kl(units, deal(units, budget + more)) <= kl(units, deal(units, budget)) + 1e-9


@given(st.lists(st.floats(0, 10).map(lambda nats: round(nats, 9)), min_size=4, max_size=4))
def test_a_unit_has_falling_convex_steps_from_the_least_bits_on(table: list[float]) -> None:
    """Each step wins something, and less for its bytes than the one before; the curve is nowhere above the measured."""
    made = unit(7.0, list(zip(BITS, table, strict=True)), lambda bits: bits)
    slopes = [made.slope(step) for step in range(len(made.bits) - 1)]
    assert made.bits[0] == 2
    assert all(slope < 0 for slope in slopes)
    assert slopes == sorted(slopes)
    assert made.kl[-1] == min(table)


def test_a_case_by_hand() -> None:
    """Two units, three bits to deal: the first step of each wins 4 and 3, then 1 and 2: 3 and 4 bits are left."""
    first = unit(1.0, [(2, 5.0), (3, 1.0), (4, 0.0)], lambda bits: bits)
    second = unit(1.0, [(2, 5.0), (3, 2.0), (4, 0.0)], lambda bits: bits)
    assert deal([first, second], 3.5) == [3, 4]


def test_a_budget_below_the_least_is_refused() -> None:
    """With the least there is."""
    one = unit(4.0, [(2, 1.0)], lambda bits: bits + 0.5)
    assert deal([one], 2.5) == [2]
    with pytest.raises(MethodRefused, match=r"the least is 2\.5"):
        deal([one], 2.4)
