"""Chip names by grammar, facts by name and GPU core count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.hardware import chips

FACTS = json.loads((Path(__file__).parents[1] / "data" / "apple_chips.json").read_text())
IDS = [f"{row['chip']}-{row['gpu_cores']}" for row in FACTS]

# GPU core counts of Macs as in the technical specifications of each model (https://support.apple.com/docs/mac).
PUBLISHED = {
    1: {"base": (7, 8), "Pro": (14, 16), "Max": (24, 32), "Ultra": (48, 64)},
    2: {"base": (8, 10), "Pro": (16, 19), "Max": (30, 38), "Ultra": (60, 76)},
    3: {"base": (8, 10), "Pro": (14, 18), "Max": (30, 40), "Ultra": (60, 80)},
    4: {"base": (8, 10), "Pro": (16, 20), "Max": (32, 40)},
    5: {"base": (8, 10), "Pro": (16, 20), "Max": (32, 40)},
}


@pytest.mark.parametrize(
    ("name", "generation", "tier"),
    [
        ("Apple M3 Max", 3, "Max"),
        ("Apple M10 Pro", 10, "Pro"),
        ("Apple M1", 1, "base"),
        ("Apple M2 Ultra", 2, "Ultra"),
        ("M4 Max", 4, "Max"),
        ("m5 pro", 5, "Pro"),
        ("  Apple  M4 ", 4, "base"),
        ("Apple M99 Ultra", 99, "Ultra"),
    ],
)
def test_apple_m_names_are_parsed(name: str, generation: int, tier: str) -> None:
    """Generation and tier of every form in which a name is written."""
    parsed = chips.parse(name)
    assert parsed is not None
    assert (parsed.generation, parsed.tier) == (generation, tier)
    assert parsed.name == f"Apple M{generation}" + ("" if tier == "base" else f" {tier}")


@pytest.mark.parametrize(
    "name",
    [
        "AMD EPYC 7M12",
        "Intel(R) Core(TM) m3-7Y32",
        "Intel(R) Core(TM) m3-7Y32 CPU @ 1.10GHz",
        "Apple A17 Pro",
        "M4Max2",
        "M4Max",
        "Apple M0",
        "Apple M03",
        "Apple M100",
        "Apple M4 Pro Max",
        "Apple M1 (Virtual)",
        "Apple M٣",
        "AppleM3",
        "Apple processor",
        "",
        None,
        3,
    ],
)
def test_what_only_contains_an_m_is_no_apple_m_chip(name: object) -> None:
    """Names are matched as a whole."""
    assert chips.parse(name) is None


@given(st.text())
def test_parse_takes_any_text(name: str) -> None:
    """Any text gives a name that parses to itself, or None."""
    parsed = chips.parse(name)
    assert parsed is None or chips.parse(parsed.name) == parsed


@pytest.mark.parametrize("row", FACTS, ids=IDS)
def test_every_row_of_the_facts_is_looked_up_by_name_and_core_count(row: dict[str, object]) -> None:
    """Bandwidth, achieved figures, memory options and source are those of the facts file, for each variant."""
    facts = chips.lookup(f"Apple {row['chip']}", int(str(row["gpu_cores"])))
    assert facts is not None
    assert facts.bandwidth_gbps == row["bandwidth_gbps"]
    assert list(facts.memory_options_gb) == row["memory_options_gb"]
    assert str(row["source_url"]) in facts.sources["bandwidth_gbps"]
    assert (facts.confidence == 1) == (row["confidence"] == "published")
    if "achieved_prefill_tflops" in row:
        assert facts.prefill_tflops == row["achieved_prefill_tflops"]
    efficiency = {k: row[f"decode_eff_{k}"] for k in ("f16", "q8", "q4") if f"decode_eff_{k}" in row}
    if efficiency:
        assert facts.decode_efficiency == efficiency


def test_table_has_every_variant_of_macs_from_m1_to_m5() -> None:
    """No published Mac variant is missing, and no M4 Ultra, which never was, is there."""
    rows = set(chips.table())
    for generation, tiers in PUBLISHED.items():
        for tier, cores in tiers.items():
            name = f"Apple M{generation}" + ("" if tier == "base" else f" {tier}")
            assert {(name, count) for count in cores} <= rows
    assert not [name for name, _ in rows if name == "Apple M4 Ultra"]
    assert len(rows) == len(chips.table())


@pytest.mark.parametrize(
    ("name", "cores", "gbps"),
    [("Apple M3 Max", 30, 300), ("Apple M3 Max", 40, 400), ("Apple M4 Max", 32, 410), ("Apple M4 Max", 40, 546)],
)
def test_core_count_decides_between_bus_widths(name: str, cores: int, gbps: float) -> None:
    """M3 Max and M4 Max exist with two buses each (Apple's technical specifications)."""
    facts = chips.lookup(name, cores)
    assert facts is not None
    assert facts.bandwidth_gbps == gbps


def test_unknown_core_count_takes_the_narrower_variant_and_says_so() -> None:
    """Without a count, or with one between two variants, the careful figure is used."""
    for cores in (None, 35, 12):
        facts = chips.lookup("Apple M3 Max", cores)
        assert facts is not None
        assert (facts.bandwidth_gbps, facts.gpu_cores) == (300, 30)
        assert "30 or 40" in facts.sources["bandwidth_gbps"]
        assert facts.confidence < 1


def test_unknown_generation_is_extrapolated_with_low_confidence_and_says_so() -> None:
    """M10 Pro is above the newest known Pro, stays below twice its bandwidth, and is marked."""
    facts, newest = chips.lookup("Apple M10 Pro"), chips.lookup("Apple M5 Pro", 16)
    assert facts is not None
    assert newest is not None
    assert newest.bandwidth_gbps < facts.bandwidth_gbps < 2 * newest.bandwidth_gbps
    assert facts.extrapolated
    assert facts.confidence < 0.5
    assert all("extrapolated" in source for source in facts.sources.values())


def test_generation_between_two_known_ones_lies_between_them() -> None:
    """There is no M4 Ultra: its figure is the geometric mean of 819 and 1200 GB/s, 991.4."""
    facts = chips.lookup("Apple M4 Ultra", 80)
    assert facts is not None
    assert facts.bandwidth_gbps == pytest.approx((819 * 1200) ** 0.5, abs=0.05)
    assert facts.extrapolated


@given(st.integers(1, 99), st.sampled_from(chips.TIERS), st.one_of(st.none(), st.integers(1, 4096)))
def test_every_apple_m_name_has_facts(generation: int, tier: str, cores: int | None) -> None:
    """Any generation, tier and core count gives positive figures with a source each."""
    facts = chips.lookup(f"Apple M{generation}" + ("" if tier == "base" else f" {tier}"), cores)
    assert facts is not None
    assert facts.bandwidth_gbps > 0
    assert facts.prefill_tflops is not None
    assert all(0 < share <= 1 for share in facts.decode_efficiency.values())
    assert {"bandwidth_gbps", "prefill_tflops", "decode_efficiency"} == set(facts.sources)


def test_other_chips_have_no_facts() -> None:
    """No Apple M chip, no row."""
    assert chips.lookup("AMD EPYC 7M12", 8) is None


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("applegpu_g13g", (1, "base")),
        ("applegpu_g14d", (2, "Ultra")),
        ("applegpu_g16s", (4, None)),
        ("applegpu_g16p", None),
        ("applegpu_g09g", None),
        ("x86_64", None),
        (None, None),
    ],
)
def test_architecture_names_generation_and_sometimes_tier(architecture: str | None, expected: object) -> None:
    """The letter s covers Pro and Max; p is a phone."""
    assert chips.parse_architecture(architecture) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Intel(R) Core(TM) m3-7Y32 CPU @ 1.10GHz", "Intel Core m3-7Y32"),
        ("AMD EPYC 7763 64-Core Processor", "AMD EPYC 7763"),
        ("AMD Ryzen 7 5800U with Radeon Graphics", "AMD Ryzen 7 5800U"),
        ("apple m4 max", "Apple M4 Max"),
    ],
)
def test_names_lose_vendor_noise(name: str, expected: str) -> None:
    """What is left is the name people use."""
    assert chips.clean(name) == expected
