"""Python's garbage collector, left out where nothing is garbage."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_MANY_OBJECTS = 100_000


@contextmanager
def no_collections() -> Iterator[None]:
    """Leave the garbage collector out while many records come: none is garbage, and it would walk them each time."""
    pauses = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()
            if gc.get_count()[0] > _MANY_OBJECTS:
                gc.collect()  # once and here, or the next thousand objects of anybody would start it
