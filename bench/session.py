"""A daemon of its own for a demo, a bench or a test: private folders, a short socket path, a clean end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from veloxquant.client import Client
from veloxquant.errors import DaemonError

if TYPE_CHECKING:
    from collections.abc import Iterator

_FOLDERS = {
    "HOME": "home",
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "XDG_STATE_HOME": "state",
    "XDG_RUNTIME_DIR": "run",
}


class SessionError(Exception):
    """The daemon did not start, or did not end as it should."""


@dataclass(frozen=True)
class Home:
    """Folders that nothing else uses, with the environment that points into them."""

    folder: Path
    environment: dict[str, str]

    @property
    def socket(self) -> Path:
        """Where the daemon listens."""
        return self.folder / "run" / "d.sock"

    def adopt(self) -> None:
        """Make this process live here too: settings of the user's are forgotten, folders of the user's not touched."""
        os.environ.clear()
        os.environ.update(self.environment)

    @property
    def log(self) -> Path:
        """What the daemon wrote on its standard error."""
        return self.folder / "daemon.log"


@contextmanager
def private_home() -> Iterator[Home]:
    """Folders under /tmp, since a socket path may have 103 bytes on macOS; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="vq-", dir="/tmp"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VELOXQUANT_")}
    for variable, name in _FOLDERS.items():
        (folder / name).mkdir(mode=0o700)
        environment[variable] = str(folder / name)
    environment["VELOXQUANT_SOCKET"] = str(folder / "run" / "d.sock")
    environment["HF_HUB_OFFLINE"] = "1"
    try:
        yield Home(folder, environment)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Daemon:
    """A running daemon, and how long it took to answer."""

    process: subprocess.Popen[bytes]
    home: Home
    ready_s: float

    def client(self) -> Client:
        """A client that never plans in its own process: what it gets is the daemon's answer."""
        return Client(self.home.socket, fallback=False, timeout_s=60.0)

    def stop(self, within_s: float = 5.0) -> int:
        """SIGTERM; the exit code. Raises SessionError when it stays, or leaves its socket behind."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise SessionError(f"the daemon did not stop within {within_s:g} s of SIGTERM") from None
        if self.home.socket.exists():
            raise SessionError(f"the daemon left its socket behind: {self.home.socket}")
        return code


def start(home: Home, within_s: float = 10.0) -> Daemon:
    """Start a daemon and wait until it answers a ping. Raises SessionError with its last words."""
    began = time.perf_counter()
    with home.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "veloxquant.daemon.main"],
            env=home.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    while not _answers(home.socket):
        if process.poll() is not None or time.perf_counter() - began > within_s:
            process.kill()
            process.wait()
            words = home.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise SessionError(f"the daemon did not answer on {home.socket}; it said:\n{words}")
        time.sleep(0.005)
    return Daemon(process, home, time.perf_counter() - began)


@contextmanager
def running(home: Home) -> Iterator[Daemon]:
    """A daemon for the length of a block; ended the hard way only if the block fails before it is stopped."""
    daemon = start(home)
    try:
        yield daemon
        if daemon.process.poll() is None:
            daemon.stop()
    finally:
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.wait()


def _answers(socket: Path) -> bool:
    if not socket.exists():
        return False
    with Client(socket, fallback=False, timeout_s=1.0) as client:
        try:
            client.ping()
        except DaemonError:
            return False
    return True
