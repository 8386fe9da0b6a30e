"""The agent under systemd's user manager: a service, with a socket unit where systemd is to listen.

Units are stopped before their files change and loaded again afterwards; systemd itself says (NeedDaemonReload) when an
install was killed between the two.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant import paths
from veloxquant.errors import ServiceRefused
from veloxquant.service import files, places, unit_file, values
from veloxquant.service.values import INSTALL, SOCKET_UNIT, UNIT, Done, Order, Preview, State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from veloxquant.service.systemctl import Systemctl
    from veloxquant.service.values import Installed

_UNITS = (SOCKET_UNIT, UNIT)
"""The socket first: what is stopped must not be woken by it."""


class SystemdAgent:
    """The units of one user. `env` names the folders; `systemctl` is asked for everything else."""

    def __init__(self, env: Mapping[str, str], systemctl: Systemctl) -> None:
        self.folder = places.unit_folder(env)
        self.home = paths.home(env)
        self.runtime = env.get("XDG_RUNTIME_DIR", "").rstrip("/")
        self.systemctl = systemctl

    def preview(self, order: Order) -> Preview:
        """What `install` writes, and the calls that load it."""
        texts = unit_file.render(order, self.runtime)
        units = [unit for unit in _UNITS if unit in texts]
        line = self.systemctl.command.line
        return Preview(
            files={self.folder / unit: texts[unit].decode() for unit in units},
            commands=(line("daemon-reload"), line("enable", *units), line("start", *units)),
        )

    def install(self, order: Order) -> Done:
        """Write the units that differ and load them unless they are loaded as they are. Raises ServiceError."""
        texts = unit_file.render(order, self.runtime)
        self.systemctl.refuse_unread(self.folder)  # and without a manager nothing is made
        with files.exclusively(self.folder):
            self._refuse_foreign()
            before = self._facts()
            if not self._written(texts) or _to_reload(before):
                self._replace(texts, before)
                self.systemctl.change("daemon-reload")
            self._bring_up([unit for unit in _UNITS if unit in texts])
        changed = bool(self.systemctl.command.ran)
        summary = f"{self.folder / UNIT} is installed and runs{'' if changed else ', nothing changed'}"
        return self._done(changed=changed, summary=summary, notes=_shadows(before))

    def uninstall(self) -> Done:
        """Stop, disable and remove what `install` led to, and nothing else. Raises ServiceError."""
        if not self.folder.is_dir() and not self._of_ours(self._facts()):
            return self._done(changed=False, summary="nothing was installed")
        with files.exclusively(self.folder):
            self._refuse_foreign()
            before = self._of_ours(self._facts())
            present = [unit for unit in _UNITS if (self.folder / unit).exists()]
            self._stop(before)
            if present:
                self.systemctl.change("disable", *present)
            removed = [self.folder / unit for unit in _UNITS if files.remove(self.folder / unit)]
            removed += [link for link in self._dangling() if files.remove(link)]
        if not removed and not before:
            return self._done(changed=False, summary="nothing was installed")
        self.systemctl.change("daemon-reload")
        for unit, facts in before.items():
            if facts.get("ActiveState") == "failed":
                self.systemctl.command.change("reset-failed", unit)  # unknown by now is as good
        gone = ", ".join(map(str, removed)) or "nothing on the disk"
        return self._done(changed=True, summary=f"stopped and disabled; removed: {gone}")

    def start(self) -> Done:
        """Start what is installed; systemd waits until the daemon is ready. Raises ServiceError."""
        units = self._require_installed()
        was = self.systemctl.properties(UNIT)
        if _active(was):
            return self._done(changed=False, summary=f"already running: pid {was.get('MainPID')}")
        self._reload_if_stale()
        self.systemctl.start(*units)
        return self._running()

    def stop(self) -> Done:
        """Stop the service, and the socket, which would start it at the next call. Raises ServiceError."""
        if not self._stop(self._facts()):
            return self._done(changed=False, summary="it does not run")
        return self._done(changed=True, summary="stopped until the next login, or: veloxquantctl service start")

    def restart(self) -> Done:
        """End the process that runs and start another, as the files say now. Raises ServiceError."""
        units = self._require_installed()
        self._reload_if_stale()
        self._stop({UNIT: self.systemctl.properties(UNIT)})
        self._bring_up(units)
        return self._running()

    def state(self) -> State:
        """How it is. Raises ServiceError when systemd cannot be asked."""
        facts, listening = self.systemctl.properties(UNIT), self.systemctl.properties(SOCKET_UNIT)
        installed = unit_file.installed(self.folder, self.home)
        pid = int(facts.get("MainPID", "0"))
        return State(
            manager="systemd",
            target=UNIT,
            installed=installed,
            loaded=facts.get("LoadState") == "loaded",
            running=_active(facts),
            pid=pid or None,
            last_exit=_last_exit(facts),
            listening=_active(listening),
            warnings=tuple(_warnings(installed, facts, listening)),
        )

    def _facts(self) -> dict[str, dict[str, str]]:
        """What systemd knows of both units. Raises ServiceUnavailable."""
        return {unit: self.systemctl.properties(unit) for unit in _UNITS}

    def _of_ours(self, facts: Mapping[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        """Those units that systemd has from our folder, or still from a file that was there; not an administrator's."""
        known = {unit: one for unit, one in facts.items() if _known(one)}
        return {unit: one for unit, one in known.items() if self._is_here(one.get("FragmentPath", ""))}

    def _is_here(self, path: str) -> bool:
        return not path or os.path.realpath(os.path.dirname(path)) == os.path.realpath(self.folder)  # noqa: PTH120

    def _written(self, texts: Mapping[str, bytes]) -> bool:
        """The files are what they would be written to, and there is no other."""
        kept = all(files.same(self.folder / unit, content) for unit, content in texts.items())
        return kept and not any((self.folder / unit).exists() for unit in _UNITS if unit not in texts)

    def _bring_up(self, units: list[str]) -> None:
        """Enable and start those that are not. A socket cannot be opened under a service that listens by itself."""
        facts = {unit: self.systemctl.properties(unit) for unit in units}
        disabled = [unit for unit in units if facts[unit].get("UnitFileState") != "enabled"]
        idle = [unit for unit in units if not _active(facts[unit])]
        if disabled:
            self.systemctl.change("enable", *disabled)
        if SOCKET_UNIT in idle and self._stop({UNIT: facts[UNIT]}):
            idle = units
        if idle:
            self.systemctl.start(*idle)

    def _replace(self, texts: Mapping[str, bytes], before: Mapping[str, Mapping[str, str]]) -> None:
        """All new files on the disk, then the old units stopped, then the files in their places."""
        with ExitStack() as stack:
            staged = [stack.enter_context(files.Staged(self.folder / unit, text)) for unit, text in texts.items()]
            self._stop(before)
            leftover = [unit for unit in _UNITS if unit not in texts and (self.folder / unit).exists()]
            if leftover:
                self.systemctl.change("disable", *leftover)
                for unit in leftover:
                    files.remove(self.folder / unit)
            for one in staged:
                one.publish()

    def _stop(self, before: Mapping[str, Mapping[str, str]]) -> bool:
        """Stop those units that do anything; whether there were any."""
        busy = [unit for unit in _UNITS if _busy(before.get(unit, {}))]
        if busy:
            self.systemctl.change("stop", *busy)
        return bool(busy)

    def _reload_if_stale(self) -> None:
        if _to_reload(self._facts()):
            self.systemctl.change("daemon-reload")

    def _dangling(self) -> list[Path]:
        """Links in *.wants that `enable` made for files that are gone: `disable` finds no unit to read them from."""
        links = [wants / unit for wants in self.folder.glob("*.wants") for unit in _UNITS]
        ours = {os.path.realpath(self.folder / unit) for unit in _UNITS}
        return [link for link in links if link.is_symlink() and os.path.realpath(link) in ours]

    def _require_installed(self) -> list[str]:
        found = unit_file.installed(self.folder, self.home)
        if found is None:
            raise ServiceRefused(f"{self.folder / UNIT} is not there", hint=INSTALL)
        return [UNIT] if found.socket_unit is None else list(_UNITS)

    def _refuse_foreign(self) -> None:
        """Raises ServiceRefused for units of our names that are somebody else's, or links."""
        for unit in _UNITS:
            files.refuse_link(self.folder / unit)
        unit_file.installed(self.folder, self.home)
        unit_file.refuse_foreign_socket(self.folder / SOCKET_UNIT)

    def _running(self) -> Done:
        return self._done(changed=True, summary=f"running: pid {self.systemctl.properties(UNIT).get('MainPID')}")

    def _done(self, *, changed: bool, summary: str, notes: tuple[str, ...] = ()) -> Done:
        return Done(changed, summary, tuple(self.systemctl.command.ran), notes)


