"""The agent under launchd, against a stand-in for launchctl: installed once, whatever was there before."""

from __future__ import annotations

import errno
import os
import plistlib
import re
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from service_kit import GUI, PROGRAM, USER, tree

from veloxquant.errors import ServiceFailed, ServiceRefused, ServiceUnavailable
from veloxquant.service.values import LABEL, Order

if TYPE_CHECKING:
    from service_kit import Mac

    from veloxquant.service.command import Answer

ORDER = Order((PROGRAM,))


def test_an_installation_is_written_and_loaded(mac: Mac) -> None:
    """The file that was ordered, readable and written by nobody else, loaded where the session at the screen is."""
    done = mac.agent().install(ORDER)
    assert done.changed
    assert mac.written()["ProgramArguments"] == [PROGRAM]
    assert mac.path.stat().st_mode & 0o777 == 0o644
    assert mac.job()["path"] == str(mac.path)
    assert done.commands == (f"launchctl bootstrap {GUI} {mac.path}",)


def test_r39_an_unchanged_plist_is_not_registered_again(mac: Mac) -> None:
    """The second installation changes nothing: neither the file, nor the job, nor its process."""
    mac.agent().install(ORDER)
    before, facts = dict(mac.job()), mac.path.stat()
    mac.changes()
    done = mac.agent().install(ORDER)
    assert not done.changed
    assert mac.changes() == []
    assert mac.job() == before
    assert (mac.path.stat().st_ino, mac.path.stat().st_mtime_ns) == (facts.st_ino, facts.st_mtime_ns)


@pytest.mark.parametrize("word", ["disabled", "true"])
def test_r39_fifty_rounds_leave_nothing(mac: Mac, word: str) -> None:
    """After 50 installations and removals of a job that is slow to go, nothing is left, on the disk or loaded."""
    mac.state.update(linger=3, settle=2, disabled_word=word)
    mac.path.parent.mkdir(parents=True)
    mac.agent().crash_log.parent.mkdir(parents=True)
    before = tree(mac.home)
    for number in range(50):
        mac.agent().install(Order((f"{PROGRAM}{number % 3}",), activated=mac.home / "s" / "d.sock"))
        mac.agent().crash_log.write_text("Traceback")  # launchd makes it
        assert len(mac.state["jobs"]) == 1
        mac.agent().uninstall()
        assert mac.state["jobs"] == {}
    assert tree(mac.home) == before
    assert not mac.agent().uninstall().changed


def test_an_upgrade_of_the_program_needs_no_installation(mac: Mac, tmp_path: Path) -> None:
    """The file names the link, so that a link which leads to the next version is still the same file."""
    for version in ("1.0", "2.0"):
        cellar = tmp_path / "Cellar" / "veloxquant" / version / "bin"
        cellar.mkdir(parents=True)
        (cellar / "veloxquantd").touch(mode=0o755)
        link = tmp_path / "bin" / "veloxquantd"
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(cellar / "veloxquantd")
        assert mac.agent().install(Order((str(link),))).changed == (version == "1.0")
    assert mac.written()["ProgramArguments"] == [str(link)]


def test_a_program_that_has_moved_replaces_the_loaded_one(mac: Mac) -> None:
    """The old job is unloaded, waited for, and the new file loaded in its place."""
    mac.state.update(linger=4)
    mac.agent().install(ORDER)
    mac.changes()
    mac.agent().install(Order(("/new/veloxquantd",)))
    assert mac.changes() == ["bootout", "bootstrap"]
    assert mac.job()["content"]["ProgramArguments"] == ["/new/veloxquantd"]


@pytest.mark.parametrize("settle", [1, 20])
@pytest.mark.parametrize("code", [5, 37])
def test_a_label_that_is_slow_to_go_is_waited_for(mac: Mac, settle: int, code: int) -> None:
    """Launchd refuses a label for some seconds after it has let go of it: that is no failure."""
    mac.agent().install(ORDER)
    mac.state.update(linger=7, settle=settle, busy_code=code)
    mac.agent().install(Order(("/new/veloxquantd",)))
    assert mac.job()["content"]["ProgramArguments"] == ["/new/veloxquantd"]
    assert sum(mac.waited) < 20


