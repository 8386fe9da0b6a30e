"""Single sources: control groups, system versions, the GPU's registry entry, kernel values, processor names."""

from __future__ import annotations

import ctypes
import platform
import plistlib
import subprocess
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.hardware import accelerator, cpu, memory, os_release, sysctl, versions
from veloxquant.hardware.memory import Limit

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30

# The relevant lines of `ioreg -rc AGXAccelerator -d1` on an Apple chip, shortened.
IOREG = """
+-o AGXAcceleratorG13X  <class AGXAcceleratorG13X, id 0x100000391, registered, matched, active, busy 0, retain 75>
    {
      "gpu-core-count" = 32
      "PerformanceStatistics" = {"In use system memory (driver)"=0,"Alloc system memory"=7143571456,"Device Utilization %"=3,"In use system memory"=513638400}
      "model" = "Apple M1 Max"
    }
"""  # noqa: E501 -- one line of the tool's output


def _group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_tightest_limit_of_all_groups_above_counts(short_folder: Path) -> None:
    """Version 2: the limits of the group and its parents; droppable file cache is free again."""
    root, own = short_folder / "cg", short_folder / "own"
    own.write_text("0::/a/b\n")
    _group(root, memory__max="max\n")
    _group(root / "a", memory__max=f"{4 * GIB}\n", memory__current=f"{3 * GIB}\n")
    _group(
        root / "a" / "b",
        memory__max=f"{8 * GIB}\n",
        memory__current=f"{GIB}\n",
        memory__stat="anon 1\ninactive_file 0\n",
    )
    (root / "a" / "memory.stat").write_text(f"anon 5\ninactive_file {2 * GIB}\n")
    found = memory.cut(64 * GIB, 32 * GIB, memory.limits(root, own))
    assert (found.total_bytes, found.available_bytes) == (4 * GIB, 3 * GIB)
    assert found.limit is not None
    assert str(root / "a" / "memory.max") in found.limit
    assert str(64 * GIB) in found.limit


def test_version_1_limits_are_read(short_folder: Path) -> None:
    """The memory controller of version 1 has other file names."""
    root, own = short_folder / "cg", short_folder / "own"
    own.write_text("5:cpu,cpuacct:/x\n4:memory:/x\n")
    _group(root / "memory" / "x", memory__limit_in_bytes=str(2 * GIB), memory__usage_in_bytes=str(GIB))
    assert memory.limits(root, own) == (
        Limit(limit_bytes=2 * GIB, free_bytes=GIB, file=str(root / "memory" / "x" / "memory.limit_in_bytes")),
    )


def test_path_from_outside_the_namespace_leaves_the_root(short_folder: Path) -> None:
    """A container may see its own group as ../..; then only the root of its view counts."""
    root, own = short_folder / "cg", short_folder / "own"
    own.write_text("0::/../../other\n")
    _group(root, memory__max=str(GIB))
    assert [limit.limit_bytes for limit in memory.limits(root, own)] == [GIB]


def test_no_groups_no_limits(short_folder: Path) -> None:
    """Missing files are no error."""
    assert memory.limits(short_folder / "none", short_folder / "none") == ()


def test_a_limit_above_the_machine_is_none() -> None:
    """Version 1 writes 2**63 less a page for unlimited."""
    unlimited = Limit(limit_bytes=2**63 - 4096, free_bytes=2**62, file="f")
    assert memory.cut(8 * GIB, 5 * GIB, (unlimited,)) == memory.Memory(total_bytes=8 * GIB, available_bytes=5 * GIB)


def test_this_machine_has_memory() -> None:
    """The real source gives less available than total."""
    found = memory.read()
    assert 0 < found.available_bytes <= found.total_bytes


@pytest.mark.parametrize(
    ("plist", "darwin", "version"),
    [
        ("26.4.1", "25.4.0", "26.4.1"),
        ("15.6", "24.6.0", "15.6"),
        ("16.0", "25.1.0", "26.1"),
        ("16.1", "26.0.0", "27.0"),
        ("10.16", "20.6.0", "11.6"),
        (None, "24.6.0", "15.6"),
        ("13.7.8", "junk", "13.7.8"),
    ],
)
def test_macos_version_is_the_true_one(plist: str | None, darwin: str, version: str) -> None:
    """10.16 and 16.x are what programs built for an older SDK are told (cpython issue 135675)."""
    assert os_release.macos_of(plist, darwin).version == version


def test_linux_release_is_this_system() -> None:
    """The same as the standard library reads."""
    try:
        expected = platform.freedesktop_os_release()["NAME"]
    except OSError:
        expected = platform.system()
    assert os_release.linux().name == expected


