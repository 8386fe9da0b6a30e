"""Sockets that a service manager opened: taken when they are ours and private, never removed, refused otherwise."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from daemon_kit import Wire, environment, in_process, wait_for

from veloxquant import paths
from veloxquant.daemon import activation, lifecycle
from veloxquant.errors import SocketRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from veloxquant.daemon.server import Server

ACTIVATE = shutil.which("systemd-socket-activate") or ""


@pytest.fixture
def path(short_folder: Path) -> Path:
    """Where the daemon would listen, in a private folder."""
    folder = short_folder / "s"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / "d.sock"


@pytest.fixture
def manager() -> Iterator[Callable[..., socket.socket]]:
    """Make sockets as a manager does; they are closed in the end, whoever has them."""
    made: list[socket.socket] = []

    def listen(path: Path | str, mode: int = 0o600, kind: int = socket.SOCK_STREAM, backlog: int = 8) -> socket.socket:
        server = socket.socket(socket.AF_UNIX, kind)
        made.append(server)
        server.bind(str(path))
        if not str(path).startswith("\0"):
            os.chmod(path, mode)  # noqa: PTH101 -- a path or a text
        if backlog and kind == socket.SOCK_STREAM:
            server.listen(backlog)
        return server

    yield listen
    for one in made:
        one.close()


def announced(count: str = "1", pid: int | str | None = None) -> dict[str, str]:
    """What systemd puts into the environment of the process it starts."""
    return {
        "LISTEN_PID": str(os.getpid() if pid is None else pid),
        "LISTEN_FDS": count,
        "LISTEN_FDNAMES": "x",
        "A": "b",
    }


def taken(path: Path, server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> lifecycle.Listener:
    """What is inherited when this socket's descriptor is the announced one."""
    monkeypatch.setattr(activation, "FIRST_DESCRIPTOR", os.dup(server.fileno()))
    listener = activation.inherited(path, announced(), "linux")
    assert listener is not None
    return listener


@pytest.mark.parametrize("env", [{}, {"LISTEN_FDS": "1"}, announced(pid=1), announced(pid="me"), announced("9", pid=1)])
def test_without_a_manager_nothing_is_inherited(path: Path, env: dict[str, str]) -> None:
    """No variables, or those of another process, which go no further."""
    left = dict(env)
    assert activation.inherited(path, left, "linux") is None
    assert not [name for name in left if name.startswith("LISTEN_")]


