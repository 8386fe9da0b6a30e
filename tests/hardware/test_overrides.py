"""Overrides: this machine with a fact given, or as if on another one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.errors import InvalidParams
from veloxquant.hardware import overrides as overrides_module
from veloxquant.hardware.detect import detect
from veloxquant.hardware.overrides import is_elsewhere, with_overrides
from veloxquant.profiles import HardwareProfile

if TYPE_CHECKING:
    from veloxquant.hardware.sources import Sources

GIB = 2**30
MAC = HardwareProfile(
    chip="Apple M3 Max",
    generation=3,
    tier="Max",
    gpu_cores=30,
    performance_cores=10,
    efficiency_cores=4,
    total_memory_bytes=96 * GIB,
    working_set_bytes=77309411328,
    max_buffer_bytes=57982058496,
    active_bytes=5 * GIB,
    available_bytes=60 * GIB,
    bandwidth_gbps=300.0,
    mlx_version="0.32.4",
    mlx_lm_version="0.32.2",
    os_name="macOS",
    os_version="26.1",
    macos_version="26.1",
    backend="metal",
    sources={field: "read" for field in HardwareProfile.__struct_fields__ if field != "sources"},
)


def test_no_overrides_change_nothing() -> None:
    """An empty mapping and None values leave the profile as it is."""
    assert with_overrides(MAC, {}) is MAC
    assert with_overrides(MAC, {"chip": None, "working_set_bytes": None}) is MAC


def test_a_given_fact_replaces_only_itself() -> None:
    """Another working set on this Mac: all else stays, active memory too."""
    made = with_overrides(MAC, {"working_set_bytes": 90 * GIB})
    assert made.sources["working_set_bytes"] == "given"
    changed = [f for f in MAC.__struct_fields__ if f != "sources" and getattr(made, f) != getattr(MAC, f)]
    assert changed == ["working_set_bytes"]


@pytest.mark.parametrize(
    ("chip", "cores", "gigabytes", "bandwidth", "working_set"),
    [
        # 0.74 of 16 GiB, reported as 11.84 GB; the newest macOS comes first.
        ("Apple M2", 10, 16, 100, round(0.74 * 16 * GIB)),
        ("Apple M4 Max", 40, 128, 546, 115448725504),
        ("M4 Max", 32, 64, 410, 55662788608),
        ("Apple M5 Pro", 20, 48, 307, 40200896512),
        ("Apple M3 Ultra", 60, 256, 819, 223338299392),
    ],
)
def test_as_if_on_a_chip(  # noqa: PLR0917 -- one row of the table
    this_linux: Sources, chip: str, cores: int, gigabytes: int, bandwidth: float, working_set: int
) -> None:
    """Chip facts by the table, the working set as Macs of that size reported, nothing active, and each says so."""
    here = detect(this_linux)
    made = with_overrides(here, {"chip": chip, "gpu_cores": cores, "total_memory_bytes": gigabytes * GIB})
    assert made.chip == f"Apple {chip.removeprefix('Apple ')}"
    assert (made.bandwidth_gbps, made.gpu_cores, made.backend) == (bandwidth, cores, "metal")
    assert made.working_set_bytes == pytest.approx(working_set, rel=1e-6)
    assert made.max_buffer_bytes == pytest.approx(0.75 * working_set, rel=1e-3)
    assert (made.active_bytes, made.available_bytes, made.performance_cores) == (0, None, None)
    assert "recorded on a Mac" in made.sources["working_set_bytes"]
    assert made.mlx_version == here.mlx_version


def test_memory_size_nobody_reported_has_no_working_set() -> None:
    """No ratio is made up for 512 GB; the reason is stated."""
    made = with_overrides(MAC, {"chip": "Apple M3 Ultra", "gpu_cores": 80, "total_memory_bytes": 512 * GIB})
    assert (made.working_set_bytes, made.max_buffer_bytes) == (None, None)
    assert "no report" in made.sources["working_set_bytes"]


def test_given_working_set_wins_over_the_recorded_one() -> None:
    """And the buffer stays that of the default, which does not follow a limit set by hand."""
    given_set = round(11.8 * GIB)
    made = with_overrides(MAC, {"chip": "M1", "total_memory_bytes": 16 * GIB, "working_set_bytes": given_set})
    assert (made.working_set_bytes, made.sources["working_set_bytes"]) == (given_set, "given")
    assert made.max_buffer_bytes == pytest.approx(0.75 * 0.74 * 16 * GIB, rel=1e-6)


def test_older_macos_takes_its_own_report() -> None:
    """A 16 GB Mac reported two thirds on macOS 13 and 0.74 on 26."""
    machine = {"chip": "Apple M1", "total_memory_bytes": 16 * GIB}
    old = with_overrides(MAC, {**machine, "macos_version": "13.5"})
    new = with_overrides(MAC, {**machine, "macos_version": "27.0"})
    assert old.working_set_bytes == 11453251584
    assert new.working_set_bytes == pytest.approx(0.74 * 16 * GIB, rel=1e-6)
    assert (old.macos_version, old.os_name) == ("13.5", "macOS")


def test_decimal_gigabytes_find_the_report_of_the_mac_sold_with_as_many() -> None:
    """16 x 10**9 bytes is how 16GB reads elsewhere; the given total stays as given."""
    made = with_overrides(MAC, {"chip": "Apple M2", "total_memory_bytes": 16 * 10**9})
    assert made.total_memory_bytes == 16 * 10**9
    assert made.working_set_bytes == pytest.approx(0.74 * 16 * GIB, rel=1e-6)


def test_chip_alone_keeps_this_machines_memory_size_and_says_so() -> None:
    """Without a memory size the answer is for as much memory as here."""
    made = with_overrides(MAC, {"chip": "Apple M2 Max"})
    assert made.total_memory_bytes == 96 * GIB
    assert "as much as here" in made.sources["total_memory_bytes"]
    assert made.working_set_bytes == 72 * GIB


def test_core_count_alone_is_another_variant_of_this_chip() -> None:
    """An M3 Max with 40 GPU cores has 400 GB/s."""
    made = with_overrides(MAC, {"gpu_cores": 40})
    assert (made.chip, made.bandwidth_gbps, made.working_set_bytes) == ("Apple M3 Max", 400, MAC.working_set_bytes)


def test_memory_size_alone_resets_what_followed_from_memory() -> None:
    """This chip with 64 GB: the working set of such a Mac, nothing active."""
    made = with_overrides(MAC, {"total_memory_bytes": 64 * GIB})
    assert (made.working_set_bytes, made.active_bytes, made.chip) == (55662788608, 0, "Apple M3 Max")


@pytest.mark.parametrize("given", [{}, {"chip": "Apple M3 Ultra"}])
def test_a_working_set_larger_than_this_machine_is_not_lowered_by_it(given: dict[str, str]) -> None:
    """464 GiB are another machine's: neither the 96 GiB here nor what is active or allowed here counts."""
    made = with_overrides(MAC, {"working_set_bytes": 464 * GIB, **given})
    assert (made.working_set_bytes, made.total_memory_bytes, made.active_bytes) == (464 * GIB, None, 0)
    assert (made.max_buffer_bytes, made.available_bytes) == (None, None)
    assert "the working set is" in made.sources["total_memory_bytes"]


