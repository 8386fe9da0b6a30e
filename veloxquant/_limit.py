"""A wall over a piece of work: the caller goes on when its time is over, whatever the work is doing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def within(limit_s: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises. Raises TimeoutError after `limit_s`.

    It runs in a thread that does not keep the process alive. Work that comes too late is not stopped, since Python
    cannot; it ends by itself, and nobody hears of it.
    """
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 -- whatever it is belongs to whoever waits, and is raised there
            failed.append(error)

    thread = threading.Thread(target=run, name="vq-local", daemon=True)
    thread.start()
    thread.join(min(limit_s, threading.TIMEOUT_MAX))
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError
    return found[0]
