"""The filters of `records list` and `records export`, the same for both."""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Any

from veloxquant.errors import InvalidParams, quoted
from veloxquant.units import parse_seconds

if TYPE_CHECKING:
    import argparse

_TEXTS = {
    "method": ("LABEL", "of this variant or method only: affine4-g64"),
    "model": ("ID", "of this model only"),
    "architecture": ("NAME", "of this architecture only: llama"),
    "chip": ("NAME", "measured on this chip only: 'Apple M4 Max', m4"),
    "mlx_version": ("VERSION", "measured with this MLX only: 0.32.4"),
    "source": ("NAME", "from this source only: manual"),
    "tag": ("WORD", "with this tag only"),
    "since": ("WHEN", "measured since a date or time (UTC) or within an age: 2026-11-30, 7d, 12h"),
}
FILTERS = (*_TEXTS, "pinned")
_ISO = re.compile(r"[0-9]{4}-[0-9]{2}.*", re.ASCII)


def filter_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each."""
    for name, (metavar, text) in _TEXTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=f"{text} (list, export)")
    parser.add_argument("--pinned", action="store_true", help="pinned ones only (list, export)")


def filters(options: argparse.Namespace, *, now: dt.datetime) -> dict[str, Any]:
    """What was given, as the call `records` takes it. Raises InvalidParams."""
    given = {name: getattr(options, name) for name in FILTERS if getattr(options, name) not in (None, False)}
    for name, value in given.items():
        if value == "":
            flag = f"--{name.replace('_', '-')}"
            raise InvalidParams(f"{flag} is empty", hint=f"give a value, or leave {flag} out", field=flag)
    if "since" in given:
        given["since"] = _since(given["since"], now)
    return {"model_id" if name == "model" else name: value for name, value in given.items()}


def _since(text: str, now: dt.datetime) -> str:
    """The moment in ISO 8601."""
    try:
        if _ISO.fullmatch(text):
            at = dt.datetime.fromisoformat(text)
            return (at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC)).isoformat()
        if not text.strip().isdigit():  # of seconds, a year or a day?
            return (now - dt.timedelta(seconds=parse_seconds(text, field="--since"))).isoformat()
    except (ValueError, InvalidParams):
        pass
    raise InvalidParams(
        f"--since is {quoted(text)}, which is neither a date nor an age", hint="2026-11-30, 7d, 12h", field="--since"
    )
