"""The systemd user units: filled in from their templates, and read back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant import plain_file
from veloxquant.errors import ServiceRefused
from veloxquant.service import files, templates, unit_text
from veloxquant.service.files import MOST_BYTES
from veloxquant.service.values import SOCKET_UNIT, UNIT, Installed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from veloxquant.service.values import Order

_NOTE = "# Written by veloxquantctl service install, which overwrites what is changed here; a drop-in is left alone.\n"
_UNHOLDABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_FORBIDDEN_IN_PROGRAM = "\"'\\"
"""systemd starts no program whose path has one of these (its string_is_safe)."""


def render(order: Order, runtime: str) -> dict[str, bytes]:
    """The units' names and contents. `runtime`: what %t stands for. Raises ServiceRefused for text they cannot hold."""
    for text in (*order.program, str(order.activated or ""), *order.environment.values()):
        _holdable(text)
    program, *arguments = order.program
    if any(mark in program for mark in _FORBIDDEN_IN_PROGRAM):
        raise ServiceRefused(
            f"systemd starts no program whose path has a quote or a backslash in it: {program}",
            hint="give a path without them, such as a link: --program PATH",
        )
    words = [unit_text.quote(program), *map(unit_text.argument, arguments)]
    variables = [f"Environment={unit_text.quote(f'{key}={value}')}\n" for key, value in order.environment.items()]
    service = templates.read(UNIT).replace("@ENVIRONMENT@\n", "".join(variables), 1)
    texts = {UNIT: service.replace("@COMMAND@", " ".join(words), 1)}
    if order.activated is not None:
        place = _listen(order.activated, runtime)
        texts[SOCKET_UNIT] = templates.read(SOCKET_UNIT).replace("@SOCKET@", place, 1)
    return {name: (_NOTE + _without_head(text)).encode() for name, text in texts.items()}


def _without_head(text: str) -> str:
    """What the template says of itself does not hold for the file."""
    return text[text.index("[Unit]") :]


def _listen(path: Path, runtime: str) -> str:
    """The value of ListenStream, which knows specifiers but no quotes. Raises ServiceRefused."""
    text = str(path)
    if text != text.strip() or text.endswith("\\"):
        raise ServiceRefused(
            f"systemd cannot listen on {text!r}: blanks at its ends or a backslash as the last character",
            hint="set VELOXQUANT_SOCKET to another path",
        )
    if runtime and text.startswith(f"{runtime}/"):
        return "%t" + unit_text.percent(text[len(runtime) :])
    return unit_text.percent(text)


def _holdable(text: str) -> None:
    """Raises ServiceRefused for control characters and for bytes of a file name that are no UTF-8."""
    if not _UNHOLDABLE.search(text):
        return
    raise ServiceRefused(
        f"a unit file cannot hold {text!r}: control characters, or bytes that are no UTF-8",
        hint="give the program, the socket and the environment in printable text",
    )


def load(path: Path) -> Mapping[str, Mapping[str, str]]:
    """Section -> key -> value. Raises ServiceRefused; FileNotFoundError where there is no file."""
    try:
        text = plain_file.read(path, MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text in UTF-8"
        raise files.not_ours(path, "unit", reason) from None
    return unit_text.sections(text.replace("\r\n", "\n"))


def installed(folder: Path, home: Path) -> Installed | None:
    """What the units in `folder` install; None without a service. Raises ServiceRefused."""
    path, socket_unit = folder / UNIT, folder / SOCKET_UNIT
    try:
        value = load(path).get("Service", {}).get("ExecStart", "")
    except FileNotFoundError:
        return None
    program = unit_text.command(value, str(home))
    if not program or not Path(program[0]).name.startswith("veloxquant"):
        raise files.not_ours(path, "unit", f"it runs {value or 'nothing'}")
    return Installed(
        manager="systemd", path=path, program=program, socket_unit=socket_unit if socket_unit.exists() else None
    )


def refuse_foreign_socket(path: Path) -> None:
    """Raises ServiceRefused for a socket unit of our name that `render` did not write."""
    try:
        found = load(path)
    except FileNotFoundError:
        return
    if "X-Veloxquant" not in found:
        raise files.not_ours(path, "unit", "it was not written by veloxquantctl")
