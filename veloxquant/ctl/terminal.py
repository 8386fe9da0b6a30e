"""What people and programs see: data on stdout, the rest on stderr, colour only where it is wanted."""

from __future__ import annotations

import itertools
import os
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO

from veloxquant.errors import VeloxError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ERROR_SCHEMA = "veloxquant.error/1"
_CUT = "..."
_SEQUENCE = re.compile(r"(\033\[[0-9;]*m)")
_HOME, _CLEAR = "\033[H", "\033[2J"
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class Unwritable(VeloxError):
    """Our data could not be written: a full disk, a terminal that is gone."""


class Terminal:
    """Two streams and how to write on them. `json`: one object on stdout instead of text, errors included."""

    def __init__(
        self, out: TextIO, err: TextIO, *, json: bool = False, color: str = "auto", quiet: bool = False
    ) -> None:
        self.out = out
        self.err = err
        self.json = json
        self.quiet = quiet
        self._color = color

    @classmethod
    def of_process(cls, arguments: Sequence[str]) -> Terminal:
        """Our own streams, as the raw arguments ask: an error in the arguments must be shown as they wish, too."""
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal without × or ✓ shows ? and does not end us
        pairs = itertools.pairwise(arguments)
        color = next((value for flag, value in pairs if flag == "--color"), "auto")
        color = next((one.partition("=")[2] for one in arguments if one.startswith("--color=")), color)
        return cls(sys.stdout, sys.stderr, json="--json" in arguments, color=color, quiet="--quiet" in arguments)

    def say(self, text: str = "") -> None:
        """One line of data."""
        self._write(text + "\n")

    def _write(self, text: str) -> None:
        try:
            self.out.write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _unwritable(error) from None

    def flush(self) -> None:
        """Hand over what was said. Raises BrokenPipeError, Unwritable."""
        try:
            self.out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _unwritable(error) from None

    def value(self, schema: str, value: Any) -> None:
        """One JSON object of data; `schema` names its form and is its first field."""
        import msgspec

        plain = msgspec.to_builtins(value)
        body: Mapping[str, Any] = {"schema": schema, **{k: v for k, v in plain.items() if k != "schema"}}
        self.say(msgspec.json.encode(body).decode())

    def warning(self, text: str) -> str:
        """A line of data on what a person should look at, aligned with lines that begin with a subject."""
        return f"{self.paint('yellow', 'warning')}   {text}"

    def note(self, text: str) -> None:
        """Something worth knowing that is no data."""
        if not self.quiet:
            self.err.write(self.paint("yellow", "note: ", self.err) + text + "\n")

    def fail(self, error: VeloxError) -> None:
        """What went wrong, why, and what to do next."""
        if self.json:
            shown = {
                "name": error.name,
                "message": error.message,
                "hint": error.hint,
                "field": error.field,
                "exit_code": error.exit_code,
            }
            self.value(ERROR_SCHEMA, {"error": shown})
        else:
            self.complain(error)

    def complain(self, error: VeloxError) -> None:
        """The error for people, on stderr."""
        self.err.write(self.paint("red", "error: ", self.err) + error.message + "\n")
        if error.hint:
            self.err.write(self.paint("dim", "  next: ", self.err) + error.hint + "\n")

    def cut(self, text: str) -> str:
        """The text, shortened to the terminal's width; whole where no terminal reads it (a pipe, a file)."""
        width = self._width()
        return text if width is None or len(text) <= width else f"{text[: max(1, width - len(_CUT))]}{_CUT}"

    def paint(self, style: str, text: str, stream: TextIO | None = None) -> str:
        """The text in a style, or as it is where colour is not wanted."""
        if not text or not self._coloured(stream or self.out):
            return text
        return f"\033[{_CODES[style]}m{text}\033[0m"

    @property
    def in_place(self) -> bool:
        """Whether what was drawn can be drawn over: a terminal that understands the usual sequences."""
        return self.out.isatty() and os.environ.get("TERM", "") not in ("", "dumb")

    @property
    def rows(self) -> int | None:
        """How many lines `redraw` has room for, at least one; None where the terminal does not say.

        The last row stays free: a newline there would scroll.
        """
        height = self._size()[1]
        return None if height is None else max(1, height - 1)

    def redraw(self, lines: Sequence[str], *, first: bool) -> None:
        """These lines in place of what was drawn, within the terminal's size as it is now; `first` clears it.

        Each line ends in clearing its rest, the last one in clearing all below, so that nothing flickers.
        """
        width = self._width()
        body = "".join(f"{self._fitted(line, width)}\033[K\n" for line in lines[: self.rows])
        self._write(f"{_CLEAR if first else ''}{_HOME}{body}\033[J")

    def _fitted(self, line: str, width: int | None) -> str:
        """A line that takes one row: sequences of colour take no column, and are kept to the last."""
        if width is None:
            return line
        parts = _SEQUENCE.split(line)
        left, made = width, []
        for part in parts:
            if _SEQUENCE.fullmatch(part):
                made.append(part)
            else:
                made.append(part[:left])
                left -= len(made[-1])
        return "".join(made)

    def _width(self) -> int | None:
        """Columns of the terminal that reads our data, None when none does or it does not say."""
        return self._size()[0]

    def _size(self) -> tuple[int | None, int | None]:
        """Columns and rows of the terminal that reads our data."""
        try:
            size = os.get_terminal_size(self.out.fileno())
        except (OSError, ValueError):  # no terminal; a stream without a descriptor
            return None, None
        return size.columns or None, size.lines or None

    def _coloured(self, stream: TextIO) -> bool:
        if self._color != "auto":
            return self._color == "always"
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return not plain and stream.isatty()


def _unwritable(error: OSError) -> Unwritable:
    return Unwritable(f"the answer cannot be written: {error.strerror or error}", hint="send it somewhere else")


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines of aligned columns two blanks apart; the columns numbered in `right` end together."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
