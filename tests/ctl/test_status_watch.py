"""`status --watch`: drawn again when something changed or it is time, and at the daemon's end it says so and waits."""

from __future__ import annotations

import fcntl
import io
import json
import os
import queue
import struct
import termios
from typing import TYPE_CHECKING, Any, Self

import msgspec
import pytest

from veloxquant.ctl import status_watch
from veloxquant.ctl.session import Session
from veloxquant.ctl.terminal import Terminal
from veloxquant.errors import NotAnswering, NotRunning
from veloxquant.wire.answers import Notice, Pong, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import SimpleNamespace

Run = Any


class Daemons:
    """Clients of scripted daemons. `turns` says what each look finds: a generation, an error, or Ctrl-C."""

    def __init__(self, example: Status, *turns: Any) -> None:
        self.turns = list(turns)
        self.pings: list[Any] = []
        self.notices: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        self.waits: list[float] = []
        self._example = example

    def client(self, *, wait_s: float = 0.0, fallback: bool = True) -> Self:
        """One client; how long it would wait for a daemon is kept."""
        assert not fallback
        self.waits.append(wait_s)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def ping(self) -> Pong:
        """The next of `pings`, else an answer."""
        found = self.pings.pop(0) if self.pings else None
        if isinstance(found, BaseException):
            raise found
        return Pong(pid=1, generation=1)

    def status(self) -> Status:
        """The next turn; a notice before it comes from within it."""
        found = self.turns.pop(0)
        if isinstance(found, BaseException):
            raise found
        return msgspec.structs.replace(self._example, generation=found)

    def subscribe(self, topics: tuple[str, ...]) -> Iterator[Notice]:
        """Notices as the test puts them; None ends the subscription."""
        assert set(topics) == {"generation", "records", "methods", "hardware", "warnings"}
        yield Notice(event="state", generation=0, full=True)
        while (notice := self.notices.get()) is not None:
            yield notice
        raise NotAnswering("ended")


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch, example: SimpleNamespace) -> Iterator[Callable[..., Daemons]]:
    """Script them; their listeners end with the test."""
    scripted: list[Daemons] = []

    def script(*turns: Any) -> Daemons:
        made = Daemons(example.status, *turns)
        monkeypatch.setattr(Session, "daemon_client", made.client)
        scripted.append(made)
        return made

    yield script
    for made in scripted:
        for _ in range(3):
            made.notices.put(None)


def generations(out: str) -> list[int]:
    """Of each JSON line."""
    return [json.loads(line)["generation"] for line in out.splitlines()]


def test_one_object_a_line_until_ctrl_c(ctl: Run, daemons: Callable[..., Daemons]) -> None:
    """With the schema of `status`; exit 130."""
    daemons(1, 2, 3, KeyboardInterrupt())
    done = ctl("status", "--watch", "--interval", "100ms", "--json")
    assert done.code == 130
    assert generations(done.out) == [1, 2, 3]
    assert {json.loads(line)["schema"] for line in done.out.splitlines()} == {"veloxquant.status/1"}


def test_a_change_is_drawn_at_once(ctl: Run, daemons: Callable[..., Daemons]) -> None:
    """Not at the interval's end, which is a day; several changes at once are drawn once."""
    script = daemons(1, 2, KeyboardInterrupt())
    script.notices.put(Notice(event="changed", generation=2))
    looks: list[int] = []
    ask = script.status

    def status_now() -> Status:
        looks.append(1)
        if len(looks) == 2:
            script.notices.put(Notice(event="changed", generation=3))
        return ask()

    script.status = status_now  # type: ignore[method-assign]
    done = ctl("status", "--watch", "--interval", "1d", "--json")
    assert (done.code, generations(done.out)) == (130, [1, 2])


def test_without_a_daemon_it_ends_at_once(ctl: Run, daemons: Callable[..., Daemons]) -> None:
    """Exit 3, as `status` does."""
    daemons().pings.append(NotRunning("nobody", hint=""))
    assert ctl("status", "--watch").code == 3


