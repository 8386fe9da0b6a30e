"""A plugin that ends the process after it passed its trial: the next process knows, and goes without it."""

from __future__ import annotations

import errno
import fcntl
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from reliability.plugins import HOOK, head, lay_out

from veloxquant.methods import registry, suspects, verdicts
from veloxquant.methods.plugin import Plugin
from veloxquant.methods.suspects import Accused, Calls

if TYPE_CHECKING:
    from pathlib import Path

PLUGIN = Plugin(distribution="d", name="n", value="m", version="1")
CALL = """
import os, sys, signal
from veloxquant.methods import registry
from veloxquant.methods.checks import sample_part
method = registry.load(only=["ender"]).method("ender")
part = sample_part(int(sys.argv[1]), 2)
BEGIN
method.key_bits(method.variants()[0], part)
END
"""


@pytest.fixture
def ender(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A method that ends its process, or stops it, over widths that no trial has; gives a call of it in a process."""
    site = short_folder / "site"
    site.mkdir()
    deeds = "999: lambda: os._exit(0), 998: lambda: re.match('(a+)+$', 'a' * 64 + 'b')"
    source = "import os, re\n" + head("ender").replace(
        "return float(variant", f"{{{deeds}}}.get(part.key_width, int)(); return float(variant", 1
    )
    module = lay_out(site, "ender", source + HOOK).stem
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))

    def call(width: int, begin: str = "", end: str = "") -> int:
        code = CALL.replace("BEGIN", begin).replace("END", end)
        return subprocess.run([sys.executable, "-c", code, str(width)], check=False, timeout=60).returncode

    yield call
    sys.modules.pop(module, None)


def ready(folder: Path | None = None) -> bool:
    """Whether the method is on offer to a process that loads now."""
    return any(method.name == "ender" for method in registry.load(only=["ender"], cache_dir=folder).methods)


def test_what_ended_a_process_is_out_in_the_next_one_for_a_while(ender: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once is not to be helped: nothing catches os._exit."""
    assert ender(64, end="print('answered')") == 0
    assert ready()
    assert ender(999, end="sys.exit(5)") == 0, "it ended amid the call"
    (out,) = registry.load(only=["ender"]).quarantined
    assert (out.name, "amid one of its calls" in out.reason) == ("ender", True)
    now = verdicts.time.time()
    monkeypatch.setattr(verdicts.time, "time", lambda: now + verdicts.BAD_FOR_S + 1)
    assert ready()


def test_a_call_that_stops_the_interpreter_ends_the_process(ender: Any) -> None:
    """Where that is wanted (the daemon): a loop in native code that keeps the interpreter's lock stops each thread."""
    begin = "from veloxquant.methods.suspects import Calls; Calls.stuck_s = 0.5"
    assert ender(64, begin=begin, end="import time; time.sleep(1); sys.exit(5)") == 5, "a call that ends is no cause"
    assert ready()
    assert ender(998, begin=begin) == 1
    assert not ready()


@pytest.mark.parametrize(("begin", "status"), [("", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)])
def test_a_process_that_ends_between_two_calls_accuses_nobody(ender: Any, begin: str, status: int) -> None:
    """By itself or by a signal."""
    assert ender(64, begin=begin) == status
    assert ready()


@pytest.fixture
def place(short_folder: Path) -> Path:
    """A folder for notes, not made yet."""
    return short_folder / "notes"


def notes(folder: Path) -> Path:
    """The one file of notes in a folder."""
    (found,) = folder.iterdir()
    return found


def left_behind(folder: Path) -> Path:
    """A file of notes that says what one of a process that ended amid a call says."""
    calls = Calls(folder)
    with calls.under_way(PLUGIN, "stamp"):
        copy = notes(folder).read_bytes()
    path = folder / "left.calls"
    path.write_bytes(copy)
    path.chmod(0o600)
    return path


def test_a_process_that_lives_is_not_accused(place: Path) -> None:
    """Its file is locked, amid a call and after it."""
    calls = Calls(place)
    with calls.under_way(PLUGIN, "stamp"):
        assert suspects.accused(place) == []
    assert notes(place).stat().st_mode & 0o777 == 0o600
    with notes(place).open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_an_accusation_is_read_once(place: Path) -> None:
    """With the plugin and the stamp of its files; the file goes."""
    path = left_behind(place)
    assert suspects.accused(place) == [Accused(PLUGIN, "stamp")]
    assert not path.exists()
    assert suspects.accused(place) == []


def test_what_others_may_write_accuses_nobody(place: Path) -> None:
    """Else anybody could take a plugin out of use."""
    left_behind(place).chmod(0o666)
    assert suspects.accused(place) == []


@pytest.mark.parametrize(
    "content", [b"", b"\1" * 5000, b"\1" + bytes(1023) + b"[1]\n", b"\1" + bytes(1023) + b"[[], 2]"]
)
def test_a_damaged_file_accuses_nobody(place: Path, content: bytes) -> None:
    """It is removed."""
    path = left_behind(place)
    path.write_bytes(content)
    assert suspects.accused(place) == []
    assert not path.exists()


def test_without_a_disk_calls_go_on_unnoted(place: Path) -> None:
    """Nothing is raised, and nothing accused."""
    place.write_text("a file where the folder belongs")
    with Calls(place).under_way(PLUGIN, "stamp"):
        assert suspects.accused(place) == []


def test_calls_within_calls_and_more_plugins_than_there_is_room_for(place: Path) -> None:
    """A call that ends leaves the one around it noted; plugins beyond the file's room go unnoted."""
    calls = Calls(place)
    with calls.under_way(PLUGIN, "stamp"):
        with calls.under_way(PLUGIN, "stamp"):
            assert notes(place).read_bytes()[0] == 2
        assert notes(place).read_bytes()[0] == 1
        for number in range(1100):
            with calls.under_way(PLUGIN, f"{number}"):
                pass
        with calls.under_way(PLUGIN, "x" * 2**20):
            pass
        assert sum(notes(place).read_bytes()[:1024]) == 1
    assert notes(place).stat().st_size == 512 * 1024


def test_r34_on_a_full_disk_calls_go_on_unnoted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a plugin is known, and after."""
    calls = Calls(place)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with calls.under_way(PLUGIN, "stamp"):
        before = notes(place).read_bytes()
        monkeypatch.setattr(suspects.os, "pwrite", full)
        for stamp in ("stamp", "another"):
            with calls.under_way(PLUGIN, stamp):
                assert notes(place).read_bytes() == before
