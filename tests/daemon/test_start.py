"""Starting: one daemon a socket, in a private place, recovering alone from whatever the last one left."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from daemon_kit import Daemon, environment, wait_for

from veloxquant import paths
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.benchmarks.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_r07_folder_socket_and_lock_are_private_once_it_is_ready(start: Callable[..., Daemon]) -> None:
    """And its folder, socket and lock are private."""
    daemon = start().ready()
    assert daemon.call("ping")["pid"] == daemon.process.pid
    modes = [
        stat.S_IMODE(p.lstat().st_mode) for p in (daemon.socket.parent, daemon.socket, paths.lock_path(daemon.socket))
    ]
    assert modes == [0o700, 0o600, 0o600]
    (ready,) = daemon.events("daemon.ready")
    assert (ready["socket"], ready["pid"]) == (str(daemon.socket), daemon.process.pid)
    assert paths.lock_path(daemon.socket).read_text() == f"{daemon.process.pid}\n"


def test_r07_whatever_the_umask_no_folder_is_left_open(start: Callable[..., Daemon]) -> None:
    """Those on the way to the socket and to the log are nobody else's to write in either."""
    before = os.umask(0o000)
    try:
        daemon = start()
    finally:
        os.umask(before)
    home = daemon.ready().socket.parents[1]
    made = [path for path in home.rglob("*") if path.is_dir()]
    assert daemon.socket.parent in made
    assert len(made) > 1
    assert [path for path in made if path.stat().st_mode & 0o022] == []


def test_r03_a_second_daemon_exits_with_75_and_names_the_first(start: Callable[..., Daemon]) -> None:
    """The first is not disturbed."""
    first = start().ready()
    inode = first.socket.lstat().st_ino
    second = start()
    assert second.wait() == 75
    assert f"pid {first.process.pid}" in second.log()
    assert first.socket.lstat().st_ino == inode
    assert first.call("ping")["pid"] == first.process.pid


def test_r03_of_four_that_start_together_one_survives(start: Callable[..., Daemon]) -> None:
    """The others exit with 75."""
    started = [start() for _ in range(4)]
    wait_for(lambda: sum(one.process.poll() is not None for one in started) >= 3, "three losers")
    (survivor,) = [one for one in started if one.process.poll() is None]
    wait_for(survivor.socket.exists, "the socket")
    assert survivor.ready().call("ping")["pid"] == survivor.process.pid
    assert sorted(one.process.returncode for one in started if one is not survivor) == [75, 75, 75]


def test_r04_a_killed_daemon_needs_no_cleaning_up(start: Callable[..., Daemon]) -> None:
    """Its socket is still there, its lock is not."""
    first = start().ready()
    first.process.kill()
    first.wait()
    assert first.socket.exists()
    assert start().ready().call("ping")["pong"]


def test_r04_killed_in_any_phase_the_next_one_answers(start: Callable[..., Daemon], short_folder: Path) -> None:
    """While it holds the lock and loads, and while it winds up with a client; records and index are whole after it."""
    database = BenchmarkDatabase(short_folder / "benchmarks")
    database.add("fp16", "org/m", context_length=1024, memory_bytes=1000)
    database.close()
    loading = start()
    wait_for(paths.lock_path(loading.socket).exists, "the lock")
    loading.process.kill()
    loading.wait()
    ending = start().ready()
    ending.connect().send(b"half")
    ending.signal(signal.SIGTERM)
    ending.process.kill()
    ending.wait()
    assert start().ready().call("status")["records"]["used"] == 1
    assert verify(short_folder / "benchmarks").sound


@pytest.mark.parametrize("what", ["file", "link", "folder"])
def test_r05_what_is_not_ours_at_the_path_is_refused(
    start: Callable[..., Daemon], short_folder: Path, what: str
) -> None:
    """Exit status 2, the way out named, and the thing untouched."""
    path = short_folder / "s" / "d.sock"
    path.parent.mkdir(mode=0o700)
    if what == "file":
        path.write_text("precious")
    elif what == "link":
        path.symlink_to(short_folder / "elsewhere")
    else:
        path.mkdir()
    daemon = start()
    assert daemon.wait() == 2
    assert "VELOXQUANT_SOCKET" in daemon.log()
    assert path.is_symlink() or path.exists()
    assert "Traceback" not in daemon.log()


