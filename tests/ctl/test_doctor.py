"""Doctor: each check sees the trouble it is there for, and names the fix."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.config import Config, load
from veloxquant.ctl import checks_daemon, checks_machine, checks_stores, doctor
from veloxquant.ctl.finding import Finding, ok
from veloxquant.errors import StoreUnavailable
from veloxquant.profiles import HardwareProfile

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def config(short_folder: Path) -> Config:
    """Everything in a folder of the test's own."""
    folder = short_folder / "socket"
    folder.mkdir(mode=0o700)
    return load(flags={"socket.path": str(folder / "d.sock"), "records.directory": str(short_folder / "records")})


@pytest.fixture
def folder(config: Config) -> Path:
    """The socket's folder."""
    return Path(config.socket.path).parent


def test_a_fresh_machine_has_no_problem(ctl: Callable[..., Any]) -> None:
    """Nothing set up, no daemon: notes at most, exit 0, one object as JSON with every check once."""
    done = ctl("doctor", "--json")
    shown = json.loads(done.out)
    assert shown["schema"] == "veloxquant.doctor/1"
    assert [check["name"] for check in shown["checks"]] == ["config", *doctor.CHECKS]
    assert [check for check in shown["checks"] if check["state"] == "failed"] == []
    assert (done.code, shown["failed"]) == (0, 0)


def test_a_failed_check_ends_with_1(ctl: Callable[..., Any], short_folder: Path) -> None:
    """An open socket folder fails, with the command that closes it."""
    (short_folder / "run" / "veloxquant").mkdir(mode=0o755)
    done = ctl("doctor")
    assert done.code == 1
    line = next(line for line in done.out.splitlines() if "socket folder" in line)
    assert line.startswith("✗")
    assert f"chmod 700 '{short_folder}/run/veloxquant'" in line
    assert done.out.splitlines()[-1].startswith("1 problem, ")


@pytest.mark.parametrize(
    ("variable", "value", "key"),
    [("VELOXQUANT_DAEMON_LOG_LEVEL", "loud", "daemon.log_level"), ("VELOXQUANT_SOCKET", "relative", "socket.path")],
)
def test_an_invalid_configuration_hides_no_other_finding(
    ctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, key: str
) -> None:
    """It is the one problem, named by its key; the other checks are about the defaults."""
    monkeypatch.setenv(variable, value)
    done = ctl("doctor", "--json")
    first, *others = json.loads(done.out)["checks"]
    assert (done.code, first["name"], first["state"]) == (1, "config", "failed")
    assert key in first["text"]
    assert [one["name"] for one in others] == list(doctor.CHECKS)
    assert "failed" not in {one["state"] for one in others}


def test_a_check_that_breaks_is_a_finding(config: Config) -> None:
    """One broken check does not hide the others."""

    def broken(_config: Config) -> Finding:
        raise ZeroDivisionError("oh")

    found = doctor._fenced(broken, config)
    assert (found.state, found.text) == ("failed", "the check itself failed: ZeroDivisionError: oh")


