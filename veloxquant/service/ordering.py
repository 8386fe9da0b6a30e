"""From what a user asks for to what is installed: program, socket and the few variables that the agent gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant.config import PREFIX
from veloxquant.errors import InvalidParams
from veloxquant.paths import SOCKET_VARIABLE
from veloxquant.service import files, program
from veloxquant.service.values import Order

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path


def order(
    started_as: str,
    socket: Path,
    env: Mapping[str, str],
    *,
    named: str | None = None,
    socket_given: bool = False,
    activation: bool = False,
    variables: Iterable[str] = (),
) -> Order:
    """What to install. `socket` is the daemon's as clients here resolve it; `socket_given`: by a flag or a variable.

    A socket that is given goes into the arguments, since the agent sees neither; one from the configuration or by
    default the daemon finds by itself. Raises ServiceRefused, InvalidParams.
    """
    files.refuse_open_folder(socket)
    found = program.find(named, started_as, env)
    program.check(found)
    words = (found, "--socket", str(socket)) if socket_given or SOCKET_VARIABLE in variables else (found,)
    return Order(
        program=words,
        activated=socket if activation else None,
        environment={name: _value(name, env) for name in variables if name != SOCKET_VARIABLE},
    )


def notes(given: Order, env: Mapping[str, str]) -> Iterator[str]:
    """Sentences on what a user may not expect of the order."""
    yield from program.doubts(given.program[0])
    left_out = sorted(
        name for name in env if name.startswith(PREFIX) and name not in (*given.environment, SOCKET_VARIABLE)
    )
    if left_out:
        flags = " ".join(f"--env {name}" for name in left_out)
        yield f"the agent does not see {', '.join(left_out)}: {flags} hands it over, or put it into the configuration"


def _value(name: str, env: Mapping[str, str]) -> str:
    if not name.startswith(PREFIX):
        raise InvalidParams(
            f"--env {name}: the agent is given variables of veloxquant's own only",
            hint=f"a name that starts with {PREFIX}",
            field="--env",
        )
    if name not in env:
        raise InvalidParams(f"--env {name}: it is not set here", hint=f"export {name}=... first", field="--env")
    return env[name]
