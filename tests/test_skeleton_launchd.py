"""The templates of launchd/: what was decided, what the daemon does, and what systemd itself takes."""

from __future__ import annotations

import configparser
import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from veloxquant.config import Config
from veloxquant.daemon import activation, main
from veloxquant.service import Order, plist, unit_file
from veloxquant.service.program import PLAIN_ENVIRONMENT
from veloxquant.service.values import LABEL, SOCKET_UNIT, UNIT

FOLDER = Path(__file__).parents[1] / "launchd"
PROGRAM = "/opt/tools/bin/veloxquantd"
RUNTIME = "/run/user/501"


def unit(text: str) -> configparser.RawConfigParser:
    """Sections and keys; a key that stands twice is an error."""
    parser = configparser.RawConfigParser(strict=True, comment_prefixes=("#",), delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign] -- the documented way to keep case
    parser.read_string(text)
    return parser


def rendered(socket: str | None = None) -> dict[str, Any]:
    """The launchd agent, filled in."""
    order = Order((PROGRAM,), activated=Path(socket) if socket else None)
    found: dict[str, Any] = plistlib.loads(plist.render(order, Path("/Users/anna/Library/Logs/x.log")))
    return found


def units(socket: str | None = None) -> dict[str, configparser.RawConfigParser]:
    """The units, filled in."""
    texts = unit_file.render(Order((PROGRAM,), activated=Path(socket) if socket else None), RUNTIME)
    return {name: unit(text.decode()) for name, text in texts.items()}


def test_the_agent_is_exactly_what_was_decided() -> None:
    """Starts at login, again after a crash but not after a stop, without a shell, with next to no environment."""
    assert rendered() == {
        "Label": "io.veloxquant.daemon",
        "ProgramArguments": [PROGRAM],
        "EnvironmentVariables": {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 15,
        "LimitLoadToSessionType": ["Aqua", "Background"],
        "Umask": 0o077,
        "StandardErrorPath": "/Users/anna/Library/Logs/x.log",
    }


def test_the_daemon_is_tried_as_the_agent_runs_it() -> None:
    """A program that is installed or looked at by doctor is run with the variables that the agent will have."""
    assert rendered()["EnvironmentVariables"] == PLAIN_ENVIRONMENT


def test_a_socket_of_launchd_is_the_one_that_the_daemon_asks_for() -> None:
    """Private to the user from its first instant, under the name that the daemon hands to launchd."""
    socket = "/Users/anna/Library/Application Support/veloxquant/d.sock"
    assert rendered(socket)["Sockets"] == {
        activation.LAUNCHD_NAME.decode(): {"SockPathName": socket, "SockPathMode": 0o600}
    }


def test_the_agent_is_named_as_its_file() -> None:
    """The commands of launchd name the label, people the file: they are one."""
    assert rendered()["Label"] == LABEL
    assert (FOLDER / f"{LABEL}.plist").is_file()


def test_the_unit_is_what_the_daemon_does() -> None:
    """Says when it is ready, is told to reload by SIGHUP, starts again after a crash, and writes for nobody else."""
    service = units()[UNIT]["Service"]
    assert service["Type"] == "notify"  # tests/daemon/test_start.py holds that it says READY=1
    assert service["Restart"] == "on-failure"
    assert service["UMask"] == "0077"
    assert service["RestrictAddressFamilies"] == "AF_UNIX"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert main.__doc__ is not None
    for status in service["RestartPreventExitStatus"].split():
        assert re.search(rf"\b{status}\b", main.__doc__), f"the daemon has no exit status {status}"


def test_the_socket_unit_is_private_and_is_the_services() -> None:
    """Mode 0600 in a folder of mode 0700, one stream; a unit of the same name is what systemd starts for it."""
    assert set(units()) == {UNIT}
    both = units(f"{RUNTIME}/veloxquant/d.sock")
    socket = both[SOCKET_UNIT]["Socket"]
    assert socket["ListenStream"] == "%t/veloxquant/d.sock"
    assert (socket["SocketMode"], socket["DirectoryMode"]) == ("0600", "0700")
    assert "Accept" not in socket  # the default: the daemon gets the listening socket, not each connection
    assert SOCKET_UNIT.partition(".")[0] == UNIT.partition(".")[0]


def test_both_outlast_the_drain() -> None:
    """The managers wait longer than the daemon may take to answer its last clients."""
    assert rendered()["ExitTimeOut"] > Config().daemon.drain_s + 1
    assert int(units()[UNIT]["Service"]["TimeoutStopSec"]) > Config().daemon.drain_s + 1


@pytest.mark.parametrize("socket", [None, "/srv/a b%c/d.sock"], ids=["own socket", "activated"])
def test_systemd_takes_the_units(socket: str | None, tmp_path: Path) -> None:
    """Where systemd is installed it finds nothing wrong; elsewhere the sections and keys are the known ones."""
    given = Order(
        (sys.executable, "--socket", "/srv/a $b%c"), Path(socket) if socket else None, {"VELOXQUANT_X": "a%b"}
    )
    texts = unit_file.render(given, RUNTIME)
    for name, text in texts.items():
        assert set(unit(text.decode()).sections()) <= {"Unit", "Service", "Socket", "Install", "X-Veloxquant"}
        assert all(re.fullmatch(r"[A-Z][A-Za-z]+", key) for part in unit(text.decode()).values() for key in part)
        (tmp_path / name).write_bytes(text)
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        names = [str(tmp_path / name) for name in texts]
        done = subprocess.run([analyze, "verify", "--user", *names], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("socket", [None, "/srv/d.sock"], ids=["own socket", "activated"])
def test_nothing_is_left_to_fill_in(socket: str | None) -> None:
    """Each marked value stands for something that an installation fills in."""
    order = Order((PROGRAM,), Path(socket) if socket else None)
    written = [plist.render(order, Path("/x.log")), *unit_file.render(order, RUNTIME).values()]
    assert [re.findall(rb"@[A-Z]+@", text) for text in written] == [[]] * len(written)
