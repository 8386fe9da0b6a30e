"""What the daemon writes down, and how much."""

from __future__ import annotations

import io
import json
import logging
import stat
from typing import TYPE_CHECKING

import pytest

from veloxquant.daemon import log, log_file
from veloxquant.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It does."""
        return True


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Detach what a test attached."""
    yield
    log.stop()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    """What was written, decoded."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object() -> None:
    """With time, level, event and the event's fields; a newline inside stays inside."""
    stream = io.StringIO()
    log.start("info", stream=stream)
    log.event("client.dropped", logging.WARNING, reason="half\na frame", peer_pid=7)
    (line,) = lines(stream)
    stamp = str(line.pop("ts"))
    assert line == {"level": "warning", "event": "client.dropped", "reason": "half\na frame", "peer_pid": 7}
    assert stamp.endswith("Z")
    assert stamp[10] == "T"


def test_other_rooms_lines_carry_their_room() -> None:
    """Plain logging from the library becomes an event named after its module."""
    stream = io.StringIO()
    log.start("info", stream=stream)
    logging.getLogger("veloxquant.local").warning("planning without records: %s", "gone")
    assert lines(stream)[0] | {"ts": ""} == {
        "ts": "",
        "level": "warning",
        "event": "veloxquant.local",
        "text": "planning without records: gone",
    }


def test_people_get_a_line_for_people() -> None:
    """When stderr is a terminal."""
    stream = Terminal()
    log.start("info", stream=stream)
    log.event("daemon.ready", pid=7)
    assert stream.getvalue().rstrip().endswith("info    daemon.ready pid=7")


def test_no_line_can_command_the_terminal() -> None:
    """A client's words are shown with their control letters as numbers, in a traceback too."""
    stream = Terminal()
    log.start("info", stream=stream)
    log.event("trace.started", model="\x1b[2J\nfake line")

    def fail() -> None:
        raise ValueError("\x1b]0;title\x07")

    try:
        fail()
    except ValueError:
        log.failure("request.failed")
    assert "\x1b" not in stream.getvalue()
    assert "\x07" not in stream.getvalue()
    assert "model=\\x1b[2J\\x0afake line\n" in stream.getvalue()


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_failure_carries_its_traceback(kind: type[io.StringIO]) -> None:
    """In the log, and nowhere else."""
    stream = kind()
    log.start("info", stream=stream)
    try:
        {}["boom"]
    except KeyError:
        log.failure("request.failed", ticket="ab12")
    assert "ab12" in stream.getvalue()
    assert "KeyError: 'boom'" in stream.getvalue()


def test_levels_are_kept() -> None:
    """And can change while running."""
    stream = io.StringIO()
    log.start("warning", stream=stream)
    log.event("one")
    log.level("info")
    log.event("two")
    assert [line["event"] for line in lines(stream)] == ["two"]


def test_after_the_end_logging_is_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    """The level of a daemon that ran in this process silences nothing afterwards, and nothing is written twice."""
    stream = io.StringIO()
    log.start("error", stream=stream)
    log.stop()
    with caplog.at_level(logging.WARNING):
        log.event("later", logging.WARNING)
    assert [record.message for record in caplog.records] == ["later"]
    assert stream.getvalue() == ""
    assert logging.raiseExceptions


def test_repeated_lines_are_thinned() -> None:
    """Ten of one event in a window, then one in a hundred with the count; other events are not touched."""
    stream = io.StringIO()
    log.start("info", stream=stream)
    for _ in range(311):
        log.event("accept.paused")
    log.event("daemon.ready")
    written = lines(stream)
    assert [line.get("repeated") for line in written[10:-1]] == [11, 111, 211, 311]
    assert len(written) == 10 + 4 + 1


def test_what_was_left_out_is_said_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line of a later window tells of those that nobody heard of; the counts add up to all lines."""
    stream = io.StringIO()
    log.start("info", stream=stream)
    now = 1_000_000.0
    monkeypatch.setattr(logging.time, "time", lambda: now)
    monkeypatch.setattr(logging.time, "time_ns", lambda: int(now * 1e9), raising=False)
    for _ in range(150):
        log.event("accept.paused")
    now += log.WINDOW_S + 1
    log.event("accept.paused")
    written = lines(stream)
    assert [line.get("repeated") for line in written[10:-1]] == [11, 111]
    assert written[-1]["left_out"] == 150 - 111


def test_thinning_is_the_same_for_all_who_listen(short_folder: Path) -> None:
    """A line is in the file exactly when it is on stderr, a plain line of another room's with its text."""
    stream = io.StringIO()
    file = short_folder / "daemon.log"
    log.start("info", file, stream=stream)
    for number in range(150):
        logging.getLogger("veloxquant.local").warning("trouble %d", number)
    assert file.read_text() == stream.getvalue()
    last = lines(stream)[-1]
    assert (last["event"], last["text"], last["repeated"]) == ("veloxquant.local", "trouble 110", 111)


def test_texts_made_for_the_occasion_are_thinned_by_where_they_are_made() -> None:
    """A plugin that logs another text each time fills neither the log nor the memory of what was seen."""
    stream = io.StringIO()
    log.start("info", stream=stream)
    for number in range(150):
        logging.getLogger("veloxquant.foreign").info(f"number {number}")  # noqa: G004 -- as others' code does
    assert len(lines(stream)) == 10 + 2


def test_no_line_is_long() -> None:
    """A text of a million letters is cut, and says how long it was; a deep traceback keeps its end."""
    stream = io.StringIO()
    log.start("info", stream=stream)
    log.event("something", text="x" * 10**6)
    (line,) = lines(stream)
    assert str(line["text"]).endswith("x... (1,000,000 letters)")

    def fall(depth: int) -> None:
        if depth:
            fall(depth - 1)
        raise ValueError(str(depth) * 10**4)

    try:
        fall(200)
    except ValueError:
        log.failure("request.failed")
    assert len(stream.getvalue()) < 2 * log.TEXT_LETTERS + 2 * log.TRACEBACK_LETTERS


def test_the_file_is_private_and_bounded(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode 0600, three files at most."""
    monkeypatch.setattr(log_file, "FILE_BYTES", 1000)
    monkeypatch.setattr(log, "BURST", 10**6)
    file = short_folder / "logs" / "daemon.log"
    log.start("info", file, stream=io.StringIO())
    for number in range(200):
        log.event("something", number=number)
    files = sorted(file.parent.iterdir())
    assert [one.name for one in files] == ["daemon.log", "daemon.log.1", "daemon.log.2"]
    assert all(one.stat().st_size <= 1000 for one in files)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_the_first_file_is_only_ours(short_folder: Path) -> None:
    """From its first byte."""
    file = short_folder / "daemon.log"
    log.start("info", file, stream=io.StringIO())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_is_a_typed_error(short_folder: Path) -> None:
    """It names the setting."""
    with pytest.raises(ConfigInvalid) as caught:
        log.start("info", short_folder, stream=io.StringIO())
    assert caught.value.field == "daemon.log_file"
