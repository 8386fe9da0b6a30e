"""Which program the agent runs: an absolute path as the user wrote it or as PATH has it, never resolved.

A link's target moves: Homebrew's versioned Cellar folder and the folder of an old virtual environment vanish on an
upgrade, while the link that a user types stays. So links are kept, in the current folder's own name too.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

from veloxquant.errors import ServiceError, ServiceRefused
from veloxquant.service.command import Command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DAEMON = "veloxquantd"
PLAIN_ENVIRONMENT = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
"""What an agent finds: a shell's variables are not there."""
_SIBLING_OF = "veloxquantctl"
_PASSING = (
    (r"/Cellar/", "Homebrew's Cellar, which the next upgrade removes"),
    (r"/(archive-v\d+|\.cache|Caches)/", "a cache, which may be emptied at any time"),
    (r"^/(private/)?(tmp|var/folders)/", "a temporary folder"),
    (r"/\.Trash/", "the bin"),
)
"""Parts of a path that do not last, and what they are."""


def find(named: str | None, started_as: str, env: Mapping[str, str]) -> str:
    """The daemon's program: `named`, else the one beside the veloxquantctl that runs, else the first on PATH.

    Raises ServiceRefused when there is none.
    """
    if named is not None:
        found: str | None = absolute(os.path.expanduser(named), env)  # noqa: PTH111 -- no Path: it drops ./ and //
    else:
        found = _beside(started_as, env) or shutil.which(DAEMON, path=env.get("PATH", ""))
    if found is None:
        raise ServiceRefused(f"there is no {DAEMON} on PATH", hint="give its path: --program PATH", field="--program")
    return absolute(found, env)


def absolute(path: str, env: Mapping[str, str]) -> str:
    """The path from the root, links kept: relative to PWD where that is this folder, as the shell wrote it."""
    if os.path.isabs(path):  # noqa: PTH117
        return path
    return os.path.join(_here(env), path.removeprefix("./"))  # noqa: PTH118


def check(program: str) -> None:
    """Run it as the agent would, without our environment. Raises ServiceRefused when it does not say its version."""
    again = f"give the path of {DAEMON}"
    if not os.path.isfile(program) or not os.access(program, os.X_OK):  # noqa: PTH113
        raise ServiceRefused(f"{program} is no program that can be run", hint=again, field="--program")
    try:
        answer = Command(program, env=PLAIN_ENVIRONMENT).ask("--version")
    except ServiceError as error:  # its interpreter is gone, or it hangs
        raise ServiceRefused(
            f"{program}: {error.message}", hint="install veloxquant again, or give another path", field="--program"
        ) from None
    if answer.code or not answer.out.startswith(DAEMON):
        raise ServiceRefused(
            f"{program} --version does not say that it is {DAEMON}: {answer.words}",
            hint=again,
            field="--program",
        )


def doubts(program: str) -> Iterator[str]:
    """Sentences on a path that will not last."""
    for pattern, what in _PASSING:
        if re.search(pattern, program):
            yield f"{program} lies in {what}: --program names a path that stays"


def _beside(started_as: str, env: Mapping[str, str]) -> str | None:
    folder, name = os.path.split(started_as)
    sibling = os.path.join(folder, DAEMON)  # noqa: PTH118
    usable = name == _SIBLING_OF and folder and os.access(sibling, os.X_OK)
    return absolute(sibling, env) if usable else None


def _here(env: Mapping[str, str]) -> str:
    """The current folder as the shell calls it, if that is the same folder."""
    shell = env.get("PWD", "")
    try:
        if os.path.isabs(shell) and os.path.samefile(shell, "."):  # noqa: PTH117, PTH121
            return shell
    except OSError:
        pass
    return os.getcwd()  # noqa: PTH109
