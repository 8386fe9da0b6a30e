"""The agent under systemd, against a stand-in for `systemctl --user`: installed once, whatever was there before."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from service_kit import PROGRAM, tree

from veloxquant.errors import ServiceFailed, ServiceRefused, ServiceUnavailable
from veloxquant.service import files, find
from veloxquant.service.values import SOCKET_UNIT, UNIT, Order

if TYPE_CHECKING:
    from pathlib import Path

    from service_kit import Linux

ORDER = Order((PROGRAM,))
LOAD = ["daemon-reload", f"enable {UNIT}", f"start {UNIT}"]
LOAD_BOTH = ["daemon-reload", f"enable {SOCKET_UNIT} {UNIT}", f"start {SOCKET_UNIT} {UNIT}"]
STOP_BOTH = f"stop {SOCKET_UNIT} {UNIT}"


def test_an_installation_is_written_enabled_and_started(linux: Linux) -> None:
    """The unit that was ordered runs now, and at the next login."""
    done = linux.agent().install(ORDER)
    assert done.changed
    assert linux.changes() == LOAD
    assert done.commands == tuple(f"systemctl --user {line}" for line in LOAD)
    assert f'ExecStart="{PROGRAM}"' in (linux.folder / UNIT).read_text()
    assert not (linux.folder / SOCKET_UNIT).exists()


def test_r39_an_unchanged_unit_is_not_loaded_again(linux: Linux) -> None:
    """The second installation asks, and changes nothing."""
    linux.agent().install(linux.activated)
    before, pid = tree(linux.home), linux.systemctl.active[UNIT]
    linux.changes()
    assert not linux.agent().install(linux.activated).changed
    assert linux.changes() == []
    assert tree(linux.home) == before
    assert linux.systemctl.active[UNIT] == pid


def test_r39_fifty_rounds_leave_nothing(linux: Linux) -> None:
    """After 50 installations and removals, with and without a socket unit, nothing is left on the disk or known."""
    for number in range(50):
        order = linux.activated if number % 2 else Order((f"{PROGRAM}{number % 3}",))
        linux.agent().install(order)
        assert set(linux.systemctl.active) == ({UNIT, SOCKET_UNIT} if number % 2 else {UNIT})
        linux.agent().uninstall()
        assert tree(linux.home) == {}
        assert (linux.systemctl.active, linux.systemctl.read) == ({}, {})
    assert [path.name for path in linux.folder.iterdir()] == []
    assert not linux.agent().uninstall().changed


def test_a_program_that_has_moved_is_loaded_anew(linux: Linux) -> None:
    """Stopped before its file changes, started from the new one."""
    linux.agent().install(linux.activated)
    linux.changes()
    linux.agent().install(Order(("/new/veloxquantd",), linux.activated.activated))
    assert linux.changes() == [STOP_BOTH, "daemon-reload", f"start {SOCKET_UNIT} {UNIT}"]
    assert b"/new/veloxquantd" in linux.systemctl.read[UNIT]


def test_a_socket_unit_comes_and_goes(linux: Linux) -> None:
    """--no-activation takes away what --activation brought, and the other way round."""
    linux.agent().install(linux.activated)
    linux.changes()
    linux.agent().install(ORDER)
    assert linux.changes() == [STOP_BOTH, f"disable {SOCKET_UNIT}", "daemon-reload", f"start {UNIT}"]
    assert [path.name for path in linux.folder.glob("**/*.socket")] == []
    linux.agent().install(linux.activated)
    assert linux.changes() == [f"stop {UNIT}", "daemon-reload", f"enable {SOCKET_UNIT}", f"start {SOCKET_UNIT} {UNIT}"]


@pytest.mark.parametrize("verb", ["stop", "daemon-reload", "enable", "start"])
def test_an_installation_that_was_killed_is_finished_by_the_next(linux: Linux, verb: str) -> None:
    """Wherever it was killed, the next one ends with what was ordered, loaded and running."""
    linux.agent().install(ORDER)
    new = Order(("/new/veloxquantd",), linux.activated.activated)
    linux.systemctl.dies_before = verb
    with pytest.raises(KeyboardInterrupt):
        linux.agent().install(new)
    linux.systemctl.dies_before = None
    linux.agent().install(new)
    assert linux.systemctl.read == {unit: (linux.folder / unit).read_bytes() for unit in (UNIT, SOCKET_UNIT)}
    assert b"/new/veloxquantd" in linux.systemctl.read[UNIT]
    assert set(linux.systemctl.active) == {UNIT, SOCKET_UNIT}
    assert not linux.agent().install(new).changed
    assert [path.name for path in linux.folder.iterdir() if path.name.endswith(".new")] == []


def test_an_edited_unit_is_written_anew(linux: Linux) -> None:
    """What is changed by hand belongs into a drop-in, as the file's first line says."""
    linux.agent().install(ORDER)
    path = linux.folder / UNIT
    original = path.read_text()
    path.write_text(original.replace("RestartSec=1", "RestartSec=7"))
    assert linux.agent().install(ORDER).changed
    assert path.read_text() == original
    assert "drop-in" in original.splitlines()[0]


