"""Owning a socket: what is refused, what is recovered from, and that nothing of others is touched."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from veloxquant import paths
from veloxquant.daemon import lifecycle
from veloxquant.errors import AlreadyRunning, SocketRefused


@pytest.fixture
def path(short_folder: Path) -> Path:
    """A socket path in a private folder."""
    folder = short_folder / "s"
    folder.mkdir(mode=0o700)
    return folder / "d.sock"


def dead_socket(path: Path) -> None:
    """What a killed daemon leaves: a socket file nobody listens on."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def test_a_missing_folder_is_made_private(short_folder: Path) -> None:
    """Parents are made too; the folder itself has mode 0700."""
    folder = short_folder / "a" / "b"
    lifecycle.private_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o770, 0o755])
def test_r07_a_folder_open_to_others_is_refused_with_the_fix(short_folder: Path, mode: int) -> None:
    """Any bit for group or others is one too many."""
    folder = short_folder / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(SocketRefused) as caught:
        lifecycle.private_folder(folder)
    assert f"chmod 700 '{folder}'" in caught.value.hint
    assert caught.value.field == "socket.path"


def test_r07_nobody_is_told_to_close_a_folder_that_all_share(short_folder: Path) -> None:
    """To root, /tmp is a folder of its own: chmod 700 there would break the machine."""
    folder = short_folder / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    with pytest.raises(SocketRefused, match="open to others") as caught:
        lifecycle.private_folder(folder)
    assert "chmod" not in caught.value.hint
    assert "VELOXQUANT_SOCKET" in caught.value.hint


