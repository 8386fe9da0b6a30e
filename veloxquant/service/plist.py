"""The launchd property list: filled in from its template, and read back."""

from __future__ import annotations

import plistlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veloxquant import plain_file
from veloxquant.errors import ServiceRefused
from veloxquant.service import files, templates
from veloxquant.service.files import MOST_BYTES
from veloxquant.service.values import LABEL, Installed

if TYPE_CHECKING:
    from veloxquant.service.values import Order

SOCKET_NAME = "daemon"
"""The key under Sockets, by which the daemon asks launchd for its socket."""
_HEAD = b'<plist version="1.0">\n'
_NOTE = b"<!-- Written by veloxquantctl service install, which overwrites what is changed here. -->\n"


def render(order: Order, crash_log: Path) -> bytes:
    """The property list that launchd is given. Raises ServiceRefused for text that XML cannot hold."""
    filled = plistlib.loads(templates.read(f"{LABEL}.plist").encode())
    filled["ProgramArguments"] = list(order.program)
    filled["EnvironmentVariables"].update(order.environment)
    filled["StandardErrorPath"] = str(crash_log)
    if order.activated is None:
        del filled["Sockets"]
    else:
        filled["Sockets"][SOCKET_NAME]["SockPathName"] = str(order.activated)
    try:
        written = plistlib.dumps(filled, sort_keys=False)
    except (ValueError, UnicodeEncodeError):  # control characters; bytes of a file name that are no UTF-8
        raise ServiceRefused(
            "a path or a value has characters that no property list can hold",
            hint="give the program, the socket and the environment in printable text",
        ) from None
    return written.replace(_HEAD, _NOTE + _HEAD, 1)


def load(path: Path) -> dict[str, Any]:
    """The dictionary in a property list. Raises ServiceRefused; FileNotFoundError where there is none."""
    try:
        found = plistlib.loads(plain_file.read(path, MOST_BYTES))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error.strerror or "unreadable") from None
    except Exception as error:  # noqa: BLE001 -- plistlib lets expat's, struct's and its own errors through
        raise _unreadable(path, f"no property list ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise _unreadable(path, "a property list without a dictionary")
    return found


def program(found: dict[str, Any], path: Path) -> tuple[str, ...]:
    """What launchd executes: ProgramArguments with Program, where given, in the first place. Raises ServiceRefused."""
    words = found.get("ProgramArguments", [])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise _unreadable(path, "ProgramArguments is no list of words")
    if isinstance(found.get("Program"), str):
        words = [found["Program"], *words[1:]]
    if not words:
        raise _unreadable(path, "it names no program")
    return tuple(words)


def installed(path: Path) -> Installed | None:
    """What the file at `path` installs; None without a file. Raises ServiceRefused."""
    try:
        found = load(path)
    except FileNotFoundError:
        return None
    if found.get("Label") != LABEL:
        raise _unreadable(path, f"its Label is {found.get('Label')!r}, not {LABEL}")
    return Installed(manager="launchd", path=path, program=program(found, path))


def activated(path: Path) -> Path | None:
    """The socket that launchd opens for the agent of this file; None without one. Raises ServiceRefused."""
    try:
        found = load(path)
    except FileNotFoundError:
        return None
    sockets = found.get("Sockets")
    entry = sockets.get(SOCKET_NAME) if isinstance(sockets, dict) else None
    name = entry.get("SockPathName") if isinstance(entry, dict) else None
    return Path(name) if isinstance(name, str) else None


def _unreadable(path: Path, why: str) -> ServiceRefused:
    return files.not_ours(path, "agent", why)