def test_a_job_that_never_goes_is_an_error_and_the_old_file_stays(mac: Mac) -> None:
    """After 20 s the user is told, and what is loaded still came from the file that is there."""
    mac.agent().install(ORDER)
    mac.state.update(linger=1000)
    with pytest.raises(ServiceFailed, match="does not let go of"):
        mac.agent().install(Order(("/new/veloxquantd",)))
    assert sum(mac.waited) == pytest.approx(20)
    assert mac.written()["ProgramArguments"] == [PROGRAM]
    assert [path.name for path in mac.path.parent.iterdir()] == [mac.path.name]


def test_an_old_plist_that_was_loaded_by_hand_is_replaced(mac: Mac) -> None:
    """One filled in by hand from an earlier template and loaded with `launchctl load`, running another program."""
    mac.path.parent.mkdir(parents=True)
    old = {"Label": LABEL, "ProgramArguments": ["/old/veloxquantd"], "EnvironmentVariables": {}, "RunAtLoad": True}
    mac.path.write_bytes(plistlib.dumps(old))
    mac.launchctl.call(["load", str(mac.path)])
    mac.agent().install(ORDER)
    assert mac.job()["content"]["ProgramArguments"] == [PROGRAM]


def test_a_file_that_is_as_ordered_with_another_program_loaded_is_loaded_anew(mac: Mac) -> None:
    """The file alone does not say what runs."""
    mac.agent().install(ORDER)
    mac.job()["content"]["ProgramArguments"] = ["/old/veloxquantd"]
    mac.changes()
    mac.agent().install(ORDER)
    assert mac.changes() == ["bootout", "bootstrap"]
    assert mac.job()["content"]["ProgramArguments"] == [PROGRAM]


def test_a_job_from_another_file_is_replaced_and_the_file_named(mac: Mac, tmp_path: Path) -> None:
    """Launchd would load it again at the next login, so the user hears of it."""
    other = tmp_path / "other.plist"
    other.write_bytes(plistlib.dumps({"Label": LABEL, "ProgramArguments": [PROGRAM], "EnvironmentVariables": {}}))
    mac.launchctl.call(["bootstrap", GUI, str(other)])
    done = mac.agent().install(ORDER)
    assert mac.job()["path"] == str(mac.path)
    assert str(other) in done.notes[0]


def test_a_plist_without_a_job_is_loaded(mac: Mac) -> None:
    """As after a login that launchd refused it at."""
    mac.agent().install(ORDER)
    mac.state["jobs"].clear()
    assert mac.agent().install(ORDER).changed
    assert mac.job()["pid"] is not None


def test_a_job_without_a_plist_is_written_and_loaded_anew(mac: Mac) -> None:
    """As after somebody has removed the file by hand."""
    mac.agent().install(ORDER)
    mac.path.unlink()
    mac.agent().install(ORDER)
    assert mac.path.exists()
    mac.path.unlink()
    assert mac.agent().uninstall().changed
    assert mac.state["jobs"] == {}


def test_an_installation_that_was_killed_is_finished_by_the_next(mac: Mac) -> None:
    """Wherever it was killed, what is loaded came from the file that is there, or nothing is loaded."""
    mac.agent().install(ORDER)
    new = Order(("/new/veloxquantd",), environment={"VELOXQUANT_RECORDS": "/r"})
    for verb in ("bootout", "bootstrap"):
        agent = mac.agent()
        setattr(agent.launchctl, verb, _killed)
        with pytest.raises(KeyboardInterrupt):
            agent.install(new)
        assert not mac.state["jobs"] or mac.job()["content"] == mac.written()
        assert [path.name for path in mac.path.parent.iterdir()] == [mac.path.name]
    assert mac.agent().install(new).changed
    assert mac.job()["content"] == mac.written()
    assert mac.written()["EnvironmentVariables"]["VELOXQUANT_RECORDS"] == "/r"


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("code", [112, 125])
def test_over_ssh_the_background_session_takes_it(mac: Mac, code: int) -> None:
    """Without a session at the screen there is no gui domain; the user is told to install again after a login."""
    mac.state["domains"][GUI] = code
    done = mac.agent().install(ORDER)
    assert mac.job(USER)["path"] == str(mac.path)
    assert "no session at the screen" in done.notes[0]
    assert mac.agent().state().target == f"{USER}/{LABEL}"
    assert not mac.agent().install(ORDER).changed


