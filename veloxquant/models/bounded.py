"""Running a short-lived program of ours within limits of time, memory and output; its death is an answer."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_ANSWER_BYTES = 64 * 2**20
_ERROR_TAIL_BYTES = 4096
_PIPE_BYTES = 65536
_LOOK_S = 0.05
"""How often the memory of the process is looked at."""
_PS_LOOK_S = 0.5
"""The same where `ps` has to be started for it (macOS, which has no /proc; not run on a Mac)."""


@dataclass(frozen=True)
class Outcome:
    """What a bounded process wrote to its answer descriptor, and how it ended."""

    answer: bytes
    ended: str = ""
    """Empty when it exited with 0; else what ended it, as a clause: "was ended after 20 s"."""
    errors: str = ""
    """The last lines of its standard error."""


def run(
    argv: Sequence[str], *, request: bytes, timeout_s: float, memory_limit_bytes: int, env: Mapping[str, str]
) -> Outcome:
    """Start argv with the number of its answer descriptor appended, send one line, gather what comes back.

    Standard output goes nowhere, so nothing printed can be taken for an answer. Standard input stays open until the
    process has ended: a worker whose parent dies reads its end and goes too. The process leads a group of its own,
    and the whole group is killed at the end, whatever happened. Never raises for what the process does.
    """
    read_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
            [*argv, str(write_fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(write_fd,),
            start_new_session=True,
            env=dict(env),
        )
    except OSError as error:
        os.close(read_fd)
        return Outcome(b"", f"could not be started: {error}")
    finally:
        os.close(write_fd)
    with os.fdopen(read_fd, "rb", buffering=0) as answers, process:
        watched = _Watched(process, answers.fileno(), request, time.monotonic() + timeout_s, memory_limit_bytes)
        try:
            stopped = watched.gather(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    return Outcome(bytes(watched.answer), stopped or _how(code), watched.errors.decode(errors="replace").strip())


@dataclass
class _Watched:
    process: subprocess.Popen[bytes]
    answers_fd: int
    request: bytes
    deadline: float
    memory_limit_bytes: int
    answer: bytearray = field(default_factory=bytearray)
    errors: bytes = b""
    _next_look: float = 0.0

    def gather(self, timeout_s: float) -> str:
        """Move bytes until the process has exited or is past a limit; "" for an exit, else which limit."""
        with selectors.DefaultSelector() as selector:
            for stream, event in self._streams():
                os.set_blocking(stream, False)
                selector.register(stream, event)
            while not (exited := self._exited()) and not (past := self._past_limit(timeout_s)):
                self._exchange(selector, _LOOK_S)
            if not exited:
                return past
            self._exchange(selector, 0)
        self._drain()
        return ""

    def _exchange(self, selector: selectors.BaseSelector, wait_s: float) -> None:
        for key, _ in selector.select(wait_s):
            if not self._move(key.fd):
                selector.unregister(key.fd)

    def _past_limit(self, timeout_s: float) -> str:
        if len(self.answer) > MAX_ANSWER_BYTES:
            return f"was ended after an answer of {MAX_ANSWER_BYTES} bytes"
        if time.monotonic() > self.deadline:
            return f"was ended after {timeout_s:g} s"
        if (held := self._resident_bytes()) > self.memory_limit_bytes:
            return f"was ended at {held} bytes of memory, the limit is {self.memory_limit_bytes}"
        return ""

    def _streams(self) -> list[tuple[int, int]]:
        assert self.process.stdin is not None  # noqa: S101 -- both are pipes
        assert self.process.stderr is not None  # noqa: S101 -- both are pipes
        return [
            (self.process.stdin.fileno(), selectors.EVENT_WRITE),
            (self.process.stderr.fileno(), selectors.EVENT_READ),
            (self.answers_fd, selectors.EVENT_READ),
        ]

    def _exited(self) -> bool:
        """Whether the process has ended; where the platform can, without reaping it, so that its number stays ours."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13; its numbers are not reused within microseconds
            return self.process.poll() is not None
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _move(self, fd: int) -> bool:
        """Move one pipe's worth of bytes; False when the stream is done with."""
        try:
            if fd == self.answers_fd:
                read = os.read(fd, _PIPE_BYTES)
                self.answer += read
                return bool(read)
            if self.process.stderr is not None and fd == self.process.stderr.fileno():
                read = os.read(fd, _PIPE_BYTES)
                self.errors = (self.errors + read)[-_ERROR_TAIL_BYTES:]
                return bool(read)
            self.request = self.request[os.write(fd, self.request[:_PIPE_BYTES]) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(self.request)

    def _drain(self) -> None:
        """Take what is still in the answer pipe; a stray child may hold its other end, so no wait for the end."""
        while len(self.answer) <= MAX_ANSWER_BYTES:
            try:
                read = os.read(self.answers_fd, _PIPE_BYTES)
            except BlockingIOError:
                return
            if not read:
                return
            self.answer += read

    def _resident_bytes(self) -> int:
        now = time.monotonic()
        if now < self._next_look:
            return 0
        on_linux = sys.platform == "linux"
        self._next_look = now + (_LOOK_S if on_linux else _PS_LOOK_S)
        return _resident_linux(self.process.pid) if on_linux else _resident_ps(self.process.pid)


def _resident_linux(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _resident_ps(pid: int) -> int:
    try:
        seen = subprocess.run(  # noqa: S603 -- a fixed program, a number as argument
            ["/bin/ps", "-o", "rss=", "-p", str(pid)], capture_output=True, timeout=5, check=False
        )
        return int(seen.stdout or b"0") * 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def _how(code: int) -> str:
    if code == 0:
        return ""
    if code > 0:
        return f"exited with status {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
