"""One client: frames in, answers out, in order, with every buffer and every silence bounded.

Frames are answered one after the other. An answer that is ready is written at once; one that takes time runs as a
task while the frames behind it wait, and reading pauses, so that a client can never make us hold more than a few
buffers for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from veloxquant.daemon import log, peer
from veloxquant.wire.frames import FrameSplitter
from veloxquant.wire.messages import encode_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from veloxquant.daemon.peer import Peer

_FRAMES_A_TURN = 32
"""Frames of one client answered before others get their turn."""
_HIGH_WATER_BYTES = 64 * 1024
_READ_BYTES = 64 * 1024
_PIECE_BYTES = 4096
"""What is cut into frames at a time."""
_HTTP_VERBS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"OPTIONS ", b"DELETE ", b"PATCH ", b"CONNECT ")
_HTTP_TEXT = b"this socket speaks newline-delimited JSON-RPC 2.0, not HTTP; try veloxquantctl status\n"
_HTTP_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
    % (len(_HTTP_TEXT), _HTTP_TEXT)
)


@dataclass(frozen=True)
class Patience:
    """How long a client may be silent, in seconds."""

    half_frame_s: float = 30.0
    """From the first byte of a frame to its newline."""
    stalled_s: float = 5.0
    """Not reading what we send."""
    idle_s: float = 600.0
    """Nothing asked, unless it subscribed."""
    look_s: float = 1.0
    """Between looks whether it is still there, while it waits for an answer."""


class Desk(Protocol):
    """Who answers the frames of a connection, and hears what becomes of it."""

    def answer(self, frame: bytes, client: Connection) -> bytes | Awaitable[bytes]:
        """The answer line, or a promise of it. Never raises."""
        ...

    def caught_up(self, client: Connection) -> None:
        """The client reads again after a pause."""
        ...

    def gone(self, client: Connection) -> None:
        """The connection is closed."""
        ...


class Connection(asyncio.Protocol):
    """The state of one connection. Every call comes from the event loop's thread."""

    def __init__(self, desk: Desk, other: Peer, patience: Patience) -> None:
        self.peer = other
        self.subscribed = False
        self.writable = True
        self._desk = desk
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._splitter = FrameSplitter()
        self._arrived = b""
        self._cut = 0
        """How much of what arrived has been cut into frames."""
        self._frames: deque[bytes] = deque()
        self._transport: asyncio.Transport
        self._working: asyncio.Task[None] | None = None
        self._timers: dict[str, asyncio.Handle] = {}
        self._last_heard = self._loop.time()
        self._at_end = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start listening."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        # Not documented, there in every release: asyncio would read 256 KiB at once. Where it is not, memory is all.
        cast("Any", transport).max_size = _READ_BYTES
        self._after("idle", self._patience.idle_s, self._check_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget everything."""
        for name in list(self._timers):
            self._cancel(name)
        if self._working is not None:
            self._working.cancel()
        self._forget()
        self._desk.gone(self)

    def data_received(self, data: bytes) -> None:
        """Answer what it completes."""
        self._last_heard = self._loop.time()
        self._arrived = self._arrived[self._cut :] + data if self._arrived else data
        self._cut = 0
        if b"\n" in data:
            self._cancel("half")
        self._work()

    def eof_received(self) -> bool:
        """The client sends no more; what it asked is still answered, unless it is gone."""
        self._at_end = True
        self._work()
        self._cancel("there")
        self._check_there()
        return True

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self.writable = False
        self._after("stall", self._patience.stalled_s, self._drop, "not reading")

    def resume_writing(self) -> None:
        """It caught up."""
        self.writable = True
        self._cancel("stall")
        self._work()
        self._desk.caught_up(self)

    def send(self, line: bytes) -> None:
        """Write a line that answers nothing (a notice)."""
        if not self._transport.is_closing():
            self._transport.write(line)

    def fileno(self) -> int:
        """The descriptor of the connection, negative once it is closed."""
        return int(self._transport.get_extra_info("socket").fileno())

    def finish(self) -> None:
        """Answer what has arrived, take nothing more, close."""
        if not self._at_end and not self._transport.is_closing():
            self._at_end = True
            self._transport.pause_reading()
        self._work()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def _work(self) -> None:
        """Answer frames until there are none left, one needs time, or it is the turn of others."""
        self._cancel("turn")
        out: list[bytes] = []
        size = 0
        while len(out) < _FRAMES_A_TURN and size < _HIGH_WATER_BYTES and self._may_answer() and self._has_frame():
            out.append(self._answer(self._frames.popleft()))
            size += len(out[-1])
        if size and not self._transport.is_closing():
            self._transport.write(b"".join(out))
        self._settle()

    def _has_frame(self) -> bool:
        """Whether a frame waits. What arrived is cut piece by piece: as objects, short lines take 20 times the room."""
        while self._arrived and not self._frames:
            self._frames.extend(self._splitter.feed(self._next_piece()))
            if self._frames or not self._splitter.pending_bytes:
                self._cancel("half")
        if self._splitter.pending_bytes and not self._arrived and "half" not in self._timers:
            self._after("half", self._patience.half_frame_s, self._drop, "half a frame")
        return bool(self._frames)

    def _next_piece(self) -> bytes:
        """Some of what arrived; the rest of it where no line ends there, which is no object at all."""
        begin = self._cut
        self._cut += _PIECE_BYTES
        if self._cut < len(self._arrived) and self._arrived.find(b"\n", begin) >= 0:
            return self._arrived[begin : self._cut]
        rest = self._arrived[begin:]
        self._arrived, self._cut = b"", 0
        return rest

    def _may_answer(self) -> bool:
        return self._working is None and self.writable and not self._transport.is_closing()

    def _answer(self, frame: bytes) -> bytes:
        """The line to write now; nothing when a task will write it."""
        if frame.startswith(_HTTP_VERBS):
            self._forget()
            self._at_end = True
            return _HTTP_ANSWER
        answer = self._desk.answer(frame, self)
        if isinstance(answer, bytes):
            return answer
        self._working = self._loop.create_task(self._answer_later(answer))
        self._after("there", self._patience.look_s, self._check_there)
        return b""

    async def _answer_later(self, promise: Awaitable[bytes]) -> None:
        line = await promise
        self._working = None
        self._cancel("there")
        self.send(line)
        self._work()

    def _settle(self) -> None:
        """Decide what comes next: another turn, the end, or more reading."""
        if self._transport.is_closing():
            return
        if self._may_answer():
            if self._frames or self._arrived:
                self._timers["turn"] = self._loop.call_soon(self._work)
            elif self._splitter.overflowed:
                self.send(encode_error(None, self._splitter.error()))
                self._transport.close()
            elif self._at_end:
                self._transport.close()
        if self._at_end or self._transport.is_closing():
            return
        if self._frames or self._arrived or not self.writable:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _forget(self) -> None:
        """What arrived and was not answered."""
        self._arrived, self._cut = b"", 0
        self._frames.clear()

    def _check_there(self) -> None:
        """Amid an answer nothing may be read or written, so that only a look tells whether somebody waits for it."""
        if self._working is None or self._transport.is_closing():
            return
        if peer.hung_up([self.fileno()]):
            self.abort()
        else:
            self._after("there", self._patience.look_s, self._check_there)

    def _check_idle(self) -> None:
        left = self._last_heard + self._patience.idle_s - self._loop.time()
        if self.subscribed or self._working is not None:
            left = self._patience.idle_s
        if left <= 0:
            self._transport.close()
        else:
            self._after("idle", left, self._check_idle)

    def _drop(self, reason: str) -> None:
        log.event("client.dropped", logging.WARNING, reason=reason, peer_pid=self.peer.pid)
        self._transport.abort()

    def _after(self, name: str, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._timers[name] = self._loop.call_later(seconds, call, *args)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