def test_a_unit_by_hand_is_taken_over(linux: Linux) -> None:
    """One that was filled in by hand from an earlier template runs veloxquantd, and so is ours."""
    linux.folder.mkdir(parents=True)
    (linux.folder / UNIT).write_text("[Service]\nExecStart=/old/veloxquantd\n")
    linux.agent().install(ORDER)
    assert PROGRAM in (linux.folder / UNIT).read_text()


@pytest.mark.parametrize(
    ("unit", "text"),
    [(UNIT, "[Service]\nExecStart=/usr/bin/other\n"), (SOCKET_UNIT, "[Socket]\nListenStream=80\n")],
)
def test_a_unit_that_is_not_ours_is_refused_and_left(linux: Linux, unit: str, text: str) -> None:
    """Neither written over nor removed, whatever else would have to be done."""
    linux.folder.mkdir(parents=True)
    (linux.folder / unit).write_text(text)
    for call in (lambda: linux.agent().install(linux.activated), linux.agent().uninstall):
        with pytest.raises(ServiceRefused, match="not veloxquant's unit"):
            call()
    assert linux.changes() == []
    assert (linux.folder / unit).read_text() == text


def test_a_link_is_refused_and_left(linux: Linux, tmp_path: Path) -> None:
    """`systemctl link` and dotfile managers make links; who made it looks after it."""
    linux.agent().install(ORDER)
    kept = (linux.folder / UNIT).rename(tmp_path / "kept.service")
    (linux.folder / UNIT).symlink_to(kept)
    with pytest.raises(ServiceRefused, match="symbolic link"):
        linux.agent().install(linux.activated)
    with pytest.raises(ServiceRefused, match="symbolic link"):
        linux.agent().uninstall()
    assert kept.exists()


@pytest.mark.parametrize("name", ["/home/anna/.config/systemd/user", "{}/more", "x{}"])
def test_a_folder_that_systemd_does_not_read_is_refused(linux: Linux, name: str) -> None:
    """A shell with its own XDG_CONFIG_HOME: the manager has another, and would never find the unit."""
    linux.systemctl.unit_path = name.format(linux.folder)
    with pytest.raises(ServiceRefused, match="where HOME and XDG_CONFIG_HOME lead"):
        linux.agent().install(ORDER)
    assert not linux.home.exists()


def test_a_masked_unit_is_refused(linux: Linux) -> None:
    """`systemctl mask` is a wish, too; the way back is named."""
    linux.folder.mkdir(parents=True)
    (linux.folder / UNIT).symlink_to(os.devnull)
    with pytest.raises(ServiceRefused, match=f"{UNIT} is masked") as caught:
        linux.agent().install(ORDER)
    assert caught.value.hint == f"systemctl --user unmask {UNIT}"


