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
from typing import TYPE_CHECKING, Any

from veloxquant.errors import MethodRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

_OURS = "veloxquant"
_SHARED = (
    *("asyncio", "builtins", "concurrent.futures", "contextlib", "functools", "hashlib", "importlib", "io", "json"),
    *("json.decoder", "json.encoder", "logging", "math", "msgspec", "msgspec.json", "os", "pathlib", "pickle"),
    *("pluggy", "posixpath", "selectors", "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading"),
    *("time", "warnings"),
)
"""Modules of others that a planner rests on. Their functions and classes are compared, and those of all of ours."""

Functions = dict[tuple[str, str], Any]


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
    return dict(found for name in names for found in _functions_of(name))


def check_unchanged(before: dict[str, Any], known: Functions) -> None:
    """Raises MethodRefused naming what is other than before."""
    after = look()
    changed = [what for what in before if not _same(before[what], after[what])]
    if changed:
        raise MethodRefused(
            f"loading it changes {' and '.join(changed)}, which the whole process shares",
            hint="do it inside build(), or not at all",
        )
    replaced = [f"{module}.{name}" for (module, name), made in known.items() if not _is_still(module, name, made)]
    if replaced:
        raise MethodRefused(
            f"loading it replaces {', '.join(sorted(replaced)[:3])}, which the whole process shares",
            hint="wrap it in a function of the plugin's own",
        )


def _functions_of(name: str) -> Iterator[tuple[tuple[str, str], Any]]:
    for attribute, value in list(vars(sys.modules[name]).items()):
        if not callable(value):
            continue
        yield (name, attribute), value
        if isinstance(value, type) and value.__module__ == name and name.startswith(_OURS):
            yield from (((name, f"{attribute}.{inner}"), made) for inner, made in _made(value))


def _made(kind: type) -> list[tuple[str, Any]]:
    return [(name, made) for name, made in vars(kind).items() if callable(made) or isinstance(made, property)]


def _is_still(module: str, name: str, made: Any) -> bool:
    owner, _, attribute = name.rpartition(".")
    holder: Any = sys.modules.get(module)
    if owner:
        holder = getattr(holder, owner, None)
    return getattr(holder, "__dict__", {}).get(attribute) is made


def _umask() -> int:
    """The mask; the system tells it only in exchange for another."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, os.stat_result):
        return os.path.samestat(before, after)
    return bool(before == after)
