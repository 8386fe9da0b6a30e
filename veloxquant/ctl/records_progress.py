"""A bar on stderr while a long piece of work runs; nothing where no person looks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from veloxquant.ctl.terminal import Terminal

_WIDTH = 30
_PAUSE_S = 0.1
_PATIENCE_S = 0.5
"""Work that ends sooner needs no bar."""


class Progress:
    """Shown from half a second on, ten times a second at most; removed at the end. `total` 0 means not known."""

    def __init__(self, terminal: Terminal, title: str, total: int = 0) -> None:
        self._err = terminal.err
        self._shown = terminal.err.isatty() and not (terminal.quiet or terminal.json)
        self._title, self._total = title, total
        self._next_at = time.monotonic() + _PATIENCE_S
        self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn:
            self._err.write("\r\033[K")
            self._err.flush()

    def at(self, done: int, note: str = "") -> None:
        """This much is done."""
        if not self._shown or time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + _PAUSE_S
        self._drawn = True
        self._err.write(f"\r\033[K{self._title} {self.bar(done)}{note}")
        self._err.flush()

    def of(self, done: int, total: int) -> None:
        """This much of a whole that is known only now."""
        self._total = total
        self.at(done)

    def bar(self, done: int) -> str:
        """The bar with its share, or the count where the whole is not known."""
        if self._total <= 0:
            return f"{done:,}"
        share = min(1.0, done / self._total)
        filled = int(_WIDTH * share)
        return f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {share:4.0%}"
