"""Plugins that would take our process down, met in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
from reliability.plugins import HOOK, head, sound

from veloxquant.methods.plugin import Plugin
from veloxquant.methods.probe import Limits, examine

LIMITS = Limits(import_s=1.5, hook_s=1.0, check_s=1.0)

HEAD = head("mine")

ASKING = """
import os, time
while True:
    time.sleep(0.1)
    for fd in range(3, 20):
        try:
            os.write(fd, b'{"stage": "import"}\\n')
        except OSError:
            pass
"""

MISBEHAVIOURS = {
    "leaves_at_import": ("import os\nos._exit(7)", "it ended the process (exit status 7) while it was imported"),
    "leaves_in_hook": (
        HEAD + "import os\n@hookimpl\ndef veloxquant_methods():\n    os._exit(0)",
        "it ended the process (exit status 0) in its hook",
    ),
    "kills_itself": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "it ended the process (SIGKILL) while it was imported",
    ),
    "exits_in_hook": (
        HEAD + "@hookimpl\ndef veloxquant_methods():\n    raise SystemExit(2)",
        "hook failed: it called sys.exit(2)",
    ),
    "interrupts": (
        "raise KeyboardInterrupt",
        "KeyboardInterrupt",
    ),
    "spins_at_import": ("while True: pass", "importing it took longer than 1.5 s"),
    "sleeps_in_hook": (
        HEAD + "import time\n@hookimpl\ndef veloxquant_methods():\n    time.sleep(60)",
        "its hook took longer than 1 s",
    ),
    "sleeps_in_planning": (
        HEAD + "    def fixed_bytes(self, variant, part):\n        import time; time.sleep(60)" + HOOK,
        "its planning functions took longer than 1 s",
    ),
    "ignores_signals": (
        "import signal, time\nfor s in (1, 2, 14, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)",
        "importing it took longer than 1.5 s",
    ),
    "floods_stdout": (
        "while True: print('x' * 1000)",
        "it wrote more than 64 KiB to its output while it was imported",
    ),
    "floods_and_passes": (
        HEAD + "import os, sys\nsys.stderr.write('x' * 100_000)" + HOOK,
        "it wrote more than 64 KiB to its output",
    ),
    "misspells_the_hook": (
        HEAD + "@hookimpl\ndef veloxquant_method():\n    return [Mine()]",
        "unknown hook 'veloxquant_method'",
    ),
    "takes_an_argument": (
        HEAD + "@hookimpl\ndef veloxquant_methods(registry):\n    return [Mine()]",
        "hook failed: PluginValidationError",
    ),
    "has_no_hook": (HEAD, "has no hook veloxquant_methods"),
    "returns_none": (HEAD + "@hookimpl\ndef veloxquant_methods(): pass", "has no hook veloxquant_methods that returns"),
    "does_not_parse": ("def (:", "import failed: SyntaxError"),
    "recurses": ("def f(): f()\nf()", "import failed: RecursionError"),
    "raises_from_str": (
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
        "import failed: E: (its text cannot be shown)",
    ),
    "carries_the_engine": (HEAD + "import mlx.core" + HOOK, "loading it imports mlx, which the planner must not carry"),
    "returns_nan": (
        HEAD + "    def key_bits(self, variant, part): return float('nan')" + HOOK,
        "mine mine8: key_bits() returned nan, not bits from 0 to 256",
    ),
    "changes_folder": (HEAD + "import os\nos.chdir('/')" + HOOK, "loading it changes the working folder"),
    "takes_signals": (
        HEAD + "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)" + HOOK,
        "loading it changes signal handlers",
    ),
    "changes_path": (HEAD + "import sys\nsys.path.insert(0, '/tmp')" + HOOK, "loading it changes sys.path"),
    "takes_stdout": (
        HEAD + "import io, sys\nsys.stdout = io.StringIO()" + HOOK,
        "loading it changes the standard streams",
    ),
    "starts_threads": (
        HEAD
        + "import threading, time\nfor _ in range(9): threading.Thread(target=time.sleep, args=(60,)).start()"
        + HOOK,
        "loading it changes the running threads",
    ),
    "changes_mask": (HEAD + "import os\nos.umask(0)" + HOOK, "loading it changes the file mode mask"),
    "changes_locale": (
        "import locale\nlocale.setlocale(locale.LC_NUMERIC, 'C.UTF-8')\n" + HEAD + HOOK,
        "loading it changes the locale",
    ),
    "changes_environment": (HEAD + "import os\nos.environ['PATH'] = '/'" + HOOK, "loading it changes the environment"),
    "replaces_json": (HEAD + "import json\njson.dumps = str" + HOOK, "loading it replaces json.dumps, which the whole"),
    "replaces_ours": (
        HEAD + "Method.fixed_bytes = lambda *_: 0" + HOOK,
        "loading it replaces veloxquant.methods.method.Method.fixed_bytes",
    ),
    "replaces_a_builtin": (
        HEAD + "import builtins\nbuiltins.oct = lambda _: 0" + HOOK,
        "loading it replaces builtins.oct",
    ),
    "leaves_a_child": (
        HEAD + "import os, time\nif not os.fork():\n    time.sleep(60)" + HOOK,
        "loading it leaves processes running",
    ),
    "takes_all_memory": (
        HEAD + "held = bytearray(10 * 10**9)" + HOOK,
        "import failed: MemoryError",
    ),
    "speaks_in_escapes": (
        HEAD + "    summary = '\\x1b[2J\\x07all is well'" + HOOK,
        "summary holds a line break or a control character: '\\x1b[2J",
    ),
    "fails_in_escapes": (
        "raise ValueError('\\x1b]0;title\\x07\\nsecond line')",
        "ValueError: \ufffd]0;title\ufffd second line",
    ),
    "asks_for_more_time": (
        ASKING,
        "importing it took longer than 1.5 s",
    ),
    "lies_into_the_pipe": (
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'[1]\\n')\n    except OSError: pass",
        "it wrote into the pipe that reports on it",
    ),
}


@pytest.fixture
def verdicts(plugin_module: Any) -> dict[str, Any]:
    """All of them and a good one, examined together."""
    plugins = [plugin_module(f"vqbad_{name}", source) for name, (source, _) in MISBEHAVIOURS.items()]
    plugins.append(plugin_module("vqgood", HEAD + HOOK))
    return dict(zip([*MISBEHAVIOURS, "good"], examine(plugins, LIMITS), strict=True))


def test_r27_every_misbehaviour_has_its_reason_and_the_good_plugin_passes(verdicts: dict[str, Any]) -> None:
    """Whatever a plugin does, this process and the other plugins go on, and the reason says what it did."""
    assert verdicts["good"].ok
    reasons = {name: verdicts[name].reason for name in MISBEHAVIOURS}
    assert {name: reason for name, reason in reasons.items() if MISBEHAVIOURS[name][1] not in reason} == {}
    assert not any(verdicts[name].ok for name in MISBEHAVIOURS)


def test_r27_nothing_a_plugin_started_outlives_its_probe(plugin_module: Any, short_folder: Any) -> None:
    """A child process that a plugin leaves behind ends with it."""
    note = short_folder / "pid"
    source = "import subprocess, pathlib, time\np = subprocess.Popen(['sleep', '60'])\n"
    source += f"pathlib.Path({str(note)!r}).write_text(str(p.pid))\ntime.sleep(60)"
    (verdict,) = examine([plugin_module("vqbad_spawns", source)], LIMITS)
    assert not verdict.ok
    pid = int(note.read_text())
    for _ in range(100):
        if _gone(pid):
            break
        time.sleep(0.02)
    assert _gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to an ancestor that asks for them")
@pytest.mark.parametrize("ending", ["time.sleep(60)", "pass"], ids=["hangs", "passes"])
def test_r27_a_daemon_that_a_plugin_starts_ends_with_its_probe(
    plugin_module: Any, short_folder: Any, ending: str
) -> None:
    """It forked twice and has a session of its own; it is found all the same, whatever its plugin does next."""
    note = short_folder / "pid"
    source = HEAD + (
        "import os, pathlib, time\n"
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    if not os.fork():\n"
        f"        pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n"
        "        time.sleep(60)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        f"while not os.path.exists({str(note)!r}): time.sleep(0.005)\n"
        f"{ending}"
    )
    (verdict,) = examine([plugin_module("vqbad_daemon", source + HOOK)], LIMITS)
    assert not verdict.ok
    wanted = "leaves processes running" if ending == "pass" else "importing it took longer"
    assert wanted in verdict.reason
    assert _gone(int(note.read_text()))


def test_a_plugin_is_not_shown_the_secrets_of_the_environment(
    plugin_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it could put into its reason, and so into answers and logs."""
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    monkeypatch.setenv("VELOXQUANT_TEST_KEY", "canary")
    source = "import os\nraise ValueError(' '.join(n for n in os.environ if n not in ('PATH', 'HOME')))"
    (verdict,) = examine([plugin_module("vqbad_telling", source)], LIMITS)
    assert verdict.reason.startswith("import failed: ValueError")
    assert "TOKEN" not in verdict.reason
    assert "KEY" not in verdict.reason


