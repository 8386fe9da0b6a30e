"""The launchd property list: filled in from its template, and read back."""

from __future__ import annotations

import plistlib
from typing import TYPE_CHECKING, Any

from veloxquant.errors import ServiceRefused
from veloxquant.service.values import LABEL, Installed

if TYPE_CHECKING:
    from pathlib import Path


def load(path: Path) -> dict[str, Any]:
    """The dictionary in a property list. Raises ServiceRefused; FileNotFoundError where there is none."""
    try:
        found = plistlib.loads(path.read_bytes())
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


def _unreadable(path: Path, why: str) -> ServiceRefused:
    return ServiceRefused(
        f"{path} is not veloxquant's agent: {why}", hint="move it away, then: veloxquantctl service install"
    )
