"""Each of doctor's checks sees its trouble, names a fix, and is content once that is done."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from veloxquant import __version__, service
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.config import Config, load
from veloxquant.ctl import checks_machine, checks_service, checks_settings, checks_stores, doctor, finding
from veloxquant.ctl.finding import Finding, failed, ok
from veloxquant.errors import NotAnswering, ProtocolUnsupported
from veloxquant.methods.plugin import Quarantined
from veloxquant.methods.registry import Loaded
from veloxquant.profiles import HardwareProfile
from veloxquant.wire import answers
from veloxquant.wire.messages import PARAMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from veloxquant.client import FakeTransport

Mend = Any
GIB = 2**30
HELLO = answers.Hello(
    server="veloxquant", version=__version__, protocol=1, capabilities=tuple(PARAMS), pid=7, generation=1
)
MAC = HardwareProfile(
    mlx_version="0.32.4",
    backend="metal",
    total_memory_bytes=64 * GIB,
    working_set_bytes=48 * GIB,
    wired_limit_bytes=None,
)


class Home:
    """A user's home in which things are broken and mended. `done` is the fix, carried out."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, daemon: FakeTransport, status: answers.Status) -> None:
        self.folder = folder
        self.patch = patch
        self.daemon = daemon
        self.status = status
        self.socket = folder / "s" / "d.sock"
        self.socket.parent.mkdir(mode=0o700)
        self.records = folder / "records"
        self.log = folder / "logs" / "daemon.log"
        self.config = self.configured()

    def configured(self, **settings: str) -> Config:
        """The configuration, everything in this home."""
        usual = {
            "socket.path": str(self.socket),
            "records.directory": str(self.records),
            "daemon.log_file": str(self.log),
            "trace.cache_directory": str(self.folder / "traces"),
        }
        return load(flags=usual | settings)

    def look(self, name: str) -> Finding:
        """What the check says now."""
        return doctor._fenced(doctor.CHECKS[name], self.config)

    def follow(self, found: Finding) -> None:
        """Carry out the command that the fix ends in or begins with."""
        command = found.fix.partition(", or ")[0].rpartition(": ")[2]
        assert shlex.split(command)[0] in ("chmod", "mv", "unset"), found.fix
        subprocess.run(command, shell=True, check=True)  # noqa: S602 -- as a person would paste it


@pytest.fixture
def home(short_folder: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeTransport, example: SimpleNamespace) -> Home:
    """One in which all is well."""
    return Home(short_folder, monkeypatch, fake, example.status)


# Each breaks one thing in the home and gives what mends it; None where following the fix itself does.


def environment(home: Home) -> Mend:
    """A misspelt variable."""
    home.patch.setenv("VELOXQUANT_SOKCET", "/x")
    return lambda: home.patch.delenv("VELOXQUANT_SOKCET")


def python(home: Home) -> Mend:
    """An old interpreter."""
    real = sys.version_info
    home.patch.setattr(checks_machine.sys, "version_info", (3, 10, 9))
    return lambda: home.patch.setattr(checks_machine.sys, "version_info", real)


def engine(home: Home) -> Mend:
    """No engine."""
    home.patch.setattr("veloxquant.models.profile.engine_version", lambda: None)
    return lambda: home.patch.setattr("veloxquant.models.profile.engine_version", lambda: "0.32.2")


def machine(**broken: Any) -> Callable[[Home], Mend]:
    """A machine that lacks something, and the same in order."""

    def breaks(home: Home) -> Mend:
        home.patch.setattr("veloxquant.hardware.detect.detect", lambda: msgspec.structs.replace(MAC, **broken))
        return lambda: home.patch.setattr("veloxquant.hardware.detect.detect", lambda: MAC)

    return breaks


def open_files(home: Home) -> Mend:
    """A low hard limit."""
    home.patch.setattr(checks_machine.resource, "getrlimit", lambda _what: (256, 512))
    return lambda: home.patch.setattr(checks_machine.resource, "getrlimit", lambda _what: (256, 10240))


def socket_path(home: Home) -> Mend:
    """One byte too long for any system."""
    home.config = home.configured(**{"socket.path": "/" + "x" * 107})

    def mend() -> None:
        home.config = home.configured()

    return mend


def socket_folder(home: Home) -> Mend:
    """Open to all."""
    home.socket.parent.chmod(0o755)


def socket_file(home: Home) -> Mend:
    """A plain file in its place."""
    home.socket.write_text("precious")


