"""Whether the system saves power at the cost of speed.

macOS shows it as `lowpowermode`, or on machines that also have a high power mode as `powermode` with 1 for low
(https://github.com/alfredapp/low-power-mode-workflow/issues/4). Linux has ACPI's platform profile
(https://docs.kernel.org/userspace-api/sysfs-platform_profile.html).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_COMMAND = ("/usr/bin/pmset", "-g")
_TIMEOUT_S = 0.1
"""As long as ioreg beside it: what comes later than that is unknown for a minute."""
_SETTING = re.compile(r"^[ \t]*(?:low)?powermode[ \t]+([0-9])\b", re.MULTILINE)
_LOW = "1"
_PROFILE = Path("/sys/firmware/acpi/platform_profile")
_SAVING = "low-power"


def macos() -> bool | None:
    """What pmset says, None on a Mac without such a mode. Raises OSError or subprocess.SubprocessError.

    Apple only: not run on a Mac.
    """
    done = subprocess.run(_COMMAND, capture_output=True, timeout=_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL)  # noqa: S603 -- fixed words
    return parse(done.stdout.decode("utf-8", "replace"))


def parse(said: str) -> bool | None:
    """Read pmset's text: the settings in use."""
    found = _SETTING.search(said)
    return None if found is None else found[1] == _LOW


def linux(profile: Path = _PROFILE) -> bool | None:
    """What the platform profile says, None without one. Raises OSError when it is there and cannot be read."""
    try:
        return profile.read_text(encoding="ascii").strip() == _SAVING
    except FileNotFoundError:
        return None
