"""Blocking work beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from veloxquant.daemon import log
from veloxquant.errors import VeloxError

if TYPE_CHECKING:
    from collections.abc import Callable

THREAD_PREFIX = "vq-question"
"""Name of the pool's threads that read models; the end of the process does not wait for one that hangs."""

T = TypeVar("T")


async def in_daemon_thread(work: Callable[..., T], *args: object) -> T:
    """Run blocking work in a thread of its own that does not keep the process alive, unlike asyncio's."""
    loop = asyncio.get_running_loop()
    promise: asyncio.Future[T] = loop.create_future()

    def succeed(result: T) -> None:
        if not promise.done():
            promise.set_result(result)

    def fail(error: BaseException) -> None:
        if not promise.done():
            promise.set_exception(error)

    def run() -> None:
        try:
            result = work(*args)
        except BaseException as error:  # noqa: BLE001 -- whatever it is belongs to whoever awaits the work
            _tell(loop, fail, error)
        else:
            _tell(loop, succeed, result)

    threading.Thread(target=run, name=f"vq-{getattr(work, '__name__', 'work')}", daemon=True).start()
    return await promise


def note_end(task: asyncio.Task[Any]) -> None:
    """Called back by a task that goes on when whoever awaited it has gone.

    What it refused was logged there, and is not told again by asyncio as an exception that nobody retrieved.
    """
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, VeloxError):
        log.event("task.failed", logging.ERROR, error=repr(error))


def _tell(loop: asyncio.AbstractEventLoop, settle: Callable[[T], None], outcome: T) -> None:
    try:
        loop.call_soon_threadsafe(settle, outcome)
    except RuntimeError:  # the loop has closed: nobody waits any more
        return
