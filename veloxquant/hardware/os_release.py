"""Name and version of the operating system, from its own files."""

from __future__ import annotations

import os
import platform
import plistlib
from pathlib import Path

import msgspec

_PLIST = Path("/System/Library/CoreServices/SystemVersion.plist")
_FIRST_YEARLY_DARWIN = 25


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Such as "macOS" "26.4.1", or "Debian GNU/Linux" "12". `source` names the file."""

    name: str | None
    version: str | None
    source: str


def macos() -> System:
    """Read SystemVersion.plist, done in well under a millisecond. Apple only: not run on a Mac."""
    return macos_of(plistlib.loads(_PLIST.read_bytes()).get("ProductVersion"), os.uname().release)


def macos_of(plist_version: str | None, darwin: str) -> System:
    """The true version. Programs built for an older SDK are told 10.16 or 16.x, which are no versions of macOS.

    The kernel does not dissemble: Darwin 20 to 24 are macOS 11 to 15, from Darwin 25 on macOS is one ahead
    (https://github.com/python/cpython/issues/135675). There has been no macOS 16 to 25.
    """
    major = (plist_version or "").partition(".")[0]
    believable = bool(major) and not (major == "10" or (major.isdigit() and 16 <= int(major) <= 25))  # noqa: PLR2004 -- above
    if believable:
        return System(name="macOS", version=plist_version, source="SystemVersion.plist")
    numbers = [int(part) for part in darwin.split(".") if part.isascii() and part.isdigit()]
    if not numbers:
        return System(name="macOS", version=plist_version, source=f"SystemVersion.plist; Darwin {darwin!r} is unknown")
    shift = 1 if numbers[0] >= _FIRST_YEARLY_DARWIN else -9
    version = ".".join(str(n) for n in (numbers[0] + shift, *numbers[1:2]))
    return System(name="macOS", version=version, source=f"Darwin {darwin} (SystemVersion.plist says {plist_version})")


def linux() -> System:
    """The distribution from os-release, else the kernel's release."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return System(name=platform.system(), version=platform.release(), source="uname (no os-release file)")
    return System(name=release.get("NAME"), version=release.get("VERSION_ID"), source="os-release")
