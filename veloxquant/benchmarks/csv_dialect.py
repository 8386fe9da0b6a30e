"""The lines of a CSV file as programs write them: their encoding, their ends and what separates their cells."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from veloxquant.benchmarks.storage import MAX_RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from veloxquant.benchmarks.exchange import Lines

DELIMITERS = ",;\t"
"""A spreadsheet writes semicolons where the comma is the decimal sign."""
_MAX_LINE_BYTES = 4 * MAX_RECORD_BYTES
# By the mark at the start; what has none is UTF-8.
_ENCODINGS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}

_UNREADABLE = "veloxquant.unreadable"
# Half a surrogate pair is no text: a record refuses it by the field's name.
codecs.register_error(_UNREADABLE, lambda error: ("\udcff", error.end))  # type: ignore[attr-defined]


class Table:
    """The text of a file line by line, ends included, from the header on.

    Ends may be CR LF, LF or CR. A line `sep=;`, which tells a spreadsheet the separator, is passed over.
    """

    def __init__(self, stream: Lines, required: Collection[str]) -> None:
        self.seen = 0
        """Bytes read so far."""
        self.first = 1
        """The line of the header."""
        self._stream = stream
        self._lines = self._read()
        self._header = next(self._lines, "").removeprefix("\ufeff")
        stated = _stated_delimiter(self._header)
        if stated is not None:
            self.first, self._header = 2, next(self._lines, "")
        self.delimiter = stated or _delimiter(self._header, required) or ","

    def __iter__(self) -> Iterator[str]:
        """The header and what follows."""
        if self._header:
            yield self._header
        yield from self._lines

    def _read(self) -> Iterator[str]:
        encoding, decoder, rest = "utf-8", None, ""
        while piece := self._stream.readline(_MAX_LINE_BYTES):
            self.seen += len(piece)
            if decoder is None:
                encoding, mark = _encoding(piece)
                piece = piece[len(mark) :]
                decoder = codecs.getincrementaldecoder(encoding)(_UNREADABLE)
            rest += decoder.decode(piece)
            whole, rest = _split(rest)
            yield from whole
        rest += "" if decoder is None else decoder.decode(b"", final=True)
        yield from _ended(rest)


def starts_table(line: bytes, required: Collection[str]) -> bool:
    """Whether a file with this first line is a table with the required columns, or says that it is one."""
    encoding, mark = _encoding(line)
    text = codecs.getincrementaldecoder(encoding)("replace").decode(line[len(mark) :])
    header = next(_ended(text.removeprefix("\ufeff")), "")
    return _stated_delimiter(header) is not None or _delimiter(header, required) is not None


def _encoding(start: bytes) -> tuple[str, bytes]:
    return next(((name, mark) for mark, name in _ENCODINGS.items() if start.startswith(mark)), ("utf-8", b""))


def _split(text: str) -> tuple[list[str], str]:
    """Lines with their ends, and what may go on: an end of CR may be half of CR LF."""
    lines = [*_ended(text)]
    is_open = bool(lines) and not lines[-1].endswith("\n") and len(lines[-1]) < _MAX_LINE_BYTES
    rest = lines.pop() if is_open else ""
    return lines, rest


def _ended(text: str) -> Iterator[str]:
    """Cut after CR LF, LF and CR alone: `str.splitlines` cuts at more."""
    start = 0
    while start < len(text):
        ends = [at for at in (text.find("\n", start), text.find("\r", start)) if at >= 0]
        end = min(ends, default=len(text) - 1)
        end += text.startswith("\r\n", end)
        yield text[start : end + 1]
        start = end + 1


def _stated_delimiter(line: str) -> str | None:
    """By a line such as `sep=;`."""
    name, _, delimiter = line.strip('\r\n "').partition("=")
    return delimiter if name.casefold() == "sep" and delimiter in tuple(DELIMITERS) else None


def _delimiter(line: str, required: Collection[str]) -> str | None:
    """What separates the columns of a header; None for a line that is none."""
    text = line.strip("\r\n").casefold()
    for delimiter in DELIMITERS:
        if {name.strip(' "') for name in text.split(delimiter)}.issuperset(required):
            return delimiter
    return None
