"""TOML from a file that anybody may have written, in bounded time and memory."""

from __future__ import annotations

import tomllib
from typing import Any

_MOST_DOTS = 64


class TooManyDots(tomllib.TOMLDecodeError):
    """A line of so many dots."""

    def __init__(self, line: int) -> None:
        # Past the parent's: from Python 3.14 on it wants the document and the place, and before it took neither.
        ValueError.__init__(self, f"more than {_MOST_DOTS} dots (at line {line}, column 1)")


def loads(text: str) -> dict[str, Any]:
    """The document. Raises what `tomllib.loads` raises, TooManyDots among it.

    The standard reader keeps every beginning of a dotted key, so that one key of 128 KiB would take it a minute and
    16 GiB. A key ends on its line, and no line that means something to us has so many dots.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > _MOST_DOTS and not line.lstrip().startswith("#"):
            raise TooManyDots(number)
    return tomllib.loads(text)
