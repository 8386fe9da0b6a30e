"""`systemctl --user`: its verbs, its properties, and what it says where there is no user manager."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from veloxquant.errors import ServiceFailed, ServiceRefused, ServiceUnavailable
from veloxquant.service.values import UNIT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from veloxquant.service.command import Command

PROGRAM = "systemctl"
PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "FragmentPath",
    "NeedDaemonReload",
    "MainPID",
    "Result",
    "ExecMainCode",
    "ExecMainStatus",
)
_NO_MANAGER = ("Failed to connect", "not been booted with systemd", "Failed to get D-Bus connection")


class Systemctl:
    """The verbs on named units. `env` is looked at for a hint only."""

    def __init__(self, command: Command, env: Mapping[str, str]) -> None:
        self.command = command
        self._env = env

    def properties(self, unit: str) -> dict[str, str]:
        """PROPERTIES of a unit, which need not exist. Raises ServiceUnavailable without a user manager."""
        answer = self.command.ask("show", unit, f"--property={','.join(PROPERTIES)}")
        if answer.code:
            raise self._no_manager(answer.words)
        return dict(line.split("=", 1) for line in answer.out.splitlines() if "=" in line)

    def refuse_unread(self, folder: Path) -> None:
        """Raises ServiceRefused when the manager does not look for units in this folder, ServiceUnavailable."""
        answer = self.command.ask("show", "--property=UnitPath")
        if answer.code:
            raise self._no_manager(answer.words)
        # The folders stand in a row with blanks between them, and may have blanks in their names: looked for whole.
        read = answer.out.partition("=")[2].strip()
        names = {str(folder), os.path.realpath(folder)}
        if read and not any(f" {name} " in f" {read} " for name in names):
            raise ServiceRefused(
                f"systemd's user manager reads no units in {folder}, where HOME and XDG_CONFIG_HOME lead",
                hint="the same with both as your login has them, or set them for the manager, too (environment.d(5))",
            )

    def change(self, verb: str, *units: str) -> None:
        """One verb. Raises ServiceFailed, ServiceUnavailable."""
        answer = self.command.change(verb, *units)
        if not answer.code:
            return
        if any(sign in answer.err for sign in _NO_MANAGER):
            raise self._no_manager(answer.words)
        raise ServiceFailed(
            f"{self.command.line(verb, *units)}: {answer.words}", hint=f"journalctl --user -u {UNIT} -n 20"
        )

    def start(self, *units: str) -> None:
        """Start, whatever was started before: StartLimitBurst is meant for crashes, and systemd counts orders, too."""
        self.command.ask("reset-failed", *units)  # says no for what is not loaded yet, which has no count
        self.change("start", *units)

    def _no_manager(self, words: str) -> ServiceUnavailable:
        """No manager, and whether that is a matter of this login or of the machine."""
        return ServiceUnavailable(f"systemd's user manager cannot be reached: {words}", hint=self._next_step())

    def _next_step(self) -> str:
        uid = os.getuid()
        runtime = f"/run/user/{uid}"
        if os.path.exists(f"{runtime}/systemd/private") and self._env.get("XDG_RUNTIME_DIR") != runtime:  # noqa: PTH110
            return f"it runs; this shell does not know where: export XDG_RUNTIME_DIR={runtime}"
        if not os.path.isdir("/run/systemd/system"):  # noqa: PTH112 -- sd_booted(3)
            return (
                "this machine (a container?) was not started by systemd: "
                "let whatever starts its processes run veloxquantd, or run veloxquantctl daemon"
            )
        return f"log in as this user (not by su or sudo), or: sudo loginctl enable-linger {uid}"
