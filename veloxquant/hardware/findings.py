"""Collects fields of a HardwareProfile, each with its source; what does not pass as a value is left out with a reason.

Sources are other programs' words: they may raise, lie, or give text where a number belongs. Nothing here raises, so
types are compared and not their kin: a subclass of str or int may do anything when it is touched.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any, TypeVar

from veloxquant.errors import MAX_WHOLE
from veloxquant.profiles import HardwareProfile

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MOST_CORES = 4096
MOST_TEXT = 200
"""Characters of a name or a reason."""
_FIELDS = tuple(field for field in HardwareProfile.__struct_fields__ if field != "sources")


class Findings:
    """Fields found so far; the first good value of a field stays, the last reason for a missing one stays."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def put(self, field: str, value: Any, source: str, failed: str = "") -> None:
        """Keep a value that is there. None means the source does not know; `failed` says why, if it is known why."""
        if field in self.values:
            return
        if value is None:
            self.sources.setdefault(field, failed or f"{source}: not reported")
        else:
            self.values[field] = value
            self.sources[field] = source

    def missing(self, field: str, reason: str) -> None:
        """Say why a field is unknown."""
        if field not in self.values:
            self.sources[field] = reason

    def remark(self, field: str, text: str) -> None:
        """Add words to a field's source."""
        self.sources[field] = f"{self.sources[field]}; {text}" if field in self.sources else text

    def profile(self) -> HardwareProfile:
        """The profile; a field nobody spoke of says so."""
        sources = {field: self.sources.get(field, "no source on this system") for field in _FIELDS}
        return HardwareProfile(**self.values, sources=sources)


def ask(source: Callable[..., T], *arguments: Any) -> tuple[T | None, str]:
    """(answer, reason why there is none)."""
    try:
        return source(*arguments), ""
    except Exception as error:  # noqa: BLE001 -- the fence: detection never raises, whatever a source does
        return None, text(traceback.format_exception_only(error)[-1]) or type(error).__name__


def part(answer: Any, name: str) -> Any:
    """One attribute of what a source said, None where it has none to give."""
    return ask(getattr, answer, name, None)[0]


def because(source: str, failed: str) -> str:
    """The reason for `Findings.put`: the source's name and error, or "" when it did not fail."""
    return failed and f"{source}: {failed}"


def size(value: Any) -> int | None:
    """A positive whole number of bytes, else None."""
    return value if type(value) is int and 0 < value <= MAX_WHOLE else None


def amount(value: Any) -> int | None:
    """A whole number of bytes from 0 up, else None."""
    return 0 if type(value) is int and value == 0 else size(value)


def count(value: Any) -> int | None:
    """A positive whole number of cores, else None."""
    found = size(value)
    return found if found is not None and found <= MOST_CORES else None


def truth(value: Any) -> bool | None:
    """Yes or no, else None."""
    return value if type(value) is bool else None


def text(value: Any) -> str | None:
    """One line of text without surrounding space, else None; what UTF-8 cannot hold is replaced."""
    if type(value) is not str:
        return None
    line = " ".join(value[:MOST_TEXT].encode("utf-8", "replace").decode().split())
    return line if line and line.isprintable() else None


def rate(value: Any) -> float | None:
    """A positive finite number, else None."""
    number = type(value) in (int, float)
    return float(value) if number and 0 < value < MAX_WHOLE else None
