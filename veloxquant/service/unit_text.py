"""The syntax of systemd's unit files: words as systemd.service(5) and systemd.syntax(7) quote them, both ways.

In a value `%` starts a specifier and is doubled; in a quoted word a backslash escapes. `$` is expanded in the arguments
of ExecStart, not in the program's own path, and is doubled there.
"""

from __future__ import annotations

import re

_ESCAPES = {"n": "\n", "t": "\t", "s": " ", "a": "\a", "b": "\b", "f": "\f", "r": "\r", "v": "\v"}
_PREFIXES = "-:+!"
"""Special executable prefixes before the program of ExecStart; the rarer @ changes the words that follow."""


def quote(word: str) -> str:
    """A word in double quotes that systemd reads as exactly this text."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{percent(escaped)}"'


def percent(value: str) -> str:
    """A value without specifiers."""
    return value.replace("%", "%%")


def argument(word: str) -> str:
    """A word of ExecStart after the program: neither a specifier nor a variable."""
    return quote(word.replace("$", "$$"))


def sections(text: str) -> dict[str, dict[str, str]]:
    """Section -> key -> the value that stands last. Comments are left out, continued lines are joined."""
    found: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        stripped = line.strip()
        if not stripped or stripped[0] in "#;":
            continue
        if stripped.startswith("[") and stripped.endswith("]"):
            current = found.setdefault(stripped[1:-1], {})
            continue
        key, _, value = stripped.partition("=")
        current[key.strip()] = value.strip()
    return found


def command(value: str, home: str) -> tuple[str, ...]:
    """The words of an ExecStart, `%h` and `%%` resolved, `$$` undone after the program."""
    words = [_resolved(word, home) for word in split(value)]
    return tuple(
        word.lstrip(_PREFIXES) if number == 0 else word.replace("$$", "$") for number, word in enumerate(words)
    )


def split(value: str) -> list[str]:
    """Words at blanks outside quotes, quotes removed and escapes resolved. An open quote ends with the value."""
    words: list[str] = []
    word: list[str] | None = None
    quote_mark = ""
    marks = iter(value)
    for mark in marks:
        if not quote_mark and mark.isspace():
            if word is not None:
                words.append("".join(word))
            word = None
            continue
        word = [] if word is None else word
        if mark == "\\":
            escaped = next(marks, "")
            word.append(_ESCAPES.get(escaped, escaped))
        elif mark == quote_mark:
            quote_mark = ""
        elif mark in "\"'" and not quote_mark:
            quote_mark = mark
        else:
            word.append(mark)
    return words if word is None else [*words, "".join(word)]


def _resolved(word: str, home: str) -> str:
    return re.sub(r"%([%h])", lambda match: "%" if match[1] == "%" else home, word)
