"""Many persistent clients in one process: each sends a line, waits for its answer, sends the next.

One process and one selector, so that on two cores the daemon has the other; a process for each client would measure
the scheduler. Plain sockets: what is timed is the daemon and the kernel, from before the send to after the last byte.
"""

from __future__ import annotations

import selectors
import socket
import time
from dataclasses import dataclass, field

_BLOCK = bytearray(1 << 18)
"""What all clients receive into: an allocation for each answer would cost more than the answer."""
_PING = b'{"jsonrpc":"2.0","id":0,"method":"ping"}\n'
_NEWLINE = ord("\n")


@dataclass
class Outcome:
    """Seconds of every answer, and what went wrong."""

    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0


class Asker:
    """One connection that asks the same question again and again."""

    def __init__(self, path: str, question: bytes, count: int) -> None:
        self.left = count
        self.socket = connect(path)
        self._question = question
        self._begun = False
        self._began = 0.0

    def arrive(self) -> None:
        """Be accepted: one question that is not timed."""
        self.socket.sendall(_PING)
        while not self.socket.recv(1 << 16).endswith(b"\n"):
            pass

    def ask(self) -> None:
        """Send the question."""
        self.left -= 1
        self._began = time.perf_counter()
        self.socket.sendall(self._question)

    def hear(self, outcome: Outcome) -> bool:
        """Take what arrived, and ask again after a whole answer; False when this client is done."""
        size = self.socket.recv_into(_BLOCK)
        if not size:
            outcome.errors.append("the daemon closed the connection")
            return False
        if not self._begun and _BLOCK.find(b'"error":', 0, 64) >= 0:
            outcome.errors.append(_BLOCK[:300].decode(errors="replace"))
        self._begun = _BLOCK[size - 1] != _NEWLINE
        if self._begun:
            return True
        outcome.seconds.append(time.perf_counter() - self._began)
        if self.left == 0:
            return False
        self.ask()
        return True


def connect(path: str, within_s: float = 30.0) -> socket.socket:
    """A connected socket. Without a time limit connect waits for room in the backlog; with one it would not."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.settimeout(within_s)
    return connection


def run(path: str, questions: list[bytes], count: int, silence_s: float = 30.0) -> Outcome:
    """One client for each question, all at once, `count` times each. A silence of so long ends it with an error.

    All are connected and were answered once before the first question is timed.
    """
    askers = [Asker(path, question, count) for question in questions]
    outcome = Outcome()
    with selectors.DefaultSelector() as selector:
        waiting = {asker.socket.fileno(): asker for asker in askers}
        for asker in askers:
            selector.register(asker.socket, selectors.EVENT_READ)
        for asker in askers:
            asker.arrive()
        began = time.perf_counter()
        for asker in askers:
            asker.ask()
        while waiting and (ready := selector.select(silence_s)):
            for key in [key for key, _ in ready if not waiting[key.fd].hear(outcome)]:
                selector.unregister(key.fileobj)
                del waiting[key.fd]
        outcome.elapsed_s = time.perf_counter() - began
    if waiting:
        outcome.errors.append(f"{len(waiting)} clients had no answer for {silence_s:g} s")
    for asker in askers:
        asker.socket.close()
    return outcome
