"""Every recorded device report, sysctl reading and build: what it says is what the profile says.

Expected values are taken from each example's own fields, by rules written here and not in the code under test.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.hardware import recorded
from veloxquant.hardware.accelerator import Accelerator
from veloxquant.hardware.detect import detect
from veloxquant.hardware.mlx_device import Device, device_of

if TYPE_CHECKING:
    from veloxquant.hardware.sources import Sources

EXAMPLES = json.loads((Path(__file__).parents[1] / "data" / "device_info_examples.json").read_text())
DEVICES = [e for e in EXAMPLES["device_info"] if e["kind"] == "mx.device_info"]
PARTIAL = [e for e in EXAMPLES["device_info"] if e["kind"] == "partial"]
SYSCTL = EXAMPLES["sysctl_examples"]
BUILDS = EXAMPLES["builds"]
KEYS = (
    "device_name",
    "architecture",
    "memory_size",
    "max_recommended_working_set_size",
    "max_buffer_length",
    "resource_limit",
)
MIB, GIB = 2**20, 2**30


def _name_parts(name: str) -> tuple[int, str]:
    words = name.split()
    return int(words[1].removeprefix("M")), words[2] if len(words) > 2 else "base"


def _gib(memory: str | None) -> int | None:
    """Memory as a Mac is sold: "16 GB" is 16 x 2**30; None where the text names no single size."""
    match = re.fullmatch(r"(\d+) GB", memory or "")
    return int(match[1]) * GIB if match else None


@pytest.mark.parametrize("example", DEVICES, ids=[f"{e['device_name']}-{n}" for n, e in enumerate(DEVICES)])
def test_device_report(example: dict[str, Any], mac: Any) -> None:
    """Sizes are the report's own; chip, generation and tier are its name's; a raised limit is seen by the buffer."""
    info = {key: example[key] for key in KEYS if example[key] is not None}
    profile = detect(mac(info=info))
    assert profile.backend == "metal"
    assert profile.working_set_bytes == example["max_recommended_working_set_size"]
    assert profile.max_buffer_bytes == example["max_buffer_length"]
    assert profile.total_memory_bytes == example["memory_size"]
    if example["device_name"]:
        assert profile.chip == example["device_name"]
        assert (profile.generation, profile.tier) == _name_parts(example["device_name"])
        assert profile.bandwidth_gbps
    else:
        # applegpu_g14d: families run 12 ahead of the generation, d is an Ultra.
        assert (profile.generation, profile.tier) == (int(example["architecture"][-3:-1]) - 12, "Ultra")
    raised = "raised" in (example.get("note") or "") or "wired_limit" in (example.get("note") or "")
    assert (profile.wired_limit_bytes is not None) == raised
    assert all(profile.sources[field] for field in profile.__struct_fields__ if field != "sources")


@pytest.mark.parametrize("example", [e for e in DEVICES if e["memory_size"]], ids=lambda e: e["device_name"])
def test_device_report_while_the_kernel_states_the_limit(example: dict[str, Any], mac: Any) -> None:
    """iogpu.wired_limit_mb, when set, is the working set, newer than a report that MLX keeps for the process's life."""
    info = {key: example[key] for key in KEYS if example[key] is not None}
    lowered = example["memory_size"] // MIB // 2
    profile = detect(mac(info=info, whole={"iogpu.wired_limit_mb": lowered}))
    assert profile.working_set_bytes == profile.wired_limit_bytes == lowered * MIB
    assert "iogpu" in profile.sources["working_set_bytes"]


@pytest.mark.parametrize(
    "example", [e for e in DEVICES if "raised" in (e.get("note") or "")], ids=lambda e: str(e["device_name"])
)
def test_report_of_a_limit_that_was_lifted_since(example: dict[str, Any], mac: Any) -> None:
    """The kernel says 0, "system default", and MLX still reports the raised limit: the default in the buffer counts."""
    info = {key: example[key] for key in KEYS if example[key] is not None}
    profile = detect(mac(info=info, whole={"iogpu.wired_limit_mb": 0}))
    assert profile.working_set_bytes == int(example["max_buffer_length"] / 0.75)
    assert profile.wired_limit_bytes is None
    assert "lifted" in profile.sources["working_set_bytes"]
    kept = detect(
        mac(
            info=info | {"max_recommended_working_set_size": example["max_buffer_length"]},
            whole={"iogpu.wired_limit_mb": 0},
        )
    )
    assert kept.working_set_bytes == example["max_buffer_length"]


