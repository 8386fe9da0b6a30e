"""Doctor's checks on the background agent: that what its file names really starts, and is this installation.

That the file is there says nothing: a virtual environment dies with an upgrade of the Python below it, and a link into
a versioned folder with the next version.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant import __version__, service
from veloxquant.ctl.finding import Finding, failed, note, ok
from veloxquant.service.program import DAEMON, PLAIN_ENVIRONMENT
from veloxquant.service.values import INSTALL

if TYPE_CHECKING:
    from veloxquant.config import Config

_LIMIT_S = 8.0
_AGAIN = f"{INSTALL}, which writes it anew"
_NONE = f"no agent is installed; {INSTALL} has the daemon start with the session"


def starts(_config: Config) -> Finding:
    """The program that the agent's file names is run, with --version, as the service manager would run it."""
    agent = service.installed()
    if agent is None:
        return ok(_NONE)
    said = _run(agent.program)
    if isinstance(said, Finding):
        return said
    version = said.rpartition(" ")[2]
    if version != __version__:
        return note(f"{agent.path} starts version {version}, this program is {__version__}", _AGAIN)
    return ok(f"{agent.path} starts {said} (checked by running it)")


def same_program(_config: Config) -> Finding:
    """The agent runs what is installed here, not another environment's."""
    agent = service.installed()
    if agent is None:
        return ok(_NONE)
    program = Path(agent.program[0])
    here = {Path(sysconfig.get_path("scripts")), Path(sys.argv[0]).absolute().parent, Path(sys.executable).parent}
    if program.parent.resolve() in {folder.resolve() for folder in here}:
        return ok(f"the agent runs this installation ({program})")
    return note(f"the agent runs {program}, this program is installed in {sysconfig.get_path('scripts')}", _AGAIN)


def _run(program: tuple[str, ...]) -> str | Finding:
    """What it says to --version, or what is wrong with it."""
    shown = shlex.join(program)
    try:
        done = subprocess.run(  # noqa: S603 -- the very words that the manager runs, no shell
            [*program, "--version"],
            env=PLAIN_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return failed(f"the agent's program {shown} did not say its version within {_LIMIT_S:.0f} s", _AGAIN)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return failed(f"the agent's program {shown} cannot be run: {why}", _AGAIN)
    said = done.stdout.strip()
    if done.returncode or not said.startswith(DAEMON):
        words = (done.stderr.strip() or said or f"exit status {done.returncode}").splitlines()[-1]
        return failed(f"the agent's program {shown} is not {DAEMON}: {words}", _AGAIN)
    return said.splitlines()[0]
