"""`veloxquantd`: run the daemon in the foreground until it is told to stop.

Exit status: 0 stopped as asked; 1 the socket was taken or the daemon failed; 2 wrong usage, configuration or socket
path; 75 another daemon holds the lock; 128 + n ended by a second signal n.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from veloxquant import __version__, environment, paths
from veloxquant.config import Config, load, log_file_of
from veloxquant.daemon import lean, log, streams
from veloxquant.daemon.scarcity import is_starved
from veloxquant.errors import InvalidParams, VeloxError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LINGER_S = 0.2
_STUCK_S = 30.0
"""A plugin's call is left to itself after a second; one that nothing can leave ends the daemon, which starts again."""


PROGRAM = "veloxquantd"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a daemon; its exit status."""
    streams.ensure()
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except VeloxError as error:
        _complain(error)
        return error.exit_code
    except (OSError, RuntimeError, MemoryError) as failure:
        if not is_starved(failure):
            raise
        _complain(_starved(failure))
        return 1


def run(arguments: Sequence[str], program: str = PROGRAM) -> int:
    """The same with errors raised: InvalidParams, ConfigInvalid, SocketRefused, AlreadyRunning."""
    options = _parser(program).parse_args(arguments)
    environment.forget_unknown()
    os.umask(os.umask(0o077) | 0o022)  # folders on the way to ours, too, are nobody else's to write in
    lean.one_arena()
    lean.short_turns()
    lean.import_without_openssl()
    try:
        config = _config(options)
        # A log that was asked for has to be possible; the one that is there by default only warns.
        log.start(config.daemon.log_level, log_file_of(config), strict=config.daemon.log_file != "default")
        import asyncio

        from veloxquant.daemon.server import serve  # after the log: what loads from here on may have something to say
        from veloxquant.methods.suspects import Calls

        Calls.stuck_s = _STUCK_S
        place = paths.config_file() if options.config is None else Path(options.config).absolute()
        status = asyncio.run(serve(config, config_path=place, read_config=lambda: _config(options)))
    finally:
        log.stop()
    _leave_hung_threads(status)
    return status


def _config(options: argparse.Namespace) -> Config:
    """All layers, flags on top. Raises ConfigInvalid."""
    flags: dict[str, Any] = {
        "socket.path": options.socket,
        "records.directory": options.records,
        "daemon.log_level": options.log_level,
        "daemon.log_file": options.log_file,
    }
    return load(options.config, flags=flags)


class _Parser(argparse.ArgumentParser):
    """Complaints are our errors: what, and what next."""

    def error(self, message: str) -> NoReturn:
        """Raises InvalidParams in place of printing usage and leaving."""
        raise InvalidParams(message, hint=f"{self.prog} --help")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        allow_abbrev=False,
        description="Plan KV caches for every program of this user, over a Unix socket, until stopped (SIGTERM).",
        epilog="SIGHUP reads configuration, plugins and records again. veloxquantctl asks the running daemon.",
    )
    parser.add_argument("--socket", metavar="PATH", help="where to listen (VELOXQUANT_SOCKET, socket.path)")
    parser.add_argument("--config", metavar="FILE", help="the configuration file (VELOXQUANT_CONFIG)")
    parser.add_argument("--records", metavar="DIR", help="the benchmark directory (VELOXQUANT_RECORDS)")
    parser.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    parser.add_argument("--log-file", metavar="FILE", help="the log, rotated at 5 MiB; '' for none")
    parser.add_argument("--version", action="version", version=f"{program} {__version__}")
    return parser


def _complain(error: VeloxError) -> None:
    sys.stderr.write(f"{PROGRAM}: {error.message}\n")
    if error.hint:
        sys.stderr.write(f"  {error.hint}\n")


def _starved(failure: Exception) -> VeloxError:
    return VeloxError(
        f"the system grants the daemon no more files, memory or threads: {str(failure) or 'out of memory'}",
        hint="close some programs, or raise the limit: `ulimit -a` tells them",
    )


def _leave_hung_threads(status: int) -> None:
    """Python would wait for a thread that hangs (a file system that does not answer): end without it."""
    ends = time.monotonic() + _LINGER_S
    while _hung() and time.monotonic() < ends:
        time.sleep(0.01)
    if _hung():
        sys.stderr.flush()
        os._exit(status)


def _hung() -> list[threading.Thread]:
    from veloxquant.daemon.threads import THREAD_PREFIX

    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]


if __name__ == "__main__":
    sys.exit(main())
