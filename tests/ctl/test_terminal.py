"""Lines on a terminal: cut to its width, and whole everywhere else."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import struct
import termios
from typing import TYPE_CHECKING

import pytest

from veloxquant.ctl import plan
from veloxquant.ctl.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import SimpleNamespace
    from typing import TextIO


def read_all(descriptor: int) -> str:
    """What was written to the terminal, to its end: one read gives what one buffer of it holds."""
    data = b""
    # Once the writing end is closed, Linux ends with an error where others end with nothing.
    with contextlib.suppress(OSError):
        while chunk := os.read(descriptor, 2**16):
            data += chunk
    return data.decode().replace("\r\n", "\n")


@pytest.fixture
def screen() -> Iterator[tuple[TextIO, int]]:
    """A pseudo-terminal of 60 columns: the stream that is written and the descriptor that is read."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(writer, "w") as stream:
        yield stream, reader
    os.close(reader)


def test_a_line_is_cut_to_the_width_of_the_terminal(screen: tuple[TextIO, int]) -> None:
    """60 columns hold 57 letters and the three dots that say there is more."""
    terminal = Terminal(screen[0], io.StringIO(), color="never")
    assert terminal.cut("x" * 60) == "x" * 60
    assert terminal.cut("x" * 61) == "x" * 57 + "..."


def test_a_pipe_gets_the_whole_line() -> None:
    """What is read by a program is never shortened."""
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as stream:
        assert Terminal(stream, io.StringIO()).cut("x" * 5000) == "x" * 5000
    assert Terminal(io.StringIO(), io.StringIO()).cut("x" * 5000) == "x" * 5000


def test_a_plan_says_that_it_was_cut_and_where_the_rest_is(
    screen: tuple[TextIO, int], example: SimpleNamespace
) -> None:
    """Every reason stays on one line; the way to the whole of it is named once."""
    stream, reader = screen
    plan.show(example.plan, Terminal(stream, io.StringIO(), color="never"))
    stream.close()
    shown = read_all(reader).splitlines()
    out = [line for line in shown if line.startswith("out ")]
    assert max(len(line) for line in out) == 60
    assert sum("--json has them whole" in line for line in shown) == 1