@pytest.mark.parametrize("example", PARTIAL, ids=[f"{e['device_name']}-{n}" for n, e in enumerate(PARTIAL)])
def test_partial_report(example: dict[str, Any], mac: Any) -> None:
    """What a partial report does name arrives, and what it does not name stays unknown with a reason."""
    name = example["device_name"]
    chip = re.match(r"Apple M\d+(?: (?:Pro|Max|Ultra))?", name)
    info: dict[str, Any] = {"device_name": chip[0]} if chip else {}
    total = _gib(example.get("memory"))
    info |= {"memory_size": total} if total else {}
    info |= {"max_buffer_length": example["max_buffer_length"]} if "max_buffer_length" in example else {}
    limit = example.get("iogpu_wired_limit_mb")
    profile = detect(mac(info=info, whole={"iogpu.wired_limit_mb": limit} if limit else {}))
    assert profile.chip == (chip[0] if chip else None)
    assert profile.total_memory_bytes == total
    assert profile.max_buffer_bytes == example.get("max_buffer_length")
    assert profile.working_set_bytes == (limit * MIB if limit else None)
    if profile.working_set_bytes is None:
        assert "not reported" in profile.sources["working_set_bytes"]


def _stock_bytes(text: str) -> float | None:
    """The default working set named by a partial report: binary GB, GiB or MB, except where its own ratio says not."""
    match = re.match(r"(?:about )?(\d+(?:\.\d+)?) (GB|GiB|MB)", text)
    if match is None or "0.90 x" in text:
        return None
    if "0.78 of memory" in text:
        return float(match[1]) * 1e6
    return float(match[1]) * (MIB if match[2] == "MB" else GIB)


@pytest.mark.parametrize(
    "example",
    [e for e in PARTIAL if "recommended" in e and (_gib(e.get("memory")) or "GB" in e["device_name"])],
    ids=lambda e: e["device_name"],
)
def test_partial_reports_of_default_working_sets_are_in_the_recorded_data(example: dict[str, Any]) -> None:
    """Each default that a report names with its memory size is a record of that size, to within its rounding."""
    expected = _stock_bytes(example["recommended"])
    size = re.search(r"(\d+) GB", example.get("memory") or example["device_name"])
    if expected is None or size is None or "/" in example["device_name"]:
        # A rounded table of five machines and an indirect figure: neither names one machine's default.
        assert "tabled" in example["recommended"] or "limit was" in example["recommended"]
        return
    known = [r.working_set_bytes for r in recorded.records() if r.memory_gb == int(size[1])]
    assert any(abs(found - expected) < 0.002 * expected for found in known)


@pytest.mark.parametrize("example", SYSCTL, ids=[f"{e.get('brand_string', 'Mac')}-{n}" for n, e in enumerate(SYSCTL)])
def test_sysctl_reading(example: dict[str, Any], mac: Any) -> None:
    """Brand string, memory, cores by level, GPU cores, wired limit and macOS version, each as recorded."""
    levels = re.fullmatch(r"(\d+)\+(\d+)", example.get("cores", ""))
    fast = int(levels[1]) if levels else example.get("perflevel0")
    slow = int(levels[2]) if levels else example.get("perflevel1")
    total = example.get("hw_memsize") or _gib(example.get("memory")) or _gib(example.get("hw_memory"))
    limit = example.get("iogpu_wired_limit_mb")
    whole = {
        "hw.memsize": total,
        "hw.perflevel0.physicalcpu": fast,
        "hw.perflevel1.physicalcpu": slow,
        "hw.ncpu": example.get("ncpu"),
        "iogpu.wired_limit_mb": limit,
    }
    brand = example.get("brand_string")
    version = example.get("sw_vers", "").partition(" ")[0] or None
    profile = detect(
        mac(
            whole={k: v for k, v in whole.items() if v is not None},
            text={"machdep.cpu.brand_string": brand} if brand else {},
            accelerator=Accelerator(gpu_cores=example.get("gpu_cores")),
            version=version,
        )
    )
    assert profile.chip == brand
    assert (profile.generation, profile.tier) == (_name_parts(brand) if brand else (None, None))
    assert profile.total_memory_bytes == total
    assert profile.performance_cores == fast
    assert profile.efficiency_cores == (slow or (example["ncpu"] - fast if fast and "ncpu" in example else None))
    assert profile.gpu_cores == example.get("gpu_cores")
    assert profile.wired_limit_bytes == (limit * MIB if limit else None)
    assert profile.macos_version == version
    assert profile.sources["chip"] == "sysctl machdep.cpu.brand_string" + ("" if brand else ": not reported")