def test_what_another_install_did_meanwhile_is_seen(linux: Linux, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is asked for while the folder's lock is held: who waited for it meets a changed world."""
    linux.agent().install(linux.activated)
    exclusively = files.exclusively

    def after_another(folder: Path) -> Any:
        monkeypatch.setattr(files, "exclusively", exclusively)
        linux.agent().install(ORDER)
        linux.changes()
        return exclusively(folder)

    monkeypatch.setattr(files, "exclusively", after_another)
    linux.agent().install(Order(("/new/veloxquantd",)))
    assert linux.changes() == [f"stop {UNIT}", "daemon-reload", f"start {UNIT}"]


def test_an_administrators_unit_is_not_removed(linux: Linux) -> None:
    """One of the same name in /etc goes on running; an install stands before it, and says so."""
    linux.systemctl.elsewhere[UNIT] = "/etc/passwd"  # a file that is there
    linux.systemctl.active[UNIT] = 9
    assert "it runs from /etc/passwd" in linux.agent().state().warnings[0]
    assert not linux.agent().uninstall().changed
    assert linux.systemctl.active == {UNIT: 9}
    assert linux.changes() == []
    assert linux.agent().install(ORDER).notes == ("/etc/passwd is there as well, and is not used for this user",)
    assert linux.changes()[0] == f"stop {UNIT}"


def test_others_files_stay(linux: Linux) -> None:
    """Drop-ins, units of others and their links are no residue of ours."""
    linux.agent().install(linux.activated)
    others = [f"{UNIT}.d/mine.conf", "other.service", "default.target.wants/other.service"]
    for name in others:
        (linux.folder / name).parent.mkdir(exist_ok=True)
        (linux.folder / name).write_text("x")
    linux.agent().uninstall()
    assert sorted(tree(linux.folder)) == sorted(str(linux.folder / name) for name in others)


def test_a_unit_whose_file_is_gone_is_stopped_and_its_links_go(linux: Linux) -> None:
    """As after somebody has removed the files by hand: systemd still runs it, and links lead nowhere."""
    linux.agent().install(linux.activated)
    (linux.folder / UNIT).unlink()
    (linux.folder / SOCKET_UNIT).unlink()
    assert "a unit that is not there any more" in linux.agent().state().warnings[0]
    assert linux.agent().uninstall().changed
    assert (tree(linux.home), linux.systemctl.active) == ({}, {})


def test_stop_start_restart(linux: Linux) -> None:
    """Stop takes the socket, too; restart leaves it listening."""
    linux.agent().install(linux.activated)
    first = linux.systemctl.active[UNIT]
    assert linux.agent().start().summary == f"already running: pid {first}"
    linux.changes()
    assert linux.agent().restart().summary == f"running: pid {first + 1}"
    assert linux.changes() == [f"stop {UNIT}", f"start {UNIT}"]
    linux.agent().stop()
    assert linux.changes() == [STOP_BOTH]
    assert not linux.agent().stop().changed
    linux.agent().start()
    assert linux.changes() == [f"start {SOCKET_UNIT} {UNIT}"]
    linux.agent().stop()
    assert linux.agent().install(linux.activated).changed
    assert set(linux.systemctl.active) == {UNIT, SOCKET_UNIT}


def test_orders_are_no_crashes(linux: Linux) -> None:
    """Every start counts towards StartLimitBurst; a user may restart as often as they like all the same."""
    linux.agent().install(linux.activated)
    for _ in range(20):
        linux.agent().restart()
    assert set(linux.systemctl.active) == {UNIT, SOCKET_UNIT}


def test_a_socket_that_was_stopped_alone_comes_back(linux: Linux) -> None:
    """It cannot be opened under a daemon that listens, so the daemon is stopped first."""
    linux.agent().install(linux.activated)
    linux.systemctl.call(["--user", "stop", SOCKET_UNIT])
    assert f"{SOCKET_UNIT} does not listen" in linux.agent().state().warnings[-1]
    linux.agent().restart()
    assert set(linux.systemctl.active) == {UNIT, SOCKET_UNIT}
    linux.systemctl.call(["--user", "stop", SOCKET_UNIT])
    assert linux.agent().install(linux.activated).changed
    assert set(linux.systemctl.active) == {UNIT, SOCKET_UNIT}


def test_a_unit_that_was_not_read_is_read_before_a_start(linux: Linux) -> None:
    """As after an edit by hand."""
    linux.agent().install(ORDER)
    linux.agent().stop()
    linux.changes()
    (linux.folder / UNIT).write_text(f"[Service]\nExecStart={PROGRAM} --log-level debug\n")
    linux.agent().start()
    assert linux.changes() == ["daemon-reload", f"start {UNIT}"]


def test_what_does_not_start_is_an_error(linux: Linux) -> None:
    """Systemd says that the job failed; the message has the words and where to read on."""
    linux.systemctl.ends_with = 2
    with pytest.raises(ServiceFailed, match=f"start {UNIT}: Job for {UNIT} failed") as caught:
        linux.agent().install(ORDER)
    assert f"journalctl --user -u {UNIT}" in caught.value.hint
    state = linux.agent().state()
    assert (state.running, state.last_exit) == (False, "2")
    assert any("it failed (exit-code)" in one for one in state.warnings)
    assert linux.agent().uninstall().changed
    assert linux.systemctl.failed == {}


@pytest.mark.parametrize("verb", ["start", "restart"])
def test_what_is_not_installed_is_not_started(linux: Linux, verb: str) -> None:
    """The next step is named."""
    with pytest.raises(ServiceRefused) as caught:
        getattr(linux.agent(), verb)()
    assert caught.value.hint == "veloxquantctl service install"


def test_the_state_of_a_healthy_agent(linux: Linux, tmp_path: Path) -> None:
    """Installed, loaded, running, listening, and nothing to warn of."""
    program = tmp_path / "veloxquantd"
    program.touch(mode=0o755)
    linux.agent().install(Order((str(program),), linux.activated.activated))
    state = linux.agent().state()
    assert (state.loaded, state.running, state.pid) == (True, True, linux.systemctl.active[UNIT])
    assert (state.last_exit, state.listening, state.warnings) == (None, True, ())
    assert state.installed is not None
    assert state.installed.socket_unit == linux.folder / SOCKET_UNIT


@pytest.mark.parametrize(
    ("wreck", "warning"),
    [
        (lambda linux: (linux.folder / "default.target.wants" / UNIT).unlink(), "disabled, so it does not start"),
        (lambda linux: (linux.folder / UNIT).write_text(f"[Service]\nExecStart={PROGRAM}\n"), "has not read the unit"),
        (lambda _: None, f"{PROGRAM} is not there any more"),
    ],
    ids=["disabled", "edited", "program gone"],
)
def test_what_is_wrong_is_said(linux: Linux, wreck: Any, warning: str) -> None:
    """Each state that a user should mend has its sentence."""
    linux.agent().install(ORDER)
    wreck(linux)
    assert any(warning in one for one in linux.agent().state().warnings)


@pytest.mark.parametrize(
    "words",
    [
        "Failed to connect to bus: No medium found",
        "System has not been booted with systemd as init system (PID 1). Can't operate.",
    ],
)
def test_without_a_user_manager_nothing_is_written(linux: Linux, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container: the error says so, has systemd's words, and what to do instead."""
    linux.systemctl.no_manager = words
    monkeypatch.setattr("os.path.isdir", lambda _: False)
    monkeypatch.setattr("os.path.exists", lambda _: False)
    with pytest.raises(ServiceUnavailable) as caught:
        linux.agent().install(ORDER)
    assert words in caught.value.message
    assert "container" in caught.value.hint
    assert not linux.home.exists()


@pytest.mark.parametrize(
    ("private", "hint"),
    [(True, f"export XDG_RUNTIME_DIR=/run/user/{os.getuid()}"), (False, f"loginctl enable-linger {os.getuid()}")],
)
def test_a_session_that_does_not_see_its_manager_is_told_how(
    linux: Linux, private: bool, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under su or sudo the manager may run, and the shell does not know where."""
    linux.systemctl.no_manager = "Failed to connect to bus: No medium found"
    monkeypatch.setattr("os.path.isdir", lambda _: True)
    monkeypatch.setattr("os.path.exists", lambda _: private)
    with pytest.raises(ServiceUnavailable) as caught:
        linux.agent().state()
    assert hint in caught.value.hint


def test_a_manager_that_goes_meanwhile_is_said(linux: Linux) -> None:
    """A logout between the look and the order."""
    agent = linux.agent()
    show = linux.systemctl.call

    def logged_out(words: list[str]) -> tuple[int, str, str]:
        if words[1] == "daemon-reload":
            linux.systemctl.no_manager = "Failed to connect to bus: No such file or directory"
        return show(words)

    linux.systemctl.call = logged_out  # type: ignore[method-assign]
    with pytest.raises(ServiceUnavailable, match="Failed to connect"):
        agent.install(ORDER)


def test_nothing_to_remove_is_no_change(linux: Linux) -> None:
    """Without a folder none is made; with an empty one nothing is done."""
    assert not linux.agent().uninstall().changed
    assert not linux.home.exists()
    linux.folder.mkdir(parents=True)
    assert not linux.agent().uninstall().changed
    assert linux.changes() == []


def test_without_systemctl_there_is_a_next_step(tmp_path: Path) -> None:
    """As on an Alpine container."""
    with pytest.raises(ServiceUnavailable, match="no systemctl on PATH") as caught:
        find({"PATH": str(tmp_path), "HOME": str(tmp_path)}, "linux")
    assert "veloxquantd" in caught.value.hint


@pytest.mark.parametrize(("platform", "env"), [("darwin", {}), ("linux", {"SUDO_USER": "anna"})])
def test_root_is_not_the_user(platform: str, env: dict[str, str]) -> None:
    """With sudo the agent would be root's; the same command without it is the way."""
    with pytest.raises(ServiceRefused, match="this is root") as caught:
        find({"HOME": "/root", "PATH": "/usr/bin", **env}, platform, uid=0)
    assert "without sudo" in caught.value.hint


def test_a_preview_changes_nothing(linux: Linux) -> None:
    """It shows what `install` writes, byte for byte, and how that is loaded."""
    preview = linux.agent().preview(linux.activated)
    assert (linux.systemctl.calls, tree(linux.home)) == ([], {})
    linux.agent().install(linux.activated)
    assert preview.files == {linux.folder / unit: (linux.folder / unit).read_text() for unit in (SOCKET_UNIT, UNIT)}
    assert preview.commands == tuple(f"systemctl --user {line}" for line in LOAD_BOTH)