def _active(facts: Mapping[str, str]) -> bool:
    return facts.get("ActiveState") in ("active", "reloading")


def _busy(facts: Mapping[str, str]) -> bool:
    """It runs, listens, starts, stops, or waits for its next start after a crash."""
    return facts.get("ActiveState", "inactive") not in ("inactive", "failed")


def _known(facts: Mapping[str, str]) -> bool:
    """It is there, from a file or still from one that is gone."""
    return facts.get("LoadState", "not-found") != "not-found" or _busy(facts)


def _to_reload(before: Mapping[str, Mapping[str, str]]) -> bool:
    """The files that are there now have not been read."""
    return any(facts.get("NeedDaemonReload") == "yes" for facts in before.values())


def _shadows(before: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """An administrator's unit of the same name, which ours now stands before."""
    others = [
        facts["FragmentPath"] for facts in before.values() if facts.get("FragmentPath", "").startswith(("/etc", "/usr"))
    ]
    return tuple(f"{path} is there as well, and is not used for this user" for path in others)


def _last_exit(facts: Mapping[str, str]) -> str | None:
    """The status, or the signal's number, of the process that ended last (ExecMainCode: 1 exited, 2 and 3 signals)."""
    code, status = facts.get("ExecMainCode", "0"), facts.get("ExecMainStatus", "")
    if code == "0":
        return None
    return status if code == "1" else f"signal {status}"


def _stray(path: str) -> str:
    """A unit that runs and is not installed by us."""
    if Path(path).exists():
        return f"it runs from {path}, which veloxquantctl did not write"
    return f"it runs from a unit that is not there any more: {INSTALL}, or uninstall"


def _warnings(installed: Installed | None, facts: Mapping[str, str], listening: Mapping[str, str]) -> Iterator[str]:
    """Sentences on an agent that is not as it should be, each with what to do."""
    if installed is None and _busy(facts):
        yield _stray(facts.get("FragmentPath", ""))
    if installed is None:
        return
    if not Path(installed.program[0]).is_file():
        yield f"{installed.program[0]} is not there any more: {INSTALL}"
    if facts.get("NeedDaemonReload") == "yes":
        yield "systemd has not read the unit as it is now: veloxquantctl service restart"
    if facts.get("UnitFileState") not in ("enabled", ""):
        yield f"{facts.get('UnitFileState')}, so it does not start at the next login: {INSTALL}"
    if facts.get("ActiveState") == "failed":
        way = values.LAST_WORDS.get(_last_exit(facts) or "", f"journalctl --user -u {UNIT} -n 20")
        yield f"it failed ({facts.get('Result')}): {way}"
    if installed.socket_unit is not None and _active(facts) and not _active(listening):
        yield f"{SOCKET_UNIT} does not listen: veloxquantctl service restart"
