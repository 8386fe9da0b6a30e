"""A stand-in for `systemctl --user` of systemd 252.

bench/reliability/r39_install.py does the same with a real user manager, where one can be started.

What it keeps to: `show` answers for units that do not exist, too; a unit is read when it is first asked for, and again
only by `daemon-reload`, until then NeedDaemonReload says that its file has changed; a unit that runs stays known when
its file goes; `enable` makes links in *.wants and reads units anew, `disable` removes the links and their empty folder;
a service that runs without its socket unit keeps that from starting; `start` of a service starts what it wants.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_SERVICE, _SOCKET = "veloxquant.service", "veloxquant.socket"
_WANTS = {_SERVICE: "default.target.wants", _SOCKET: "sockets.target.wants"}
Outcome = tuple[int, str, str]


@dataclass
class StandIn:
    """A user manager over the units in a folder."""

    folder: Path
    calls: list[list[str]] = field(default_factory=list)
    read: dict[str, bytes] = field(default_factory=dict)
    """Unit -> the content that was read."""
    active: dict[str, int] = field(default_factory=dict)
    """Unit -> pid of its process, 0 for a socket."""
    failed: dict[str, int] = field(default_factory=dict)
    """Service -> exit status."""
    ends_with: int | None = None
    """What a started service ends with at once."""
    burst: int = 5
    """Starts of the service, from StartLimitBurst on, that are refused until `reset-failed`."""
    starts: int = 0
    elsewhere: dict[str, str] = field(default_factory=dict)
    """Unit -> an administrator's file, of which systemd knows where the user has none."""
    unit_path: str = ""
    """The user's folder that is read, where it is not `folder`."""
    no_manager: str | None = None
    next_pid: int = 100
    dies_before: str | None = None
    """A verb before which whoever calls is killed (KeyboardInterrupt)."""

    def call(self, words: list[str]) -> Outcome:
        """One call: exit code, stdout, stderr."""
        self.calls.append(words)
        if self.no_manager is not None:
            return 1, "", self.no_manager
        _user, verb, *units = words
        if verb == self.dies_before:
            raise KeyboardInterrupt
        action: Any = getattr(self, f"_{verb.replace('-', '_')}")
        outcome: Outcome = action(*units)
        return outcome

    def _show(self, unit: str, _properties: str = "") -> Outcome:
        if unit == "--property=UnitPath":
            return 0, f"UnitPath=/run/user/1/systemd/transient {self.unit_path or self.folder} /etc/systemd/user\n", ""
        path = self.folder / unit
        if unit not in self.read and path.exists():
            self.read[unit] = path.read_bytes()
        if unit in self.read and not path.exists() and unit not in self.active:
            del self.read[unit]  # nothing holds it any more
        known = unit in self.read or unit in self.elsewhere
        stale = unit in self.read and (not path.exists() or path.read_bytes() != self.read[unit])
        state = "active" if unit in self.active else "failed" if unit in self.failed else "inactive"
        facts = {
            "LoadState": "loaded" if known else "not-found",
            "ActiveState": state,
            "UnitFileState": "" if not path.exists() else "enabled" if self._link(unit).is_symlink() else "disabled",
            "FragmentPath": str(path) if unit in self.read else self.elsewhere.get(unit, ""),
            "NeedDaemonReload": "yes" if stale else "no",
            "MainPID": str(self.active.get(unit, 0)),
            "Result": "exit-code" if unit in self.failed else "success",
            "ExecMainCode": "1" if unit in self.failed else "0",
            "ExecMainStatus": str(self.failed.get(unit, 0)),
        }
        return 0, "".join(f"{key}={value}\n" for key, value in facts.items()), ""

    def _daemon_reload(self) -> Outcome:
        self._reread()
        return 0, "", ""

    def _enable(self, *units: str) -> Outcome:
        for unit in units:
            if not (self.folder / unit).exists():
                return 1, "", f"Failed to enable unit, unit {unit} does not exist."
            self._link(unit).parent.mkdir(exist_ok=True)
            if not self._link(unit).is_symlink():
                self._link(unit).symlink_to(self.folder / unit)
        self._reread()
        return 0, "", ""

    def _disable(self, *units: str) -> Outcome:
        for unit in units:
            self._link(unit).unlink(missing_ok=True)
            if self._link(unit).parent.exists() and not any(self._link(unit).parent.iterdir()):
                self._link(unit).parent.rmdir()
        self._reread()
        return 0, "", ""

    def _start(self, *units: str) -> Outcome:
        for unit in units:
            if unit not in self.read:
                return 5, "", f"Failed to start {unit}: Unit {unit} not found."
            if unit == _SOCKET and unit not in self.active and _SERVICE in self.active:
                return 1, "", f"Job failed. {_SOCKET}: Socket service {_SERVICE} already active, refusing."
        self.starts += 1
        if self.starts > self.burst:
            return 1, "", f"Job for {_SERVICE} failed because start of the service was attempted too often."
        for unit in units:
            self._started(unit)
        return (1, "", f"Job for {_SERVICE} failed because the control process exited.") if self.failed else (0, "", "")

    def _stop(self, *units: str) -> Outcome:
        for unit in units:
            self.active.pop(unit, None)
            self.failed.pop(unit, None)
        return 0, "", ""

    def _reset_failed(self, *units: str) -> Outcome:
        self.starts = 0
        known = [unit for unit in units if self.failed.pop(unit, None) is not None]
        return (0, "", "") if known else (1, "", "Failed to reset failed state: not loaded.")

    def _started(self, unit: str) -> None:
        if unit == _SOCKET:
            self.active[unit] = 0
        elif self.ends_with is not None:
            self.failed[unit] = self.ends_with
        elif unit not in self.active:
            self.next_pid += 1
            self.active[unit] = self.next_pid
            self.failed.pop(unit, None)

    def _reread(self) -> None:
        for unit in (_SERVICE, _SOCKET):
            if (self.folder / unit).exists():
                self.read[unit] = (self.folder / unit).read_bytes()
            elif unit not in self.active:
                self.read.pop(unit, None)

    def _link(self, unit: str) -> Path:
        return self.folder / _WANTS[unit] / unit