def stale_socket(home: Home) -> Mend:
    """Of a daemon that died."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(home.socket))
    return home.socket.unlink  # as the next start does


def nobody(home: Home) -> Mend:
    """No daemon."""
    return lambda: home.daemon.answers.update(ping=answers.Pong(pid=7, generation=1))


def hung(home: Home) -> Mend:
    """One that does not answer."""
    home.daemon.answers["ping"] = NotAnswering("the daemon did not answer in time", hint="look at its log")
    return nobody(home)


def held_lock(home: Home) -> Mend:
    """Held by somebody who does not answer."""
    held = os.open(f"{home.socket}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(held, f"{os.getpid()}\n".encode(), 0)
    fcntl.flock(held, fcntl.LOCK_EX)
    return lambda: os.close(held)


def in_the_way(name: str) -> Callable[[Home], Mend]:
    """A folder where a file belongs; the fix takes it away."""
    return lambda home: (home.folder / name).mkdir(parents=True)


def link_in_the_way(name: str) -> Callable[[Home], Mend]:
    """A link, which could lead anywhere."""
    return lambda home: (home.folder / name).symlink_to("/nowhere")


def file_for_a_folder(name: str) -> Callable[[Home], Mend]:
    """A file where a folder belongs."""

    def breaks(home: Home) -> Mend:
        place = home.folder / name
        place.parent.mkdir(exist_ok=True)
        if place.is_dir():
            place.rmdir()
        place.touch(0o600)

    return breaks


def shared(name: str) -> Callable[[Home], Mend]:
    """A folder that everybody may write."""

    def breaks(home: Home) -> Mend:
        (home.folder / name).mkdir(exist_ok=True)
        (home.folder / name).chmod(0o777)

    return breaks


def no_plain_log(home: Home) -> Mend:
    """A device, which nobody should move away."""
    home.config = home.configured(**{"daemon.log_file": "/dev/null"})

    def mend() -> None:
        home.config = home.configured()

    return mend


def hello(**changes: Any) -> Callable[[Home], Mend]:
    """A daemon that is not as this program expects, and one that is."""

    def breaks(home: Home) -> Mend:
        home.daemon.answers["hello"] = msgspec.structs.replace(HELLO, **changes)
        return lambda: home.daemon.answers.update(hello=HELLO)

    return breaks


def refused_protocol(home: Home) -> Mend:
    """A daemon that knows later protocols only."""
    home.daemon.answers["hello"] = ProtocolUnsupported("this daemon speaks 2 to 3", hint="upgrade")
    return lambda: home.daemon.answers.update(hello=HELLO)


def watcher(home: Home) -> Mend:
    """No events."""
    (home.records / "records").mkdir(parents=True, exist_ok=True)
    scan = msgspec.structs.replace(home.status.records, watcher="scan only", directory=str(home.records))
    home.daemon.answers["status"] = msgspec.structs.replace(home.status, records=scan)
    return lambda: home.daemon.answers.update(status=home.status)


def nothing_to_watch(home: Home) -> Mend:
    """No events, since somebody removed the records."""
    mend = watcher(home)
    (home.records / "records").rmdir()
    return mend


def open_socket(home: Home) -> Mend:
    """A living one that others may knock at."""
    live = socket.socket(socket.AF_UNIX)
    live.bind(str(home.socket))
    live.listen()
    home.socket.chmod(0o666)
    live.detach()  # it lives on while the fix is carried out


def shared_by_all(home: Home) -> Mend:
    """As /tmp is: it is not to be closed."""
    home.socket.parent.chmod(0o1777)
    return lambda: home.socket.parent.chmod(0o700)


def agent(script: str, *, limit_s: float = 8.0) -> Callable[[Home], Mend]:
    """An agent whose program does this, and one that is veloxquantd."""

    def write(program: Path, text: str) -> None:
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    def breaks(home: Home) -> Mend:
        home.patch.setattr(checks_service, "_LIMIT_S", limit_s)
        program = home.folder / "veloxquantd"
        if script:
            write(program, script)
        made = service.Installed(
            manager="systemd", path=home.folder / "x.service", program=(str(program), "--records", "r")
        )
        home.patch.setattr(service, "installed", lambda: made)
        return lambda: write(program, f'test "$1 $2 $3" = "--records r --version" && echo veloxquantd {__version__}')

    return breaks


def other_program(home: Home) -> Mend:
    """An agent of another environment."""

    def install(program: Path) -> None:
        made = service.Installed(manager="launchd", path=home.folder / "x.plist", program=(str(program),))
        home.patch.setattr(service, "installed", lambda: made)

    install(home.folder / "old" / "bin" / "veloxquantd")
    return lambda: install(Path(sys.executable).parent / "veloxquantd")


def methods(loaded: Loaded) -> Callable[[Home], Mend]:
    """Plugins in trouble; then those that are really installed."""

    def breaks(home: Home) -> Mend:
        home.patch.setattr("veloxquant.methods.registry.load", lambda: loaded)
        fine = SimpleNamespace(quarantined=(), warnings=(), methods=(SimpleNamespace(name="fp16"),))
        return lambda: home.patch.setattr("veloxquant.methods.registry.load", lambda: fine)

    return breaks


def bad_record(home: Home) -> Mend:
    """A torn file."""
    torn = home.records / "records" / "bad.json"
    torn.parent.mkdir(parents=True)
    torn.write_text("{")
    return torn.unlink


def future_record(home: Home) -> Mend:
    """Measured by a machine whose clock is years ahead."""
    database = BenchmarkDatabase(home.records)
    database.add("fp16", "org/name", context_length=4096, throughput_tok_s=50.0)
    database.close()
    (file,) = (home.records / "records").glob("*.json")
    measured = json.loads(file.read_text())
    file.write_text(json.dumps(measured | {"created_at": "2099-01-01T00:00:00+00:00"}))
    return lambda: file.write_text(json.dumps(measured))


def later_index(home: Home) -> Mend:
    """Of a later program."""
    home.records.mkdir()
    index = home.records / "index.json"
    index.write_text('{"version": 99, "records": {}}')
    return lambda: index.rename(home.records / "moved")


def bad_calibration(home: Home) -> Mend:
    """A torn file."""
    torn = home.records / "calibrations" / f"{'0' * 16}.json"
    torn.parent.mkdir(parents=True)
    torn.write_text("{")
    return torn.unlink


def read_only(module: Any) -> Callable[[Home], Mend]:
    """A file system that is only read: root may write anything else."""

    def breaks(home: Home) -> Mend:
        real = module.tempfile.NamedTemporaryFile

        def refuse(**_settings: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        home.patch.setattr(module.tempfile, "NamedTemporaryFile", refuse)
        return lambda: home.patch.setattr(module.tempfile, "NamedTemporaryFile", real)

    return breaks


def linked_log(home: Home) -> Mend:
    """A link in the log's place."""
    home.log.parent.mkdir(mode=0o700)
    home.log.symlink_to(home.folder / "elsewhere")


