"""`veloxquantctl service`: what it asks of the agent, what it shows, and how it ends."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from veloxquant import __version__
from veloxquant.client import FakeTransport
from veloxquant.ctl.completion import candidates
from veloxquant.errors import NotAnswering, ServiceFailed
from veloxquant.service import Done, Installed, Order, Preview, State, find
from veloxquant.wire import answers

Run = Callable[..., Any]
UNIT = Path("/home/anna/.config/systemd/user/veloxquant.service")
FOUND = Installed("systemd", UNIT, ("/opt/veloxquantd", "--socket", "/s"), UNIT.with_suffix(".socket"))
STATE = State("systemd", "veloxquant.service", FOUND, loaded=True, running=True, pid=7, listening=True)
DONE = Done(changed=True, summary="it is there", commands=("systemctl --user start x",), notes=("mind this",))


@dataclass
class Recorder:
    """An agent that notes what it is told to do."""

    state_now: State = STATE
    told: list[str] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    raises: ServiceFailed | None = None

    def install(self, order: Order) -> Done:
        """Note the order."""
        self.orders.append(order)
        return self._do("install")

    def uninstall(self) -> Done:
        """Note it."""
        return self._do("uninstall")

    def start(self) -> Done:
        """Note it."""
        return self._do("start")

    def stop(self) -> Done:
        """Note it."""
        return self._do("stop")

    def restart(self) -> Done:
        """Note it."""
        return self._do("restart")

    def state(self) -> State:
        """As the test says."""
        return self.state_now

    def preview(self, order: Order) -> Preview:
        """Note the order."""
        self.orders.append(order)
        return Preview({UNIT: "[Service]\nExecStart=x\n"}, ("systemctl --user daemon-reload",))

    def _do(self, what: str) -> Done:
        self.told.append(what)
        if self.raises is not None:
            raise self.raises
        return DONE


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The agent of the user who runs the command."""
    recorder = Recorder()
    monkeypatch.setattr("veloxquant.service.find", lambda: recorder)
    return recorder


@pytest.fixture
def program(short_folder: Path) -> str:
    """A daemon that says its version."""
    path = short_folder / "veloxquantd"
    path.write_text("#!/bin/sh\necho veloxquantd 1.2.3\n")
    path.chmod(0o755)
    return str(path)


def hello(pid: int, version: str = __version__) -> answers.Hello:
    """A daemon's answer."""
    return answers.Hello(server="veloxquantd", version=version, protocol=1, capabilities=(), pid=pid, generation=1)


@pytest.mark.parametrize("action", ["install", "uninstall", "start", "stop", "restart"])
def test_each_action_is_the_agents(ctl: Run, agent: Recorder, program: str, action: str) -> None:
    """The commands that were run stand before the outcome; notes go to stderr."""
    done = ctl("service", action, *(["--program", program] if action == "install" else []))
    assert (done.code, agent.told) == (0, [action])
    assert done.out == "$ systemctl --user start x\nit is there\n"
    assert "mind this" in done.err


def test_an_outcome_as_json(ctl: Run, agent: Recorder) -> None:
    """One object."""
    assert json.loads(ctl("service", "stop", "--json").out) == {
        "schema": "veloxquant.service/1",
        "action": "stop",
        "changed": True,
        "summary": "it is there",
        "commands": ["systemctl --user start x"],
        "notes": ["mind this"],
    }


def test_the_order_is_what_the_flags_say(
    ctl: Run, agent: Recorder, program: str, monkeypatch: pytest.MonkeyPatch, short_folder: Path
) -> None:
    """Program, socket, activation and variables; by default systemd listens on the socket of the configuration."""
    monkeypatch.setattr("sys.platform", "linux")
    default = Path(short_folder / "run" / "veloxquant" / "d.sock")
    ctl("service", "install", "--program", program)
    assert agent.orders.pop() == Order((program,), default)
    monkeypatch.setenv("VELOXQUANT_RECORDS", "/r")
    socket = str(short_folder / "s")
    ctl(
        "service", "install", "--program", program, "--no-activation", "--env", "VELOXQUANT_RECORDS", "--socket", socket
    )
    assert agent.orders.pop() == Order((program, "--socket", socket), None, {"VELOXQUANT_RECORDS": "/r"})
    monkeypatch.setenv("VELOXQUANT_SOCKET", socket)
    ctl("service", "install", "--program", program)
    assert agent.orders.pop() == Order((program, "--socket", socket), Path(socket))