def test_r07_a_folder_of_another_user_is_refused(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could replace the socket."""
    folder = short_folder / "theirs"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SocketRefused, match="belongs to user id"):
        lifecycle.private_folder(folder)


def test_a_folder_that_cannot_be_made_is_refused(short_folder: Path) -> None:
    """A file in its place, say."""
    (short_folder / "file").write_text("")
    with pytest.raises(SocketRefused):
        lifecycle.private_folder(short_folder / "file" / "s")


def test_the_lock_names_its_holder(path: Path) -> None:
    """The loser says whom to look for, and exits with 75."""
    lock = lifecycle.Lock(paths.lock_path(path))
    with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}") as caught:
        lifecycle.Lock(paths.lock_path(path))
    assert caught.value.exit_code == 75
    lock.release()
    lifecycle.Lock(paths.lock_path(path)).release()


def test_the_lock_file_is_private_and_stays(path: Path) -> None:
    """Removing it would let two daemons hold one each."""
    lock = lifecycle.Lock(paths.lock_path(path))
    lock.release()
    facts = paths.lock_path(path).stat()
    assert stat.S_IMODE(facts.st_mode) == 0o600


def test_the_lock_is_not_inherited(path: Path) -> None:
    """A worker that outlives the daemon must not keep the next one out."""
    lock = lifecycle.Lock(paths.lock_path(path))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    lock.release()
    lifecycle.Lock(paths.lock_path(path)).release()
    child.communicate(b"\n")


def test_the_lock_of_a_killed_process_is_free(path: Path) -> None:
    """No pid has to be guessed at: the kernel lets go."""
    code = (
        "import pathlib, sys; from veloxquant.daemon.lifecycle import Lock; "
        "lock = Lock(pathlib.Path(sys.argv[1])); print('held', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(paths.lock_path(path))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(AlreadyRunning, match=f"pid {holder.pid}"):
        lifecycle.Lock(paths.lock_path(path))
    holder.kill()
    holder.communicate()
    lifecycle.Lock(paths.lock_path(path)).release()


@pytest.mark.parametrize("make", ["link", "folder", "pipe"])
def test_a_lock_that_is_no_plain_file_is_refused(path: Path, make: str) -> None:
    """A link would have us write our pid into somebody's file; a pipe must not hang the start."""
    lock = paths.lock_path(path)
    {
        "link": lambda: lock.symlink_to(path.parent / "elsewhere"),
        "folder": lock.mkdir,
        "pipe": lambda: os.mkfifo(lock),
    }[make]()
    with pytest.raises(SocketRefused):
        lifecycle.Lock(lock)
    assert not (path.parent / "elsewhere").exists()


def test_nothing_at_the_path_is_fine(path: Path) -> None:
    """The usual start."""
    lifecycle.remove_stale(path)


def test_a_dead_socket_is_removed(path: Path) -> None:
    """After a kill -9, nobody cleans up by hand."""
    dead_socket(path)
    lifecycle.remove_stale(path)
    assert not path.exists()


def test_r05_a_live_socket_is_never_replaced(path: Path) -> None:
    """Even when whoever listens does not hold our lock."""
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen(1)
        before = path.stat().st_ino
        with pytest.raises(AlreadyRunning):
            lifecycle.remove_stale(path)
        assert path.stat().st_ino == before


def test_r05_a_live_socket_with_a_full_backlog_is_live(path: Path) -> None:
    """A busy daemon is not a dead one."""
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for one in waiting:
            one.settimeout(0)
            one.connect_ex(str(path))
        with pytest.raises(AlreadyRunning):
            lifecycle.remove_stale(path)
        for one in waiting:
            one.close()


@pytest.mark.parametrize("kind", ["file", "folder", "link to a file", "link to a socket"])
def test_r05_what_is_not_a_socket_is_left_alone(path: Path, kind: str) -> None:
    """Refused with the way out, and still there."""
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a file":
        path.symlink_to("/etc/hosts")
    else:
        dead_socket(path.parent / "other.sock")
        path.symlink_to(path.parent / "other.sock")
    with pytest.raises(SocketRefused) as caught:
        lifecycle.remove_stale(path)
    assert "VELOXQUANT_SOCKET" in caught.value.hint
    assert path.is_symlink() or path.exists()


def test_r05_a_socket_of_another_user_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead or not."""
    dead_socket(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SocketRefused, match="belongs to user id"):
        lifecycle.remove_stale(path)
    assert path.exists()


def test_r07_a_listener_is_private_from_its_first_instant(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bind itself makes mode 0600, whatever the umask was, and the umask is put back."""
    before = os.umask(0o000)
    modes: list[int] = []
    real_chmod = Path.chmod
    monkeypatch.setattr(
        Path, "chmod", lambda self, mode: (modes.append(stat.S_IMODE(self.lstat().st_mode)), real_chmod(self, mode))
    )
    try:
        listener = lifecycle.listen(path)
        assert os.umask(0o000) == 0o000
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    listener.close()


def test_r07_an_observer_never_meets_another_mode(path: Path) -> None:
    """Who looks all the time while the socket comes and goes under an open umask sees it private each time."""
    seen: set[int] = set()
    over = threading.Event()

    def observe() -> None:
        while not over.is_set():
            with contextlib.suppress(FileNotFoundError):
                seen.add(stat.S_IMODE(os.lstat(path).st_mode))

    observer = threading.Thread(target=observe)
    before = os.umask(0o000)
    try:
        observer.start()
        for number in range(1000):
            lifecycle.listen(path).close()
            if number >= 50 and seen:
                break
    finally:
        os.umask(before)
        over.set()
        observer.join()
    assert seen == {0o600}


def test_closing_removes_our_socket_only(path: Path) -> None:
    """A socket somebody put in its place stays."""
    listener = lifecycle.listen(path)
    assert listener.still_ours()
    path.rename(path.with_name("moved"))
    dead_socket(path)
    assert not listener.still_ours()
    listener.close()
    assert path.exists()
    other = lifecycle.listen(path.with_name("e.sock"))
    other.close()
    other.close()
    assert not path.with_name("e.sock").exists()


def test_r06_the_longest_path_works_and_one_byte_more_is_refused(short_folder: Path) -> None:
    """Before bind, with both numbers."""
    limit = paths.socket_limit_bytes()
    room = limit - len(os.fsencode(short_folder)) - 1
    lifecycle.listen(short_folder / ("x" * room)).close()
    with pytest.raises(SocketRefused, match=rf"{limit + 1} bytes long, the system allows {limit}"):
        lifecycle.listen(short_folder / ("x" * (room + 1)))


def test_a_folder_that_is_gone_is_a_typed_error(short_folder: Path) -> None:
    """Not a traceback."""
    with pytest.raises(SocketRefused):
        lifecycle.listen(short_folder / "gone" / "d.sock")


def test_the_file_limit_is_raised_within_the_hard_one() -> None:
    """On macOS programs start with 256."""
    code = (
        "import resource as r; h = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (64, 512)); "
        "from veloxquant.daemon import lifecycle as l; print(l.raise_file_limit(), l.raise_file_limit(100))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert out.split() == [b"512", b"512"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0


@pytest.mark.parametrize("abstract", [False, True])
@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
def test_the_service_manager_is_told(short_folder: Path, monkeypatch: pytest.MonkeyPatch, *, abstract: bool) -> None:
    """Under systemd with Type=notify; a file or an abstract address."""
    address = f"\0vq-{os.getpid()}" if abstract else str(short_folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))
        lifecycle.notify_manager("READY=1")
        manager.settimeout(5)
        assert manager.recv(64) == b"READY=1"


def test_without_a_manager_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable, a foreign form, or nobody there: silence."""
    for value in ("", "tcp:1", "/nowhere/notify"):
        monkeypatch.setenv("NOTIFY_SOCKET", value)
        lifecycle.notify_manager("READY=1")
