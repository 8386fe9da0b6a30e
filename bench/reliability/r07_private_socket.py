"""R7: the socket is 0600 and its folder 0700 at every instant, as another process sees it while daemons start.

    python bench/reliability/r07_private_socket.py [--full]     1,000 starts, 40 of them of daemons; else 100 and 4

The observer looks at the path without pause. Most starts are what a daemon does with its folder, lock and socket
(`lifecycle`), under umask 000, in a process of its own; the rest are daemons from beginning to end.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import session
from reliability import figures, forked

from veloxquant import paths
from veloxquant.daemon import lifecycle


def starts(path: Path, count: int) -> int:
    """A process that owns the socket and lets go of it so many times; its pid."""
    pid = os.fork()
    if pid:
        return pid
    os.umask(0)
    for _ in range(count):
        lifecycle.private_folder(path.parent)
        lock = lifecycle.Lock(paths.lock_path(path))
        lifecycle.remove_stale(path)
        lifecycle.listen(path).close()
        lock.release()
        path.parent.joinpath(path.name + ".lock").unlink()
        path.parent.rmdir()
    os._exit(0)


def observe(path: Path, pid: int, sockets: set[tuple[int, int]]) -> Counter[str]:
    """Every mode that folder and socket were seen with while this process lived, and which sockets were seen."""
    seen: Counter[str] = Counter()
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        for _ in range(200):
            seen.update(_look(path.parent, sockets))
            seen.update(_look(path, sockets))
    return seen


def _look(place: Path, sockets: set[tuple[int, int]]) -> tuple[str, ...]:
    """What is there, with its mode; nothing when there is nothing."""
    try:
        facts = os.lstat(place)
    except FileNotFoundError:
        return ()
    mode = facts.st_mode
    if stat.S_ISSOCK(mode):
        sockets.add((facts.st_ino, facts.st_ctime_ns))
    kind = "socket" if stat.S_ISSOCK(mode) else "folder" if stat.S_ISDIR(mode) else "other"
    return (f"{kind} {stat.S_IMODE(mode):04o}",)


def main() -> int:
    """Both kinds of start under observation."""
    full = figures.options(__doc__ or "").full
    short, whole = (960, 40) if full else (96, 4)
    with session.private_home() as home:
        home.adopt()
        os.environ["VELOXQUANT_DAEMON_LOG_FILE"] = ""
        path = home.folder / "p" / "d.sock"
        sockets: set[tuple[int, int]] = set()
        seen = observe(path, starts(path, short), sockets)
        for _ in range(whole):
            daemon = forked.start(home.folder / "log", "--socket", str(path))
            pid = os.fork()
            if not pid:
                forked.ping(str(path))
                os.kill(daemon.pid, signal.SIGTERM)
                os._exit(0)
            seen += observe(path, pid, sockets)
            daemon.wait()
    wrong = sum(count for name, count in seen.items() if name not in ("socket 0600", "folder 0700"))
    print(f"  {dict(seen)}", file=sys.stderr)
    figures.say(
        "R7", f"{short + whole} starts: sockets that were seen", len(sockets), "sockets", "> 0", met=bool(sockets)
    )
    figures.at_most("R7", f"{short + whole} starts: looks that met another mode", wrong, "looks", 0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
