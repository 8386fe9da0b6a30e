"""Which program the agent runs, and with what: paths as they were written, and no variable that was not asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from veloxquant.errors import AlreadyRunning, InvalidParams, ServiceRefused
from veloxquant.service import State, notes, order, program, refuse_rival

if TYPE_CHECKING:
    from collections.abc import Callable

SOCKET = Path("/run/user/501/veloxquant/d.sock")


@pytest.fixture
def tool(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a program at a path below the test's folder; veloxquantd says its version."""

    def make(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho {path.name} 1.2.3\n")
        path.chmod(0o755)
        return path

    return make


def test_a_link_is_kept(tool: Callable[[str], Path], tmp_path: Path) -> None:
    """Homebrew's bin leads into a Cellar folder that the next upgrade removes: the agent names the link."""
    tool("Cellar/veloxquant/1.2.3/bin/veloxquantctl")
    real = tool("Cellar/veloxquant/1.2.3/bin/veloxquantd")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name in ("veloxquantctl", "veloxquantd"):
        (bin_folder / name).symlink_to(real.with_name(name))
    link = str(bin_folder / "veloxquantd")
    assert program.find(None, str(bin_folder / "veloxquantctl"), {}) == link
    assert program.find(None, "python", {"PATH": str(bin_folder)}) == link
    assert program.find(link, "", {}) == link
    assert order("x", SOCKET, {"PATH": str(bin_folder)}).program == (link,)
    assert list(program.doubts(str(real)))
    assert "Cellar" in next(program.doubts(str(real)))


def test_a_virtual_environment_behind_a_link_is_kept(tool: Callable[[str], Path], tmp_path: Path) -> None:
    """The folder may be the link, too: ~/venvs/current."""
    tool("venvs/3.12.1/bin/veloxquantd")
    (tmp_path / "venvs" / "current").symlink_to("3.12.1")
    named = str(tmp_path / "venvs" / "current" / "bin" / "veloxquantd")
    assert order("x", SOCKET, {}, named=named).program == (named,)


def test_a_relative_path_is_taken_from_the_folder_as_the_shell_calls_it(
    tool: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cd ~/current; bin/veloxquantctl ...`: the kernel knows the real folder only, the shell the link."""
    tool("1.0/bin/veloxquantd")
    tool("1.0/bin/veloxquantctl")
    link = tmp_path / "current"
    link.symlink_to("1.0")
    monkeypatch.chdir(link)
    env = {"PWD": str(link)}
    assert program.find("./bin/veloxquantd", "", env) == f"{link}/bin/veloxquantd"
    assert program.find(None, "bin/veloxquantctl", env) == f"{link}/bin/veloxquantd"
    for stale in ({}, {"PWD": "/"}, {"PWD": "/nowhere"}, {"PWD": "relative"}):
        assert program.find("bin/veloxquantd", "", stale) == f"{tmp_path}/1.0/bin/veloxquantd"


def test_the_neighbour_goes_before_the_path(tool: Callable[[str], Path], tmp_path: Path) -> None:
    """The daemon of the environment whose veloxquantctl was run, not another on PATH."""
    tool("venv/bin/veloxquantctl")
    mine, other = tool("venv/bin/veloxquantd"), tool("other/veloxquantd")
    env = {"PATH": str(other.parent)}
    assert program.find(None, str(tmp_path / "venv/bin/veloxquantctl"), env) == str(mine)
    assert program.find(None, str(tmp_path / "venv/bin/python"), env) == str(other)


def test_a_tilde_is_the_home(tool: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves it as it is in --program=~/..."""
    tool("bin/veloxquantd")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert program.find("~/bin/veloxquantd", "", {}) == str(tmp_path / "bin/veloxquantd")


def test_no_program_is_an_error() -> None:
    """It names the flag that helps."""
    with pytest.raises(ServiceRefused, match="no veloxquantd on PATH") as caught:
        program.find(None, "veloxquantctl", {"PATH": "/nowhere"})
    assert caught.value.field == "--program"


def test_what_cannot_run_is_refused(tool: Callable[[str], Path], tmp_path: Path) -> None:
    """Not there, a folder, not executable, another program, one whose interpreter is gone, one that fails."""
    plain = tool("plain/veloxquantd")
    plain.chmod(0o644)
    orphan = tool("orphan/veloxquantd")
    orphan.write_text("#!/nowhere/python\n")
    failing = tool("failing/veloxquantd")
    failing.write_text("#!/bin/sh\necho veloxquantd 1.0\necho 'ImportError: no mlx' >&2\nexit 1\n")
    for path in (tmp_path / "absent", tmp_path, plain, tool("other"), orphan, failing):
        with pytest.raises(ServiceRefused) as caught:
            program.check(str(path))
        assert caught.value.field == "--program"
        assert str(path) in caught.value.message


def test_it_is_tried_as_the_agent_runs_it(tool: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the caller's environment: a program that needs PYTHONPATH is refused now, not at the next login."""
    needy = tool("veloxquantd")
    needy.write_text('#!/bin/sh\n[ -n "$PYTHONPATH" ] && echo veloxquantd 1.0\n')
    monkeypatch.setenv("PYTHONPATH", "/here")
    with pytest.raises(ServiceRefused, match="--version does not say"):
        program.check(str(needy))


@pytest.mark.parametrize(
    ("path", "doubtful"),
    [
        ("/opt/homebrew/bin/veloxquantd", False),
        ("/Users/anna/.local/bin/veloxquantd", False),
        ("/opt/homebrew/Cellar/veloxquant/1.0/bin/veloxquantd", True),
        ("/Users/anna/.cache/uv/archive-v0/x/bin/veloxquantd", True),
        ("/private/var/folders/x/T/v/bin/veloxquantd", True),
        ("/tmp/v/bin/veloxquantd", True),  # noqa: S108 -- a name
    ],
)
def test_a_path_that_will_not_last_is_doubted(path: str, doubtful: bool) -> None:
    """It is installed as written, and the user is told."""
    assert bool(list(program.doubts(path))) == doubtful


def test_the_agent_gets_the_variables_that_were_named(tool: Callable[[str], Path]) -> None:
    """No other, whatever the shell exports; those of ours that it will not see are mentioned."""
    named = str(tool("veloxquantd"))
    env = {"VELOXQUANT_RECORDS": "/r", "VELOXQUANT_PLUGINS": "a", "HF_TOKEN": "secret", "PATH": "/usr/bin"}
    given = order("x", SOCKET, env, named=named, variables=["VELOXQUANT_RECORDS"])
    assert given.environment == {"VELOXQUANT_RECORDS": "/r"}
    said = " ".join(notes(given, env))
    assert "does not see VELOXQUANT_PLUGINS: --env VELOXQUANT_PLUGINS" in said
    assert "secret" not in said + str(given)


@pytest.mark.parametrize(("name", "why"), [("HF_TOKEN", "own only"), ("VELOXQUANT_RECORDS", "not set here")])
def test_other_variables_are_refused(tool: Callable[[str], Path], name: str, why: str) -> None:
    """Secrets have no way into the agent's file; a name without a value is a slip."""
    with pytest.raises(InvalidParams, match=why) as caught:
        order("x", SOCKET, {"HF_TOKEN": "secret"}, named=str(tool("veloxquantd")), variables=[name])
    assert "secret" not in caught.value.message


def test_a_socket_that_was_given_is_an_argument(tool: Callable[[str], Path]) -> None:
    """The agent sees neither the flag nor VELOXQUANT_SOCKET; what the configuration says it finds itself."""
    named = str(tool("veloxquantd"))
    env = {"VELOXQUANT_SOCKET": str(SOCKET)}
    assert order("x", SOCKET, env, named=named).program == (named,)
    for given in (
        order("x", SOCKET, env, named=named, socket_given=True),
        order("x", SOCKET, env, named=named, variables=["VELOXQUANT_SOCKET"]),
    ):
        assert given.program == (named, "--socket", str(SOCKET))
        assert given.environment == {}
    assert order("x", SOCKET, env, named=named, activation=True).activated == SOCKET


def test_a_socket_in_a_folder_that_is_open_is_refused_before_anything(tool: Callable[[str], Path]) -> None:
    """The daemon would end at once, and the manager would start it again and again."""
    named = tool("open/veloxquantd")
    named.parent.chmod(0o755)
    with pytest.raises(ServiceRefused, match=r"is open to others \(mode 0755\)") as caught:
        order("x", named.parent / "d.sock", {}, named=str(named))
    assert "chmod 700" in caught.value.hint
    named.parent.chmod(0o700)
    assert order("x", named.parent / "d.sock", {}, named=str(named), activation=True).activated is not None


def test_a_socket_in_somebody_elses_folder_is_refused_whatever_its_mode(
    tool: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody is told to change a mode that they cannot change."""
    named = tool("theirs/veloxquantd")
    named.parent.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ServiceRefused, match=r"belongs to user id \d+, not to you \(12345\)") as caught:
        order("x", named.parent / "d.sock", {}, named=str(named))
    assert "chmod" not in caught.value.hint


def test_a_daemon_that_the_manager_did_not_start_is_not_fought() -> None:
    """Two cannot serve one socket: launchd would start its own every 10 s, and systemd would take the socket."""
    state = State("launchd", "t", None, loaded=True, running=True, pid=7)
    refuse_rival(state, None)
    refuse_rival(state, 7)
    with pytest.raises(AlreadyRunning, match="pid 8") as caught:
        refuse_rival(state, 8)
    assert "kill 8" in caught.value.hint


def test_the_path_is_never_resolved(tool: Callable[[str], Path], tmp_path: Path) -> None:
    """Not even dots: `a/../b` means something else where `a` is a link."""
    tool("real/deep/x")
    tool("real/veloxquantd")
    (tmp_path / "a").symlink_to("real/deep")
    named = f"{tmp_path}/a/../veloxquantd"
    assert program.find(named, "", {}) == named
    program.check(named)
    assert not os.path.exists(os.path.normpath(named))  # noqa: PTH110 -- that would be another file
