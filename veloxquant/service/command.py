"""A manager's own program (launchctl, systemctl), run with a limit; what changes something is remembered."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant.errors import ServiceFailed, ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

LIMIT_S = 120.0
"""Longer than either manager waits for a daemon to start (90 s) or to stop (15 s)."""
_CALM = {"LC_ALL": "C", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}


@dataclass(frozen=True)
class Answer:
    """How one call ended, and what it said on both streams."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The one line that says most: the first that names a failure, else the first."""
        lines = [line.strip() for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        telling = [line for line in lines if "ailed" in line or "ould not" in line or "rror" in line]
        return next(iter([*telling, *lines]), f"exit status {self.code}")


@dataclass
class Command:
    """`program` with `always` before the words of each call. `ran`: the calls that were to change something."""

    program: str
    always: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    ran: list[str] = field(default_factory=list)

    def ask(self, *words: str) -> Answer:
        """A call that changes nothing. Raises ServiceUnavailable without the program, ServiceFailed at the limit."""
        command = [self.program, *self.always, *words]
        name = Path(self.program).name
        try:
            done = subprocess.run(  # noqa: S603 -- words of ours and paths, no shell
                command,
                env={**self.env, **_CALM},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=LIMIT_S,
                check=False,
            )
        except OSError as error:
            raise ServiceUnavailable(
                f"{name} cannot be run: {error.strerror}", hint="run the daemon yourself: veloxquantctl daemon"
            ) from None
        except subprocess.TimeoutExpired:
            raise ServiceFailed(
                f"{shlex.join(command)} did not end within {LIMIT_S:.0f} s", hint="see what the manager is waiting for"
            ) from None
        return Answer(done.returncode, done.stdout, done.stderr)

    def change(self, *words: str) -> Answer:
        """The same for a call that changes something."""
        self.ran.append(self.line(*words))
        return self.ask(*words)

    def line(self, *words: str) -> str:
        """The call as a person types it."""
        return shlex.join([Path(self.program).name, *self.always, *words])
