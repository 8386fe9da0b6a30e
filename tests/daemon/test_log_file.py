"""The log on disk: private, bounded, shared by two daemons without loss, and no trouble when the disk is."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from veloxquant import paths
from veloxquant.config import Config, Daemon, load, log_file_of, socket_of
from veloxquant.daemon import log, log_file
from veloxquant.daemon.log_file import LogFile
from veloxquant.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Detach what a test attached."""
    yield
    log.stop()


@pytest.fixture
def file(short_folder: Path) -> Path:
    """Where the log goes."""
    return short_folder / "logs" / "daemon.log"


def line(text: str) -> logging.LogRecord:
    """A record whose line is the text."""
    return logging.LogRecord("veloxquant", logging.INFO, __file__, 1, text, None, None)


def events(file: Path) -> list[str]:
    """The events that were written."""
    return [json.loads(line)["event"] for line in file.read_text().splitlines()]


def test_each_socket_has_a_log_of_its_own(short_folder: Path) -> None:
    """The default socket's is daemon.log; any other's name follows from the socket, so that two daemons share none."""
    usual = load()
    assert log_file_of(usual) == paths.log_file() == paths.log_file(socket=socket_of(usual))
    first = log_file_of(load(flags={"socket.path": "/run/vq-a/d.sock"}))
    second = log_file_of(load(flags={"socket.path": "/run/vq-b/d.sock"}))
    assert first is not None
    assert second is not None
    assert len({first, second, paths.log_file()}) == 3
    assert first.parent == second.parent == paths.log_file().parent


def test_the_setting_names_a_file_or_none() -> None:
    """A path is taken as it is; nothing turns the log off."""
    assert log_file_of(Config(daemon=Daemon(log_file="/var/log/x.log"))) == paths.Path("/var/log/x.log")
    assert log_file_of(Config(daemon=Daemon(log_file=""))) is None
    assert load(flags={"daemon.log_file": "default"}).daemon.log_file == "default"


def test_an_older_log_is_made_private(file: Path) -> None:
    """Whatever mode it was left with."""
    file.parent.mkdir()
    file.write_text("before\n")
    file.chmod(0o644)
    LogFile(file).close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == "before\n"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_place_where_no_folder_can_be_made_is_refused() -> None:
    """A wrong path in the configuration does not look like a passing trouble of the disk."""
    with pytest.raises(ConfigInvalid):
        LogFile(paths.Path("/proc/nope/daemon.log"))


