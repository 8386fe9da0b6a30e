"""Cutting a byte stream into lines, with a limit that holds however the bytes arrive.

A frame is everything up to a newline (0x0A), without it. JSON escapes newlines inside strings, so that a raw one can
only end a frame. No transport here: whoever reads the socket feeds what it got.
"""

from __future__ import annotations

from veloxquant.errors import FrameTooLarge

REQUEST_LIMIT_BYTES = 256 * 1024
"""Longest request, newline not counted."""
ANSWER_LIMIT_BYTES = 1024 * 1024
"""Longest answer, newline not counted."""


class FrameSplitter:
    """Collects bytes and gives back whole frames, in order.

    Once a line grows past `limit` the stream cannot be trusted any more (the rest of that line would read as a frame
    of its own), so the splitter drops what it holds, sets `overflowed` and swallows everything after it: answer
    FrameTooLarge and close. Frames complete before the long line are still given out.
    """

    def __init__(self, limit: int = REQUEST_LIMIT_BYTES) -> None:
        self.limit = limit
        self.overflowed = False
        self._partial = bytearray()

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has begun and not ended."""
        return len(self._partial)

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes. Every byte is looked at once, however small the pieces are."""
        if self.overflowed:
            return []
        *ends, rest = data.split(b"\n")
        frames: list[bytes] = []
        for end in ends:
            if not self._fits(end):
                return frames
            frames.append(bytes(self._partial + end) if self._partial else end)
            self._partial.clear()
        if self._fits(rest):
            self._partial += rest
        return frames

    def _fits(self, piece: bytes) -> bool:
        if len(self._partial) + len(piece) <= self.limit:
            return True
        self.overflowed = True
        self._partial = bytearray()
        return False

    def error(self) -> FrameTooLarge:
        """What to tell the other side once `overflowed` is set."""
        return too_large(self.limit)


def too_large(limit: int) -> FrameTooLarge:
    """The error for a line of more than `limit` bytes."""
    return FrameTooLarge(
        f"a line is longer than {limit} bytes",
        hint="send less in one message: name a model by path instead of pasting it, ask for fewer records at once",
    )
