"""launchctl's verbs, and how its answers are read.

Its exit codes are errno values and launchd's own above them. `print` is documented as "not API", so that decisions rest
on exit codes where there is one, and a field that is not found is None. Not run on a Mac: docs/service.md names the
source of each behaviour.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from veloxquant.errors import ServiceFailed
from veloxquant.service.values import LABEL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from veloxquant.service.command import Answer, Command

PROGRAM = "/bin/launchctl"
NO_PROCESS = 3
IO_ERROR = 5
IN_PROGRESS = (36, 37)
"""EINPROGRESS and EALREADY on Darwin."""
NO_DOMAIN = (112, 125)
"""No such domain; a domain that does not do this (a gui domain without a session)."""
NO_SERVICE = 113
DISABLED = 119
_ABSENT = (NO_PROCESS, NO_SERVICE, *NO_DOMAIN)

POLL_S = 0.25
GONE_POLLS = 80
"""20 s: ExitTimeOut of the plist, and five more for launchd."""


@dataclass(frozen=True)
class Job:
    """A loaded job as `launchctl print` shows it."""

    domain: str
    state: str | None
    pid: int | None
    path: str | None
    arguments: tuple[str, ...]
    last_exit: str | None

    @property
    def target(self) -> str:
        """What launchctl calls it."""
        return f"{self.domain}/{LABEL}"


class Launchctl:
    """The verbs for our one label. `pause` waits for some seconds between two looks."""

    def __init__(self, command: Command, pause: Callable[[float], None] = time.sleep) -> None:
        self.command = command
        self.pause = pause

    def has_domain(self, domain: str) -> bool:
        """Whether launchd runs such a domain now."""
        return self.command.ask("print", domain).code == 0

    def job(self, domain: str) -> Job | None:
        """The job in this domain; None where it is not loaded. Raises ServiceFailed when launchctl does not say."""
        target = f"{domain}/{LABEL}"
        answer = self.command.ask("print", target)
        if answer.code in _ABSENT or (answer.code and "ould not find" in answer.err):
            return None
        if answer.code:
            raise ServiceFailed(f"launchctl print {target}: {answer.words}", hint=f"launchctl print {target}")
        return parse(answer.out, domain)

    def disabled(self, domain: str) -> bool:
        """Whether somebody has disabled the label; that outlives the file. "disabled" is "true" before macOS 13."""
        answer = self.command.ask("print-disabled", domain)
        return re.search(rf'"{re.escape(LABEL)}" => (disabled|true)\b', answer.out) is not None

    def enable(self, domain: str) -> Answer:
        """Undo a `disable`."""
        return self.command.change("enable", f"{domain}/{LABEL}")

    def bootstrap(self, domain: str, path: Path) -> Answer:
        """Load the file into the domain."""
        return self.command.change("bootstrap", domain, str(path))

    def kickstart(self, domain: str, *, again: bool = False) -> Answer:
        """Start the loaded job; `again`: after ending the one that runs."""
        return self.command.change("kickstart", *(["-k"] if again else []), f"{domain}/{LABEL}")

    def bootout(self, domain: str) -> None:
        """Unload the job and wait until launchd has let go of it: the call itself returns before.

        Raises ServiceFailed when it is still there after 20 s. What the call says does not count: 36 means that it is
        being done, 3 and 5 come for a job that is not there.
        """
        answer = self.command.change("bootout", f"{domain}/{LABEL}")
        for _ in range(GONE_POLLS):
            if self.job(domain) is None:
                return
            self.pause(POLL_S)
        raise ServiceFailed(
            f"launchd does not let go of {domain}/{LABEL}: {answer.words}",
            hint=f"launchctl print {domain}/{LABEL} shows what it waits for",
        )


def parse(text: str, domain: str) -> Job | None:
    """The job in what `launchctl print` wrote; None when it says that the job belongs to another domain."""
    fields, arguments = _top_level(text)
    actual = fields.get("domain", domain).split(" ")[0]
    if re.fullmatch(r"(gui|user)/\d+", actual) and actual != domain:
        return None
    pid = fields.get("pid", "")
    last_exit = fields.get("last exit code")
    ended = fields.get("last terminating signal")
    if last_exit is None and ended is not None:
        last_exit = f"signal {ended}"
    return Job(
        domain=domain,
        state=fields.get("state"),
        pid=int(pid) if pid.isdigit() else None,
        path=fields.get("path"),
        arguments=tuple(arguments),
        last_exit=None if last_exit == "(never exited)" else last_exit,
    )


def _top_level(text: str) -> tuple[dict[str, str], list[str]]:
    """`key = value` lines of the outermost braces, and the lines of the block `arguments`, told by their indent."""
    fields: dict[str, str] = {}
    arguments: list[str] = []
    block: str | None = None
    for line in text.splitlines():
        inner = line[1:] if line[:1] == "\t" else ""
        if block is not None and inner != "}":
            arguments.extend([inner[1:]] if block == "arguments" else [])
        elif inner == "}":
            block = None
        elif inner.endswith("{"):
            block = inner.partition(" =")[0]
        elif " = " in inner:
            key, _, value = inner.partition(" = ")
            fields.setdefault(key, value)
    return fields, arguments