def test_after_a_login_at_the_screen_it_moves_there(mac: Mac) -> None:
    """An agent of the background session is unloaded there: two would fight for the socket."""
    mac.state["domains"][GUI] = 112
    mac.agent().install(ORDER)
    mac.state["domains"][GUI] = 0
    mac.agent().install(ORDER)
    assert list(mac.state["jobs"]) == [f"{GUI}/{LABEL}"]


def test_an_agent_in_both_domains_is_seen_and_mended(mac: Mac) -> None:
    """As launchd may load it over ssh and once more at the screen."""
    mac.agent().install(ORDER)
    mac.state["jobs"][f"{USER}/{LABEL}"] = dict(mac.job())
    assert "loaded twice" in " ".join(mac.agent().state().warnings)
    mac.agent().install(ORDER)
    assert list(mac.state["jobs"]) == [f"{GUI}/{LABEL}"]


def test_without_any_domain_nothing_is_written(mac: Mac) -> None:
    """As for a user who is not logged in: the error says what to do, and no file is left behind."""
    mac.state["domains"].clear()
    with pytest.raises(ServiceUnavailable, match="neither gui/501 nor user/501") as caught:
        mac.agent().install(ORDER)
    assert "without sudo" in caught.value.hint
    assert not mac.home.exists()


@pytest.mark.parametrize("word", ["disabled", "true"])
@pytest.mark.parametrize("code", [119, 5])
def test_a_disabled_label_is_enabled(mac: Mac, word: str, code: int) -> None:
    """Somebody disabled it long ago, which outlives the file; to install it is to want it."""
    mac.state.update(disabled={LABEL: True}, disabled_word=word, disabled_code=code)
    mac.agent().install(ORDER)
    assert mac.changes() == ["enable", "bootstrap"]
    assert mac.job()["pid"] is not None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"not a plist", "no property list"),
        (b"", "no property list"),
        (plistlib.dumps({"Label": "com.other", "ProgramArguments": ["/x"]}), "its Label is 'com.other'"),
        (plistlib.dumps({"Label": LABEL}), "it names no program"),
        (plistlib.dumps(["a"]), "without a dictionary"),
    ],
    ids=["text", "empty", "other label", "no program", "a list"],
)
def test_a_file_that_is_not_ours_is_refused_and_left(mac: Mac, content: bytes, why: str) -> None:
    """Neither written over nor removed: the reason, and what to do, are said."""
    mac.path.parent.mkdir(parents=True)
    mac.path.write_bytes(content)
    for call in (lambda: mac.agent().install(ORDER), mac.agent().uninstall):
        with pytest.raises(ServiceRefused, match=why) as caught:
            call()
        assert "move it away" in caught.value.hint
    assert mac.path.read_bytes() == content
    assert mac.changes() == []


def test_a_link_is_refused_and_left(mac: Mac, tmp_path: Path) -> None:
    """Whoever keeps agents as links to files elsewhere looks after them."""
    mac.agent().install(ORDER)
    kept = mac.path.rename(tmp_path / "dotfiles.plist")
    mac.path.symlink_to(kept)
    with pytest.raises(ServiceRefused, match="symbolic link"):
        mac.agent().install(Order(("/new/veloxquantd",)))
    with pytest.raises(ServiceRefused, match="symbolic link"):
        mac.agent().uninstall()
    assert mac.path.is_symlink()
    assert kept.exists()


def test_a_home_folder_that_is_a_link_is_no_trouble(mac: Mac, tmp_path: Path) -> None:
    """The file names the home as the user does."""
    real = tmp_path / "volume"
    real.mkdir()
    mac.home.symlink_to(real)
    mac.agent().install(ORDER)
    assert mac.written()["StandardErrorPath"].startswith(str(mac.home))
    mac.job()["path"] = str(mac.path.resolve())  # as launchctl may show it
    assert not mac.agent().install(ORDER).changed
    mac.agent().uninstall()
    assert tree(real) == {}


def test_nothing_to_remove_is_no_change(mac: Mac) -> None:
    """Without a folder none is made."""
    assert not mac.agent().uninstall().changed
    assert not mac.home.exists()


