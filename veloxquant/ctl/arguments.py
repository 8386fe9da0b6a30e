"""The command line's grammar: global flags before and after the command, sizes and counts with units, suggestions."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, NoReturn

from veloxquant import __version__
from veloxquant.errors import InvalidParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROGRAM = "veloxquantctl"
GLOBALS_WITH_VALUE = ("--color", "--socket", "--timeout", "--wait")
DEFAULT_TIMEOUT_S = 30.0


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are our errors: what, why, what next, with one suggestion."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raises InvalidParams in place of printing usage and leaving."""
        # argparse says "argument --timeout: expected one argument".
        flag = re.match(r"argument (--[\w-]+):", message)
        raise InvalidParams(message, hint=f"{self.prog} --help", field=flag[1] if flag else None)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """All of the arguments, or InvalidParams naming the first that is not known and what comes close."""
        known = [option for action in self._actions for option in action.option_strings]
        for word in arguments:
            if word == "--":
                break
            # Before argparse, which would take the value of an option that it does not know for something else.
            if re.match(r"--?[A-Za-z]", word) and word.partition("=")[0] not in known:
                raise unknown_word(word.partition("=")[0], known, f"option of {self.prog}", self.prog)
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            raise unknown_word(unknown[0].partition("=")[0], known, f"argument of {self.prog}", self.prog)
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            name = action.option_strings[0] if action.option_strings else "argument"
            raise unknown_word(str(value), choices, name, self.prog)


def unknown_word(word: str, known: Sequence[str], what: str, program: str = PROGRAM) -> InvalidParams:
    """The error for a word that is not in the vocabulary, with the one that comes closest."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
    if not known or (not close and len(known) > 12):  # noqa: PLR2004 -- a long list helps nobody
        hint = f"{program} --help"
    return InvalidParams(f"{word!r} is no known {what}", hint=hint, field=what if what.startswith("-") else None)


def add_globals(parser: argparse.ArgumentParser) -> None:
    """The flags that every command takes."""
    group = parser.add_argument_group("everywhere")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout, errors too (stable)")
    group.add_argument("--color", choices=("auto", "always", "never"), default="auto", metavar="WHEN", help=_COLOR)
    group.add_argument("--socket", metavar="PATH", help="the daemon's socket (VELOXQUANT_SOCKET)")
    group.add_argument("--timeout", metavar="TIME", help="limit of the whole call: 500ms, 20s, 2m (default 30s)")
    group.add_argument("--wait", metavar="TIME", help="wait so long for a daemon that is not there yet (default 0s)")
    group.add_argument("--quiet", action="store_true", help="no notes on stderr, errors only")
    group.add_argument("--no-daemon", action="store_true", help="answer in this process, ask no daemon")
    group.add_argument("--version", action="version", version=f"{parser.prog} {__version__}")


_COLOR = "auto (a terminal without NO_COLOR), always or never"


def timeout_s(options: argparse.Namespace) -> float:
    """The time limit in seconds. Raises InvalidParams."""
    if options.timeout is None:
        return DEFAULT_TIMEOUT_S
    from veloxquant.units import parse_seconds

    return parse_seconds(options.timeout, field="--timeout")


def wait_s(options: argparse.Namespace) -> float:
    """How long to wait for a daemon, in seconds. Raises InvalidParams."""
    if options.wait is None:
        return 0.0
    from veloxquant.units import parse_seconds

    return parse_seconds(options.wait, field="--wait")


def size(flag: str) -> Callable[[str], int]:
    """Reads a size in bytes, with a unit or without."""

    def read(text: str) -> int:
        from veloxquant.units import parse_size

        return parse_size(text, field=flag)

    return read


def count(flag: str) -> Callable[[str], int]:
    """Reads a whole number; 32k is 32768."""

    def read(text: str) -> int:
        from veloxquant.units import parse_count

        return parse_count(text, field=flag)

    return read


def number(flag: str) -> Callable[[str], float]:
    """Reads a decimal number."""

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise InvalidParams(f"{flag} is {text!r}, which is no number", hint=f"{flag} 0.05", field=flag) from None

    return read
