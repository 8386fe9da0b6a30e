"""The command line as a whole: flags anywhere, help everywhere, exit codes, errors that say what to do next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant import __version__
from veloxquant.ctl import main as program
from veloxquant.ctl.main import COMMANDS, split
from veloxquant.errors import AlreadyRunning, NotAnswering, NotRunning, ProtocolUnsupported, SocketRefused
from veloxquant.wire import answers

if TYPE_CHECKING:
    from veloxquant.client import FakeTransport

Run = Callable[..., Any]
HELLO = answers.Hello(server="veloxquant", version="0.1.0", protocol=1, capabilities=(), pid=7, generation=3)


def test_help_without_a_command(ctl: Run) -> None:
    """`--help` lists every command on stdout and ends well; no command at all is wrong usage, said on stderr."""
    shown = ctl("--help")
    assert shown.code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in shown.out
    bare = ctl()
    assert (bare.code, bare.out) == (2, "")
    assert "commands:" in bare.err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_and_version(ctl: Run, command: str) -> None:
    """`COMMAND --help` and `COMMAND --version` answer, wherever one stands."""
    shown = ctl(command, "--help")
    assert shown.code == 0
    assert shown.out.startswith(f"usage: veloxquantctl {command}")
    version = ctl(command, "--version")
    assert version.code == 0
    assert __version__ in version.out


@pytest.mark.parametrize(
    ("word", "meant"), [("plam", "plan"), ("stauts", "status"), ("docter", "doctor"), ("completions", "completion")]
)
def test_an_unknown_command_gets_one_suggestion(ctl: Run, word: str, meant: str) -> None:
    """A slip of the finger is answered with the word that comes closest."""
    done = ctl(word)
    assert done.code == 2
    assert f"did you mean {meant}?" in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("plan", "--contxt", "5"), "--context"),
        (("plan", "--model", "x", "--objective", "memori"), "memory"),
        (("config", "shwo"), "show"),
        (("completion", "bsh"), "bash"),
        (("plan", "--working-sett=5GiB"), "--working-set"),
    ],
)
def test_an_unknown_word_gets_one_suggestion(ctl: Run, words: tuple[str, ...], meant: str) -> None:
    """Flags and choices, too."""
    done = ctl(*words)
    assert done.code == 2
    assert f"did you mean {meant}?" in done.err


def test_flags_may_stand_before_and_after_the_command(ctl: Run, fake: FakeTransport) -> None:
    """`--json status` and `status --json` are the same; a flag's value is never taken for the command."""
    fake.answers["hello"] = HELLO
    before = ctl("--json", "--socket", "/run/x.sock", "version")
    after = ctl("version", "--socket=/tmp/x.sock", "--json")
    assert before == after
    assert json.loads(before.out)["daemon"]["pid"] == 7
    assert split(["--timeout", "plan", "status", "--json"]) == (["--timeout", "plan"], "status", ["--json"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotRunning("nobody", hint="start one"), 3),
        (NotAnswering("silent"), 4),
        (ProtocolUnsupported("another protocol"), 4),
        (SocketRefused("not ours"), 2),
        (AlreadyRunning("locked"), 75),
        (KeyError("our own mistake"), 5),
    ],
)
def test_each_error_has_its_exit_code(ctl: Run, fake: FakeTransport, error: Exception, code: int) -> None:
    """Scripts can rely on the code; people get a sentence on stderr and nothing on stdout."""

    def fail(_params: dict[str, Any]) -> None:
        raise error

    fake.answers["status"] = fail
    done = ctl("status")
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")


