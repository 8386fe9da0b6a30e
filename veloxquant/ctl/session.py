"""One run of one command: its options, its terminal, its configuration and its way to an answer."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from veloxquant.ctl.arguments import timeout_s, wait_s
from veloxquant.errors import ConfigInvalid, InvalidParams, NotRunning

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from veloxquant.client import Client
    from veloxquant.config import Config
    from veloxquant.ctl.terminal import Terminal


class Session:
    """What a command's `run` is given."""

    def __init__(self, options: argparse.Namespace, terminal: Terminal) -> None:
        self.options = options
        self.terminal = terminal
        self.may_create_records = False
        """Whether --records may name a folder that is not there yet."""
        self._at_end: list[Callable[[], None]] = []

    @functools.cached_property
    def config(self) -> Config:
        """The configuration with this command's flags on top. Raises ConfigInvalid."""
        from veloxquant.config import load

        return load(flags=self.flags)

    @property
    def flags(self) -> dict[str, Any]:
        """The settings that this command's flags give, None for those that were not given."""
        return {"socket.path": self.options.socket, "records.directory": self._records()}

    def _records(self) -> str | None:
        """The benchmark directory a flag names. One that is not there is a slip where nothing is put into it."""
        named: str | None = getattr(self.options, "records", None)
        lacking = named is not None and not os.path.isdir(named)  # noqa: PTH112 -- pathlib is not needed here
        if lacking and not self.may_create_records:
            raise InvalidParams(
                f"--records names {named!r}, which is no folder", hint="give the benchmark directory", field="--records"
            )
        return named

    @functools.cached_property
    def client(self) -> Client:
        """The way to an answer: the daemon, or with --no-daemon (and --records) this process alone."""
        if self.options.quiet:
            self._hush()
        if self.options.no_daemon or getattr(self.options, "records", None) is not None:
            from veloxquant.client import Client

            return Client(config=self.config, timeout_s=self.timeout_s, transport=_NoDaemon())
        return self.daemon_client()

    def daemon_client(self, **settings: Any) -> Client:
        """A client of the daemon. A wrong configuration keeps nobody from one that runs; planning here it does."""
        from veloxquant.client import Client

        settings = {"wait_s": wait_s(self.options), **settings}
        try:
            return Client(config=self.config, timeout_s=self.timeout_s, **settings)
        except ConfigInvalid as error:
            place = self.socket_without_file()
            self.terminal.note(f"{error.message}; the daemon is asked at {place}")
            return Client(place, timeout_s=self.timeout_s, **settings)

    def socket(self) -> Path:
        """The socket that this command asks at. Raises SocketRefused."""
        from pathlib import Path

        from veloxquant.config import socket_of

        try:
            return socket_of(self.config)
        except ConfigInvalid:
            return Path(self.socket_without_file())

    def socket_without_file(self) -> str:
        """The daemon's socket by flag, environment or default alone. Raises SocketRefused."""
        from veloxquant.paths import socket_path

        return os.path.abspath(self.options.socket or socket_path())  # noqa: PTH100 -- keeps links, as the daemon does

    @property
    def timeout_s(self) -> float:
        """The limit of the whole call in seconds."""
        return timeout_s(self.options)

    def close(self) -> None:
        """Let go of the daemon, and leave the process as it was."""
        while self._at_end:
            self._at_end.pop()()
        if "client" in self.__dict__:
            self.client.close()

    def _hush(self) -> None:
        """What rooms below log as a warning is a note here, and notes are not wanted."""
        import logging

        log = logging.getLogger("veloxquant")
        self._at_end.append(functools.partial(log.setLevel, log.level))
        log.setLevel(logging.ERROR)

    def say_where(self) -> None:
        """A note when the answer came from this process although a daemon was asked."""
        reason = self.client.fallback_reason
        if reason is not None and not isinstance(self.client.transport, _NoDaemon):
            self.terminal.note(f"{reason.message}; answered in this process")


class _NoDaemon:
    """A transport that reaches nobody, on purpose."""

    def exchange(self, frame: bytes, deadline: float) -> bytes:
        """Raises NotRunning."""
        raise _not_asked()

    def stream(self, frame: bytes, deadline: float) -> Iterator[bytes]:
        """Raises NotRunning."""
        raise _not_asked()

    def close(self) -> None:
        """Nothing is held."""


def _not_asked() -> NotRunning:
    return NotRunning("no daemon was asked, as --no-daemon says", hint="leave --no-daemon out")
