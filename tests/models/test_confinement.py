"""What the trace worker cannot do: reach a network, start programs, see secrets, fill a disk, load a pickle."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from veloxquant.models.exchange import ProbeRequest, TraceRequest
from veloxquant.models.resolve import resolve
from veloxquant.models.trace import Trace, trace
from veloxquant.models.trace_worker import confinement, tracing

CANARY = "canary-3f9a"
SECRETS = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "VELOXQUANT_TEST_PASSWORD", "XDG_TOKEN", "HOUSE_RENT")


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets under the names they usually have, under ours, and under one that says nothing."""
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)


@pytest.fixture
def found(secrets: None, factories: None, tiny: dict[str, Any], isolated_home: Path) -> tuple[Trace, dict[str, Any]]:
    """A trace by a factory that looks around, and what it saw."""
    source = resolve(config=tiny)
    asked = TraceRequest(
        model_id="m",
        config_json=json.dumps(source.config),
        config_hash=source.config_hash,
        dtype="float16",
        factory="engine_factory:curious",
        probes=(ProbeRequest(method="q", label="a", params={"bits": 8, "group": 32}),),
    )
    traced = trace(asked, timeout_s=30)
    return traced, json.loads((isolated_home / "cache" / "seen.json").read_text())


def test_the_worker_gets_what_it_needs_and_nothing_it_could_tell(found: tuple[Trace, dict[str, Any]]) -> None:
    """No secret, whatever its name; no network, no program, no large file, no file of more than 16 MiB."""
    traced, seen = found
    assert traced.profile is not None
    assert traced.profile.probes[0].packed == (0, 1, 2, 3)
    assert CANARY not in json.dumps(seen["variables"]) + seen["environment"]
    assert {"HOME", "PATH", "XDG_CACHE_HOME", "HF_HUB_OFFLINE"} <= set(seen["variables"])
    assert seen["uid"] == os.getuid()
    for what, event in (
        ("socket", "socket.__new__"),
        ("name", "socket.gethostbyname"),
        ("program", "subprocess.Popen"),
        ("spawn", "os.posix_spawn"),
    ):
        assert seen[what] == f"{event} is not allowed while tracing a model"
    assert "File too large" in seen["file"]
    assert seen["limits"]["CORE"] == [0, 0]
    assert seen["limits"]["FSIZE"] == [confinement.FILE_BYTES] * 2
    assert seen["limits"]["CPU"] == [40, 40], "the time limit and ten seconds"
    assert seen["files"] <= confinement.OPEN_FILES
    assert traced.network in ("namespace", "sandbox", "audit")
    if traced.network == "namespace":
        assert seen["native"] == [-1, "Network is unreachable"], "the kernel's word, past all hooks"


def test_an_unknown_system_has_the_audit_hook_alone_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel grants no namespace, or there is none, nothing is claimed."""
    monkeypatch.setattr(sys, "platform", "freebsd14")
    assert confinement._leave_network() == "audit"
    monkeypatch.setattr(sys, "platform", "linux")
    calls: list[int] = []

    class Refusing:
        def unshare(self, flags: int) -> int:
            calls.append(flags)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing())
    assert confinement._leave_network() == "audit"
    assert calls == [0x40000000, 0x50000000], "as root, else with a user namespace"


@pytest.mark.parametrize(("answer", "fence"), [(0, "sandbox"), (-1, "audit")])
def test_macos_is_asked_for_its_sandbox_without_network(
    monkeypatch: pytest.MonkeyPatch, answer: int, fence: str
) -> None:
    """By the call of <sandbox.h>; against a stand-in, not run on a Mac."""
    calls: list[tuple[bytes, int]] = []

    class System:
        def sandbox_init(self, profile: bytes, flags: Any, said: Any) -> int:
            calls.append((profile, flags.value))
            return answer

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", {"/usr/lib/libSystem.dylib": System()}.__getitem__)
    assert confinement._leave_network() == fence
    assert calls == [(b"no-network", 1)]


_WATCHED: list[str] = []
_WATCHING: list[bool] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _WATCHING and event in ("pickle.find_class", "open"):
        _WATCHED.append(f"{event} {arguments[0]}")


def test_tracing_a_folder_of_pickles_reads_none_of_them(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Python tells of each class that a pickle names, and of each file that is opened: there is none, and no .bin."""
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    for name in ("pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.safetensors.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps(Path("/")))
    sys.addaudithook(_watch)
    _WATCHING.append(True)
    try:
        source = resolve(path=str(tmp_path))
        profile = tracing.trace(source.config, "float16")
    finally:
        _WATCHING.clear()
    assert len(profile.layers) == 4
    opened = [entry for entry in _WATCHED if entry.startswith("open")]
    assert any(entry.endswith("config.json") for entry in opened), "the hook sees what is read"
    assert not [entry for entry in _WATCHED if entry.startswith("pickle")]
    assert not [entry for entry in opened if entry.endswith((".bin", ".pth", ".pt", ".pkl"))]
    assert source.weights is not None
    assert source.weights.weights_bytes is None
    (note,) = source.weights.notes
    assert note == (
        "the folder's weights are pickles (consolidated.00.pth and 3 more), which are never read: "
        "mlx-lm loads safetensors alone"
    )


def test_the_worker_says_how_it_is_kept_from_the_network(tmp_path: Path) -> None:
    """Python's own module of the process, asked without an engine: the fence is taken on before any is imported."""
    code = (
        "import sys; from veloxquant.models.trace_worker.confinement import confine\n"
        "print(confine(10, 2**30), *sorted({'mlx', 'mlx.core', 'mlx_lm', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() in (["namespace"], ["sandbox"], ["audit"])


def test_a_confined_process_loads_no_class_from_a_pickle() -> None:
    """Whoever hands one to pickle there gets an error and no code is called."""
    code = (
        "import pickle; from veloxquant.models.trace_worker.confinement import confine\n"
        "confine(60, 2**30)\n"
        "try: pickle.loads(b'cos\\ngetcwd\\n.')\n"
        "except PermissionError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "pickle.find_class is not allowed while tracing a model\n"
