"""Run the daemon in the foreground, until SIGTERM or Ctrl-C; its flags are those of veloxquantd."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_FOREIGN = ("--json", "--quiet", "--no-daemon")
_FOREIGN_WITH_VALUE = ("--color", "--timeout", "--wait")


def run_raw(before: Sequence[str], after: Sequence[str]) -> int:
    """Hand the arguments to the daemon, without the flags that speak of answers. Only --socket means something."""
    from veloxquant.daemon.main import run

    return run(_without_answer_flags([*before, *after]), "veloxquantctl daemon")


def _without_answer_flags(arguments: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for one in arguments:
        if skip or one in _FOREIGN or one.startswith(tuple(f"{flag}=" for flag in _FOREIGN_WITH_VALUE)):
            skip = False
        elif one in _FOREIGN_WITH_VALUE:
            skip = True
        else:
            kept.append(one)
    return kept
