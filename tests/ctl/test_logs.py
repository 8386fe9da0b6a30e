"""`veloxquantctl logs`: the last lines wherever they lie, and every new one whatever becomes of the file."""

from __future__ import annotations

import errno
import io
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from veloxquant import paths
from veloxquant.ctl import log_lines, logs
from veloxquant.ctl.log_lines import Follower
from veloxquant.ctl.terminal import Terminal
from veloxquant.errors import ConfigInvalid, NotRunning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from veloxquant.client import FakeTransport

Run = Any


@pytest.fixture
def log() -> Path:
    """The default log, not there yet."""
    place = paths.log_file()
    place.parent.mkdir(parents=True, mode=0o700)
    return place


def entry(number: int, level: str = "info", event: str = "something", **fields: Any) -> str:
    """A line as the daemon writes it."""
    line = {"ts": f"2026-09-01T10:00:{number % 60:02}.000Z", "level": level, "event": event, "number": number}
    return json.dumps(line | fields) + "\n"


def write(file: Path, numbers: Iterable[int]) -> None:
    """Lines of these numbers."""
    with file.open("a") as opened:
        opened.writelines(map(entry, numbers))


def numbers(lines: Iterable[bytes]) -> list[int]:
    """Which they are."""
    return [json.loads(line)["number"] for line in lines]


def shown(done: Any) -> list[int]:
    """The numbers in an output of --json."""
    return [json.loads(line)["number"] for line in done.out.splitlines()]


def test_the_last_lines_in_their_order(ctl: Run, log: Path) -> None:
    """Twenty, or as many as are asked for; fewer where there are no more."""
    write(log, range(100))
    assert shown(ctl("logs", "--json")) == list(range(80, 100))
    assert shown(ctl("logs", "--json", "--lines", "3")) == [97, 98, 99]
    assert shown(ctl("logs", "--json", "--lines", "1k")) == list(range(100))


def test_older_files_are_read_where_the_newest_is_short(ctl: Run, log: Path) -> None:
    """Over a rotation no line is missing."""
    write(log.with_name("daemon.log.2"), range(10))
    write(log.with_name("daemon.log.1"), range(10, 20))
    write(log, range(20, 25))
    assert shown(ctl("logs", "--json", "--lines", "12")) == list(range(13, 25))
    assert shown(ctl("logs", "--json", "--lines", "100")) == list(range(25))