def _gone(pid: int) -> bool:
    """No process, or one that is dead and not yet collected by its new parent."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = f"/proc/{pid}/stat"
    if not os.path.exists(stat):  # noqa: PTH110 -- a special file
        return False
    with open(stat) as file:  # noqa: PTH123 -- a special file
        return file.read().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("name", ["json", "selectors", "veloxquant", "pytest"])
def test_a_module_of_another_name_holder_is_no_plugin(name: str) -> None:
    """An entry point that names the standard library, or anybody's package, finds no hook there."""
    (verdict,) = examine([Plugin("d", "p", name)], LIMITS)
    assert not verdict.ok
    assert "no hook veloxquant_methods" in verdict.reason


def test_r29_fifty_plugins_are_tried_out_by_one_process(plugin_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets its own verdict, in order, and Python starts once for all of them."""
    started: list[Any] = []
    really = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: started.append(args) or really(*args, **options))
    plugins = [
        plugin_module(f"vqmany{at}", "raise ValueError" if at % 10 == 3 else sound(f"m{at}")) for at in range(50)
    ]
    assert [verdict.ok for verdict in examine(plugins, LIMITS)] == [at % 10 != 3 for at in range(50)]
    assert len(started) == 1


def test_r29_one_of_many_that_ends_the_process_costs_its_neighbours_nothing(plugin_module: Any) -> None:
    """Those after it in the same process are tried out in another, and it is asked again alone."""
    sources = [sound(f"m{at}") for at in range(20)]
    for at in (0, 4, 5, 19):
        sources[at] = f"import os\nos._exit({at})"
    verdicts = examine([plugin_module(f"vqexit{at}", source) for at, source in enumerate(sources)], LIMITS)
    assert [verdict.ok for verdict in verdicts] == [at not in (0, 4, 5, 19) for at in range(20)]
    assert "exit status 19" in verdicts[19].reason


def test_r29_a_plugin_is_not_blamed_for_what_another_left(plugin_module: Any) -> None:
    """One that passes and arms a clock ends its neighbour, which passes alone."""
    sources = [sound(f"m{at}") for at in range(20)]
    sources[2] += "import faulthandler\nfaulthandler.dump_traceback_later(0.05, exit=True)\n"
    sources[3] += "import time\ntime.sleep(0.3)\n"
    verdicts = examine([plugin_module(f"vqclock{at}", source) for at, source in enumerate(sources)], LIMITS)
    assert [verdict.ok for verdict in verdicts] == [True] * 20


def test_a_module_that_does_not_exist_is_a_failed_import() -> None:
    """An entry point left behind by an uninstalled package."""
    (verdict,) = examine([Plugin("gone", "gone", "vq_no_such_module")], LIMITS)
    assert "No module named 'vq_no_such_module'" in verdict.reason


def test_without_an_interpreter_to_start_nothing_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe, no load: the plugin is refused and the caller goes on."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    (verdict,) = examine([Plugin("d", "p", "json")], LIMITS)
    assert not verdict.ok
    assert verdict.reason.startswith("it could not be tried out before loading: FileNotFoundError")


def test_no_plugins_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual case costs nothing."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert examine([], LIMITS) == ()


def test_a_helper_that_answers_for_too_few_answers_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which verdict is whose cannot be told then."""
    said = subprocess.CompletedProcess([], 0, stdout=b'[{"ok": true, "reason": "", "took_s": 0.1}]', stderr=b"")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    verdicts = examine([Plugin("d", "p", "json"), Plugin("d", "q", "json")], LIMITS)
    assert [(one.ok, one.reason) for one in verdicts] == [(False, "it could not be tried out before loading")] * 2
    assert [one.ok for one in examine([Plugin("d", "p", "json")], LIMITS)] == [True]
