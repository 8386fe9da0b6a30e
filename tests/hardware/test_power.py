"""Low power mode: pmset's two spellings, Linux's platform profile, and what a profile says of either."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.hardware import power
from veloxquant.hardware.detect import detect
from veloxquant.hardware.overrides import with_overrides

if TYPE_CHECKING:
    from pathlib import Path

    from veloxquant.hardware.sources import Sources

# Shortened from github.com/AppHouseKitchen/AlDente-Battery_Care_and_Monitoring/issues/603 (a MacBook on macOS 12).
PMSET = """System-wide power settings:
 SleepDisabled\t\t1
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 sleep                1 (sleep prevented by bluetoothd, sharingd)
 displaysleep         10 (display sleep prevented by com.apphousekitchen.aldente-pro)
 tcpkeepalive         1
 lowpowermode         {}
 womp                 1
"""


@pytest.mark.parametrize(
    ("said", "saving"),
    [
        (PMSET.format(0), False),
        (PMSET.format(1), True),
        # Macs with a high power mode: 0 automatic, 1 low, 2 high (alfredapp/low-power-mode-workflow/issues/4).
        *((PMSET.replace("lowpowermode", "powermode").format(mode), mode == 1) for mode in (0, 1, 2)),
        (PMSET.replace("lowpowermode", "halfdim").format(1), None),
        ("a lowpowermode 1 in a sentence", None),
        ("", None),
    ],
)
def test_pmset_is_read(said: str, saving: bool | None) -> None:
    """Both spellings, and neither."""
    assert power.parse(said) is saving


@pytest.mark.parametrize(("text", "saving"), [("low-power\n", True), ("balanced\n", False), ("performance\n", False)])
def test_the_platform_profile_is_read(short_folder: Path, text: str, saving: bool) -> None:
    """The kernel's words for it; a machine without the file has no such mode."""
    assert power.linux(short_folder / "platform_profile") is None
    (short_folder / "platform_profile").write_text(text)
    assert power.linux(short_folder / "platform_profile") is saving


def test_a_profile_says_where_the_mode_came_from(mac: Any, this_linux: Sources) -> None:
    """On, off, no such mode, and not to be had: each with its source or its reason."""
    for sources, field, name in ((mac(), "mac_power", "pmset"), (this_linux, "linux_power", "platform_profile")):
        for saving in (True, False):
            profile = detect(replace(sources, **{field: lambda saving=saving: saving}))
            assert (profile.low_power_mode, profile.sources["low_power_mode"]) == (saving, name)
        profile = detect(replace(sources, **{field: lambda: None}))
        assert (profile.low_power_mode, profile.sources["low_power_mode"]) == (None, f"{name}: no such mode here")

        def late() -> bool:
            raise TimeoutError("late")

        profile = detect(replace(sources, **{field: late}))
        assert profile.low_power_mode is None
        assert profile.sources["low_power_mode"] == f"{name}: TimeoutError: late"


def test_another_chip_is_not_in_our_mode(mac: Any) -> None:
    """As if on another machine nothing is known of its mode; with another working set it is still this machine."""
    here = detect(replace(mac(), mac_power=lambda: True))
    assert with_overrides(here, {"working_set_bytes": 2**33}).low_power_mode is True
    assert with_overrides(here, {"chip": "Apple M4 Max", "gpu_cores": 40}).low_power_mode is None
