"""The systemd user units: filled in from their templates, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant.errors import ServiceRefused
from veloxquant.service import unit_text
from veloxquant.service.values import SOCKET_UNIT, UNIT, Installed

if TYPE_CHECKING:
    from collections.abc import Mapping


def load(path: Path) -> Mapping[str, Mapping[str, str]]:
    """Section -> key -> value. Raises ServiceRefused; FileNotFoundError where there is no file."""
    try:
        return unit_text.sections(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text in UTF-8"
        raise refused(path, reason) from None


def installed(folder: Path, home: Path) -> Installed | None:
    """What the units in `folder` install; None without a service. Raises ServiceRefused."""
    path, socket_unit = folder / UNIT, folder / SOCKET_UNIT
    try:
        value = load(path).get("Service", {}).get("ExecStart", "")
    except FileNotFoundError:
        return None
    program = unit_text.command(value, str(home))
    if not program or not Path(program[0]).name.startswith("veloxquant"):
        raise refused(path, f"it runs {value or 'nothing'}")
    return Installed(
        manager="systemd", path=path, program=program, socket_unit=socket_unit if socket_unit.exists() else None
    )


def refused(path: Path, why: str) -> ServiceRefused:
    """The error for a file of our name that is somebody else's."""
    return ServiceRefused(
        f"{path} is not veloxquant's unit: {why}", hint="move it away, then: veloxquantctl service install"
    )
