"""`hardware --calibrate`: a chip that no table lists gets a measured bandwidth, and plans use it."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.hardware import calibrate
from veloxquant.hardware.calibrate import stored
from veloxquant.hardware.memory import Memory
from veloxquant.hardware.mlx_device import Device
from veloxquant.hardware.os_release import System
from veloxquant.hardware.sources import Sources
from veloxquant.wire import answers

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

    from veloxquant.client import FakeTransport

    Run = Callable[..., Any]

CHIP, VERSION = "Unlisted 9000", "0.32.4"


def _machine(chip: str | None) -> Sources:
    """A Linux machine with this processor, whose stored measurements are real."""
    return Sources(
        platform="linux",
        device=lambda: Device(backend="cpu"),
        memory=lambda: Memory(total_bytes=16 * 2**30, available_bytes=8 * 2**30),
        cpu_name=lambda: chip,
        linux=lambda: System(name="Linux", version="6", source="recorded"),
        version={"mlx": VERSION, "mlx-lm": "0.32.2"}.get,
    )


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """A machine that no table lists, and a measurement as short as it may be."""

    def use(chip: str | None) -> None:
        monkeypatch.setattr("veloxquant.hardware.detect.Sources", lambda: _machine(chip))

    short = functools.partial(calibrate.measure, buffer_bytes=2**26, seconds=0.01)
    monkeypatch.setattr(calibrate, "measure", short)
    use(CHIP)
    return use


def test_an_unlisted_chip_has_no_bandwidth_until_it_is_measured(ctl: Run) -> None:
    """Before: unknown, and the reason names the command. After: the stored figure, whose source says calibrated."""
    before = json.loads(ctl("hardware", "--no-daemon", "--json").out)
    assert before["bandwidth_gbps"] is None
    assert "veloxquantctl hardware --calibrate" in before["sources"]["bandwidth_gbps"]
    done = ctl("hardware", "--calibrate", "--no-daemon", "--json")
    assert done.code == 0
    assert "GB/s on the" in done.err
    kept = stored(CHIP, VERSION)
    assert kept is not None
    for after in (json.loads(done.out), json.loads(ctl("hardware", "--no-daemon", "--json").out)):
        assert after["bandwidth_gbps"] == kept.bandwidth_gbps > 0
        assert after["sources"]["bandwidth_gbps"].startswith(f"calibrated {kept.date}")


def test_a_published_figure_stays_and_that_is_said(ctl: Run, small: Callable[[str | None], None]) -> None:
    """Apple's figure for an M2 is 100 GB/s, whatever was measured."""
    small("Apple M2")
    done = ctl("hardware", "--calibrate", "--no-daemon", "--json")
    assert json.loads(done.out)["bandwidth_gbps"] == 100
    assert "published" in done.err


def test_a_running_daemon_looks_at_the_machine_again(ctl: Run, fake: FakeTransport, example: SimpleNamespace) -> None:
    """The next plan uses the figure: no wait for the daemon's own look."""
    fake.answers["reload"] = answers.Reloaded(generation=4, changed=True)
    fake.answers["hardware"] = example.hardware
    assert ctl("hardware", "--calibrate").code == 0
    assert [name for name, _ in fake.calls] == ["reload", "hardware"]


def test_only_this_machine_can_be_measured(ctl: Run) -> None:
    """Measuring as if on another chip is refused, and nothing is stored."""
    done = ctl("hardware", "--calibrate", "--chip", "Apple M2", "--no-daemon", "--json")
    assert (done.code, json.loads(done.out)["error"]["field"]) == (2, "--calibrate")
    assert stored(CHIP, VERSION) is None


def test_a_machine_without_a_chip_name_is_refused_with_the_reason(
    ctl: Run, small: Callable[[str | None], None]
) -> None:
    """The figure is kept by chip, so there must be one."""
    small(None)
    done = ctl("hardware", "--calibrate", "--no-daemon", "--json")
    error = json.loads(done.out)["error"]
    assert (done.code, error["name"]) == (2, "engine_unavailable")
    assert "chip is unknown" in error["message"]
    assert error["hint"]


def test_a_figure_that_cannot_be_kept_is_an_error(ctl: Run) -> None:
    """A file where the cache folder should be: the measurement would be lost, which ends with 1."""
    Path(os.environ["XDG_CACHE_HOME"], "veloxquant").write_text("in the way")
    done = ctl("hardware", "--calibrate", "--no-daemon", "--json")
    assert (done.code, json.loads(done.out)["error"]["name"]) == (1, "store_unavailable")
