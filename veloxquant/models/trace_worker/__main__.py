"""Entry point: `python -m veloxquant.models.trace_worker FD` reads one request line, writes answer lines to FD."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

import msgspec

from veloxquant.models.exchange import Failed, TraceRequest


def main() -> None:
    """Answer the request on standard input; go when the parent closes it."""
    answer_fd = int(sys.argv[1])
    os.set_inheritable(answer_fd, False)  # noqa: FBT003 -- positional only
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=TraceRequest)
    _limit(request)
    sys.addaudithook(_forbid)
    threading.Thread(target=_go_with_parent, daemon=True).start()
    try:
        from veloxquant.models.trace_worker.tracing import answers
    except ImportError as error:
        missing = Failed(
            kind="engine_missing", message=f"mlx cannot be imported: {error}", hint="pip install --upgrade mlx"
        )
        _write(answer_fd, missing)
        return
    for answer in answers(request):
        _write(answer_fd, answer)


def _limit(request: TraceRequest) -> None:
    """Limits the system enforces: CPU seconds, no core file, and on Linux the bytes that can be written to.

    Address space is no measure: MLX and the thread stacks reserve far more than they use.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (request.cpu_limit_s, request.cpu_limit_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        limit = request.memory_limit_bytes
        with contextlib.suppress(ValueError, OSError):  # a lower limit was set from outside
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


_FORBIDDEN = frozenset(
    {"socket.connect", "socket.getaddrinfo", "socket.sendto", "pickle.find_class"}
    | {"os.fork", "os.forkpty", "os.system", "os.exec"}
)
"""Audit events (docs.python.org/3/library/audit_events.html). A copy of the process would hold memory of its own."""


def _forbid(event: str, _: tuple[Any, ...]) -> None:
    """No network, no pickles and no copies of itself, whatever a model module or a plugin tries."""
    if event in _FORBIDDEN:
        raise PermissionError(f"{event} is not allowed while tracing a model")


def _go_with_parent() -> None:
    """The parent keeps our standard input open as long as it wants us."""
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    os._exit(3)


def _write(fd: int, answer: Any) -> None:
    line = memoryview(msgspec.json.encode(answer) + b"\n")
    while line:
        line = line[os.write(fd, line) :]


if __name__ == "__main__":
    main()
