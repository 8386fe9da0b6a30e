"""R8: a real second user knocks at the daemon's socket. Needs root, who alone can become somebody else.

    sudo python bench/reliability/r08_second_user.py

The folder and the socket keep others out before anybody is asked who he is; so they are opened by hand here, and what
is left is the question to the kernel. Run as root the daemon is root's, and uid 65534 is the other.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, forked

from veloxquant.client import Client

OTHER = 65534
KNOCKS = 20
SHUT, OPEN_TO_BYTES = 100, 101


def knock(path: Path) -> int:
    """As the other user, in a process of its own: bytes received until the end, SHUT when there was no way in."""
    pid = os.fork()
    if not pid:
        os.setgroups([])
        os.setgid(OTHER)
        os.setuid(OTHER)
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(10)
                connection.connect(str(path))
                connection.sendall(forked.PING)
                got = len(connection.recv(4096))
        except (ConnectionResetError, BrokenPipeError):
            got = 0  # closed with our question unread
        except OSError:
            got = SHUT
        os._exit(min(got, OPEN_TO_BYTES))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> int:
    """Knock at the closed door, then at the open one."""
    figures.options(__doc__ or "")
    if os.geteuid() != 0:
        print("R8: needs root to become another user; nothing was measured", file=sys.stderr)
        return 0
    with session.private_home() as home:
        home.adopt()
        os.environ["VELOXQUANT_DAEMON_LOG_FILE"] = ""
        daemon = forked.start(home.folder / "log")
        forked.ping(str(home.socket))
        closed = knock(home.socket)
        for place, mode in ((home.folder, 0o711), (home.socket.parent, 0o711), (home.socket, 0o666)):
            place.chmod(mode)
        got = [knock(home.socket) for _ in range(KNOCKS)]
        with Client(home.socket, fallback=False) as client:
            refused = client.status().clients.refused
        daemon.signal(signal.SIGTERM)
        daemon.wait()
    figures.say("R8", "another user is kept out by the folder", closed == SHUT, "", "1", met=closed == SHUT)
    figures.at_most("R8", f"bytes that another user got, {KNOCKS} connections, doors opened by hand", sum(got), "B", 0)
    counted = refused == KNOCKS
    figures.say("R8", "connections that the daemon counted as refused", refused, "", str(KNOCKS), met=counted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