def test_registry_entry_is_parsed() -> None:
    """Core count, and the memory in use rather than the driver's or the allocated one."""
    assert accelerator.parse(IOREG) == accelerator.Accelerator(gpu_cores=32, in_use_bytes=513638400)


def test_late_registry_keeps_the_core_count_seen_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores cannot change while a process lives; memory in use can, so it is unknown."""

    def late(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        raise subprocess.TimeoutExpired(command, 0.1)

    monkeypatch.setattr(accelerator, "_cores_seen", deque(maxlen=1))
    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(subprocess.TimeoutExpired):
        accelerator.read()
    answer = subprocess.CompletedProcess([], 0, stdout=IOREG.encode())
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert accelerator.read().in_use_bytes == 513638400
    monkeypatch.setattr(subprocess, "run", late)
    assert accelerator.read() == accelerator.Accelerator(gpu_cores=32)


@given(st.text())
def test_any_registry_text_is_read(text: str) -> None:
    """What is not there is None."""
    found = accelerator.parse(text)
    assert found.gpu_cores is None or found.gpu_cores >= 0


def test_kernel_values_are_decoded() -> None:
    """Whole numbers of four and eight bytes; text up to its NUL."""
    assert sysctl.decode_whole((14000).to_bytes(4, "little")) == 14000
    assert sysctl.decode_whole((16 * GIB).to_bytes(8, "little")) == 16 * GIB
    assert sysctl.decode_text(b"Apple M4 Max\0") == "Apple M4 Max"
    with pytest.raises(OSError, match="no whole number"):
        sysctl.decode_whole(b"abc")


def test_the_kernel_is_asked_by_name_with_room_for_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """sysctlbyname(3): 0 and the length it wrote, or -1 for a name it does not have. A stand-in; not run on a Mac."""
    values = {b"machdep.cpu.brand_string": b"Apple M4\0", b"hw.memsize": (16 * GIB).to_bytes(8, "little")}

    def sysctlbyname(name: bytes, old: Any, length: Any, new: None, new_length: int) -> int:
        assert (new, new_length, length._obj.value) == (None, 0, len(old))
        if name not in values:
            return -1
        ctypes.memmove(old, values[name], len(values[name]))
        length._obj.value = len(values[name])
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(sysctlbyname=sysctlbyname))
    assert (sysctl.text("machdep.cpu.brand_string"), sysctl.whole("hw.memsize")) == ("Apple M4", 16 * GIB)
    assert (sysctl.text("hw.no_such"), sysctl.whole("hw.no_such")) == (None, None)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    with pytest.raises(OSError, match="no sysctlbyname"):
        sysctl.whole("hw.memsize")


def test_the_macos_version_is_read_from_its_file(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An XML property list; the kernel's release where the file says nothing. Not run on a Mac."""
    place = short_folder / "SystemVersion.plist"
    monkeypatch.setattr(os_release, "_PLIST", place)
    monkeypatch.setattr(os_release.os, "uname", lambda: SimpleNamespace(release="25.1.0"))
    place.write_bytes(plistlib.dumps({"ProductName": "macOS", "ProductVersion": "26.4.1"}))
    assert (os_release.macos().version, os_release.macos().source) == ("26.4.1", "SystemVersion.plist")
    place.write_bytes(plistlib.dumps({}))
    assert os_release.macos().version == "26.1"
    assert os_release.macos_of("16.2", "next").source == "SystemVersion.plist; Darwin 'next' is unknown"


def test_a_linux_without_a_release_file_is_named_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As uname has it."""

    def absent() -> dict[str, str]:
        raise FileNotFoundError("/etc/os-release")

    monkeypatch.setattr(platform, "freedesktop_os_release", absent)
    found = os_release.linux()
    assert (found.name, found.version) == (platform.system(), platform.release())


def test_processor_name_is_the_first_model_name(short_folder: Path) -> None:
    """The line of the first processor; none on kernels that do not write it."""
    place = short_folder / "cpuinfo"
    place.write_text("processor\t: 0\nmodel name\t: AMD EPYC 7763 64-Core Processor\nmodel name\t: other\n")
    assert cpu.name(place) == "AMD EPYC 7763 64-Core Processor"
    place.write_text("processor\t: 0\nBogoMIPS\t: 48.00\n")
    assert cpu.name(place) is None


def test_versions_come_from_metadata() -> None:
    """A distribution that is not installed has none."""
    assert versions.installed("pytest") == pytest.__version__
    assert versions.installed("veloxquant-no-such-distribution") is None