def test_a_working_set_without_a_gpu_here_is_another_machines(this_linux: Sources) -> None:
    """The memory of this machine says nothing about it."""
    assert with_overrides(detect(this_linux), {"working_set_bytes": 12 * GIB}).total_memory_bytes is None


def test_working_set_given_to_a_machine_without_gpu_starts_empty(this_linux: Sources) -> None:
    """What is active in main memory is not active in a working set that this machine does not have."""
    made = with_overrides(detect(this_linux), {"working_set_bytes": 12 * GIB})
    assert (made.working_set_bytes, made.active_bytes) == (12 * GIB, 0)


@pytest.mark.parametrize(
    ("name", "near"), [("Apple Q9", "Apple M5"), ("apple m4 mx", "Apple M4 Max"), ("Apple M4 Mega", "Apple M4 Max")]
)
def test_an_apple_chip_that_cannot_be_is_refused_with_what_comes_close(name: str, near: str) -> None:
    """A misspelt Mac is not planned for as if it were a machine nobody knows."""
    with pytest.raises(InvalidParams, match=r"hardware\.chip is") as caught:
        with_overrides(MAC, {"chip": name})
    assert caught.value.field == "hardware.chip"
    assert near in caught.value.hint


@pytest.mark.parametrize("name", ["NVIDIA H200", "Applecorp X", "Pineapple M4"])
def test_names_of_other_makers_are_taken(name: str) -> None:
    """Only names that start with the word Apple follow the grammar."""
    made = with_overrides(MAC, {"chip": name})
    assert (made.chip, made.bandwidth_gbps, made.working_set_bytes) == (name, None, None)


def test_other_chips_can_be_named() -> None:
    """What is no Apple M chip has no facts, and given ones count."""
    made = with_overrides(MAC, {"chip": "AMD EPYC 7M12", "bandwidth_gbps": 200})
    assert (made.generation, made.tier, made.bandwidth_gbps, made.working_set_bytes) == (None, None, 200.0, None)
    assert "not an Apple M chip" in made.sources["generation"]


