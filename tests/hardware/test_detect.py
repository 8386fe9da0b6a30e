"""Detection: never raises, every field has a source, volatile fields can be read again."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from veloxquant.hardware.accelerator import Accelerator
from veloxquant.hardware.calibrate import Calibration
from veloxquant.hardware.detect import detect, refresh
from veloxquant.hardware.memory import Memory
from veloxquant.hardware.mlx_device import Device
from veloxquant.hardware.os_release import System
from veloxquant.hardware.sources import Sources
from veloxquant.profiles import HardwareProfile

FIELDS = [field for field in HardwareProfile.__struct_fields__ if field != "sources"]
CALLABLES = [name for name in Sources.__dataclass_fields__ if name != "platform"]
GIB = 2**30
INFO_KEYS = (
    *("device_name", "architecture", "memory_size", "max_recommended_working_set_size", "max_buffer_length"),
    *("total_memory", "free_memory"),
)


class _Odd:
    """A value that breaks on every touch."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)


class _OddText(str):
    """A text that cannot be read."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> str:
        raise ValueError(key)


class _OddNumber(int):
    """A number that cannot be compared."""

    def __lt__(self, other: object) -> bool:
        raise ValueError(other)

    __gt__ = __le__ = __ge__ = __eq__ = __lt__
    __hash__ = int.__hash__


ODDITIES = (_Odd(), _OddText("Apple M3"), _OddNumber(5), "\ud800", 10**5000, b"Apple M3")


def _junk() -> st.SearchStrategy[Any]:
    """What no source should say: wrong types, absurd numbers, text that no encoding holds, fields of the wrong type."""
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.sampled_from(ODDITIES)
    )
    infos = st.dictionaries(
        st.sampled_from(INFO_KEYS),
        scalars,
    )
    return st.one_of(
        scalars,
        st.lists(scalars, max_size=2),
        st.builds(
            Device, backend=st.sampled_from(["metal", "cuda", "cpu", "", "junk", None]), info=infos, call=scalars
        ),
        st.builds(Accelerator, gpu_cores=scalars, in_use_bytes=scalars),
        st.builds(Memory, total_bytes=scalars, available_bytes=scalars, limit=scalars),
        st.builds(System, name=scalars, version=scalars, source=scalars),
        st.builds(Calibration, chip=scalars, mlx_version=scalars, bandwidth_gbps=scalars, date=scalars),
    )


def _raising(error: Exception) -> Any:
    def source(*arguments: Any) -> Any:
        raise error

    return source


def _saying(value: Any) -> Any:
    def source(*arguments: Any) -> Any:
        return value

    return source


def _sources() -> st.SearchStrategy[Sources]:
    """Each source at its own: gives junk, or raises."""
    errors = st.sampled_from(
        [OSError(2, "gone"), RuntimeError(), ImportError("no mlx"), MemoryError(), RecursionError(), ValueError(_Odd())]
    )
    said = _junk().map(_saying)
    return st.builds(
        Sources,
        platform=st.sampled_from(["darwin", "linux", "win32"]),
        **dict.fromkeys(CALLABLES, st.one_of(said, errors.map(_raising))),
    )


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(_sources())
def test_whatever_sources_say_detection_gives_a_valid_profile(sources: Sources) -> None:
    """No source can make it raise; the profile survives JSON and its own types; every field has a reason in words."""
    for profile in (detect(sources), refresh(detect(sources), sources)):
        assert msgspec.json.decode(msgspec.json.encode(profile), type=HardwareProfile) == profile
        assert set(profile.sources) == set(FIELDS)
        assert all(profile.sources[field].strip() for field in FIELDS)
        for field in FIELDS:
            value = getattr(profile, field)
            assert not isinstance(value, (int, float)) or value >= 0


@pytest.mark.parametrize("source", CALLABLES)
@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_each_source_may_say_anything(source: str, platform: str, mac: Any, this_linux: Sources) -> None:
    """One source at a time gives each oddity, as it is and in the fields of its own answer."""
    whole = mac() if platform == "darwin" else this_linux
    for odd in ODDITIES:
        infos = [{key: odd, "max_buffer_length": odd} for key in INFO_KEYS]
        answers = [
            odd,
            Device(backend=odd),
            *(Device(backend=backend, info=info) for backend in ("metal", "cuda") for info in infos),
            Accelerator(gpu_cores=odd, in_use_bytes=odd),
            Memory(total_bytes=odd, available_bytes=odd, limit=odd),
            System(name=odd, version=odd, source=odd),
            Calibration(chip="X", mlx_version="1", bandwidth_gbps=odd, date=odd),
        ]
        for answer in answers:
            profile = detect(replace(whole, **{source: _saying(answer)}))
            assert msgspec.json.decode(msgspec.json.encode(profile), type=HardwareProfile) == profile
            assert all(profile.sources[field].strip() for field in FIELDS)


def test_nothing_works_is_still_a_profile_that_says_why() -> None:
    """Every source fails: all fields are unknown, and the errors are quoted."""
    sources = Sources(platform="darwin", **dict.fromkeys(CALLABLES, _raising(OSError("broken"))))
    profile = detect(sources)
    assert [field for field in FIELDS if getattr(profile, field) not in (None, {})] == []
    for field in ("total_memory_bytes", "working_set_bytes", "active_bytes", "mlx_version", "os_version", "backend"):
        assert "broken" in profile.sources[field]


def test_full_mac(mac: Any) -> None:
    """A MacBook Pro with an M4 Max: bandwidth by core count, active memory by all programs, cores by level."""
    info = {
        "device_name": "Apple M4 Max",
        "memory_size": 128 * GIB,
        "max_recommended_working_set_size": 115448725504,
        "max_buffer_length": 86586540032,
    }
    sources = mac(
        info=info,
        whole={"hw.memsize": 128 * GIB, "iogpu.wired_limit_mb": 0, "hw.perflevel0.physicalcpu": 12}
        | {"hw.perflevel1.physicalcpu": 4, "hw.ncpu": 16},
        text={"machdep.cpu.brand_string": "Apple M4 Max", "hw.perflevel0.name": "Performance"}
        | {"hw.perflevel1.name": "Efficiency"},
        accelerator=Accelerator(gpu_cores=40, in_use_bytes=3 * GIB),
        memory=Memory(total_bytes=128 * GIB, available_bytes=90 * GIB),
        version="26.1",
    )
    profile = detect(sources)
    assert (profile.gpu_cores, profile.bandwidth_gbps, profile.active_bytes) == (40, 546, 3 * GIB)
    assert (profile.performance_cores, profile.efficiency_cores) == (12, 4)
    assert (profile.wired_limit_bytes, profile.available_bytes) == (None, 90 * GIB)
    assert (profile.os_name, profile.macos_version, profile.mlx_version, profile.mlx_lm_version) == (
        ("macOS", "26.1", "0.32.4", "0.32.2")
    )
    assert profile.sources["wired_limit_bytes"] == "the system's default limit rules"


def test_two_levels_of_fast_cores_are_counted_together(mac: Any) -> None:
    """An M5 Max has 6 super and 12 performance cores and no efficiency cores."""
    whole = {"hw.perflevel0.physicalcpu": 6, "hw.perflevel1.physicalcpu": 12, "hw.ncpu": 18}
    text = {"hw.perflevel0.name": "Super", "hw.perflevel1.name": "Performance"}
    profile = detect(mac(whole=whole, text=text))
    assert (profile.performance_cores, profile.efficiency_cores) == (18, 0)


def test_unknown_gpu_core_count_takes_the_narrower_bus(mac: Any) -> None:
    """When ioreg fails, an M3 Max counts as the one with 300 GB/s, and the source says why."""
    profile = detect(mac(text={"machdep.cpu.brand_string": "Apple M3 Max"}))
    assert profile.bandwidth_gbps == 300
    assert "core count unknown" in profile.sources["bandwidth_gbps"]
    assert "not recorded" in profile.sources["gpu_cores"]


def test_rosetta_is_named(mac: Any) -> None:
    """An x86 Python on an Apple chip cannot reach Metal: the backend's source says so."""
    profile = detect(mac(text={"machdep.cpu.brand_string": "Apple M1"}, whole={"sysctl.proc_translated": 1}))
    assert profile.chip == "Apple M1"
    assert "Rosetta" in profile.sources["backend"]


