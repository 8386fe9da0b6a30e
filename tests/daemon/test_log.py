"""What the daemon writes down, and how much."""

from __future__ import annotations

import io
import json
import logging
import stat
from typing import TYPE_CHECKING

import pytest

from veloxquant.daemon import log
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


def test_the_file_is_private_and_bounded(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode 0600, three files at most."""
    monkeypatch.setattr(log, "FILE_BYTES", 1000)
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
