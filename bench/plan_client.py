"""One client process of the latency bench: sends request lines from a file, in turn, and times each answer.

Waits for a line on standard input before it starts, so that all clients start together, and prints a JSON list of
seconds. Plain sockets: what is timed is the daemon and the kernel, not a client library.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path


def times(path: str, requests: list[bytes], count: int) -> list[float]:
    """Seconds from sending a request to having its whole answer, `count` times over the requests in turn.

    Raises ValueError for an answer that is an error.
    """
    seconds = []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        for number in range(count):
            request = requests[number % len(requests)]
            began = time.perf_counter()
            connection.sendall(request)
            answer = read_line(connection)
            seconds.append(time.perf_counter() - began)
            if b'"error"' in answer[:64]:
                raise ValueError(answer.decode())
    return seconds


def read_line(connection: socket.socket) -> bytes:
    """One answer. Raises ValueError when the daemon hangs up."""
    parts = []
    while True:
        block = connection.recv(1 << 18)
        if not block:
            raise ValueError("the daemon closed the connection")
        parts.append(block)
        if block.endswith(b"\n"):
            return b"".join(parts)


def main() -> int:
    """Arguments: socket, file with request lines, how often."""
    path, requests, count = sys.argv[1], Path(sys.argv[2]).read_bytes().splitlines(keepends=True), int(sys.argv[3])
    times(path, requests[:1], 5)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(times(path, requests, count)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
