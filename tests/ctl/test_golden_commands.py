"""What commands without a `show` of their own write, letter by letter; every figure is arithmetic on the example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from veloxquant.ctl import version, wait
from veloxquant.planner.result import MemoryTerm
from veloxquant.wire import answers

if TYPE_CHECKING:
    from veloxquant.client import FakeTransport
    from veloxquant.planner.result import Plan

FOLDER = Path(__file__).parents[1] / "golden"
Run = Callable[..., Any]


def written(name: str) -> str:
    """The golden file of that name."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


@pytest.fixture
def explained(example: SimpleNamespace) -> Plan:
    """The example's plan with the one term its bytes are made of."""
    chosen = example.plan.chosen
    term = MemoryTerm(
        layers=32,
        packed=True,
        kind="kv",
        heads=8,
        key_width=128,
        value_width=128,
        key_bits=4.5,
        value_bits=4.5,
        slots=example.slots,
        fixed_bytes=0,
        bytes=chosen.memory.stored_bytes,
    )
    memory = msgspec.structs.replace(chosen.memory, terms=(term,))
    plan: Plan = msgspec.structs.replace(example.plan, chosen=msgspec.structs.replace(chosen, memory=memory))
    return plan


def test_explain_as_text(ctl: Run, fake: FakeTransport, explained: Plan) -> None:
    """Decision, layers, bytes, fit, speed and quality, each with its grounds."""
    fake.answers["plan"] = explained
    done = ctl("explain", "--model", "a/b")
    assert done.out == written("explain")
    assert done.code == 0


def test_the_figures_of_the_explanation() -> None:
    """4.5 of 16 bits; 514 steps of 256 slots; 11.8 GiB less weights and reserve; one token in 125 ms."""
    text = written("explain")
    assert (131_072 + 512) // 256 == 514
    stored = 32 * 8 * 128 * 2 * 4.5 * 131_584 / 8 / 2**30
    own = 32 * 8 * 128 * 2 * 16 * 131_584 / 8 / 2**30
    assert f"131,584 slots / 8 = {stored:.2f} GiB (packed)" in text
    assert f"{stored:.2f} GiB stored for 1 sequence, {4.5 / 16:.3g} of the engine's own {own:.1f} GiB" in text
    assert f"{32 * 8 * 128 * 2 * 4.5 / 8:,.0f} bytes more with each token" in text
    assert f"{stored + 1:.2f} GiB at the peak: 1 GiB more at the worst moment, with a prefill step of 128" in text
    total = 4.5 + stored + 1 + 0.5
    assert f"4.5 GiB weights + {stored + 1:.2f} GiB caches at the peak + 0 B other work + 512 MiB reserve" in text
    assert f"= {total:.1f} GiB; 6.8 GiB for caches, {11.8 - total:.2f} GiB to spare" in text
    assert f"largest context at the asked slots: {int((6.8 - 1) * 2**30 // 36_864):,} tokens" in text
    assert f"125 ms a token at {131_072 + 512:,} tokens ({125 / 2:.3g} to {125 * 2}), {1000 / 125:g} tokens" in text
    assert f"0.051 nats a token against the engine's own cache ({0.051 / 2:.3g} to {0.051 * 2:.3g})" in text


def test_wait_as_text(ctl: Run, fake: FakeTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it took, and who answers: from 10 s to 13 s on the clock."""
    clock = iter((10.0, 10.0, 13.0))  # before the wait, for what is left of it, and after
    monkeypatch.setattr(wait, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    fake.answers["ping"] = answers.Pong(pid=4312, generation=118)
    assert ctl("wait").out == written("wait")


def test_version_as_text(ctl: Run, fake: FakeTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """This program, what it stands on, one of it missing, and the daemon."""
    found = {"mlx": "0.32.4", "msgspec": "0.20.0", "pluggy": "1.6.0", "watchdog": "6.0.0", "psutil": "7.0.0"}
    monkeypatch.setattr(version, "__version__", "0.1.0")
    monkeypatch.setattr(version.platform, "python_version", lambda: "3.12.1")
    monkeypatch.setattr(version.versions, "installed", found.get)
    fake.answers["hello"] = answers.Hello(
        server="veloxquant", version="0.1.0", protocol=1, capabilities=(), pid=4312, generation=118
    )
    assert ctl("version").out == written("version")


def test_config_as_text(ctl: Run) -> None:
    """Every key with its default, without a file."""
    assert ctl("config", "show").out == written("config")


def test_the_figures_of_the_configuration() -> None:
    """Sizes are bytes and times seconds, as the page on the configuration has them in larger units."""
    lines = set(written("config").splitlines())
    assert f"reserve_bytes = {512 * 2**20}" in lines
    assert f"max_bytes = {2**30}" in lines
    assert f"memory_limit_bytes = {2 * 2**30}" in lines
    assert f"idle_timeout_s = {10 * 60.0}" in lines


def test_socket_as_text(ctl: Run) -> None:
    """The path and nothing else."""
    assert ctl("socket", "--socket", "/run/user/501/veloxquant/d.sock").out == written("socket")