def test_calibration_fills_what_the_table_lacks(this_linux: Sources) -> None:
    """A stored measurement of this chip and MLX version is the bandwidth, with its date."""
    made = Calibration(chip="AMD EPYC 7763", mlx_version="0.32.4", bandwidth_gbps=28.5, date="2026-01-02")
    asked: list[tuple[str, str]] = []

    def stored(chip: str, version: str) -> Calibration:
        asked.append((chip, version))
        return made

    profile = detect(replace(this_linux, calibration=stored))
    assert asked == [("AMD EPYC 7763", "0.32.4")]
    assert profile.bandwidth_gbps == 28.5
    assert profile.sources["bandwidth_gbps"].startswith("calibrated 2026-01-02")


def test_calibration_does_not_replace_the_table_but_an_extrapolation(mac: Any) -> None:
    """A published figure stays; a guessed one gives way to a measured one."""
    made = Calibration(chip="any", mlx_version="0.32.4", bandwidth_gbps=99.0, date="2026-01-02")
    for chip, expected in (("Apple M2", 100.0), ("Apple M9 Pro", 99.0)):
        sources = replace(mac(text={"machdep.cpu.brand_string": chip}), calibration=lambda *_: made)
        assert detect(sources).bandwidth_gbps == expected


def test_container_limit_is_the_total_and_is_stated(this_linux: Sources) -> None:
    """A limit below the machine's memory counts."""
    memory = Memory(total_bytes=4 * GIB, available_bytes=3 * GIB, limit="container limit /x; the machine has 9 bytes")
    profile = detect(replace(this_linux, memory=lambda: memory))
    assert (profile.total_memory_bytes, profile.active_bytes) == (4 * GIB, GIB)
    assert "container limit" in profile.sources["total_memory_bytes"]


