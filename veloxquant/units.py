"""Sizes, counts and times: read from what people type, printed as people read them.

Sizes take binary (KiB, MiB, GiB, TiB: powers of 1024) and decimal units (kB, MB, GB, TB: powers of 1000). Counts take
binary thousands, since context lengths are powers of two: 32k is 32768. Arithmetic is exact (`Fraction`), so no size
is off by a byte because of a float.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NoReturn

from veloxquant.errors import MAX_WHOLE, InvalidParams, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SECONDS = 10 * 365 * 86400

_NUMBER = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})\s*([A-Za-z]*)", re.ASCII)
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+", re.ASCII)
_BINARY = {f"{letter}ib": Fraction(1024**n) for n, letter in enumerate("kmgtp", 1)}
_DECIMAL = {f"{letter}b": Fraction(1000**n) for n, letter in enumerate("kmgtp", 1)}
_BINARY_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class _Kind:
    """What one sort of quantity is called, its units in lower case, its upper bound and how to write it."""

    what: str
    units: Mapping[str, Fraction]
    high: int
    hint: str


_SIZE = _Kind(
    "size",
    {"": Fraction(1), "b": Fraction(1), **_BINARY, **_DECIMAL},
    MAX_WHOLE,
    "write bytes (12884901888) or a number with a unit: 12GiB, 12GB, 512MiB",
)
_COUNT = _Kind(
    "count",
    {"": Fraction(1), "k": Fraction(1024), "m": Fraction(1024**2)},
    MAX_WHOLE,
    "write a whole number (32768) or binary thousands: 32k, 128k, 1m",
)
_SECONDS = _Kind(
    "time",
    {
        "": Fraction(1),
        "ms": Fraction(1, 1000),
        "s": Fraction(1),
        "m": Fraction(60),
        "h": Fraction(3600),
        "d": Fraction(86400),
    },
    MAX_SECONDS,
    "write seconds (20) or a number with a unit: 500ms, 20s, 10m, 2h, 1d",
)


def parse_size(value: str | float, *, field: str | None = None) -> int:
    """Bytes from "12GiB", "12GB", "1.5 GiB" or a plain number; a fraction of a byte is dropped.

    Raises InvalidParams (`field` names the input) for anything else, negative, not finite or above 2**53.
    """
    return int(_read(value, _SIZE, field))


def parse_count(value: str | float, *, field: str | None = None) -> int:
    """A whole number from "32k" (32768), "1m" (1048576), "65,536" or a plain number.

    Raises InvalidParams as `parse_size` does, and when the number is not whole.
    """
    if isinstance(value, str) and _GROUPED.fullmatch(value.strip()):
        value = value.replace(",", "")
    number = _read(value, _COUNT, field)
    if number.denominator != 1:
        _refuse(value, _COUNT, "it is not whole", field)
    return int(number)


def parse_seconds(value: str | float, *, field: str | None = None) -> float:
    """Seconds from "20", "1.5", "500ms", "20s", "10m", "2h" or "1d"; at most ten years.

    Raises InvalidParams as `parse_size` does.
    """
    return float(_read(value, _SECONDS, field))


def format_size(size_bytes: float) -> str:
    """A size in the largest binary unit that keeps it above 1: "512 MiB", "1.75 GiB", "11.8 GiB"."""
    sign, size = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    step = 0
    # The comparison is with the printed value, so that 1023.99 MiB becomes 1 GiB and not 1024 MiB.
    while step < len(_BINARY_NAMES) - 1 and float(_digits(size / 1024**step)) >= 1024:  # noqa: PLR2004 -- the unit
        step += 1
    return f"{sign}{_digits(size / 1024**step)} {_BINARY_NAMES[step]}"


def format_count(count: int, thing: str = "") -> str:
    """A whole number with thousands marked, and what was counted: "65,536", "1 layer", "1,024 heads"."""
    number = f"{count:,}"
    return number if not thing else f"{number} {thing}" if count == 1 else f"{number} {thing}s"


def format_duration(seconds: float) -> str:
    """A time in its two largest units: "3d 4h", "5m 3s", "12s", "400ms"."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if 0 < seconds < 1:
        milliseconds = round(seconds * 1000)
        return f"{milliseconds}ms" if milliseconds < 1000 else "1s"  # noqa: PLR2004 -- milliseconds in a second
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")]
    first = next((i for i, (amount, _) in enumerate(parts) if amount), 3)
    shown = [parts[first], *(p for p in parts[first + 1 : first + 2] if p[0])]
    return " ".join(f"{amount}{unit}" for amount, unit in shown)


def _digits(value: float) -> str:
    """Two decimals below 10, one above, none when they would be zeros."""
    text = f"{value:.2f}" if value < 10 else f"{value:.1f}"  # noqa: PLR2004 -- three significant digits
    return text.rstrip("0").rstrip(".")


def _read(value: str | float, kind: _Kind, field: str | None) -> Fraction:
    if isinstance(value, str):
        number = _read_text(value, kind, field)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(value, kind, "it is not a number", field)
    elif not isinstance(value, int) and not math.isfinite(value):
        _refuse(value, kind, "it is not finite", field)
    else:
        number = Fraction(value)
    if number < 0:
        _refuse(value, kind, "it is below 0", field)
    if number > kind.high:
        _refuse(value, kind, f"it is above {kind.high}", field)
    return number


def _read_text(text: str, kind: _Kind, field: str | None) -> Fraction:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        _refuse(text, kind, "it is not a number from 0 up with a unit", field)
    scale = kind.units.get(match[2].lower())
    if scale is None:
        _refuse(text, kind, f"{match[2]!r} is no unit of a {kind.what}", field)
    return Fraction(match[1]) * scale


def _refuse(value: object, kind: _Kind, reason: str, field: str | None) -> NoReturn:
    shown = quoted(value)
    name = f"{field} is {shown}" if field else shown
    raise InvalidParams(f"{name}, which is no {kind.what}: {reason}", hint=kind.hint, field=field)