def open_log(home: Home) -> Mend:
    """A log that others can read."""
    home.log.parent.mkdir(mode=0o700)
    home.log.touch(0o600)
    home.log.chmod(0o644)


def shared_log_folder(home: Home) -> Mend:
    """A folder in which others could put a link."""
    home.log.parent.mkdir()
    home.log.parent.chmod(0o777)


def huge_log(home: Home) -> Mend:
    """Something else writes there."""
    home.log.parent.mkdir(mode=0o700)
    home.log.touch(0o600)
    old = home.log.with_name("daemon.log.1")
    old.touch()
    os.truncate(old, 30 * 10**6)
    return old.unlink


def full_disk(home: Home) -> Mend:
    """Where the records lie."""
    real = checks_stores.shutil.disk_usage
    home.records.mkdir()
    little = SimpleNamespace(free=2**20)
    home.patch.setattr(
        checks_stores.shutil, "disk_usage", lambda place: little if place == home.records else real(place)
    )
    return lambda: home.patch.setattr(checks_stores.shutil, "disk_usage", real)


def clock(home: Home) -> Mend:
    """From before this program was made."""
    real = checks_stores.time.time
    home.patch.setattr(checks_stores.time, "time", lambda: 0.0)
    return lambda: home.patch.setattr(checks_stores.time, "time", real)


FENCED = Loaded((), (), (Quarantined("foo", "veloxquant-foo", "import failed: no module 'bar'"),), "")
SLOW = SimpleNamespace(quarantined=(), warnings=("foo: its import took 2.1 s",), methods=(SimpleNamespace(name="foo"),))