def test_an_interrupt_is_130(ctl: Run, fake: FakeTransport) -> None:
    """Ctrl-C ends without a traceback."""

    def interrupt(_params: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    fake.answers["status"] = interrupt
    assert ctl("status").code == 130


def test_errors_are_json_when_json_is_asked(ctl: Run) -> None:
    """One object with a schema on stdout, stderr silent: also for wrong usage, also before the command is known."""
    for words, name, field in (
        (("--json", "plam"), "invalid_params", None),
        (("plan", "--json"), "invalid_params", "--model"),
        (("plan", "--json", "--model", "/nowhere/at/all", "--no-daemon"), "model_not_found", "model.path"),
        (("status", "--json", "--no-daemon"), "not_running", None),
    ):
        done = ctl(*words)
        shown = json.loads(done.out)
        assert shown["schema"] == "veloxquant.error/1"
        assert (shown["error"]["name"], shown["error"]["field"]) == (name, field)
        assert shown["error"]["exit_code"] == done.code
        assert shown["error"]["hint"]
        assert done.err == ""


@pytest.mark.parametrize(
    ("words", "name", "field"),
    [
        ((), "invalid_params", None),
        (("daemon", "--nonsense"), "invalid_params", None),
        (("daemon", "--socket", "/" + "x" * 200), "socket_refused", "socket.path"),
        (("plan", "--context"), "invalid_params", "--context"),
        (("completion", "tcsh"), "invalid_params", None),
    ],
)
def test_every_error_is_json_when_json_is_asked(ctl: Run, words: tuple[str, ...], name: str, field: str | None) -> None:
    """Also without a command, and for the daemon in the foreground: one object with name, hint and field."""
    done = ctl(*words, "--json")
    error = json.loads(done.out)["error"]
    assert (done.code, done.err) == (2, "")
    assert (error["name"], error["field"], error["exit_code"]) == (name, field, 2)
    assert error["hint"]


def test_the_version_flag_is_json_when_json_is_asked(ctl: Run) -> None:
    """It gives what the version command gives."""
    shown = [ctl(*words) for words in (("--version", "--json"), ("--json", "plan", "--version"), ("version", "--json"))]
    assert {done.code for done in shown} == {0}
    assert len({done.out for done in shown}) == 1
    assert json.loads(shown[0].out)["veloxquant"] == __version__


def test_colour_only_where_it_is_wanted(ctl: Run, fake: FakeTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never into a pipe, always when told, and neither NO_COLOR nor TERM=dumb stops an explicit `always`."""
    fake.answers["status"] = NotRunning("nobody", hint="start one")
    assert "\033[" not in ctl("status").err
    assert "\033[" in ctl("status", "--color", "always").err
    assert "\033[" in ctl("--color=always", "status").err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for variable, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(variable, value)
        assert "\033[" not in ctl("status").err
        monkeypatch.delenv(variable)


def test_a_closed_pipe_is_no_error(ctl: Run, fake: FakeTransport) -> None:
    """`veloxquantctl ... | head -1` ends quietly: no traceback, no complaint at exit."""
    code = "import sys; from veloxquant.ctl.main import main; sys.exit(main(['completion', 'bash']))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_closed_streams_are_no_error() -> None:
    """Started with descriptors 0, 1 and 2 closed, nothing is opened in their place and the exit code still speaks."""
    code = (
        "import os, sys; from veloxquant.ctl.main import main\n"
        "status = [main(['socket']), main(['socket', '--json']), main(['nonsense']), main(['--help'])]\n"
        "null = os.stat(os.devnull).st_rdev\n"
        "nowhere = all(os.fstat(number).st_rdev == null for number in (0, 1, 2))\n"
        "sys.exit(0 if nowhere and status == [0, 0, 2, 0] else 1)"
    )
    shell = 'exec "$0" -c "$1" <&- >&- 2>&-'
    done = subprocess.run(["/bin/sh", "-c", shell, sys.executable, code], check=False, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize("words", [("socket",), ("socket", "--json"), ("nonsense", "--json"), ("--help",)])
def test_an_answer_that_cannot_be_written_is_an_error(words: tuple[str, ...]) -> None:
    """A full disk behind stdout: one sentence on stderr, never a traceback and never a success."""
    code = f"import sys; from veloxquant.ctl.main import main; sys.exit(main({list(words)!r}))"
    reader, writer = os.pipe()
    # Writing to the reading end fails with EBADF, on every platform: a stand-in for /dev/full.
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=reader,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},  # argparse forgives a --help that fails at once
        check=False,
        timeout=60,
    )
    os.close(reader)
    os.close(writer)
    assert done.returncode == 5
    first, *rest = done.stderr.decode().splitlines()
    assert first.startswith("error: the answer cannot be written: ")
    assert rest == ["  next: send it somewhere else"]


def test_our_own_mistakes_say_where_on_demand(ctl: Run, fake: FakeTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """An internal error is one sentence; VELOXQUANT_TRACEBACK=1 shows the rest."""

    def fail(_params: dict[str, Any]) -> None:
        raise ZeroDivisionError("in the example")

    fake.answers["status"] = fail
    assert "ZeroDivisionError: in the example" in ctl("status").err
    monkeypatch.setenv("VELOXQUANT_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        program.main(["status"])


def test_help_loads_neither_engine_nor_planner() -> None:
    """What makes `--help` quick: no msgspec, no planner, no asyncio, no mlx is imported for it."""
    code = (
        "import sys\nfrom veloxquant.ctl.main import main\nmain(['--help'])\n"
        "print([m for m in ('msgspec','asyncio','mlx','mlx_lm','psutil','veloxquant.planner','veloxquant.client') "
        "if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"