def make_link(path: Path) -> None:
    """A link to something precious."""
    path.with_name("precious").write_text("precious")
    path.symlink_to(path.with_name("precious"))


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (make_link, "symbolic link"),
        (lambda path: path.mkdir(), "directory"),
        (os.mkfifo, "pipe"),
        (lambda path: path.parent.chmod(0o777), "chmod go-w"),
    ],
)
def test_what_is_no_log_is_refused(file: Path, put: Callable[[Path], None], why: str) -> None:
    """A link, a folder, a pipe, a folder in which others can write: refused with the reason, and nothing is touched.

    Where the log is there by default and nobody asked for it, that is a warning and the daemon starts.
    """
    file.parent.mkdir()
    put(file)
    with pytest.raises(ConfigInvalid, match=why) as caught:
        LogFile(file)
    assert caught.value.field == "daemon.log_file"
    stream = io.StringIO()
    log.start("info", file, stream=stream, strict=False)
    log.event("daemon.ready")
    assert why in str(log.trouble())
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["log.lost", "daemon.ready"]
    precious = file.with_name("precious")
    assert not precious.exists() or precious.read_text() == "precious"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_r34_a_disk_that_takes_no_lines_is_one_warning(file: Path, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line on stderr and one sentence for `status`; once the disk takes lines again, how many were lost."""
    stream = io.StringIO()
    log.start("info", file, stream=stream)
    write = os.write

    def full(_descriptor: int, _line: bytes) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(log_file.os, "write", full)
    for number in range(5):
        log.event(f"event.{number}")
    assert os.strerror(error) in str(log.trouble())
    monkeypatch.setattr(log_file.os, "write", write)
    log.event("after")
    assert log.trouble() is None
    shown = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [one["event"] for one in shown].count("log.lost") == 1
    back = next(one for one in shown if one["event"] == "log.back")
    assert back["lost"] == 5 + 1  # the line that told of the loss is one of them
    assert events(file) == ["after", "log.back"]


def test_a_file_that_cannot_be_opened_yet_is_opened_later(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is only read at the start: the daemon starts, and logs once it can."""
    opening = os.open

    def read_only(*_arguments: object, **_more: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(log_file.os, "open", read_only)
    log.start("info", file, stream=io.StringIO())
    log.event("one")
    monkeypatch.setattr(log_file.os, "open", opening)
    log.event("two")
    assert events(file) == ["two", "log.back"]


@pytest.mark.parametrize("room", [1, 3, 6])
def test_a_line_cut_by_a_full_disk_spoils_no_other(file: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """The next line begins on a line of its own, though the disk took no further byte when this one was cut."""
    handler = LogFile(file)
    write, left = os.write, [room]

    def write_what_fits(descriptor: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(log_file.os, "write", write_what_fits)
    for text in ("abcdef", "lost"):
        handler.emit(line(text))
    left[0] = 1
    handler.emit(line("lost"))  # there is room for the end of the line that was cut, and no more
    assert handler.lost == 3
    left[0] = 1000
    for text in ("whole", "too"):
        handler.emit(line(text))
    handler.close()
    assert file.read_text().splitlines() == ["abcdef"[:room], "whole", "too"]


def test_a_file_that_ends_amid_a_line_spoils_no_other(file: Path) -> None:
    """As a daemon leaves it that was killed on a full disk."""
    file.parent.mkdir()
    file.write_text('one\n{"half')
    for text in ("two", "three"):
        handler = LogFile(file)
        handler.emit(line(text))
        handler.close()
    assert file.read_text().splitlines() == ["one", '{"half', "two", "three"]


def test_a_log_that_was_moved_away_is_made_anew(file: Path) -> None:
    """As another program that rotates logs, or a person, would do."""
    handler = LogFile(file)
    handler.emit(line("one"))
    file.rename(file.with_name("elsewhere"))
    handler.emit(line("two"))
    file.unlink()
    handler.emit(line("three"))
    handler.close()
    assert file.with_name("elsewhere").read_text() == "one\n"
    assert file.read_text() == "three\n"


def test_two_handlers_on_one_file_lose_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds the file full moves it on, the other follows: all lines are there, once, in files of their size."""
    monkeypatch.setattr(log_file, "FILE_BYTES", 1000)
    monkeypatch.setattr(log_file, "FILE_COUNT", 50)
    handlers = [LogFile(file), LogFile(file)]
    for number in range(400):
        handlers[number % 3 % 2].emit(line(f"{number:020}"))
    for handler in handlers:
        handler.close()
    files = list(file.parent.iterdir())
    assert all(one.stat().st_size <= 1000 for one in files)
    assert len(files) == -(-400 * 21 // (1000 // 21 * 21))
    written = [int(text) for one in files for text in one.read_text().splitlines()]
    assert sorted(written) == list(range(400))


WRITER = """
import logging, sys
from pathlib import Path
from veloxquant.daemon import log_file
log_file.FILE_BYTES, log_file.FILE_COUNT = 4000, 100
handler = log_file.LogFile(Path(sys.argv[1]))
for number in range(1500):
    handler.emit(logging.LogRecord("v", 20, "", 1, f"{sys.argv[2]}{number:030}", None, None))
sys.exit(handler.lost)
"""


def test_two_processes_on_one_file_lose_nothing(file: Path) -> None:
    """Both write and rotate as fast as they can."""
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(file), name]) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    written = [text for one in file.parent.iterdir() for text in one.read_text().splitlines()]
    assert sorted(written) == sorted(f"{name}{number:030}" for name in "ab" for number in range(1500))


def test_r38_a_flood_stays_below_20_mb(short_folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 MB through the real handlers: three files of 5 MiB, and a stderr in a plain file that stops at 2 MiB."""
    monkeypatch.setattr(log, "BURST", 10**9)  # as if every line were another event
    kept = short_folder / "stderr"
    with kept.open("w") as stream:
        log.start("info", file, stream=stream)
        for number in range(6_000):
            log.event("flood", number=number, text="x" * 4000)
    on_disk = [one.stat().st_size for one in (*file.parent.iterdir(), kept)]
    assert len(on_disk) == 4
    assert 12e6 < sum(on_disk) <= 3 * 5 * 2**20 + 2 * 2**20 + 4200 < 20e6
    last = json.loads(file.read_text().splitlines()[-1])
    assert last["number"] == 5_999


@pytest.mark.parametrize("turned_off", [True, False])
def test_r38_a_stderr_that_is_all_there_is_stays_bounded(
    short_folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch, *, turned_off: bool
) -> None:
    """Whether the log is turned off or cannot be written: 4 MiB in a plain file, below 20 MB with older logs."""
    monkeypatch.setattr(log, "BURST", 10**9)
    file.parent.mkdir()
    file.mkdir()  # what is there can never be a log
    kept = short_folder / "stderr"
    with kept.open("w") as stream:
        log.start("info", None if turned_off else file, stream=stream, strict=False)
        for number in range(2_000):
            log.event("flood", number=number, text="x" * 4000)
    assert 4 * 2**20 <= kept.stat().st_size <= 4 * 2**20 + 4200
    assert kept.stat().st_size + 3 * 5 * 2**20 < 20e6


def test_stderr_gets_what_the_file_cannot_take(short_folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its bound, too: while lines are lost in the file, stderr is all there is."""
    monkeypatch.setattr(log, "STDERR_BYTES", 10)
    kept = short_folder / "stderr"
    with kept.open("w") as stream:
        log.start("info", file, stream=stream)
        log.event("one")
        log.event("two")
        monkeypatch.setattr(log_file.os, "write", lambda *_all: 0)
        log.event("three")  # is lost in both: the trouble is known from here on
        log.event("four")
    assert events(kept) == ["one", "log.lost", "four"]
