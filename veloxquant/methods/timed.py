"""A stranger's code with a time limit inside this process: run in a thread of its own, which is left when it hangs.

A plugin is tried out in another process first, and a good verdict is remembered. What it does later may depend on more
than its files, so that code which once returned may hang. Python cannot end a thread. One that is left gets a
SystemExit, which ends loops in Python; a sleep or a call of the system goes on in the background and holds up nobody.
A loop in native code that keeps the interpreter's lock is beyond this.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")


@dataclass
class _Outcome:
    result: Any = None
    error: BaseException | None = None


class NoThread(RuntimeError):
    """The system grants no further thread for now, which is no fault of the code that was to run in it."""


def within(seconds: float, what: str, call: Callable[[], _Result]) -> _Result:
    """What `call` returns or raises, within the limit.

    Raises MethodRefused when it takes longer, or raises KeyboardInterrupt: the user's own one reaches the main thread.
    Raises NoThread.
    """
    outcome = _Outcome()
    thread = threading.Thread(target=_run, args=(call, outcome), name=f"veloxquant {what}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThread(*error.args) from error
    thread.join(seconds)
    if thread.is_alive():
        _leave(thread)
        raise MethodRefused(f"{what} took longer than {seconds:g} s", hint="tell the plugin's author")
    if isinstance(outcome.error, KeyboardInterrupt):
        raise MethodRefused(f"{what} raised KeyboardInterrupt", hint="tell the plugin's author") from outcome.error
    if outcome.error is not None:
        raise outcome.error
    return outcome.result  # type: ignore[no-any-return]


def _run(call: Callable[[], Any], outcome: _Outcome) -> None:
    try:
        outcome.result = call()
    except BaseException as error:  # noqa: BLE001 -- fence: handed to the caller, who knows what to say
        outcome.error = error


def _leave(thread: threading.Thread) -> None:
    """Ask the thread to end at its next step in Python (PyThreadState_SetAsyncExc)."""
    with contextlib.suppress(ImportError, AttributeError):  # an interpreter without ctypes
        import ctypes

        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