class _Metal:
    """`mlx.core` of some build, reduced to what detection calls."""

    gpu = "gpu"

    def __init__(self, backend: str, info: dict[str, Any], *, old: bool = False) -> None:
        self.asked: list[Any] = []
        self._info = info
        self.metal = self._room(backend == "metal", old=old)
        self.cuda = self._room(backend == "cuda", old=False)
        if not old:
            self.device_info = self._device_info

    def _room(self, available: bool, *, old: bool) -> Any:
        room: dict[str, Any] = {"is_available": lambda: available}
        if old:
            room["device_info"] = lambda: self._old_info(available)
        return type("Room", (), {k: staticmethod(v) for k, v in room.items()})()

    def _old_info(self, available: bool) -> dict[str, Any]:
        if not available:
            raise RuntimeError("[metal_device_info] Cannot get Metal device info without metal backend")
        return self._info

    def _device_info(self, device: Any = None) -> dict[str, Any]:
        self.asked.append(device)
        return self._info


def test_builds_recorded_are_those_tested_below() -> None:
    """A build added to the record needs a test of its own."""
    assert [b["build"] for b in BUILDS] == [
        "Metal",
        "CUDA",
        "CPU (any)",
        "CPU wheel 0.32.4 on this Linux box",
        "before mlx 0.22-0.30, no Metal",
    ]


def test_metal_build_is_asked_for_the_gpu_device() -> None:
    """With a GPU the GPU is named, since the default device may be the CPU; all recorded keys are taken over."""
    info = dict.fromkeys(BUILDS[0]["keys"], 1)
    mx = _Metal("metal", info)
    assert device_of(mx) == Device(backend="metal", info=info, call="mx.device_info(gpu)")
    assert mx.asked == ["gpu"]


def test_cuda_build_reports_total_and_free_memory(this_linux: Sources) -> None:
    """The card's memory is the working set, total less free is active, and the chip is the card."""
    keys = [key.partition(" ")[0] for key in BUILDS[1]["keys"]]
    info: dict[str, Any] = dict.fromkeys(keys, 1)
    info |= {"device_name": "NVIDIA H200", "total_memory": 141 * GIB, "free_memory": 100 * GIB}
    profile = detect(_with(this_linux, device=lambda: device_of(_Metal("cuda", info))))
    assert (profile.backend, profile.chip) == ("cuda", "NVIDIA H200")
    assert (profile.working_set_bytes, profile.active_bytes) == (141 * GIB, 41 * GIB)


def test_cpu_build_reports_name_and_architecture_only(this_linux: Sources) -> None:
    """Two keys, no GPU device: no working set, and what is active is total less available."""
    info = {key: BUILDS[3]["value"][key] for key in BUILDS[2]["keys"]}
    profile = detect(_with(this_linux, device=lambda: device_of(_Metal("cpu", info)), cpu_name=lambda: None))
    assert (profile.backend, profile.chip) == ("cpu", info["device_name"])
    assert profile.working_set_bytes is None
    assert profile.sources["working_set_bytes"] == "no GPU device"
    assert profile.active_bytes == 10 * GIB


def test_reduced_report_on_a_mac_with_the_cpu_as_default_is_tolerated(mac: Any) -> None:
    """Missing keys are unknown, never an error (mlx-lm issue 1813)."""
    profile = detect(mac(info={"device_name": "Apple M4", "architecture": "arm64"}))
    assert (profile.chip, profile.working_set_bytes, profile.max_buffer_bytes) == ("Apple M4", None, None)


def test_old_build_with_metal_is_asked_the_old_way() -> None:
    """Before mx.device_info there was mx.metal.device_info, as the recorded M1 on 0.29.3 says."""
    example = next(e for e in DEVICES if e.get("mlx") == "0.29.3")
    info = {key: example[key] for key in KEYS}
    assert device_of(_Metal("metal", info, old=True)).info == info


def test_old_build_without_metal_is_not_asked() -> None:
    """The old call raised without Metal, so it is left alone."""
    assert device_of(_Metal("cpu", {}, old=True)) == Device(backend="cpu", info={}, call="no mx.device_info")


def test_this_machine_says_what_mlx_says() -> None:
    """The installed MLX gives a report whose backend agrees with its own answers."""
    import mlx.core as mx

    device = device_of(mx)
    assert device.backend == ("metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else "cpu")
    assert device.info["device_name"]


def _with(sources: Sources, **changed: Any) -> Sources:
    from dataclasses import replace

    return replace(sources, **changed)