def test_a_managers_socket_is_taken_and_never_removed(
    path: Path, manager: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections without blocking, no child gets it, and closing leaves the file and the manager's end."""
    server = manager(path)
    listener = taken(path, server, monkeypatch)
    assert (listener.activated, listener.path) == (True, path)
    assert not listener.socket.get_inheritable()
    with pytest.raises(BlockingIOError):
        listener.socket.accept()
    assert listener.still_ours()
    listener.close()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        server.accept()[0].close()


def test_the_folder_may_be_named_through_a_link(
    short_folder: Path, path: Path, manager: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """/var/run and /run are one place."""
    (short_folder / "l").symlink_to(path.parent)
    listener = taken(short_folder / "l" / "d.sock", manager(path), monkeypatch)
    listener.close()


@pytest.mark.parametrize("count", ["0", "2", "", "x", "-1", "1 "])
def test_more_or_less_than_one_socket_is_refused(path: Path, count: str) -> None:
    """A unit with two ListenStream lines does not mean what the daemon does."""
    with pytest.raises(SocketRefused, match="one socket"):
        activation.inherited(path, announced(count), "linux")


@pytest.mark.parametrize("wrong", ["elsewhere", "abstract", "datagram", "deaf", "open", "gone", "replaced", "theirs"])
def test_r07_a_managers_socket_that_is_not_ours_alone_is_refused(
    path: Path, manager: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """Another path, another kind, one that nobody listens on, one that others may use: each with what to do."""
    makes: dict[str, dict[str, Any]] = {
        "elsewhere": {"path": path.with_name("e.sock")},
        "abstract": {"path": f"\0vq-{os.getpid()}"},
        "datagram": {"kind": socket.SOCK_DGRAM},
        "deaf": {"backlog": 0},
        "open": {"mode": 0o660},
    }
    if wrong == "abstract" and sys.platform != "linux":
        pytest.skip("abstract addresses are Linux's")
    server = manager(**{"path": path} | makes.get(wrong, {}))
    if wrong in ("gone", "replaced"):
        path.unlink()
    if wrong == "replaced":
        path.write_text("")
    if wrong == "theirs":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    before = set(path.parent.iterdir())
    copy = os.dup(server.fileno())
    monkeypatch.setattr(activation, "FIRST_DESCRIPTOR", copy)
    with pytest.raises(SocketRefused) as caught:
        activation.inherited(path, announced(), "linux")
    os.close(copy)
    assert caught.value.hint
    assert caught.value.field == "socket.path"
    assert set(path.parent.iterdir()) == before


def test_a_descriptor_that_is_no_socket_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that somebody set by hand."""
    with path.with_name("file").open("w") as file:
        monkeypatch.setattr(activation, "FIRST_DESCRIPTOR", file.fileno())
        with pytest.raises(SocketRefused, match="is no socket"):
            activation.inherited(path, announced(), "linux")


class Launchd:
    """launch_activate_socket(3) as its manual page has it: once, by name, an array that the caller frees."""

    def __init__(self, *descriptors: int, error: int = 0) -> None:
        self.freed = 0
        self.asked: list[bytes] = []
        self._array = (ctypes.c_int * max(1, len(descriptors)))(*descriptors)
        self._count = len(descriptors)
        self._error = error

    def launch_activate_socket(self, name: ctypes.c_char_p, found: Any, count: Any) -> int:
        """0 and the array, or an errno; the second call is EALREADY."""
        assert name.value is not None
        self.asked.append(name.value)
        if self._error or len(self.asked) > 1:
            return self._error or errno.EALREADY
        found._obj.contents = ctypes.c_int.from_buffer(self._array)
        count._obj.value = self._count
        return 0

    def free(self, found: Any) -> None:
        """The caller's duty."""
        assert ctypes.addressof(found.contents) == ctypes.addressof(self._array)
        self.freed += 1


def test_launchd_hands_over_its_socket(path: Path, manager: Callable[..., socket.socket]) -> None:
    """By the name in the plist; the array is freed; systemd's variables mean nothing there. Not run on a Mac."""
    launchd = Launchd(os.dup(manager(path).fileno()))
    listener = activation.inherited(path, announced("7"), "darwin", launchd)
    assert listener is not None
    assert (listener.activated, launchd.asked, launchd.freed) == (True, [b"daemon"], 1)
    listener.close()
    assert path.exists()
    with pytest.raises(SocketRefused, match="launchd does not hand over"):
        activation.inherited(path, {}, "darwin", launchd)


@pytest.mark.parametrize("library", [Launchd(error=errno.ESRCH), Launchd(error=errno.ENOENT), object()])
def test_a_mac_without_an_agents_socket_binds_its_own(path: Path, library: Any) -> None:
    """Started by hand (ESRCH), from a plist without Sockets (ENOENT), or before launchd knew of them."""
    assert activation.inherited(path, {}, "darwin", library) is None


@pytest.mark.parametrize("launchd", [Launchd(error=errno.EALREADY), Launchd(), Launchd(50, 51)])
def test_a_launchd_socket_that_cannot_be_served_is_refused(path: Path, launchd: Launchd) -> None:
    """Taken already, none, or two of one name."""
    with pytest.raises(SocketRefused) as caught:
        activation.inherited(path, {}, "darwin", launchd)
    assert caught.value.hint


@pytest.fixture
def activator(path: Path, short_folder: Path, traced: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A stand-in of systemd's own for a socket unit: it listens and becomes the daemon when the first client comes."""
    command = [ACTIVATE, "--listen", str(path), sys.executable, "-m", "veloxquant.daemon.main", "--socket", str(path)]
    with (short_folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment(short_folder) | traced, stdout=log, stderr=log)
    wait_for(lambda: "Listening on" in (short_folder / "log").read_text(), "systemd's socket")
    path.chmod(0o600)  # SocketMode= in a unit; this tool has no option for it and makes 0644
    yield process
    process.kill()
    process.wait()


@pytest.mark.skipif(not ACTIVATE, reason="systemd-socket-activate is not installed")
def test_systemd_starts_the_daemon_when_a_client_comes(
    activator: subprocess.Popen[bytes], path: Path, short_folder: Path
) -> None:
    """The client that woke it is answered; after SIGTERM the file is there and clients wait for the next daemon."""
    inode = path.lstat().st_ino
    wire = Wire(path)
    assert wire.call("ping")["pid"] == activator.pid
    assert paths.lock_path(path).read_text() == f"{activator.pid}\n"
    activator.send_signal(signal.SIGTERM)
    assert wire.closed()
    wire.close()
    assert activator.wait(30) == 0
    facts = path.lstat()
    assert (facts.st_ino, stat.S_ISSOCK(facts.st_mode)) == (inode, True)
    assert '"activated": true' in (short_folder / "log").read_text()


@pytest.mark.skipif(not ACTIVATE, reason="systemd-socket-activate is not installed")
def test_r09_a_managers_socket_succeeds_a_daemon_started_by_hand(
    short_folder: Path, request: pytest.FixtureRequest
) -> None:
    """It takes the place of the old socket; the old daemon sees that and goes, the new one waits for it to be gone."""
    answers: list[int] = []

    def succeed(_server: Server) -> None:
        (short_folder / "s" / "d.sock").unlink()  # as systemd does before it binds
        activator: subprocess.Popen[bytes] = request.getfixturevalue("activator")
        wire = Wire(short_folder / "s" / "d.sock")
        answers.append(wire.call("ping")["pid"] - activator.pid)
        wire.close()

    assert in_process(short_folder, succeed, self_check_s=0.02) == 1
    assert answers == [0]