def test_a_huge_log_is_read_from_its_end(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ten lines of 100 GiB cost two blocks: the rest of the file is a hole that nobody looks into."""
    log.touch()
    os.truncate(log, 100 * 2**30)
    write(log, [-1, *range(10)])
    follower = Follower(log)
    read: list[int] = []
    reading = log_lines.backwards

    class Counted:
        def __init__(self, file: Any) -> None:
            self._file = file
            self.seek = file.seek

        def read(self, size: int) -> bytes:
            read.append(size)
            return bytes(self._file.read(size))

    monkeypatch.setattr(log_lines, "backwards", lambda file, end: reading(Counted(file), end))  # type: ignore[arg-type]
    before = follower.before()
    assert numbers(next(before) for _ in range(10)) == list(range(9, -1, -1))
    assert sum(read) <= 2 * 64 * 1024
    follower.close()


@given(st.lists(st.binary(max_size=40).filter(lambda one: b"\n" not in one), max_size=30), st.integers(1, 50))
def test_backwards_is_forwards_reversed(lines: list[bytes], block: int) -> None:
    """Whatever the lines and wherever the blocks are cut; as bytes.split has it."""
    data = b"".join(one + b"\n" for one in lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_lines, "_BLOCK_BYTES", block)
        assert list(log_lines.backwards(io.BytesIO(data), len(data))) == lines[::-1]
        last = data.removesuffix(b"\n")
        if lines and lines[-1]:  # a last line without its newline counts, too
            assert list(log_lines.backwards(io.BytesIO(last), len(last))) == last.split(b"\n")[::-1]


def test_a_line_without_end_is_given_in_pieces(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no log costs no more memory than a block and a line; nothing of it is lost."""
    monkeypatch.setattr(log_lines, "_LINE_BYTES", 100)
    monkeypatch.setattr(log_lines, "_BLOCK_BYTES", 64)
    data = b"\n".join(bytes([65 + n]) * 300 for n in range(3))
    log.write_bytes(data)
    follower = Follower(log)
    pieces = list(follower.before())
    follower.close()
    assert max(map(len, pieces)) <= 100 + 64
    assert b"".join(reversed(pieces)) == data.replace(b"\n", b"")


def test_filters_go_back_until_enough_is_found(ctl: Run, log: Path) -> None:
    """By level and above, by event and those below it; lines of the interpreter have no level and pass every one."""
    log.write_text(
        entry(1, "error", "request.failed")
        + entry(2, "warning", "request.slow")
        + "Fatal Python error: Segmentation fault\n"
        + "".join(entry(number) for number in range(10, 50))
    )
    done = ctl("logs", "--json", "--level", "warning")
    assert [json.loads(line).get("number") for line in done.out.splitlines()] == [1, 2, None]
    assert json.loads(done.out.splitlines()[-1]) == {"text": "Fatal Python error: Segmentation fault"}
    assert shown(ctl("logs", "--json", "--event", "request")) == [1, 2]
    assert shown(ctl("logs", "--json", "--event", "request.slow")) == [2]
    assert ctl("logs", "--json", "--event", "req").out == ""
    assert ctl("logs", "--level", "loud").code == 2


def test_logs_as_text(ctl: Run, log: Path, golden_text: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Time, level, event, fields; tracebacks below their line; foreign lines as they are."""
    monkeypatch.setenv("TZ", "UTC")
    logs.time.tzset()
    log.write_text(
        entry(1, event="daemon.ready", socket="/run/vq/d.sock")
        + entry(2, "warning", "request.slow", method="plan", text="two words")
        + entry(3, "error", "request.failed", traceback="Traceback (most recent call last):\n  oh")
        + "not JSON\n"
        + "[1]\n"
    )
    done = ctl("logs")
    monkeypatch.undo()
    logs.time.tzset()
    assert (done.code, done.out) == (0, golden_text("logs"))


def test_no_line_can_command_the_terminal(ctl: Run, log: Path) -> None:
    """What a client chose to call itself is in the log: control letters come as numbers, in foreign lines too."""
    log.write_text(entry(1, model="\x1b[2J\x07") + "\x1b]0;title\x07\n")
    out = ctl("logs").out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "\\x1b[2J\\x07" in out


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=2)
)
LINES = st.dictionaries(
    st.sampled_from(["ts", "level", "event", "traceback", "text"]) | st.text(), ANYTHING, max_size=6
)


@given(LINES.map(lambda line: json.dumps(line).encode()) | st.binary(max_size=60))
@example(b'{"event": "x", "ts": "0001-01-01T00:00:00"}')
@example(b'{"event": "x", "level": "\\ud800"}')
def test_whatever_a_line_holds_it_is_shown(line: bytes) -> None:
    """Any fields of any kind, and any bytes: never an error, never a control letter but the newlines."""
    out = io.StringIO()
    terminal = Terminal(out, io.StringIO(), color="never")
    logs.show_text(logs.read(line), terminal)
    logs.show_json(logs.read(line), terminal)
    shown = out.getvalue()
    assert shown.endswith("\n")
    assert shown.replace("\n", "").isprintable()


def test_without_a_log_it_says_so(ctl: Run, log: Path) -> None:
    """Where it would be; that it is turned off; exit 1 either way."""
    done = ctl("logs")
    assert (done.code, done.out) == (1, "")
    assert f"no log at {log}" in done.err
    paths.config_file().parent.mkdir(parents=True)
    paths.config_file().write_text('[daemon]\nlog_file = ""\n')
    done = ctl("logs")
    assert done.code == 1
    assert "turned off" in done.err


@pytest.mark.parametrize("make", ["pipe", "folder"])
def test_what_is_no_file_is_refused_and_waited_for_by_nobody(ctl: Run, log: Path, make: str) -> None:
    """A pipe that nobody writes to would hold us for ever; the setting is named."""
    os.mkfifo(log) if make == "pipe" else log.mkdir()
    done = ctl("logs")
    assert done.code == 2
    assert f"the log {log} cannot be read: it is not a regular file" in done.err
    assert "doctor" in done.err


def test_a_log_that_may_not_be_looked_at_is_not_an_absent_one(
    ctl: Run, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that others made is no reason to say that no daemon has run."""

    def shut(_path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(log_lines, "open_plain", shut)
    done = ctl("logs")
    assert done.code == 2
    assert f"the log {log} cannot be read: Permission denied" in done.err


def test_a_pipe_among_the_older_files_is_passed_over(ctl: Run, log: Path) -> None:
    """One that takes the log's own place while that is followed is refused."""
    write(log, range(2))
    os.mkfifo(log.with_name(f"{log.name}.1"))
    assert shown(ctl("logs", "--json")) == [0, 1]
    follower = Follower(log)
    log.unlink()
    os.mkfifo(log)
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        list(follower.poll())
    follower.close()


def test_the_running_daemon_knows_its_log_best(
    ctl: Run, fake: FakeTransport, example: Any, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been started with --log-file; without a daemon, or with --no-daemon, the configuration counts."""
    import msgspec

    other = short_folder / "elsewhere.log"
    write(other, [7])
    fake.answers["status"] = msgspec.structs.replace(example.status, log_file=str(other))
    assert shown(ctl("logs", "--json")) == [7]
    assert ctl("logs", "--no-daemon").code == 1
    fake.answers["status"] = NotRunning("gone", hint="")
    assert ctl("logs").code == 1


def test_follow_gives_each_line_once(log: Path) -> None:
    """What was there before is before, what comes is polled; half a line waits for its end."""
    write(log, range(3))
    follower = Follower(log)
    write(log, range(3, 5))
    assert numbers(follower.before()) == [2, 1, 0]
    assert numbers(follower.poll()) == [3, 4]
    whole = entry(5)
    with log.open("a") as opened:
        opened.write(whole[:10])
        opened.flush()
        assert list(follower.poll()) == []
        opened.write(whole[10:])
    assert numbers(follower.poll()) == [5]
    assert list(follower.poll()) == []
    follower.close()


def rotate(log: Path) -> None:
    """As the daemon does it."""
    for number in (1, 0):
        file = log.with_name(f"daemon.log.{number}") if number else log
        if file.exists():
            file.rename(log.with_name(f"daemon.log.{number + 1}"))


@pytest.mark.parametrize("rotations", [1, 2])
def test_follow_across_rotations(log: Path, rotations: int) -> None:
    """What was written to the old file after the last look, to one that came and went, and to the new one."""
    write(log, [0])
    follower = Follower(log)
    for turn in range(rotations):
        write(log, [10 * turn + 1, 10 * turn + 2])
        rotate(log)
    assert numbers(follower.poll()) == [1, 2]  # the new file is not there yet: only what is in the old one
    write(log, [99])
    assert numbers(follower.poll()) == ([11, 12, 99] if rotations == 2 else [99])
    follower.close()


def test_follow_a_log_that_is_emptied_removed_or_not_there_yet(log: Path) -> None:
    """Truncated: from its new start. Removed: the next file of that name from its start."""
    follower = Follower(log)
    assert list(follower.poll()) == []
    write(log, [1])
    assert numbers(follower.poll()) == [1]
    os.truncate(log, 0)
    assert list(follower.poll()) == []
    write(log, [2])
    assert numbers(follower.poll()) == [2]
    os.truncate(log, 0)
    write(log, [7, 8, 9])
    assert numbers(follower.poll()) == [7, 8, 9]  # longer than it was, before we looked again
    log.unlink()
    assert list(follower.poll()) == []
    write(log, [3])
    assert numbers(follower.poll()) == [3]
    follower.close()


def test_follow_ends_with_an_interrupt(ctl: Run, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C: exit 130 and no traceback; what came until then was shown."""
    write(log, [1])
    turns = iter((2, 3))

    def sleep(_seconds: float) -> None:
        number = next(turns, None)
        if number is None:
            raise KeyboardInterrupt
        write(log, [number])

    monkeypatch.setattr(logs.time, "sleep", sleep)
    done = ctl("logs", "--follow", "--json", "--lines", "0")
    assert (done.code, shown(done), done.err) == (130, [2, 3], "")