def test_a_socket_that_launchd_leaves_behind_is_removed(mac: Mac, short_folder: Path) -> None:
    """With the agent it belonged to; nobody listens on it any more."""
    path = short_folder / "s" / "d.sock"
    mac.agent().install(Order((PROGRAM,), activated=path))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    mac.agent().uninstall()
    assert not path.exists()


def test_a_stale_job_is_loaded_anew_by_start(mac: Mac) -> None:
    """One that is not what the file says is unloaded first."""
    mac.agent().install(ORDER)
    mac.job()["content"]["ProgramArguments"] = ["/old"]
    mac.changes()
    mac.agent().start()
    assert mac.changes() == ["bootout", "bootstrap"]


def test_an_order_that_launchd_refuses_has_its_words(mac: Mac) -> None:
    """A kickstart that fails for a reason of launchd's own."""
    mac.agent().install(ORDER)
    mac.state["script"] = [["kickstart", 1, "Operation not permitted"]]
    with pytest.raises(ServiceFailed, match="Operation not permitted"):
        mac.agent().restart()


def test_others_files_stay(mac: Mac) -> None:
    """Removal takes the agent's files and no others."""
    mac.agent().install(ORDER)
    (mac.path.parent / "com.other.plist").write_bytes(b"other")
    own_log = mac.home / "Library" / "Logs" / "veloxquant" / "daemon.log"
    own_log.parent.mkdir(parents=True)
    own_log.write_text("{}")
    mac.agent().uninstall()
    assert sorted(Path(path).name for path in tree(mac.home)) == ["com.other.plist", "daemon.log"]


