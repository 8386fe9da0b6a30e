"""launchctl's answers read, its refusals explained, and the same agent over a stand-in that is a program of its own."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import launchctl_stand_in
import pytest
from service_kit import GUI, PROGRAM, USER

from veloxquant.errors import ServiceFailed, ServiceUnavailable
from veloxquant.service import find
from veloxquant.service.command import Answer, Command
from veloxquant.service.launchctl import parse
from veloxquant.service.values import LABEL, Order

if TYPE_CHECKING:
    from pathlib import Path

    from service_kit import Mac

# The form that boxen/puppet-boxen #104 shows, with the fields of later systems.
PRINTED = f"""{GUI}/{LABEL} = {{
\tactive count = 1
\tpath = /Users/anna/Library/LaunchAgents/{LABEL}.plist
\tstate = not running

\tprogram = /opt/my tools/veloxquantd
\targuments = {{
\t\t/opt/my tools/veloxquantd
\t\t--socket
\t\t/Users/anna/a = {{
\t\t}}
\t}}

\tinherited environment = {{
\t\tSSH_AUTH_SOCK => /private/tmp/x
\t\tpid = 3
\t}}

\tdomain = {GUI} [100005]
\truns = 3
\tlast exit code = 78: EX_CONFIG

\tendpoints = {{
\t\t"x" = {{
\t\t\tport = 0x1
\t\t\tpid = 7
\t\t}}
\t\tstate = active
\t}}
}}
"""


def test_fields_of_inner_blocks_are_not_the_jobs() -> None:
    """`pid` and `state` occur in inner blocks, too; an argument may look like a brace."""
    job = parse(PRINTED, GUI)
    assert job is not None
    assert (job.state, job.pid, job.last_exit) == ("not running", None, "78: EX_CONFIG")
    assert job.arguments == ("/opt/my tools/veloxquantd", "--socket", "/Users/anna/a = {", "}")
    assert job.path == f"/Users/anna/Library/LaunchAgents/{LABEL}.plist"


@pytest.mark.parametrize(
    ("line", "last_exit"),
    [
        ("last exit code = (never exited)", None),
        ("last exit code = 0", "0"),
        ("last terminating signal = Killed: 9", "signal Killed: 9"),
        ("", None),
    ],
)
def test_how_it_ended(line: str, last_exit: str | None) -> None:
    """As launchd words it; nothing before the first end."""
    job = parse(f"x = {{\n\tstate = running\n\tpid = 12\n\t{line}\n}}\n", GUI)
    assert job is not None
    assert (job.pid, job.last_exit) == (12, last_exit)


def test_a_job_of_another_domain_is_not_this_ones() -> None:
    """Domains of one user share names: what belongs to gui is not taken for user's."""
    assert parse(PRINTED, USER) is None


def test_an_unknown_form_is_no_crash() -> None:
    """`print` is no interface: without the fields, nothing is known but that the job is loaded."""
    job = parse("loaded!", GUI)
    assert job is not None
    assert (job.state, job.pid, job.path, job.arguments) == (None, None, None, ())


