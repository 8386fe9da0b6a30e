"""R39: the agent installed and removed again and again, by a real systemd user manager.

    python bench/reliability/r39_install.py [--full]

Rounds of `service install` and `uninstall` (8, `--full`: 50), with and without a socket unit, each answered by a real
daemon; what is left afterwards; what a second install does; restarts under calls; a crash. Where no user manager can be
started (no root, no systemd), it says so and gives no figure: tests/service has the same against stand-ins, and launchd
against nothing else.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reliability import figures, user_manager

from veloxquant import Client
from veloxquant.errors import VeloxError
from veloxquant.service import Agent, Order, find
from veloxquant.service.values import SOCKET_UNIT, UNIT

PROGRAM = str(Path(sys.executable).with_name("veloxquantd"))
RESTARTS = 8
"""More than StartLimitBurst: orders are no crashes."""
PING = b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{}}\n'


class Session:
    """One login: its agent, its socket, and what lies in its home."""

    def __init__(self, manager: user_manager.UserManager) -> None:
        self.manager = manager
        self.path = Path(manager.env["XDG_RUNTIME_DIR"]) / "veloxquant" / "d.sock"
        self.units = manager.home / ".config" / "systemd" / "user"

    def agent(self) -> Agent:
        """As one run of the command line has it."""
        return find(self.manager.env, "linux")

    def order(self, *, activated: bool) -> Order:
        """What is installed."""
        return Order((PROGRAM,), self.path if activated else None)

    def pid(self, wait_s: float = 0.0) -> int | None:
        """Who answers."""
        try:
            with Client(self.path, timeout_s=10, wait_s=wait_s, fallback=False) as client:
                pid: int = client.ping().pid
                return pid
        except VeloxError:
            return None

    def residue(self) -> list[str]:
        """Files and links of the agent that are on the disk, and units that systemd knows."""
        files = [str(path) for path in self.units.rglob("*") if not path.is_dir() or path.is_symlink()]
        known = [unit for unit in (UNIT, SOCKET_UNIT) if "not-found" not in self.facts(unit)]
        return files + known + ([str(self.path)] if os.path.lexists(self.path) else [])

    def facts(self, unit: str) -> str:
        """LoadState."""
        return self.manager.systemctl("show", unit, "--property=LoadState").stdout


def rounds(session: Session, count: int) -> tuple[int, int, list[float]]:
    """What was left after all rounds, rounds without an answering daemon, and the seconds of each install."""
    left, dumb, seconds = 0, 0, []
    for number in range(count):
        began = time.monotonic()
        session.agent().install(session.order(activated=number % 2 == 0))
        seconds.append(time.monotonic() - began)
        dumb += session.pid() is None
        session.agent().uninstall()
        left += len(session.residue())
    return left, dumb, seconds


def again(session: Session) -> int:
    """Calls that change something, made by a second install of the same."""
    session.agent().install(session.order(activated=True))
    return len(session.agent().install(session.order(activated=True)).commands)


def calls_during_restarts(session: Session) -> Counter[str]:
    """How new connections fared while the agent was restarted."""
    fates: Counter[str] = Counter()
    over = threading.Event()

    def restart() -> None:
        try:
            for _ in range(RESTARTS):
                session.agent().restart()
        finally:
            over.set()

    thread = threading.Thread(target=restart)
    thread.start()
    while not over.is_set():
        fates[fate(session.path)] += 1
        time.sleep(0.01)
    thread.join()
    return fates


def fate(path: Path) -> str:
    """One call on a connection of its own. "closed": taken by the process that was just ending (R30 bounds that)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.settimeout(30)
        try:
            door.connect(str(path))
        except OSError:
            return "refused"
        try:
            door.sendall(PING)
            return "answered" if b'"pong"' in door.recv(4096) else "closed"
        except OSError:
            return "closed"


def back_after_a_crash(session: Session) -> float:
    """Seconds from kill -9 until another process answers; the socket unit wakes it at the first call."""
    before = session.agent().state().pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    began = time.monotonic()
    while session.pid(wait_s=30) in (None, before):
        time.sleep(0.05)
    return time.monotonic() - began


def main() -> int:
    """Six figures."""
    count = 50 if figures.options(__doc__ or "").full else 8
    if not user_manager.possible():
        print("R39: needs root on Linux with systemd, for a user manager of its own: no figure", file=sys.stderr)
        return 0
    with user_manager.UserManager() as manager:
        session = Session(manager)
        left, dumb, seconds = rounds(session, count)
        figures.at_most("R39", f"files, links and units left by {count} rounds under systemd", left, "items", 0)
        figures.at_most("R39", f"rounds of {count} whose daemon did not answer", dumb, "rounds", 0)
        figures.at_most(
            "R39", "one installation until the daemon is ready, median", figures.percentile(seconds, 50), "s", 5
        )
        figures.at_most("R39", "changes made by a second install of the same", again(session), "calls", 0)
        fates = calls_during_restarts(session)
        what = (
            f"connections refused during {RESTARTS} restarts ({fates['answered']} answered, {fates['closed']} closed)"
        )
        figures.at_most("R39", what, fates["refused"], "connections", 0)
        figures.at_most("R39", "from kill -9 until another process answers", back_after_a_crash(session), "s", 10)
        session.agent().uninstall()
    return 0


if __name__ == "__main__":
    sys.exit(main())
