"""Daemons by the hundred: each is a fork of one process that has imported what a daemon imports.

A fork runs the same `main` with the same locks, sockets and signals; what it saves is the start of an interpreter,
which is no part of what the rounds are about. Fork only while no other thread runs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from veloxquant.daemon import server
from veloxquant.daemon.main import main
from veloxquant.errors import VeloxError
from veloxquant.hardware import detect
from veloxquant.methods import registry
from veloxquant.planner import plan

if TYPE_CHECKING:
    from pathlib import Path

IMPORTED = (server, detect, registry, plan)
PING = b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n'


@dataclass
class Forked:
    """One daemon process, and when it was started."""

    pid: int
    began: float
    log: Path
    code: int | None = None

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, within_s: float = 30.0) -> int:
        """Its exit status. Raises TimeoutError."""
        ends = time.monotonic() + within_s
        while self.poll() is None:
            if time.monotonic() > ends:
                self.signal(signal.SIGKILL)
                raise TimeoutError(f"pid {self.pid} still runs after {within_s:g} s")
            time.sleep(0.001)
        assert self.code is not None
        return self.code


def start(log: Path, *arguments: str) -> Forked:
    """Start a daemon in the environment of this process."""
    began = time.monotonic()
    pid = os.fork()
    if pid:
        return Forked(pid, began, log)
    code = 70  # EX_SOFTWARE: an exception left main
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = main(arguments)
    finally:
        os._exit(code)


def ping(path: str, within_s: float = 30.0) -> dict[str, Any]:
    """The daemon's answer to a ping, as soon as there is one. Raises TimeoutError."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(within_s)
                connection.connect(path)
                connection.sendall(PING)
                line = connection.recv(4096)
            if line.endswith(b"\n"):
                found: dict[str, Any] = json.loads(line)["result"]
                return found
        except (OSError, VeloxError):
            pass
        time.sleep(0.002)
    raise TimeoutError(f"no answer on {path} within {within_s:g} s")