def test_an_unknown_form_is_not_registered_again(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a release of macOS prints differently, an unchanged file is still an unchanged agent."""
    mac.agent().install(Order((PROGRAM,)))
    mac.changes()
    monkeypatch.setattr(launchctl_stand_in, "_printed", lambda *_: "a new form\n")
    mac.agent().install(Order((PROGRAM,)))
    assert mac.changes() == ["kickstart"]
    assert mac.agent().restart().summary == "launchd took the order"
    mac.agent().uninstall()
    assert mac.state["jobs"] == {}


def test_an_answer_that_says_nothing_of_absence_is_an_error(mac: Mac) -> None:
    """A launchctl that fails is not taken for a job that is not there."""
    mac.state["script"] = [["print", 0, ""], ["print", 1, "Operation not permitted"]]
    with pytest.raises(ServiceFailed, match="Operation not permitted"):
        mac.agent().install(Order((PROGRAM,)))


def test_the_one_line_that_says_most() -> None:
    """Launchctl often says "Bad request." first."""
    answer = Answer(113, "", 'Bad request.\nCould not find service "x" in domain\n')
    assert answer.words == 'Could not find service "x" in domain'
    assert Answer(7, "", "").words == "exit status 7"


def refused(mac: Mac) -> ServiceFailed:
    """The error of an installation that launchd refuses."""
    with pytest.raises(ServiceFailed) as caught:
        mac.agent().install(Order((PROGRAM,)))
    return caught.value


def test_a_refusal_for_a_bad_file_says_so(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a volume that keeps no modes: everybody could change the file."""
    monkeypatch.setattr("veloxquant.service.files.MODE", 0o666)
    error = refused(mac)
    assert "bad plist: others could change the file" in error.message
    assert "Bootstrap failed: 5" in error.message
    assert mac.changes() == ["bootstrap", "bootout", "bootstrap"]


def test_a_refusal_by_the_domain_says_so(mac: Mac) -> None:
    """125 with a domain that is there: background items may be switched off."""
    mac.state["script"] = [["bootstrap", 125, "Bootstrap failed: 125: Domain does not support specified action"]]
    error = refused(mac)
    assert f"wrong domain: {GUI} takes no agents now" in error.message
    assert "Login Items" in error.hint
    assert mac.changes() == ["bootstrap"]


def test_a_domain_that_goes_meanwhile_is_named(mac: Mac) -> None:
    """A logout between the look and the order; launchd says 5 for that, too."""
    mac.state["script"] = [["bootstrap", 5, "Bootstrap failed: 5: Input/output error"]] * 2
    agent = mac.agent()
    bootout = agent.launchctl.bootout

    def logged_out(domain: str) -> None:
        bootout(domain)
        mac.state["domains"][GUI] = 112

    agent.launchctl.bootout = logged_out  # type: ignore[method-assign]
    with pytest.raises(ServiceFailed, match="wrong domain"):
        agent.install(Order((PROGRAM,)))


def test_a_label_that_stays_disabled_says_so(mac: Mac) -> None:
    """As under a profile that an administrator has set: enabling changes nothing."""
    mac.state["disabled"][LABEL] = True
    mac.state["script"] = [["enable", 0, ""]] * 9
    error = refused(mac)
    assert "the agent is disabled" in error.message
    assert f"launchctl enable {GUI}/{LABEL}" in error.hint


def test_a_label_that_is_loaded_elsewhere_is_named(mac: Mac) -> None:
    """When launchd refuses a label and has it, the job and its file are said."""
    mac.state["script"] = [["bootstrap", 5, "Bootstrap failed: 5: Input/output error"]] * 3
    agent = mac.agent()
    other: dict[str, Any] = {"path": "/Library/LaunchAgents/x.plist", "pid": 1, "exit": None, "state": "running"}
    other["content"] = {"ProgramArguments": ["/old"], "EnvironmentVariables": {}, "Label": LABEL}
    bootout = agent.launchctl.bootout

    def loaded_by_somebody(domain: str) -> None:
        bootout(domain)
        mac.state["jobs"][f"{USER}/{LABEL}"] = other

    agent.launchctl.bootout = loaded_by_somebody  # type: ignore[method-assign]
    with pytest.raises(ServiceFailed, match=f"already loaded as {USER}/{LABEL} from /Library/LaunchAgents/x.plist"):
        agent.install(Order((PROGRAM,)))


def test_a_refusal_without_a_cause_has_launchds_words(mac: Mac) -> None:
    """After 10 s of patience: what it said, where to look, and that the file stays."""
    mac.state["settle"] = mac.state["settling"] = 1000
    error = refused(mac)
    assert "launchd gives no reason (Bootstrap failed: 5: Input/output error)" in error.message
    assert "log show" in error.hint
    assert sum(mac.waited) == pytest.approx(10)
    assert mac.path.exists()
    mac.state["settling"] = 0
    assert mac.agent().install(Order((PROGRAM,))).changed


def test_a_login_that_loads_the_file_first_is_no_error(mac: Mac) -> None:
    """Launchd loads the folder at a login: the label is taken by this very file."""
    agent = mac.agent()
    bootstrap = agent.launchctl.bootstrap

    def overtaken(domain: str, path: Path) -> Answer:
        mac.launchctl.call(["load", str(path)])
        return bootstrap(domain, path)

    agent.launchctl.bootstrap = overtaken  # type: ignore[method-assign]
    assert agent.install(Order((PROGRAM,))).changed
    assert mac.job()["content"] == mac.written()


def test_the_same_over_a_program(tmp_path: Path) -> None:
    """install, status, restart, uninstall through a launchctl that is an executable, by its path."""
    env = {**os.environ, "HOME": str(tmp_path / "home"), "LAUNCHCTL_STAND_IN": str(tmp_path)}
    program = tmp_path / "launchctl"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{launchctl_stand_in.__file__}" "$@"\n')
    program.chmod(0o755)

    def agent() -> Any:
        return find(env, "darwin", launchctl=str(program), uid=launchctl_stand_in.UID)

    assert agent().install(Order((PROGRAM,))).changed
    assert not agent().install(Order((PROGRAM,))).changed
    assert agent().state().pid == 1001
    assert agent().restart().summary == "running: pid 1002"
    assert agent().uninstall().changed
    assert json.loads((tmp_path / "state.json").read_text())["jobs"] == {}


def test_without_launchctl_there_is_a_next_step(tmp_path: Path) -> None:
    """A system that says it is macOS and has no launchd."""
    with pytest.raises(ServiceUnavailable, match="launchctl cannot be run: No such file") as caught:
        find({"HOME": str(tmp_path)}, "darwin", launchctl="/nowhere/launchctl", uid=501).install(Order((PROGRAM,)))
    assert "veloxquantctl daemon" in caught.value.hint


def test_a_program_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is long, and there is one."""
    monkeypatch.setattr("veloxquant.service.command.LIMIT_S", 0.01)
    with pytest.raises(ServiceFailed, match="sleep 5 did not end within"):
        Command("/bin/sleep").ask("5")
