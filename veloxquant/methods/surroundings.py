"""What a whole process shares, and a plugin must leave as it found it: looked at before and after it is loaded."""

from __future__ import annotations

import locale
import logging
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_OURS = "veloxquant"
_SHARED = (
    *("asyncio", "builtins", "concurrent.futures", "contextlib", "functools", "hashlib", "importlib", "io", "json"),
    *("json.decoder", "json.encoder", "logging", "math", "msgspec", "msgspec.json", "os", "pathlib", "pickle"),
    *("pluggy", "posixpath", "selectors", "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading"),
    *("time", "warnings"),
)
"""Modules of others that a planner rests on. Their functions and classes are compared, and those of all of ours."""


class Place(NamedTuple):
    """Where a function or class is found: its name, the namespace that holds it, and what it is."""

    name: str
    space: Mapping[str, Any]
    attribute: str
    made: Any


class Functions(NamedTuple):
    """Modules, and all that is in them."""

    modules: dict[str, Any]
    places: tuple[Place, ...]


def look() -> dict[str, Any]:
    """Everything of a process but its modules."""
    return {
        "the working folder": Path().stat(),
        "the file mode mask": _umask(),
        "signal handlers": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "the alarm clock": signal.getitimer(signal.ITIMER_PROF) + signal.getitimer(signal.ITIMER_VIRTUAL),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the environment": dict(os.environ),
        "limits of the system": [resource.getrlimit(one) for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)],
        "the recursion limit": sys.getrecursionlimit(),
        "trace functions": (sys.gettrace(), sys.getprofile()),
        "sys.path": [*sys.path],
        "the standard streams": (sys.stdin, sys.stdout, sys.stderr),
        "the running threads": threading.enumerate(),
        "the root logger": (logging.root.level, [*logging.root.handlers]),
    }


def functions() -> Functions:
    """Every function and class of ours and of the modules we rest on, as imported by now."""
    names = [name for name in sys.modules if name == _OURS or name.startswith(f"{_OURS}.") or name in _SHARED]
    places = tuple(place for name in names for place in _places_of(name))
    return Functions({name: sys.modules[name] for name in names}, places)


def check_unchanged(before: dict[str, Any], known: Functions) -> None:
    """Raises MethodRefused naming what is other than before."""
    after = look()
    changed = [what for what in before if not _same(before[what], after[what])]
    if changed:
        raise MethodRefused(
            f"loading it changes {' and '.join(changed)}, which the whole process shares",
            hint="do it inside build(), or not at all",
        )
    replaced = [name for name, module in known.modules.items() if sys.modules.get(name) is not module]
    replaced += [name for name, space, attribute, made in known.places if space.get(attribute) is not made]
    if replaced:
        raise MethodRefused(
            f"loading it replaces {', '.join(sorted(replaced)[:3])}, which the whole process shares",
            hint="wrap it in a function of the plugin's own",
        )


def _places_of(module: str) -> Iterator[Place]:
    space = vars(sys.modules[module])
    for attribute, value in list(space.items()):
        if not callable(value):
            continue
        yield Place(f"{module}.{attribute}", space, attribute, value)
        if isinstance(value, type) and value.__module__ == module and module.startswith(_OURS):
            inside = vars(value)
            yield from (Place(f"{module}.{attribute}.{name}", inside, name, made) for name, made in _made(inside))


def _made(space: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, made) for name, made in space.items() if callable(made) or isinstance(made, property)]


def _umask() -> int:
    """The mask; the system tells it only in exchange for another."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, os.stat_result):
        return os.path.samestat(before, after)
    return bool(before == after)