def test_on_a_mac_activation_has_to_be_asked_for(
    ctl: Run, agent: Recorder, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has run it there."""
    monkeypatch.setattr("sys.platform", "darwin")
    ctl("service", "print", "--program", program)
    assert agent.orders.pop().activated is None
    ctl("service", "print", "--program", program, "--activation")
    assert agent.orders.pop().activated is not None


def test_print_shows_and_does_nothing(ctl: Run, agent: Recorder, program: str) -> None:
    """Files with their paths, then commands; the same as JSON."""
    done = ctl("service", "print", "--program", program)
    assert (done.code, agent.told) == (0, [])
    assert done.out == f"# {UNIT}\n[Service]\nExecStart=x\n\n$ systemctl --user daemon-reload\n"
    shown = json.loads(ctl("service", "print", "--program", program, "--json").out)
    assert shown["files"] == {str(UNIT): "[Service]\nExecStart=x\n"}
    assert shown["commands"] == ["systemctl --user daemon-reload"]


@pytest.mark.parametrize("flag", [["--program", "/x"], ["--env", "VELOXQUANT_X"], ["--activation"]])
def test_a_flag_that_would_do_nothing_is_refused(ctl: Run, agent: Recorder, flag: list[str]) -> None:
    """`restart --program` installs nothing."""
    done = ctl("service", "restart", *flag)
    assert (done.code, agent.told) == (2, [])
    assert flag[0] in done.err


def test_a_daemon_of_ones_own_is_in_the_way(ctl: Run, agent: Recorder, program: str, fake: FakeTransport) -> None:
    """One that was started by hand serves the socket: exit 75, nothing installed, and how to stop it."""
    fake.answers["hello"] = hello(pid=8)
    done = ctl("service", "install", "--program", program)
    assert (done.code, agent.told) == (75, [])
    assert "kill 8" in done.err
    fake.answers["hello"] = hello(pid=7)
    assert ctl("service", "install", "--program", program).code == 0


def test_a_daemon_of_another_protocol_is_in_the_way_too(
    ctl: Run, agent: Recorder, program: str, fake: FakeTransport
) -> None:
    """Its pid is known by its ping."""
    fake.answers["hello"] = replace_protocol(hello(pid=8), 99)
    fake.answers["ping"] = answers.Pong(pid=8, generation=1)
    assert ctl("service", "install", "--program", program).code == 75


def replace_protocol(answer: answers.Hello, protocol: int) -> dict[str, Any]:
    """The same of another version."""
    return {"server": answer.server, "version": "9", "protocol": protocol, "capabilities": [], "pid": answer.pid} | {
        "generation": 1
    }


def test_the_status_of_a_healthy_agent(ctl: Run, agent: Recorder, fake: FakeTransport) -> None:
    """Exit 0: it runs, and the process that answers is the manager's."""
    fake.answers["hello"] = hello(pid=7)
    done = ctl("service", "status", "--socket", "/s")
    assert done.code == 0
    assert done.out.splitlines() == [
        f"installed {UNIT}",
        "program   /opt/veloxquantd --socket /s",
        "loaded    veloxquant.service",
        "running   pid 7",
        f"answers   pid 7, version {__version__}",
    ]
    shown = json.loads(ctl("service", "status", "--socket", "/s", "--json").out)
    assert (shown["running"], shown["pid"], shown["answers"]["pid"], shown["warnings"]) == (True, 7, 7, [])
    assert shown["program"] == list(FOUND.program)


def test_status_asks_where_the_agent_serves(
    ctl: Run, agent: Recorder, monkeypatch: pytest.MonkeyPatch, short_folder: Path
) -> None:
    """A shell that asks elsewhere is told so, and that is no fault of the agent."""
    transport, asked = FakeTransport(), []
    monkeypatch.setattr("veloxquant.client.SocketTransport", lambda place, **_: asked.append(str(place)) or transport)
    transport.answers["hello"] = hello(pid=7)
    done = ctl("service", "status")
    assert (done.code, asked) == (0, ["/s"])
    assert "it serves /s, calls from here go to" in done.out
    agent.state_now = replace(STATE, installed=replace(FOUND, program=("/opt/veloxquantd",)))
    default = Path(short_folder / "run" / "veloxquant" / "d.sock")
    monkeypatch.setenv("VELOXQUANT_SOCKET", str(short_folder / "mine"))
    assert f"it serves {default}, calls from here go to {short_folder}/mine" in ctl("service", "status").out


@pytest.mark.parametrize("action", ["start", "restart"])
def test_a_daemon_of_ones_own_keeps_its_socket(ctl: Run, agent: Recorder, fake: FakeTransport, action: str) -> None:
    """Systemd would take the path from it. One that the manager has started meanwhile is no rival."""
    fake.answers["hello"] = hello(pid=8)
    agent.state_now = replace(STATE, running=False, pid=None, listening=False)
    done = ctl("service", action)
    assert (done.code, agent.told) == (75, [])
    assert "kill 8" in done.err
    fake.answers["hello"] = hello(pid=7)
    agent.state_now = STATE
    assert (ctl("service", action).code, agent.told) == (0, [action])


@pytest.mark.parametrize(
    ("state", "answer", "says"),
    [
        (STATE, NotAnswering("silent"), "does not answer on the socket"),
        (STATE, None, "does not answer on the socket"),
        (STATE, hello(pid=8), "kill 8"),
        (replace(STATE, installed=None, loaded=False, running=False, pid=None, listening=False), None, "installed no"),
        (replace(STATE, running=False, pid=None, last_exit="2"), None, "last exit 2"),
    ],
    ids=["silent", "absent", "another", "not installed", "failed"],
)
def test_an_agent_that_is_not_well_is_exit_1(  # noqa: PLR0917 -- fixtures and parameters
    ctl: Run, agent: Recorder, fake: FakeTransport, state: State, answer: Any, says: str
) -> None:
    """And it says what is the matter."""
    agent.state_now = state
    if answer is not None:
        fake.answers["hello"] = answer
    done = ctl("service", "status")
    assert done.code == 1
    assert says in done.out


def test_a_process_of_an_older_version_is_mentioned(ctl: Run, agent: Recorder, fake: FakeTransport) -> None:
    """After an upgrade the old process runs on until it is restarted."""
    fake.answers["hello"] = hello(pid=7, version="0.0.1")
    done = ctl("service", "status")
    assert (done.code, f"it runs 0.0.1, installed is {__version__}: veloxquantctl service restart" in done.out) == (
        0,
        True,
    )


def test_status_wakes_nobody(ctl: Run, agent: Recorder, fake: FakeTransport) -> None:
    """Where the manager listens for a daemon that does not run, a call would start it."""
    agent.state_now = replace(STATE, running=False, pid=None)
    done = ctl("service", "status")
    assert (done.code, fake.calls) == (1, [])
    assert "running   no; the first call starts it" in done.out


def test_a_managers_refusal_is_exit_1(ctl: Run, agent: Recorder) -> None:
    """With its words and the next step, as JSON too."""
    agent.raises = ServiceFailed("launchd did not", hint="do this")
    assert ctl("service", "start").code == 1
    shown = json.loads(ctl("service", "start", "--json").out)["error"]
    assert (shown["name"], shown["hint"], shown["exit_code"]) == ("service_failed", "do this", 1)


def test_without_a_manager_there_is_a_next_step(ctl: Run, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container: systemctl is there and nobody answers it. Nothing is written."""
    systemctl = short_folder / "systemctl"
    systemctl.write_text("#!/bin/sh\necho 'Failed to connect to bus: No medium found' >&2\nexit 1\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{short_folder}:/usr/bin:/bin")
    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.setattr("veloxquant.service.find", functools.partial(find, platform="linux"))
    done = ctl("service", "status")
    assert done.code == 1
    assert "user manager cannot be reached: Failed to connect to bus" in done.err
    assert "next:" in done.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["service", "re"], ["restart"]),
        (["service", "install", "--ac"], ["--activation"]),
        (["service", "install", "--no-"], ["--no-activation", "--no-daemon"]),
    ],
)
def test_it_completes(words: list[str], expected: list[str]) -> None:
    """Actions and flags, as for every command."""
    assert candidates(words) == expected