BAD: list[tuple[str, Any]] = [
    ("chip", 5), ("chip", ""), ("chip", "a\nb"), ("chip", "x" * 300), ("chip", "\ud800"), ("gpu_cores", 0),
    ("gpu_cores", True), ("gpu_cores", 2.0), ("gpu_cores", 10**9), ("total_memory_bytes", -1),
    ("total_memory_bytes", 0),
    ("total_memory_bytes", "16GB"), ("working_set_bytes", 10**5000), ("active_bytes", -1), ("max_buffer_bytes", 1.5),
    ("bandwidth_gbps", math.nan), ("bandwidth_gbps", math.inf), ("bandwidth_gbps", 0), ("bandwidth_gbps", -1),
    ("bandwidth_gbps", "fast"), ("mlx_version", 0.32), ("mlx_version", "latest"), ("macos_version", ""),
    ("chip", [10**5000]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BAD, ids=lambda v: "number" if isinstance(v, (int, list)) else repr(v)[:12])
def test_bad_values_are_refused_by_field(key: str, value: object) -> None:
    """Wrong types, not finite, out of range: the field is named as the protocol names it."""
    with pytest.raises(InvalidParams) as caught:
        with_overrides(MAC, {key: value})
    assert caught.value.field == f"hardware.{key}"
    assert caught.value.hint


def test_unknown_keys_are_refused_with_a_near_match() -> None:
    """Also when their value is None."""
    for value in (1, None):
        with pytest.raises(InvalidParams, match=r"hardware\.working_set is not known") as caught:
            with_overrides(MAC, {"working_set": value})
        assert caught.value.hint == "did you mean working_set_bytes?"


def test_keys_are_those_of_the_protocol() -> None:
    """The nine names of the plan request's hardware."""
    assert set(overrides_module.KEYS) == {
        *("chip", "gpu_cores", "total_memory_bytes", "working_set_bytes", "active_bytes", "max_buffer_bytes"),
        *("bandwidth_gbps", "mlx_version", "macos_version"),
    }


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "chip": st.sampled_from(["Apple M1", "M5 Ultra", "Apple M17 Pro", "AMD EPYC"]),
            "gpu_cores": st.integers(1, 4096),
            "total_memory_bytes": st.integers(1, 2**53),
            "working_set_bytes": st.integers(1, 2**53),
            "active_bytes": st.integers(0, 2**53),
            "max_buffer_bytes": st.integers(1, 2**53),
            "bandwidth_gbps": st.floats(0.1, 1e5),
            "mlx_version": st.sampled_from(["0.31.0", "0.32"]),
            "macos_version": st.sampled_from(["13.7.8", "26", "15.6"]),
        },
    )
)
def test_what_is_given_is_what_stands(facts: dict[str, Any]) -> None:
    """Every given value arrives unchanged and is marked as given; every field keeps a source."""
    made = with_overrides(MAC, facts)
    for key, value in facts.items():
        assert str(getattr(made, key)).removeprefix("Apple ") == str(value).removeprefix("Apple ")
        assert made.sources[key] == "given"
    assert all(made.sources[field] for field in MAC.sources)


_ELSEWHERE: list[dict[str, Any]] = [
    *({"chip": "Apple M2"}, {"total_memory_bytes": 16 * GIB}, {"working_set_bytes": 464 * GIB}),
    *({"chip": "Apple M2", "active_bytes": GIB}, {"total_memory_bytes": 8 * GIB, "macos_version": "26.1"}),
]
_HERE: list[dict[str, Any]] = [
    *({}, {"gpu_cores": 40}, {"working_set_bytes": 90 * GIB}, {"max_buffer_bytes": GIB}, {"bandwidth_gbps": 300.0}),
    *({"mlx_version": "0.33.0"}, {"macos_version": "26.2"}),
]


@given(st.sampled_from(_ELSEWHERE), *[st.none() | st.integers(0, 96 * GIB)] * 2, st.text(max_size=5))
def test_nothing_of_another_machine_is_memory_in_use_here(
    overrides: dict[str, Any], active: int | None, available: int | None, source: str
) -> None:
    """The whole profile is the same, sources and all, whatever is in use and however that was read."""
    told = {**MAC.sources, "active_bytes": source, "available_bytes": source}
    later = msgspec.structs.replace(MAC, active_bytes=active, available_bytes=available, sources=told)
    assert is_elsewhere(MAC, overrides)
    assert is_elsewhere(later, overrides)
    assert with_overrides(later, overrides) == with_overrides(MAC, overrides)


@pytest.mark.parametrize("overrides", _HERE)
def test_this_machine_with_a_fact_given_is_still_this_machine(overrides: dict[str, Any]) -> None:
    """What is in use on it counts."""
    assert not is_elsewhere(MAC, overrides)
    later = msgspec.structs.replace(MAC, active_bytes=7)
    assert with_overrides(later, overrides) != with_overrides(MAC, overrides)
