"""The templates for launchd and systemd: whole once filled in by the commands that their page gives."""

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

from veloxquant.daemon import main

FOLDER = Path(__file__).parents[1] / "launchd"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
PLIST, UNIT = "io.veloxquant.daemon.plist", "veloxquant.service"


def fill(name: str, program: str, home: Path) -> str:
    """The template after the `sed` command of the page, run by a shell."""
    (line,) = re.findall(rf"^(sed .*launchd/{re.escape(name)})", PAGE, flags=re.MULTILINE)
    command = line.replace("$(command -v veloxquantd)", program)
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        ["sh", "-c", command], cwd=FOLDER.parent, env=environment, capture_output=True, text=True, check=True
    ).stdout


def unit(text: str) -> configparser.RawConfigParser:
    """Sections and keys; a key that stands twice is an error."""
    parser = configparser.RawConfigParser(strict=True, comment_prefixes=("#",), delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign] -- the documented way to keep case
    parser.read_string(text)
    return parser


def plist(program: str = "/opt/tools/bin/veloxquantd") -> dict[str, Any]:
    """The launchd agent, filled in."""
    found: dict[str, Any] = plistlib.loads(fill(PLIST, program, Path("/Users/anna")).encode())
    return found


def test_the_agent_is_exactly_what_was_decided() -> None:
    """Starts at login, again after a crash but not after a stop, without a shell, with next to no environment."""
    assert plist() == {
        "Label": "io.veloxquant.daemon",
        "ProgramArguments": ["/opt/tools/bin/veloxquantd"],
        "EnvironmentVariables": {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 15,
        "LimitLoadToSessionType": ["Aqua", "Background"],
        "StandardErrorPath": "/Users/anna/Library/Logs/io.veloxquant.daemon.log",
    }


def test_the_agent_is_named_as_its_file() -> None:
    """The commands of launchd name the label, people the file: they are one."""
    assert f"{plist()['Label']}.plist" == PLIST


def test_a_blank_in_the_path_is_no_trouble() -> None:
    """The program's path is one word for both managers."""
    program = "/Users/anna/my tools/bin/veloxquantd"
    assert plist(program)["ProgramArguments"] == [program]
    assert unit(fill(UNIT, program, Path("/home/anna")))["Service"]["ExecStart"] == f'"{program}"'


def test_the_unit_is_what_the_daemon_does() -> None:
    """Says when it is ready, is told to reload by SIGHUP, starts again after a crash, and writes for nobody else."""
    service = unit(fill(UNIT, "/opt/veloxquantd", Path("/home/anna")))["Service"]
    assert service["Type"] == "notify"  # tests/daemon/test_start.py holds that it says READY=1
    assert service["Restart"] == "on-failure"
    assert service["UMask"] == "0077"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert main.__doc__ is not None
    for status in service["RestartPreventExitStatus"].split():
        assert re.search(rf"\b{status}\b", main.__doc__), f"the daemon has no exit status {status}"


def test_both_outlast_the_drain() -> None:
    """The managers wait longer than the daemon may take to answer its last clients."""
    from veloxquant.config import Config

    service = unit(fill(UNIT, "/opt/veloxquantd", Path("/home/anna")))["Service"]
    assert plist()["ExitTimeOut"] > Config().daemon.drain_s + 1
    assert int(service["TimeoutStopSec"]) > Config().daemon.drain_s + 1


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Where systemd is installed it finds nothing wrong; elsewhere the sections and keys are the known ones."""
    text = fill(UNIT, sys.executable, tmp_path)
    assert set(unit(text).sections()) == {"Unit", "Service", "Install"}
    assert all(re.fullmatch(r"[A-Z][A-Za-z]+", key) for section in unit(text).values() for key in section)
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        (tmp_path / UNIT).write_text(text)
        done = subprocess.run(
            [analyze, "verify", "--user", str(tmp_path / UNIT)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", [PLIST, UNIT])
def test_nothing_is_left_to_fill_in(name: str) -> None:
    """Each marked value stands for something that the page fills in."""
    text = fill(name, "/opt/veloxquantd", Path("/home/anna"))
    assert re.findall(r"@[A-Z]+@", text) == []