TROUBLES: list[tuple[str, Callable[[Home], Mend], str, str]] = [
    ("environment", environment, "note", "VELOXQUANT_SOCKET"),
    ("python", python, "failed", "3.11"),
    ("engine", engine, "failed", "pip install mlx-lm"),
    ("device", machine(mlx_version=None, backend=None), "failed", "mlx"),
    ("device", machine(backend="cpu"), "note", ""),
    ("working set", machine(working_set_bytes=None, total_memory_bytes=None), "failed", "--working-set"),
    ("wired limit", machine(wired_limit_bytes=60 * GIB), "note", "iogpu.wired_limit_mb=0"),
    ("wired limit", machine(wired_limit_bytes=65 * GIB), "failed", "iogpu.wired_limit_mb=0"),
    ("open files", open_files, "failed", "ulimit"),
    ("socket path", socket_path, "failed", "VELOXQUANT_SOCKET"),
    ("socket folder", socket_folder, "failed", "chmod 700"),
    ("socket folder", shared_by_all, "failed", "VELOXQUANT_SOCKET"),
    ("socket file", socket_file, "failed", "mv"),
    ("socket file", open_socket, "failed", "chmod 600"),
    ("socket file", stale_socket, "note", "veloxquantctl daemon"),
    ("socket", nobody, "note", "veloxquantctl daemon"),
    ("socket", hung, "failed", "log"),
    ("lock", held_lock, "failed", "kill -9"),
    ("lock", in_the_way("s/d.sock.lock"), "failed", "mv"),
    ("lock", link_in_the_way("s/d.sock.lock"), "failed", "mv"),
    ("socket folder", file_for_a_folder("s"), "failed", "mv"),
    ("record folder", file_for_a_folder("records"), "failed", "mv"),
    ("record folder", link_in_the_way("records"), "failed", "mv"),
    ("index", in_the_way("records/index.json"), "failed", "mv"),
    ("index", file_for_a_folder("records"), "failed", "mv"),
    ("calibrations", file_for_a_folder("records/calibrations"), "failed", "mv"),
    ("calibrations", shared("records"), "failed", "chmod"),
    ("trace cache", file_for_a_folder("traces"), "failed", "mv"),
    ("trace cache", link_in_the_way("traces"), "failed", "mv"),
    ("trace cache", shared("traces"), "failed", "chmod go-w"),
    ("log", file_for_a_folder("logs"), "failed", "mv"),
    ("log", no_plain_log, "failed", "set daemon.log_file"),
    ("version", hello(version="0.0.9"), "note", "restart"),
    ("protocol", hello(capabilities=("plan",)), "note", "restart"),
    ("protocol", hello(protocol=2), "failed", "one version on both sides"),
    ("protocol", refused_protocol, "failed", "one version on both sides"),
    ("watcher", watcher, "note", "local disk"),
    ("watcher", nothing_to_watch, "note", "mkdir"),
    ("agent", agent(""), "failed", "service install"),
    ("agent", agent("exit 127"), "failed", "service install"),
    ("agent", agent("echo some other program"), "failed", "service install"),
    ("agent", agent("echo veloxquantd 0.0.9"), "note", "service install"),
    ("agent", agent("exec sleep 30", limit_s=0.2), "failed", "service install"),
    ("agent's program", other_program, "note", "service install"),
    ("methods", methods(FENCED), "failed", "reinstall"),
    ("methods", methods(SLOW), "note", "update"),  # type: ignore[arg-type]
    ("records", bad_record, "note", "records --skipped"),
    ("record folder", read_only(checks_stores), "failed", "mount it for writing"),
    ("record dates", future_record, "note", "check this clock"),
    ("index", later_index, "failed", "away"),
    ("calibrations", bad_calibration, "note", "look into"),
    ("trace cache", read_only(checks_stores), "failed", "trace.cache_directory"),
    ("log", linked_log, "failed", "mv"),
    ("log", open_log, "note", "chmod 600"),
    ("log", shared_log_folder, "failed", "chmod go-w"),
    ("log", huge_log, "note", "rm"),
    ("log", read_only(checks_settings), "failed", "daemon.log_file"),
    ("disk", full_disk, "failed", "records.directory"),
    ("clock", clock, "failed", "clock"),
]


@pytest.mark.parametrize(
    ("name", "breaks", "state", "way"), TROUBLES, ids=[f"{one[0]}-{n}" for n, one in enumerate(TROUBLES)]
)
def test_each_trouble_is_seen_and_mended(
    home: Home, name: str, breaks: Callable[[Home], Mend], state: str, way: str
) -> None:
    """Broken: failed or a note, with the way out. That way taken: ok; where it is a command, it is run as it stands."""
    mend = breaks(home)
    found = home.look(name)
    assert (found.state, way in found.fix) == (state, True), found
    if mend is None:
        home.follow(found)
    else:
        mend()
    assert home.look(name).state == "ok", home.look(name)


def test_every_check_has_a_trouble() -> None:
    """At least fifteen checks, and none that nobody has seen fail (the configuration's are below)."""
    assert {name for name, *_ in TROUBLES} == set(doctor.CHECKS)
    assert len(doctor.CHECKS) + 1 >= 15


def report(done: Any) -> dict[str, dict[str, str]]:
    """What --json says, by check."""
    return {check["name"]: check for check in json.loads(done.out)["checks"]}


