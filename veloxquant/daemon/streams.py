"""Standard streams that were closed before we began (`>&-`, some service managers) lead nowhere instead.

Without this the next file or socket that is opened would become descriptor 0, 1 or 2, and whatever writes to a standard
stream would write into it.
"""

from __future__ import annotations

import errno
import os
import sys

_STANDARD = (0, 1, 2)


def ensure() -> None:
    """Open what is closed of descriptors 0 to 2, and give Python the streams it left out."""
    for descriptor in _STANDARD:
        try:
            os.fstat(descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            # The lowest free descriptor is taken: this one, since those below it are open by now.
            os.open(os.devnull, os.O_RDWR)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 -- for as long as we run