def test_a_foreign_socket_folder_fails(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of another user could hold another user's daemon."""
    monkeypatch.setattr(checks_daemon.os, "geteuid", lambda: 12345)
    assert checks_daemon.socket_folder(config).state == "failed"


@pytest.mark.parametrize("made", [True, False])
def test_a_socket_folder_that_cannot_be_written_fails(
    config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch, *, made: bool
) -> None:
    """The daemon could not bind there, nor make the folder: the place that is shut is named."""
    shut = folder if made else folder.parent
    if not made:
        folder.rmdir()
    # Root may write whatever the mode says, so that the system's answer is replaced for that one folder.
    access = os.access
    monkeypatch.setattr(checks_daemon.os, "access", lambda path, mode: path != shut and access(path, mode))
    found = checks_daemon.socket_folder(config)
    assert (found.state, f"{shut} cannot be written" in found.text) == ("failed", True)
    assert f"chmod u+rwx '{shut}'" in found.fix
    assert "VELOXQUANT_SOCKET" in found.fix
    monkeypatch.undo()
    assert checks_daemon.socket_folder(config).state == "ok"


def test_a_silent_daemon_fails(config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody listens and does not answer: that is worse than nobody."""
    monkeypatch.setattr(checks_daemon, "_PATIENCE_S", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(folder / "d.sock"))
        listener.listen(8)
        found = checks_daemon.socket_answers(config)
        assert (found.state, "kill -9" in found.fix) == ("failed", True)


def test_a_held_lock_without_an_answer_fails(config: Config, folder: Path) -> None:
    """A lock that is held while nobody answers names the pid that holds it."""
    held = os.open(folder / "d.sock.lock", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(held, f"{os.getpid()}\n".encode())
    fcntl.flock(held, fcntl.LOCK_EX)
    found = checks_daemon.lock(config)
    assert (found.state, f"pid {os.getpid()} " in found.text) == ("failed", True)
    assert found.fix.endswith(f"kill -9 {os.getpid()}")
    os.pwrite(held, b"4194305", 0)  # beyond Linux's highest pid: somebody else holds it than who has written there
    found = checks_daemon.lock(config)
    assert (found.state, "kill" in found.fix, "lsof" in found.fix) == ("failed", False, True)
    os.close(held)
    assert checks_daemon.lock(config).state == "ok"


def test_looking_at_the_lock_does_not_take_it(config: Config, folder: Path) -> None:
    """After the check a daemon can still take the lock."""
    lock = folder / "d.sock.lock"
    lock.write_text("")
    assert checks_daemon.lock(config).state == "ok"
    descriptor = os.open(lock, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_skipped_records_are_a_note(config: Config, short_folder: Path) -> None:
    """Records that are not used are counted, with the command that says why."""
    folder = short_folder / "records" / "records"
    folder.mkdir(parents=True)
    (folder / "bad.json").write_text("{")
    found = checks_stores.records_readable(config)
    assert (found.state, found.fix) == ("note", "veloxquantctl records --skipped")
    assert found.text.startswith("0 records used, 1 skipped")


def test_records_that_cannot_be_read_fail(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is no directory is a problem with its own fix."""

    def refuse(_directory: Path) -> None:
        raise StoreUnavailable("it is a file", hint="move it away")

    monkeypatch.setattr("veloxquant.benchmarks.benchmark_db.BenchmarkDatabase", refuse)
    found = checks_stores.records_readable(config)
    assert (found.state, found.text, found.fix) == ("failed", "it is a file", "move it away")


@pytest.mark.parametrize("check", [checks_stores.records_writable, checks_stores.traces_writable])
def test_a_folder_without_room_or_permission_fails(
    config: Config, check: Callable[[Config], Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full or read-only disk is found by writing, not by looking at modes."""

    def full(**_settings: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checks_stores.tempfile, "NamedTemporaryFile", full)
    found = check(config)
    assert found.state == "failed"
    assert "No space left on device" in found.text
    assert "_directory" in found.fix or "records.directory" in found.fix


def test_little_disk_fails(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than 256 MiB free is a problem, with the figure."""
    monkeypatch.setattr(checks_stores.shutil, "disk_usage", lambda _place: SimpleNamespace(free=255 * 2**20))
    found = checks_stores.disk_space(config)
    assert found.state == "failed"
    assert found.text.startswith("255 MiB free")


def test_a_wrong_clock_fails(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock from before this program was made is wrong; one that differs from the files' is worth a note."""
    now = checks_stores.time.time()
    monkeypatch.setattr(checks_stores.time, "time", lambda: now + 3600)
    assert checks_stores.clock(config).state == "note"
    monkeypatch.setattr(checks_stores.time, "time", lambda: 0.0)
    assert checks_stores.clock(config).state == "failed"


def test_quarantined_methods_fail(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is named with its distribution and reason."""
    from veloxquant.methods.plugin import Quarantined
    from veloxquant.methods.registry import Loaded

    fenced = Quarantined("foo", "veloxquant-foo", "import failed: no module 'bar'")
    monkeypatch.setattr("veloxquant.methods.registry.load", lambda: Loaded((), (), (fenced,), ""))
    found = checks_stores.methods(config)
    assert found.state == "failed"
    assert "foo (veloxquant-foo): import failed: no module 'bar'" in found.text


@pytest.mark.parametrize(
    ("version", "state"), [(None, "failed"), ("0.32.2", "ok"), ("0.31.9", "note"), ("0.320.1", "note")]
)
def test_the_engine_is_one_that_was_tested(
    config: Config, version: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mlx-lm is a problem; another minor version is a note that names the tested one."""
    monkeypatch.setattr("veloxquant.models.profile.engine_version", lambda: version)
    assert checks_machine.engine(config).state == state


@pytest.mark.parametrize(
    ("machine", "device", "working_set"),
    [
        (HardwareProfile(), "failed", "failed"),
        (HardwareProfile(mlx_version="0.32.4", backend="cpu", total_memory_bytes=2**34), "note", "note"),
        (HardwareProfile(mlx_version="0.32.4", backend="metal", working_set_bytes=2**33), "ok", "ok"),
    ],
)
def test_device_and_working_set(
    config: Config, machine: HardwareProfile, device: str, working_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device is a problem, a CPU a note; unknown memory is a problem, unknown working set a note."""
    monkeypatch.setattr("veloxquant.hardware.detect.detect", lambda: machine)
    assert checks_machine.device(config).state == device
    assert checks_machine.working_set(config).state == working_set


def test_few_open_files_fail(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the hard limit, since the daemon raises the soft one."""
    monkeypatch.setattr(checks_machine.resource, "getrlimit", lambda _what: (256, 512))
    assert checks_machine.open_files(config).state == "failed"
    monkeypatch.setattr(checks_machine.resource, "getrlimit", lambda _what: (256, 10240))
    assert checks_machine.open_files(config) == ok("10,240 files may be open")


def test_an_old_python_fails(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below 3.11 nothing is promised."""
    monkeypatch.setattr(checks_machine.sys, "version_info", (3, 10, 9))
    assert checks_machine.python(config).state == "failed"
