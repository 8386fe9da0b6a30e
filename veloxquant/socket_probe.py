"""Whether somebody listens on a socket: a knock on it, which asks nothing and never waits long."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 1.0
_NOBODY = frozenset({errno.ECONNREFUSED, errno.ENOENT})


def failure(path: Path, patience_s: float = PATIENCE_S) -> OSError | None:
    """Why no connection was taken; None when one was. A full queue counts as a failure, though somebody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(patience_s)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            return error
    return None


def answers(path: Path) -> bool:
    """Whether a connection would be taken: only a refusal proves that nobody listens."""
    error = failure(path)
    return error is None or error.errno not in _NOBODY