def test_refresh_reads_only_what_changes(this_linux: Sources) -> None:
    """Available and active memory follow; the chip, versions and total are not asked for again."""
    before = detect(this_linux)
    later = Memory(total_bytes=16 * GIB, available_bytes=2 * GIB)
    silent = dict.fromkeys(("cpu_name", "linux", "version", "calibration"), _raising(AssertionError("asked again")))
    after = refresh(before, replace(this_linux, memory=lambda: later, **silent))
    assert (after.available_bytes, after.active_bytes) == (2 * GIB, 14 * GIB)
    unchanged = [f for f in FIELDS if f not in ("available_bytes", "active_bytes")]
    assert [getattr(after, f) for f in unchanged] == [getattr(before, f) for f in unchanged]


def test_refresh_sees_a_limit_set_since(mac: Any) -> None:
    """MLX keeps its report for the process's life; the kernel's value is of now."""
    info = {"max_recommended_working_set_size": 12713103196}
    before = detect(mac(info=info))
    after = refresh(before, mac(info=info, whole={"iogpu.wired_limit_mb": 14000}))
    assert (before.working_set_bytes, after.working_set_bytes) == (12713103196, 14000 * 2**20)


def test_refresh_keeps_what_could_not_be_read_this_time(this_linux: Sources) -> None:
    """A source that fails for a moment leaves the last value, with a remark that does not pile up."""
    before = detect(this_linux)
    broken = replace(this_linux, memory=_raising(OSError("busy")))
    after = refresh(refresh(before, broken), broken)
    assert (after.available_bytes, after.active_bytes) == (before.available_bytes, before.active_bytes)
    assert after.sources["available_bytes"] == "psutil (last known; now: psutil: OSError: busy)"
    assert refresh(after, this_linux) == before


def test_this_machine() -> None:
    """The real sources agree with psutil and importlib.metadata; mlx_lm is not imported by it."""
    from importlib.metadata import version

    import psutil

    had = "mlx_lm" in sys.modules
    profile = detect()
    assert profile.total_memory_bytes is not None
    assert profile.total_memory_bytes <= psutil.virtual_memory().total
    assert profile.mlx_version == version("mlx")
    assert profile.mlx_lm_version == version("mlx-lm")
    assert profile.backend in ("metal", "cuda", "cpu")
    assert ("mlx_lm" in sys.modules) == had


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_of_this_machine_has_a_source(field: str) -> None:
    """Known or not, each field says where it is from or why it is missing."""
    profile = detect()
    assert profile.sources[field]
