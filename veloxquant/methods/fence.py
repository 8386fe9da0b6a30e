"""Importing a plugin and calling its hook, with everything that can go wrong turned into one sentence.

Used in the probe's child process and, for a plugin that passed it, in ours. It is a fence against mistakes, not a
sandbox against malice (docs/decisions/0004-plugin-fence.md).
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import pluggy

from veloxquant import environment
from veloxquant.errors import MethodRefused, VeloxError, quoted
from veloxquant.methods import hookspec
from veloxquant.methods.checks import check_returned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from veloxquant.methods.method import Method
    from veloxquant.methods.plugin import Plugin

_REASON_LIMIT = 300
_LOOKED_AT = 2**16
_ON_YOUR_OWN = "a plugin's methods must be importable without side effects"


def methods_of(plugin: Plugin, on_stage: Callable[[str], None] = lambda _: None) -> tuple[Method, ...]:
    """The plugin's method objects, of the right types. Raises MethodRefused whatever the plugin raises or returns.

    `on_stage` is told "import" and "hook" as each begins. A KeyboardInterrupt goes through: it is the user's.
    """
    on_stage("import")
    loaded = _fenced(lambda: _import(plugin), "import failed")
    on_stage("hook")
    returned = _fenced(lambda: _call_hook(plugin, loaded), "hook failed")
    methods: tuple[Method, ...] = _fenced(lambda: check_returned(returned), "its methods are not usable")
    return methods


def reason_of(error: BaseException) -> str:
    """What a plugin raised, on one line of bounded length."""
    if isinstance(error, VeloxError):
        text = str(error.message)
    elif isinstance(error, SystemExit):
        text = f"it called sys.exit({quoted(error.code)})"
    else:
        text = f"{type(error).__name__}: {_text_of(error)}".rstrip(": ")
    return one_line(text)


def one_line(text: str, most: int = _REASON_LIMIT) -> str:
    """A stranger's text as it may be shown: without secrets, line breaks and control characters, bounded."""
    bounded = " ".join(environment.without_secrets(text[:_LOOKED_AT])[: 4 * most].split())
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in bounded)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 -- fence: an exception's own __str__ is the plugin's code too
        return "(its text cannot be shown)"


def _fenced(call: Callable[[], Any], what: str) -> Any:
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # fence: a plugin may raise anything, SystemExit included
        raise MethodRefused(f"{what}: {reason_of(error)}", hint=_ON_YOUR_OWN) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep a plugin's prints off our standard output, which carries answers, and its filters off our warnings."""
    nowhere = io.TextIOWrapper(io.BufferedWriter(_Nowhere()), "utf-8", "replace")
    with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere):
        yield


class _Nowhere(io.RawIOBase):
    """Bytes that are forgotten; no file behind it, so that a plugin may keep the stream."""

    def write(self, data: Any) -> int:
        """Forget the bytes."""
        return len(data)

    def writable(self) -> bool:
        """Yes."""
        return True


def _import(plugin: Plugin) -> Any:
    point = EntryPoint(plugin.name, plugin.value, hookspec.ENTRY_POINT_GROUP)
    if point.pattern.match(plugin.value) is None:
        raise MethodRefused(
            f"its entry point {quoted(plugin.value)} is no module or module:attribute", hint=_ON_YOUR_OWN
        )
    return point.load()


def _call_hook(plugin: Plugin, loaded: Any) -> Any:
    """Call this plugin's hook alone: in a call over many, one that raises loses everybody's results."""
    manager = pluggy.PluginManager(hookspec.PROJECT)
    manager.add_hookspecs(hookspec)
    manager.register(loaded, name=plugin.name)
    manager.check_pending()  # a misspelt hook is an error, not silence
    if os.environ.get("VELOXQUANT_TRACE_HOOKS") == "1":
        manager.trace.root.setwriter(lambda text: sys.stderr.write(f"{plugin.name}: {text}") and None)
        manager.enable_tracing()
    results = manager.hook.veloxquant_methods()
    if not results:
        raise MethodRefused(
            f"{plugin.value} has no hook veloxquant_methods that returns a list",
            hint="mark the function with veloxquant.methods.hookimpl and return a list",
        )
    return results[0]