def test_a_daemon_that_comes_back_is_watched_on(ctl: Run, daemons: Callable[..., Daemons]) -> None:
    """Told of the stop by its last notice; waited for within the time limit; one that stops just now is asked again."""
    script = daemons(1, 2, KeyboardInterrupt())
    script.pings += [None, NotAnswering("on its way out"), None]
    script.notices.put(Notice(event="stopping", generation=1))
    done = ctl("status", "--watch", "--json", "--timeout", "5s", "--interval", "0.1")
    assert (done.code, generations(done.out)) == (130, [1, 2])
    assert done.err.count("the daemon stopped; waiting for it to come back") == 1
    assert any(0 < wait <= 5 for wait in script.waits)


def test_a_daemon_that_hangs_for_a_while_is_watched_on(ctl: Run, daemons: Callable[..., Daemons]) -> None:
    """It is asked again within the time limit."""
    script = daemons(1, NotAnswering("no answer in time"), 2, KeyboardInterrupt())
    script.pings += [None, NotAnswering("still none"), None]
    done = ctl("status", "--watch", "--json", "--timeout", "5s", "--interval", "0.1")
    assert (done.code, generations(done.out)) == (130, [1, 2])
    assert "the daemon does not answer; waiting for it" in done.err


@pytest.mark.parametrize("how", [NotRunning("nobody", hint=""), None])
def test_a_daemon_that_stays_away_ends_it(ctl: Run, daemons: Callable[..., Daemons], how: NotRunning | None) -> None:
    """Whether a look or the end of the subscription finds it gone: exit 3 when the time is over."""
    script = daemons(1, how or 2)
    script.notices.put(None)
    script.pings += [None, NotRunning("nobody came", hint="")]
    done = ctl("status", "--watch", "--timeout", "0.2", "--interval", "1d")
    assert done.code == 3
    assert "the daemon stopped" in done.err
    assert "nobody came" in done.err


def test_a_pipe_gets_blocks(ctl: Run, daemons: Callable[..., Daemons]) -> None:
    """One below the other with an empty line between, without any sequence."""
    daemons(1, 2, KeyboardInterrupt())
    out = ctl("status", "--watch", "--interval", "0.1").out
    first, second = out.split("\n\n")
    assert "generation 1\n" in first
    assert "generation 2\n" in second
    assert "\033" not in out


@pytest.mark.parametrize(
    "words", [("--interval", "1s"), ("--watch", "--interval", "1ms"), ("--watch", "--interval", "soon")]
)
def test_a_wrong_interval_is_refused(ctl: Run, words: tuple[str, ...]) -> None:
    """Without --watch, too short, no time: exit 2, naming the flag."""
    done = ctl("status", *words)
    assert done.code == 2
    assert "--interval" in done.err


class Pty(io.StringIO):
    """A terminal of some size that keeps what is written."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self._reader, self._writer = os.openpty()
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        """As a person does with the mouse."""
        fcntl.ioctl(self._writer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def isatty(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """Whose size is asked."""
        return self._writer

    def end(self) -> None:
        """Give the descriptors back."""
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture
def pty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pty]:
    """Sixty columns, eight rows."""
    monkeypatch.setenv("TERM", "xterm")
    made = Pty(60, 8)
    yield made
    made.end()


def picture(written: str, rows: int) -> list[str]:
    """What a terminal shows after these sequences: home, clear, clear the line's rest, clear below."""
    import re

    screen, row = [""] * rows, 0
    for part in re.findall(r"\033\[[0-9;]*[A-Za-z]|\n|[^\033\n]+", written):
        if part == "\033[2J":
            screen = [""] * rows
        elif part == "\033[H":
            row = 0
        elif part == "\n":
            row += 1
            assert row < rows, "it would scroll"
        elif part == "\033[J":
            screen[row:] = [""] * (rows - row)
        elif not part.startswith("\033"):
            screen[row] = part
    return screen


