"""Who may speak to the daemon."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import pytest

from veloxquant.daemon import peer


@pytest.mark.skipif(sys.platform != "linux", reason="SO_PEERCRED is Linux's")
def test_r08_the_kernel_names_the_peer() -> None:
    """Both ends of a pair are this process."""
    here, there = socket.socketpair()
    with here, there:
        assert peer.identify(here) == peer.Peer(uid=os.geteuid(), pid=os.getpid())


@pytest.mark.parametrize(("uid", "ok"), [(501, True), (0, True), (502, False), (4294967294, False)])
def test_r08_only_our_user_and_root_are_served(monkeypatch: pytest.MonkeyPatch, uid: int, *, ok: bool) -> None:
    """As ssh-agent does it."""
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    assert peer.allowed(peer.Peer(uid=uid, pid=1)) is ok


class Library:
    """A C library with getpeereid, as macOS has it."""

    def __init__(self, result: int) -> None:
        self.result = result

    def getpeereid(self, _descriptor: int, uid: Any, gid: Any) -> int:
        """Fill in user 501, group 20."""
        uid._obj.value, gid._obj.value = 501, 20
        return self.result


class Socket:
    """A connected socket as macOS answers getsockopt(SOL_LOCAL, LOCAL_PEERPID)."""

    def __init__(self, *, knows_pid: bool) -> None:
        self.knows_pid = knows_pid

    def fileno(self) -> int:
        """Any."""
        return 3

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Level 0, option 2 and four bytes: <sys/un.h>."""
        assert (level, option, size) == (0, 2, 4)
        if not self.knows_pid:
            raise OSError(42, "not available")
        return (4312).to_bytes(4, sys.byteorder)


@pytest.mark.parametrize("knows_pid", [True, False])
def test_r08_the_calls_macos_needs(monkeypatch: pytest.MonkeyPatch, *, knows_pid: bool) -> None:
    """Against a recorded shape of the calls; not run on a Mac."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", lambda *_args, **_more: Library(0))
    found = peer.identify(Socket(knows_pid=knows_pid))  # type: ignore[arg-type]
    assert found == peer.Peer(uid=501, pid=4312 if knows_pid else None)


def test_a_peer_the_kernel_does_not_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is closed by the server."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", lambda *_args, **_more: Library(-1))
    with pytest.raises(OSError):  # noqa: PT011 -- whatever errno holds
        peer.identify(Socket(knows_pid=True))  # type: ignore[arg-type]