def test_a_folder_that_cannot_be_written_stops_nothing(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded goes on running, and the file is named. EACCES is played: root may write everywhere."""
    mac.agent().install(ORDER)
    monkeypatch.setattr("veloxquant.service.files.tempfile.mkstemp", _denied)
    with pytest.raises(ServiceRefused, match=f"{LABEL}.plist cannot be written: Permission denied"):
        mac.agent().install(Order(("/new/veloxquantd",)))
    assert mac.job()["content"]["ProgramArguments"] == [PROGRAM]


def _denied(**_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_file_in_place_of_the_folder_is_an_error(mac: Mac) -> None:
    """Nothing is guessed at, the path is named."""
    mac.path.parent.parent.mkdir(parents=True)
    mac.path.parent.touch()
    with pytest.raises(ServiceRefused, match="LaunchAgents cannot be used"):
        mac.agent().install(ORDER)


def test_two_installations_at_once_are_one_after_the_other(mac: Mac) -> None:
    """Both end well, and what is loaded is what the file says."""
    mac.state.update(linger=2, settle=1)
    orders = [Order((f"/{number}/veloxquantd",)) for number in range(6)]
    failures: list[BaseException] = []

    def install(order: Order) -> None:
        try:
            mac.agent().install(order)
        except BaseException as error:  # noqa: BLE001 -- shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=install, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert mac.job()["content"] == mac.written()


def test_a_socket_of_launchd_gets_its_folder(mac: Mac) -> None:
    """Launchd makes no folders; the daemon takes none that others can look into."""
    path = mac.home / "Library" / "Application Support" / "veloxquant" / "d.sock"
    mac.agent().install(Order((PROGRAM,), activated=path))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert mac.agent().state().listening


def test_stop_start_restart(mac: Mac) -> None:
    """Stop unloads; start loads or starts; restart ends the process that runs."""
    mac.agent().install(ORDER)
    first = mac.job()["pid"]
    assert mac.agent().start().summary == f"already running: pid {first}"
    mac.agent().restart()
    second = mac.job()["pid"]
    assert second != first
    mac.agent().stop()
    assert mac.state["jobs"] == {}
    assert not mac.agent().stop().changed
    mac.changes()
    assert mac.agent().start().summary == f"running: pid {mac.job()['pid']}"
    assert mac.changes() == ["bootstrap"]
    mac.agent().stop()
    assert mac.agent().restart().changed


def test_start_wakes_a_loaded_job(mac: Mac) -> None:
    """As after the daemon was told to end over its socket: kickstart, and no new registration."""
    mac.agent().install(ORDER)
    mac.job().update(pid=None, state="not running", exit="0")
    mac.changes()
    mac.agent().start()
    assert mac.changes() == ["kickstart"]
    mac.job().update(pid=None, state="not running", exit="0")
    assert mac.agent().install(ORDER).summary.endswith("it did not run and was started")


def test_a_job_that_goes_while_it_is_started_is_loaded(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    """113 between the look and the kickstart: as after somebody else's bootout."""
    mac.agent().install(ORDER)
    agent, first = mac.agent(), mac.job()["pid"]
    kickstart = agent.launchctl.kickstart

    def too_late(domain: str, *, again: bool) -> Answer:
        mac.state["jobs"].clear()
        return kickstart(domain, again=again)

    monkeypatch.setattr(agent.launchctl, "kickstart", too_late)
    assert agent.restart().summary == f"running: pid {first + 1}"


def test_what_does_not_start_is_an_error_with_its_last_exit(mac: Mac) -> None:
    """Launchd takes the order and the program ends at once."""
    mac.agent().install(ORDER)
    mac.agent().stop()
    mac.state["ends_with"] = "78: EX_CONFIG"
    with pytest.raises(ServiceFailed, match="no process runs; it ended with 78: EX_CONFIG") as caught:
        mac.agent().start()
    assert str(mac.agent().crash_log) in caught.value.hint


@pytest.mark.parametrize("verb", ["start", "restart"])
def test_what_is_not_installed_is_not_started(mac: Mac, verb: str) -> None:
    """The next step is named."""
    with pytest.raises(ServiceRefused) as caught:
        getattr(mac.agent(), verb)()
    assert caught.value.hint == "veloxquantctl service install"


def test_the_state_of_a_healthy_agent(mac: Mac, tmp_path: Path) -> None:
    """Installed, loaded, running, and nothing to warn of."""
    program = tmp_path / "veloxquantd"
    program.touch(mode=0o755)
    mac.agent().install(Order((str(program),)))
    state = mac.agent().state()
    assert (state.target, state.loaded, state.running, state.pid) == (f"{GUI}/{LABEL}", True, True, mac.job()["pid"])
    assert (state.last_exit, state.listening, state.warnings) == (None, False, ())
    assert state.installed is not None
    assert state.installed.program == (str(program),)


def test_an_install_of_what_ends_at_once_says_so(mac: Mac) -> None:
    """For launchctl a job that is loaded is enough; a user hears after three seconds that nothing runs."""
    mac.state["ends_with"] = "78: EX_CONFIG"
    (note,) = mac.agent().install(ORDER).notes
    assert "no process runs yet; it ended with 78: EX_CONFIG" in note
    assert sum(mac.waited) == pytest.approx(3)


@pytest.mark.parametrize(
    ("wreck", "warning"),
    [
        (lambda mac: mac.state["jobs"].clear(), "installed and not loaded"),
        (lambda mac: mac.path.unlink(), "that is not there any more"),
        (lambda mac: mac.job().update(pid=None, exit="1", state="spawn scheduled"), "ended with 1 .*spawn scheduled"),
        (lambda mac: mac.job().update(pid=None, exit="2", state="spawn scheduled"), "veloxquantctl config check"),
        (lambda mac: mac.path.chmod(0o666), "others could change the file"),
        (lambda mac: mac.state["disabled"].update({LABEL: True}), "disabled, so it is not loaded"),
        (lambda mac: mac.job()["content"].update(ProgramArguments=["/old"]), "the loaded agent runs /old"),
        (lambda _: None, "/opt/tools/bin/veloxquantd cannot be executed"),
    ],
    ids=[
        "no job",
        "no file",
        "crashes",
        "misconfigured",
        "open to others",
        "disabled",
        "another program",
        "program gone",
    ],
)
def test_what_is_wrong_is_said(mac: Mac, wreck: Any, warning: str) -> None:
    """Each state that a user should mend has its sentence."""
    mac.agent().install(ORDER)
    wreck(mac)
    assert any(re.search(warning, one) for one in mac.agent().state().warnings)


def test_a_preview_changes_nothing(mac: Mac) -> None:
    """It shows what `install` writes, byte for byte, and how that is loaded."""
    preview = mac.agent().preview(ORDER)
    assert mac.state["calls"] == []
    assert tree(mac.home.parent) == {}
    mac.agent().install(ORDER)
    assert preview.files == {mac.path: mac.path.read_text()}
    assert preview.commands[-1] == f"launchctl bootstrap {GUI} {mac.path}"
