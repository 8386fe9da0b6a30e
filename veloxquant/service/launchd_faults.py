"""What launchd's refusals mean, and what is worth a warning about an agent that it has.

`Bootstrap failed: 5: Input/output error` stands for half a dozen causes, none of which it names: they are looked for
one by one. Not run on a Mac.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from veloxquant.errors import ServiceFailed, ServiceRefused
from veloxquant.service import plist, values
from veloxquant.service.launchctl import DISABLED, NO_DOMAIN
from veloxquant.service.values import INSTALL, LABEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from veloxquant.service.command import Answer
    from veloxquant.service.launchctl import Job, Launchctl
    from veloxquant.service.values import Installed

_NOT_BY_USERS = stat.S_IWGRP | stat.S_IWOTH
_BACKGROUND = "System Settings > General > Login Items & Extensions > Allow in the Background"


class Cause(NamedTuple):
    """Why launchd does not load the agent, and what to do about it."""

    why: str
    hint: str


def explained(answer: Answer, domain: str, path: Path, launchctl: Launchctl) -> ServiceFailed:
    """The error for a bootstrap that failed, with the cause as far as it can be found."""
    found = cause(answer, domain, path, launchctl)
    why, hint = found or Cause("launchd gives no reason", "log show --last 5m --predicate 'process == \"launchd\"'")
    return ServiceFailed(
        f"launchd did not load {path} into {domain}: {why} ({answer.words})",
        hint=f"{hint}; the file stays, `veloxquantctl service uninstall` removes it",
    )


def cause(answer: Answer, domain: str, path: Path, launchctl: Launchctl) -> Cause | None:
    """Disabled, a bad file, the wrong domain, already loaded; None when it is none of these."""
    if answer.code == DISABLED or launchctl.disabled(domain):
        return Cause("the agent is disabled", f"launchctl enable {domain}/{LABEL}, or allow it in {_BACKGROUND}")
    wrong = bad_file(path)
    if wrong is not None:
        return Cause(f"bad plist: {wrong}", f"{INSTALL} writes it anew; plutil -lint '{path}'")
    if answer.code in NO_DOMAIN or not launchctl.has_domain(domain):
        hint = f"log in at the screen or over ssh, without sudo; if you are, allow it in {_BACKGROUND}"
        return Cause(f"wrong domain: {domain} takes no agents now", hint)
    for kind in ("gui", "user"):
        job = launchctl.job(f"{kind}/{domain.partition('/')[2]}")
        if job is not None:
            return Cause(f"already loaded as {job.target} from {job.path}", f"launchctl bootout {job.target}")
    return None


def bad_file(path: Path) -> str | None:
    """What launchd holds against the file; None when nothing can be seen."""
    try:
        facts, folder = path.lstat(), path.parent.stat()
        found = plist.installed(path)
    except OSError as error:
        return error.strerror
    except ServiceRefused as error:
        return error.message
    if not stat.S_ISREG(facts.st_mode):
        return "not a plain file"
    if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & _NOT_BY_USERS or folder.st_mode & stat.S_IWOTH:
        return "others could change the file, so launchd takes it from nobody"
    if found is None or not Path(found.program[0]).is_absolute():
        return "the program is not given by its absolute path"
    return None


def warnings(installed: Installed | None, jobs: list[Job], launchctl: Launchctl, crash_log: Path) -> Iterator[str]:
    """Sentences on an agent that is not as it should be, each with what to do."""
    if installed is not None and not jobs:
        yield "installed and not loaded: it starts at the next login, or with veloxquantctl service start"
    if installed is None and jobs:
        yield f"loaded from {jobs[0].path or 'a file'} that is not there any more: {INSTALL}, or uninstall"
    if len(jobs) > 1:
        yield f"loaded twice, as {' and '.join(job.target for job in jobs)}: {INSTALL}"
    if installed is not None and not os.access(installed.program[0], os.X_OK):
        yield f"{installed.program[0]} cannot be executed: {INSTALL}"
    wrong = None if installed is None else bad_file(installed.path)
    if wrong is not None:
        yield f"launchd will not load the file at the next login, since {wrong}: {INSTALL}"
    for job in jobs:
        yield from _of_job(job, installed, launchctl, crash_log)


def _of_job(job: Job, installed: Installed | None, launchctl: Launchctl, crash_log: Path) -> Iterator[str]:
    if installed is not None and job.arguments not in ((), installed.program):
        named = installed.program[0]
        yield f"the loaded agent runs {job.arguments[0]}, the file names {named}: {INSTALL}"
    if launchctl.disabled(job.domain):
        yield f"disabled, so it is not loaded at the next login: launchctl enable {job.target}"
    if job.pid is None and job.last_exit not in (None, "0"):
        way = values.LAST_WORDS.get((job.last_exit or "").partition(":")[0], f"read {crash_log}")
        yield f"it ended with {job.last_exit} and launchd {job.state or 'keeps it'}: {way}"