def test_it_is_drawn_in_place_and_fits(pty: Pty, example: SimpleNamespace) -> None:
    """The second state lies over the first; no line is longer than the terminal and none is below its last row."""
    pty.resize(60, 11)
    screen = status_watch._Screen(Terminal(pty, io.StringIO(), color="never"))
    screen.draw(example.status)
    shown = picture(pty.getvalue(), 11)
    assert [line.split()[0] for line in shown[:-1]] == [*SUBJECTS, "warning"]
    assert max(len(line) for line in shown) == 60
    assert shown[-1] == ""
    screen.draw(msgspec.structs.replace(example.status, version="0.2.0", warnings=()))
    again = picture(pty.getvalue(), 11)
    assert again[0].startswith("veloxquant 0.2.0  running")
    assert again[1:9] == shown[1:9]
    assert again[9:] == ["", ""]
    pty.resize(20, 4)
    before = len(pty.getvalue())
    screen.draw(example.status)
    small = picture(pty.getvalue()[before:], 4)
    assert [len(line) for line in small] == [20, 20, 20, 0]


SUBJECTS = ["veloxquant", "machine", "methods", "records", "clients", "traces", "process", "socket", "log"]


@pytest.mark.parametrize(
    ("rows", "warned", "seen", "says"),
    [
        (12, 2, [*SUBJECTS, "warning", "warning"], None),
        (11, 2, [*SUBJECTS[:7], "warning", "warning"], "2 lines left out: "),
        (10, 0, SUBJECTS, None),
        (9, 0, SUBJECTS[:7], "2 lines left out: "),
        (5, 2, ["veloxquant", "warning", "warning"], "8 lines left out: "),
        (4, 2, ["warning", "warning"], "9 lines left out: "),
        (4, 5, ["warning", "warning"], "12 lines left out, 3 warnings among them: "),
        (3, 2, ["warning"], "10 lines left out, 1 warning among them: "),
        (2, 2, [], "11 lines left out, 2 warnings among them: "),
        (2, 0, [], "9 lines left out: "),
    ],
)
def test_warnings_stay_where_rows_are_few(
    pty: Pty, example: SimpleNamespace, *, rows: int, warned: int, seen: list[str], says: str | None
) -> None:
    """Subjects go from the last to the first, then warnings, and the last line counts what is not seen."""
    pty.resize(120, rows)
    found = msgspec.structs.replace(example.status, warnings=tuple(f"number {i}" for i in range(warned)))
    status_watch._Screen(Terminal(pty, io.StringIO(), color="never")).draw(found)
    *shown, free = picture(pty.getvalue(), rows)
    assert free == ""
    if says is not None:
        assert shown.pop().startswith(says)
    assert [line.split()[0] for line in shown] == seen


def test_a_line_break_within_a_line_takes_a_row(pty: Pty, example: SimpleNamespace) -> None:
    """A folder may have one in its name; rows are counted with it."""
    pty.resize(120, 12)
    found = msgspec.structs.replace(example.status, warnings=("/a\n/b is not used", "another"))
    status_watch._Screen(Terminal(pty, io.StringIO(), color="never")).draw(found)
    *_, first, second, third, last, free = picture(pty.getvalue(), 12)
    assert [first.split()[0], second, third.split()[-1]] == ["warning", "/b is not used", "another"]
    assert last.startswith("2 lines left out")
    assert free == ""


def test_a_terminal_that_grows_shows_all_again(pty: Pty, example: SimpleNamespace) -> None:
    """Within an interval, without a change at the daemon."""
    screen = status_watch._Screen(Terminal(pty, io.StringIO(), color="never"))
    screen.draw(example.status)
    assert "left out" in pty.getvalue()
    pty.resize(60, 11)
    before = len(pty.getvalue())
    screen.draw(example.status)
    assert "left out" not in pty.getvalue()[before:]
    assert picture(pty.getvalue()[before:], 11)[9].startswith("warning")


def test_colour_takes_no_room(pty: Pty) -> None:
    """A line is cut by what is seen of it, and its colour ends even where it was cut."""
    terminal = Terminal(pty, io.StringIO(), color="always")
    pty.resize(10, 5)
    terminal.redraw([terminal.paint("green", "x" * 30)], first=True)
    assert f"\033[32m{'x' * 10}\033[0m\033[K\n" in pty.getvalue()


def test_a_dumb_terminal_gets_blocks(pty: Pty, monkeypatch: pytest.MonkeyPatch, example: SimpleNamespace) -> None:
    """As a pipe does."""
    monkeypatch.setenv("TERM", "dumb")
    status_watch._Screen(Terminal(pty, io.StringIO())).draw(example.status)
    assert "\033" not in pty.getvalue()
