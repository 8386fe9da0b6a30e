"""The agent under launchd: one property list, one label, in the domain of the session that is there.

A job that is loaded always came from the file as it is: the new file is put in its place between unloading and loading,
so that an install that is killed half-way is finished by the next. Not run on a Mac.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from veloxquant.errors import ServiceFailed, ServiceRefused, ServiceUnavailable
from veloxquant.service import files, launchd_faults, places, plist
from veloxquant.service.launchctl import DISABLED, IN_PROGRESS, IO_ERROR, NO_SERVICE, POLL_S
from veloxquant.service.values import INSTALL, LABEL, Done, Order, Preview, State

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from veloxquant.service.launchctl import Job, Launchctl
    from veloxquant.service.values import Installed

BOOTSTRAP_TRIES = 40
"""10 s at a quarter each: launchd was seen to refuse a label for 5 s after it had let go of it."""
_FIRST_POLLS = 12
"""3 s after RunAtLoad: no process waits that long for its turn."""
_START_POLLS = 80
"""20 s: the old process may drain, and launchd may wait out the rest of ThrottleInterval."""


class LaunchdAgent:
    """launchd's agent of one user. `env` names the home folder; `launchctl` is asked for everything else."""

    def __init__(self, env: Mapping[str, str], uid: int, launchctl: Launchctl) -> None:
        self.path = places.launch_agent(env)
        self.crash_log = places.crash_log(env)
        self.uid = uid
        self.launchctl = launchctl

    def preview(self, order: Order) -> Preview:
        """What `install` writes, and the calls that load it where a session at the screen is there."""
        domain = f"gui/{self.uid}"
        line = self.launchctl.command.line
        return Preview(
            files={self.path: plist.render(order, self.crash_log).decode()},
            commands=(line("bootout", f"{domain}/{LABEL}"), line("bootstrap", domain, str(self.path))),
        )

    def install(self, order: Order) -> Done:
        """Write the file if it differs and load it unless it is loaded as it is. Raises ServiceError."""
        content, domain = plist.render(order, self.crash_log), self._domain()
        with files.exclusively(self.path.parent):
            self._refuse_foreign()
            jobs = self._jobs()
            if files.same(self.path, content) and self._current(jobs, domain, order.program):
                return self._awake(jobs[0])
            with contextlib.suppress(OSError):  # without it there is no crash log, and all the rest
                self.crash_log.parent.mkdir(parents=True, exist_ok=True)
            if order.activated is not None:
                files.private_folder(order.activated.parent)
            with files.Staged(self.path, content) as staged:
                for job in jobs:
                    self.launchctl.bootout(job.domain)
                staged.publish()
            self._bootstrap(domain)
            return self._done(
                changed=True,
                summary=f"{self.path} is installed and loaded into {domain}",
                notes=[*_strange_origins(jobs, self.path), *_without_a_screen(domain), *self._no_process(domain)],
            )

    def uninstall(self) -> Done:
        """Unload and remove what `install` led to, and nothing else. Raises ServiceError."""
        if not self.path.parent.is_dir() and not self._jobs():
            return self._done(changed=False, summary="nothing was installed")
        with files.exclusively(self.path.parent):
            self._refuse_foreign()
            activated = plist.activated(self.path)
            jobs = self._jobs()
            for job in jobs:
                self.launchctl.bootout(job.domain)
            removed = [path for path in (self.path, self.crash_log) if files.remove(path)]
        if activated is not None:
            files.remove_dead_socket(activated)
        if not jobs and not removed:
            return self._done(changed=False, summary="nothing was installed")
        gone = ", ".join(map(str, removed)) or "nothing on the disk"
        return self._done(changed=True, summary=f"unloaded; removed: {gone}")

    def start(self) -> Done:
        """Start it, loading the file where that is not loaded. Raises ServiceError."""
        installed = self._require_installed()
        job = self._job_for(installed)
        if job is None:
            self._bootstrap(self._domain())
        elif job.pid is not None:
            return self._done(changed=False, summary=f"already running: pid {job.pid}")
        else:
            self._kickstart(job.domain, again=False)
        return self._started()

    def stop(self) -> Done:
        """Unload it, which ends it (SIGTERM, SIGKILL after ExitTimeOut): until the next login, or `start`.

        A signal alone would not do: a job that crashes again and again has no process to signal and comes back, and
        with Sockets the next client wakes it.
        """
        jobs = self._jobs()
        for job in jobs:
            self.launchctl.bootout(job.domain)
        if not jobs:
            return self._done(changed=False, summary="not loaded, so it does not run")
        return self._done(changed=True, summary="stopped until the next login, or: veloxquantctl service start")

    def restart(self) -> Done:
        """End the process that runs and start another; a job that is not what the file says is loaded anew."""
        installed = self._require_installed()
        job = self._job_for(installed)
        if job is None:
            self._bootstrap(self._domain())
        else:
            self._kickstart(job.domain, again=True)
        return self._started(other_than=None if job is None else job.pid)

    def state(self) -> State:
        """How it is. Raises ServiceError when launchctl cannot be asked."""
        jobs = self._jobs()
        job = jobs[0] if jobs else None
        installed = plist.installed(self.path)
        return State(
            manager="launchd",
            target=job.target if job else f"{self._domain()}/{LABEL}",
            installed=installed,
            loaded=job is not None,
            running=job is not None and job.pid is not None,
            pid=job.pid if job else None,
            last_exit=job.last_exit if job else None,
            listening=job is not None and plist.activated(self.path) is not None,
            warnings=tuple(launchd_faults.warnings(installed, jobs, self.launchctl, self.crash_log)),
        )

    def _domain(self) -> str:
        """The session at the screen, else the one in the background (over ssh). Raises ServiceUnavailable."""
        for kind in ("gui", "user"):
            if self.launchctl.has_domain(f"{kind}/{self.uid}"):
                return f"{kind}/{self.uid}"
        raise ServiceUnavailable(
            f"launchd runs nothing for user id {self.uid}: neither gui/{self.uid} nor user/{self.uid} exists",
            hint="log in as that user, at the screen or over ssh, without sudo",
        )

    def _jobs(self) -> list[Job]:
        """Our label wherever it is loaded: an install over ssh and a login at the screen use different domains."""
        found = [self.launchctl.job(f"{kind}/{self.uid}") for kind in ("gui", "user")]
        return [job for job in found if job is not None]

    def _current(self, jobs: list[Job], domain: str, program: tuple[str, ...]) -> bool:
        """Loaded once, here, from our file, with this program (as far as launchctl shows it)."""
        if [job.domain for job in jobs] != [domain]:
            return False
        (job,) = jobs
        return _same_place(job.path, self.path) and job.arguments in ((), program)

    def _awake(self, job: Job) -> Done:
        """Loaded as it should be: start it where it was stopped."""
        summary = f"{self.path} is installed and loaded"
        if job.pid is not None:
            return self._done(changed=False, summary=f"{summary}, nothing changed")
        self._kickstart(job.domain, again=False)
        return self._done(changed=True, summary=f"{summary}; it did not run and was started")

    def _job_for(self, installed: Installed) -> Job | None:
        """The loaded job if it is the file's; one that is not is unloaded first."""
        jobs = self._jobs()
        if len(jobs) == 1 and self._current(jobs, jobs[0].domain, installed.program):
            return jobs[0]
        for job in jobs:
            self.launchctl.bootout(job.domain)
        return None

    def _bootstrap(self, domain: str) -> None:
        """Load the file, with patience for a label that is still being let go. Raises ServiceFailed saying why.

        A refusal of which the cause is found is tried once more, after unloading; one without a cause for 10 s.
        """
        if self.launchctl.disabled(domain):
            self.launchctl.enable(domain)
        for number in range(BOOTSTRAP_TRIES):
            answer = self.launchctl.bootstrap(domain, self.path)
            if answer.code == 0 or self._loaded_as_filed(domain):
                return
            if answer.code not in (*IN_PROGRESS, IO_ERROR, DISABLED):
                break
            if number and launchd_faults.cause(answer, domain, self.path, self.launchctl) is not None:
                break
            if number == 0:
                self._clear(answer.code, domain)
            self.launchctl.pause(POLL_S)
        raise launchd_faults.explained(answer, domain, self.path, self.launchctl)

    def _clear(self, code: int, domain: str) -> None:
        """Take away what most often stands in the way."""
        if code == DISABLED:
            self.launchctl.enable(domain)
        elif code == IO_ERROR:
            self.launchctl.bootout(domain)

    def _loaded_as_filed(self, domain: str) -> bool:
        """Somebody else (a second install, a login) has loaded the same file meanwhile."""
        job, installed = self.launchctl.job(domain), plist.installed(self.path)
        return job is not None and installed is not None and self._current([job], domain, installed.program)

    def _kickstart(self, domain: str, *, again: bool) -> None:
        answer = self.launchctl.kickstart(domain, again=again)
        if answer.code == NO_SERVICE:  # unloaded since we looked
            self._bootstrap(domain)
        elif answer.code not in (0, *IN_PROGRESS):
            raise ServiceFailed(
                f"launchd did not start {domain}/{LABEL}: {answer.words}", hint=f"launchctl print {domain}/{LABEL}"
            )

    def _started(self, other_than: int | None = None) -> Done:
        """Wait for a process. Raises ServiceFailed when there is none."""
        job = None
        for _ in range(_START_POLLS):
            job = next(iter(self._jobs()), None)
            if job is not None and job.pid not in (None, other_than):
                return self._done(changed=True, summary=f"running: pid {job.pid}")
            if job is not None and job.state is None:  # a form of `print` that we do not know
                return self._done(changed=True, summary="launchd took the order")
            self.launchctl.pause(POLL_S)
        raise ServiceFailed(
            f"launchd took the order, and no process runs{_ended(job)}",
            hint=f"read {self.crash_log}, or: veloxquantctl daemon",
        )

    def _no_process(self, domain: str) -> list[str]:
        """What to say of a job that is loaded and of which nothing runs: launchctl says yes to that, too."""
        job = None
        for _ in range(_FIRST_POLLS):
            job = self.launchctl.job(domain)
            if job is None or job.pid is not None or job.state is None:
                return []
            self.launchctl.pause(POLL_S)
        return [f"no process runs yet{_ended(job)}: veloxquantctl service status, and read {self.crash_log}"]

    def _require_installed(self) -> Installed:
        found = plist.installed(self.path)
        if found is None:
            raise ServiceRefused(f"{self.path} is not there", hint=INSTALL)
        return found

    def _refuse_foreign(self) -> None:
        """Raises ServiceRefused for a file of our name that is another's, or a link."""
        files.refuse_link(self.path)
        plist.installed(self.path)

    def _done(self, *, changed: bool, summary: str, notes: list[str] | None = None) -> Done:
        return Done(changed, summary, tuple(self.launchctl.command.ran), tuple(notes or ()))


def _ended(job: Job | None) -> str:
    """How its last process ended, as the end of a sentence on one that does not run."""
    return f"; it ended with {job.last_exit}" if job is not None and job.last_exit else ""


def _strange_origins(jobs: list[Job], ours: Path) -> list[str]:
    """A job of our label that came from elsewhere comes back at the next login."""
    others = [job.path for job in jobs if not _same_place(job.path, ours)]
    return [f"the agent had been loaded from {place}: remove that file, or launchd loads it again" for place in others]


def _same_place(shown: str | None, ours: Path) -> bool:
    """Links may be shown resolved (a home folder on another volume), and the path not at all."""
    return shown is None or os.path.realpath(shown) == os.path.realpath(ours)


def _without_a_screen(domain: str) -> list[str]:
    if domain.startswith("gui/"):
        return []
    return ["no session at the screen: the agent runs in the background session; after a login there, install again"]
