"""A systemd user manager of its own, for a home folder of its own: nothing of the user's session is touched.

It needs root on Linux with systemd installed: the manager runs in a mount namespace with its own control group, and is
reached through the runtime folder, as every user's is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

MANAGER = "/lib/systemd/systemd"
_GROUP = "/sys/fs/cgroup/veloxquant-bench"
_SCRIPT = f"""mount -t cgroup2 none /sys/fs/cgroup && mkdir -p {_GROUP} && echo $$ > {_GROUP}/cgroup.procs &&
mount -t tmpfs none /run/systemd && mkdir -p /run/systemd/system && exec {MANAGER} --user --log-target=null"""
_TO_START_S = 20.0
_UP = ("SystemState=running", "SystemState=degraded")


class UserManager:
    """Started on entry, ended on exit. `env` is what a login of that user has. Raises OSError where none can run."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="vq", dir="/tmp"))  # short, for the socket's sake
        self.home = self.folder / "h"
        runtime = self.folder / "r"
        self.home.mkdir()
        runtime.mkdir(mode=0o700)
        self.env = {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(runtime), "PATH": os.environ["PATH"]}

    def __enter__(self) -> Self:
        command = ["unshare", "--mount", "sh", "-c", _SCRIPT]
        self._process = subprocess.Popen(command, env=self.env, stderr=subprocess.DEVNULL)
        ends = time.monotonic() + _TO_START_S
        while self._process.poll() is None and time.monotonic() < ends:
            # is-system-running says offline outside the namespace, where the machine was not started by systemd.
            if self.systemctl("show", "--property=SystemState").stdout.strip() in _UP:
                return self
            time.sleep(0.2)
        self.__exit__()
        raise OSError("no systemd user manager can be started here")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def systemctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Ask the manager."""
        command = ["systemctl", "--user", *words]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)


def possible() -> bool:
    """Whether one can be tried here."""
    tools = all(shutil.which(name) for name in ("unshare", "systemctl"))
    return os.geteuid() == 0 and tools and Path(MANAGER).exists()