def test_the_configuration_is_seen_and_mended(
    ctl: Callable[..., Any], isolated_home: Path, monkeypatch: pytest.MonkeyPatch, home: Home
) -> None:
    """Broken TOML: named with its line, exit 1; what the environment and the flags say still holds. Mended: exit 0."""
    file = isolated_home / "config" / "veloxquant" / "veloxquant.toml"
    file.parent.mkdir()
    file.write_text("[daemon]\nlog_level = loud\n")
    monkeypatch.setenv("VELOXQUANT_RECORDS", str(home.records))
    monkeypatch.setenv("VELOXQUANT_DAEMON_LOG_LEVEL", "shrill")
    done = ctl("doctor", "--json", "--socket", str(home.socket))
    found = report(done)
    assert (done.code, found["config"]["state"]) == (1, "failed")
    assert "line 2" in found["config"]["text"]
    assert "without the file and VELOXQUANT_DAEMON_LOG_LEVEL" in found["config"]["text"]
    assert str(home.records) in found["records"]["text"]
    assert str(home.socket) in found["socket path"]["text"]
    assert [name for name, one in found.items() if one["state"] == "failed"] == ["config"]
    file.write_text('[daemon]\nlog_level = "debug"\n')
    monkeypatch.delenv("VELOXQUANT_DAEMON_LOG_LEVEL")
    done = ctl("doctor", "--json", "--socket", str(home.socket))
    assert (done.code, report(done)["config"]["state"]) == (0, "ok")


def test_a_variable_that_is_only_named_still_holds(
    ctl: Callable[..., Any], isolated_home: Path, monkeypatch: pytest.MonkeyPatch, home: Home
) -> None:
    """The file is wrong, and its path holds a variable's name: what that variable sets is what is looked at."""
    file = isolated_home / "VELOXQUANT_RECORDS" / "veloxquant.toml"
    file.parent.mkdir(mode=0o700)
    file.write_text("[daemon]\nlog_level = 'loud'\n")
    monkeypatch.setenv("VELOXQUANT_CONFIG", str(file))
    monkeypatch.setenv("VELOXQUANT_RECORDS", str(home.records))
    found = report(ctl("doctor", "--json", "--socket", str(home.socket)))
    assert found["config"]["text"].endswith("what follows is without the file")
    assert str(home.records) in found["records"]["text"]


def test_a_check_that_hangs_is_a_finding(ctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not answer keeps nobody from the other findings."""
    go = threading.Event()

    def hang(_config: Config) -> Finding:
        go.wait(60)
        return ok("late")

    monkeypatch.setattr(doctor, "CHECKS", {"socket path": doctor.CHECKS["socket path"], "disk": hang})
    done = ctl("doctor", "--json", "--timeout", "0.2")
    go.set()
    found = report(done)
    assert (done.code, found["disk"]["state"], found["socket path"]["state"]) == (1, "failed", "ok")
    assert "did not end within 0.2 s" in found["disk"]["text"]


def test_a_refused_path_is_one_problem(ctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs a socket says that it was not looked at."""
    monkeypatch.setenv("VELOXQUANT_SOCKET", "/" + "x" * 107)
    done = ctl("doctor", "--json")
    found = report(done)
    assert [name for name, one in found.items() if one["state"] == "failed"] == ["socket path"]
    assert "not looked at" in found["lock"]["text"]


@pytest.mark.parametrize(
    ("number", "flag", "way"),
    [
        (errno.EROFS, 0, "mount it for writing"),
        (None, os.ST_RDONLY, "mount it for writing"),
        (errno.ENOSPC, 0, "free some space"),
        (errno.EACCES, 0, "belongs to user id"),
        (errno.EACCES, 0, "chmod u+rwx"),
    ],
)
def test_the_way_to_write_again_is_one_that_helps(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, number: int | None, flag: int, way: str
) -> None:
    """A mode is no help on a disk that is only read, on a full one, or in another user's folder."""
    monkeypatch.setattr(finding.os, "statvfs", lambda _place: SimpleNamespace(f_flag=flag))
    if way == "belongs to user id":
        monkeypatch.setattr(finding.os, "geteuid", lambda: 4711)
    fix = finding.way_to_write(short_folder, "records.directory", None if number is None else OSError(number, ""))
    assert way in fix
    assert "set records.directory" in fix
    assert ("chmod" in fix) == (way == "chmod u+rwx")


def test_findings_have_a_fix_exactly_when_they_need_one() -> None:
    """A problem without a way out is a complaint."""
    assert failed("x", "y").fix == "y"
    assert ok("x").fix == ""
