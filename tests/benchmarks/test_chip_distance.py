"""How far Apple's chips are apart, held against their published bandwidths."""

from __future__ import annotations

import json
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.benchmarks.benchmark_db import BenchmarkRecord
from veloxquant.benchmarks.chip_distance import BANDWIDTHS, TIERS, Chip, apple_chip, closeness
from veloxquant.benchmarks.matching import THRESHOLD, chip_factor, chip_key
from veloxquant.benchmarks.selection import Selection
from veloxquant.hardware import chips

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "apple_chips.json").read_text())
PAIRS = list(combinations_with_replacement(ROWS, 2))
USABLE_RATIO = 1.5
CHIPS = st.tuples(st.integers(1, 20), st.integers(0, 3))


@given(
    st.one_of(
        st.from_regex(r"(?i)\s?(apple\s{1,2})?m[0-9]{1,3}(\s{0,2}(base|pro|max|ultra|pro max))?", fullmatch=True),
        st.sampled_from([name for name, _ in chips.table()]),
        st.text(max_size=12),
    )
)
def test_what_is_an_apple_chip_to_the_chip_table_is_one_here(name: str) -> None:
    """Records and machines are read by one grammar, though by two pieces of code: same generation, same tier."""
    parsed = chips.parse(name)
    if parsed is not None:
        assert apple_chip(name) == (parsed.generation, chips.TIERS.index(parsed.tier))


@pytest.mark.parametrize(
    "name",
    [
        "M4Max",
        "M4-Max",
        "m4_max",
        "apple-m4-max",
        "AppleM4Max",
        "Apple M4\u00a0Max",
        "Apple M4 Max 128GB",
        "M4 Max, 128 GB",
        "M4 Max (16-core CPU)",
        "M4 Max (16-core CPU) (40 cores GPU) 48GiB",
    ],
)
def test_people_spell_a_chip_as_they_like(name: str) -> None:
    """Run together, with hyphens, with what else is in the machine: it is an M4 Max, and equal to one."""
    assert apple_chip(name) == (4, 2)
    assert chip_factor(name, "Apple M4 Max") == chip_factor("m4 max", name) == 1.0
    assert chip_factor(name, "M4") < THRESHOLD
    assert chip_key(name) == chip_key("Apple M4 Max")
    assert Selection(chip=name).takes(BenchmarkRecord("a", "m", "x", chip="Apple M4 Max"))


@pytest.mark.parametrize(
    "name",
    ["M4 Maximum", "M4 Pro Max", "M4 Max M4", "EPYC M4", "AMD EPYC 7M12", "m3-7Y32", "M4 128", "M4Maxi", "M", "M0 Max"],
)
def test_what_is_not_plainly_an_apple_chip_is_none(name: str) -> None:
    """A name that says something more, or two things, is left alone."""
    assert apple_chip(name) is None


SHIPPED = json.loads(Path(chips.__file__).with_name("data").joinpath("apple_chips.json").read_text())["chips"]


@pytest.mark.parametrize("rows", [ROWS, SHIPPED], ids=["published", "shipped"])
def test_the_bandwidths_are_those_of_the_chip_table(rows: list[dict[str, Any]]) -> None:
    """Narrowest and widest variant of each name: the published table, and the one that the hardware room ships."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        generation, tier = apple_chip(row["chip"]) or (0, 0)
        found.setdefault(TIERS[tier], {}).setdefault(generation, []).append(row["bandwidth_gbps"])
    assert {tier: {n: (min(b), max(b)) for n, b in of.items()} for tier, of in found.items()} == BANDWIDTHS


def test_chips_far_apart_in_bandwidth_never_pass() -> None:
    """Of all pairs, variants by GPU cores included: above 1.5 times the bandwidth only the very name passes."""
    for one, two in PAIRS:
        apart = max(one["bandwidth_gbps"], two["bandwidth_gbps"]) / min(one["bandwidth_gbps"], two["bandwidth_gbps"])
        if one["chip"] != two["chip"] and apart > USABLE_RATIO:
            assert chip_factor(one["chip"], two["chip"]) < THRESHOLD, (one["chip"], two["chip"])


def test_neighbouring_generations_near_in_bandwidth_pass() -> None:
    """A fleet of M4 and M5 (120 and 153 GB/s) shares what it measures; M3 Pro and M4 Pro, 1.82 times apart, do not."""
    for one, two in (("M2", "M3"), ("M3", "M4"), ("M4", "M5"), ("M1 Pro", "M2 Pro"), ("M4 Pro", "M5 Pro")):
        assert chip_factor(one, two) >= THRESHOLD
    assert chip_factor("M3 Pro", "M4 Pro") < THRESHOLD


def test_m1_and_m4_are_three_generations_and_76_percent_apart() -> None:
    """0.9 for each generation, and 68.25 / 120 by way of M2 and M3, each of 100 GB/s."""
    assert chip_factor("M1", "M4") == pytest.approx(0.9**3 * 68.25 / 120)


@given(CHIPS, CHIPS)
def test_closeness_is_symmetric_and_within_bounds(one: Chip, two: Chip) -> None:
    """1 for the same chip alone."""
    assert 0 < closeness(one, two) == closeness(two, one) <= 1
    assert (closeness(one, two) == 1) == (one == two)


@given(CHIPS, CHIPS, st.integers(0, 12), st.integers(0, 3))
def test_a_step_away_never_brings_chips_nearer(one: Chip, two: Chip, generations: int, tiers: int) -> None:
    """In generation and in tier, upwards and downwards, listed or not."""
    up, down = two[0] + generations, two[0] - generations
    if two[0] >= one[0]:
        assert closeness(one, (up, two[1])) <= closeness(one, two)
    elif down >= 1:
        assert closeness(one, (down, two[1])) <= closeness(one, two)
    nearer, further = sorted((abs(one[1] - two[1]), tiers))
    same = one[0]
    for low, high in ((one[1] + nearer, one[1] + further), (one[1] - nearer, one[1] - further)):
        if 0 <= min(low, high) <= max(low, high) <= 3:
            assert closeness(one, (same, high)) <= closeness(one, (same, low))
