"""Entry point: `python -m veloxquant.models.trace_worker FD` reads one request line, writes answer lines to FD."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

import msgspec

from veloxquant.models.exchange import Failed, Traced, TraceRequest
from veloxquant.models.trace_worker.confinement import confine


def main() -> None:
    """Answer the request on standard input; go when the parent closes it."""
    answer_fd = int(sys.argv[1])
    os.set_inheritable(answer_fd, False)  # noqa: FBT003 -- positional only
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=TraceRequest)
    fence = confine(request.cpu_limit_s, request.memory_limit_bytes)
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
        _write(answer_fd, msgspec.structs.replace(answer, network=fence) if isinstance(answer, Traced) else answer)


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