def test_r05_a_live_socket_without_a_lock_is_not_taken(start: Callable[..., Daemon], short_folder: Path) -> None:
    """Somebody deleted the lock, or another program listens there."""
    path = short_folder / "s" / "d.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(4)
        inode = path.lstat().st_ino
        assert start().wait() == 75
        assert path.lstat().st_ino == inode


def test_r07_an_open_folder_is_refused_with_the_fix(start: Callable[..., Daemon], short_folder: Path) -> None:
    """Others could put a socket of theirs there."""
    (short_folder / "s").mkdir(mode=0o755)
    daemon = start()
    assert daemon.wait() == 2
    assert f"chmod 700 '{short_folder}/s'" in daemon.log()


def test_r06_a_path_that_is_too_long_is_refused(start: Callable[..., Daemon], short_folder: Path) -> None:
    """With its length, the limit and a shorter one."""
    daemon = start(socket_path=short_folder / ("x" * 120))
    assert daemon.wait() == 2
    assert f"allows {paths.socket_limit_bytes()}" in daemon.log()
    assert "VELOXQUANT_SOCKET" in daemon.log()


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        (["--config", "/nowhere/x.toml"], {}, "/nowhere/x.toml"),
        (["--log-level", "loud"], {}, "log_level"),
        (["--log-file", "/proc/nope/x"], {}, "log file"),
        ([], {"VELOXQUANT_DAEMON_MAX_CONNECTIONS": "many"}, "max_connections"),
        ([], {"VELOXQUANT_PLANNER_RESERVE_BYTE": "1"}, "RESERVE_BYTE"),
        (["--bogus"], {}, "--bogus"),
    ],
)
def test_a_wrong_setting_ends_the_start_with_2(
    start: Callable[..., Daemon], args: list[str], env: dict[str, str], words: str
) -> None:
    """Naming the setting; no socket is left."""
    daemon = start(*args, env=env)
    assert daemon.wait() == 2
    assert words in daemon.log()
    assert not daemon.socket.exists()


def test_help_and_version_start_nothing(short_folder: Path) -> None:
    """They print and exit with 0."""
    for option, word in (("--help", "SIGHUP"), ("--version", "veloxquantd ")):
        done = subprocess.run(
            [sys.executable, "-m", "veloxquant.daemon.main", option],
            capture_output=True,
            text=True,
            check=True,
            env=environment(short_folder),
        )
        assert word in done.stdout


def test_a_records_directory_that_is_a_file_does_not_stop_the_start(
    start: Callable[..., Daemon], short_folder: Path
) -> None:
    """Planning goes on without records, and the status says so."""
    (short_folder / "benchmarks").write_text("")
    daemon = start().ready()
    status = daemon.call("status")
    assert any("benchmark records cannot be read" in warning for warning in status["warnings"])
    assert status["records"]["used"] == 0


def test_the_log_goes_to_the_file_as_well(start: Callable[..., Daemon], short_folder: Path) -> None:
    """As JSON lines, whatever stderr is."""
    daemon = start("--log-file", str(short_folder / "d.log")).ready()
    daemon.stop()
    events = [json.loads(line)["event"] for line in (short_folder / "d.log").read_text().splitlines()]
    assert "daemon.ready" in events
    assert events[-1] == "daemon.stopped"


def test_the_file_limit_is_raised(start: Callable[..., Daemon]) -> None:
    """And shown."""
    status = start().ready().call("status")
    assert status["process"]["fd_limit"] >= min(8192, os.sysconf("SC_OPEN_MAX"))


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
def test_the_service_manager_hears_when_it_is_ready(start: Callable[..., Daemon], short_folder: Path) -> None:
    """READY=1 after the socket listens, STOPPING=1 at the end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(short_folder / "notify"))
        manager.settimeout(30)
        daemon = start(env={"NOTIFY_SOCKET": str(short_folder / "notify")})
        assert manager.recv(64) == b"READY=1"
        assert daemon.call("ping")["pong"]
        daemon.signal(signal.SIGTERM)
        assert manager.recv(64) == b"STOPPING=1"
        assert daemon.wait() == 0
