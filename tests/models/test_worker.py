"""The worker as a process: whatever it does, the caller gets an answer within its limits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from veloxquant.models import bounded
from veloxquant.models.exchange import ProbeRequest, Traced, TraceRequest
from veloxquant.models.resolve import resolve
from veloxquant.models.trace import trace
from veloxquant.profiles import CacheLayer, ModelProfile

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


def run(code: str, **limits: Any) -> bounded.Outcome:
    """Run a Python program under the bounds; it finds its answer descriptor in sys.argv[1]."""
    asked = {"request": b"", "timeout_s": 10.0, "memory_limit_bytes": 512 * MIB, "env": dict(os.environ), **limits}
    return bounded.run([sys.executable, "-c", f"import os, sys, time\nfd = int(sys.argv[1])\n{code}"], **asked)


def test_what_is_written_to_the_descriptor_is_the_answer() -> None:
    """Standard output and error are not, however much goes there, and a long request arrives whole."""
    request = b"x" * MIB + b"\n"
    flood = "for _ in range(200): print('n' * 65536); print('e' * 65536, file=sys.stderr)\n"
    outcome = run(f"{flood}os.write(fd, str(len(sys.stdin.readline())).encode())", request=request)
    assert (outcome.answer, outcome.ended) == (str(len(request)).encode(), "")
    assert len(outcome.errors) <= 4096


def test_a_program_that_hangs_is_ended() -> None:
    """And what it had written before still counts."""
    outcome = run("os.write(fd, b'so far'); time.sleep(600)", timeout_s=0.5)
    assert (outcome.answer, outcome.ended) == (b"so far", "was ended after 0.5 s")


def test_a_program_that_takes_too_much_memory_is_ended() -> None:
    """By what it holds, not by what it reserves."""
    outcome = run("held = []\nwhile True: held.append(b'x' * 10**7); time.sleep(0.005)", memory_limit_bytes=128 * MIB)
    assert "bytes of memory, the limit is 134217728" in outcome.ended


def test_an_endless_answer_is_ended() -> None:
    """64 MiB are more than any answer."""
    assert "was ended after an answer of" in run("while True: os.write(fd, b'x' * 65536)").ended


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("sys.exit(7)", "exited with status 7"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("pass", ""),
    ],
)
def test_how_a_program_ended_is_said(code: str, ended: str) -> None:
    """Exit status or the signal's name."""
    assert run(code).ended == ended


def test_children_left_behind_are_ended_too() -> None:
    """They hold the answer descriptor open, and are not waited for."""
    code = "pid = os.fork()\nif pid: os.write(fd, str(pid).encode())\nelse: time.sleep(600)"
    outcome = run(code)
    assert outcome.ended == ""
    child = int(outcome.answer)
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if _is_zombie(child):
            return
        time.sleep(0.05)
    pytest.fail("the child still runs")


def _is_zombie(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return state.stdout.startswith("Z") or not state.stdout


def test_a_program_that_cannot_be_started_is_an_answer() -> None:
    """No exception."""
    outcome = bounded.run(["/no/such/program"], request=b"", timeout_s=1, memory_limit_bytes=MIB, env={})
    assert "could not be started" in outcome.ended


def request(config: dict[str, Any], factory: str = "", *labels: str, **limits: Any) -> TraceRequest:
    """A request for a trace, with a probe for each label."""
    probes = tuple(ProbeRequest(method="q", label=label, params={"bits": 8, "group": 32}) for label in labels)
    source = resolve(config=config)
    return TraceRequest(
        model_id="m",
        config_json=json.dumps(source.config),
        config_hash=source.config_hash,
        dtype="float16",
        factory=factory,
        probes=probes,
        **limits,
    )


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a package named mlx_lm with this code in its `utils` before the real one."""

    def install(code: str) -> None:
        (tmp_path / "mlx_lm").mkdir()
        (tmp_path / "mlx_lm" / "__init__.py").write_text("")
        (tmp_path / "mlx_lm" / "utils.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.mark.parametrize(
    ("code", "timeout_s", "died"),
    [
        ("import sys; sys.exit(7)", 30, "exited with status 7"),
        ("import os; os.kill(os.getpid(), 11)", 30, "was killed by SIGSEGV"),
        ("import time; time.sleep(600)", 2, "was ended after 2 s"),
        ("held = []\nwhile True: held.append(bytearray(10**7))", 30, "MemoryError|bytes of memory, the limit is"),
    ],
)
def test_an_engine_that_dies_is_an_answer(
    fake_engine: Any, tiny: dict[str, Any], code: str, timeout_s: float, died: str
) -> None:
    """While it is imported, the worst moment: exit, crash, hang, memory (refused to it, or seen by us first)."""
    fake_engine(code)
    found = trace(request(tiny, memory_limit_bytes=256 * MIB), timeout_s=timeout_s)
    assert (found.profile, found.failed) == (None, None)
    assert re.search(died, found.died or "")


def test_a_module_that_exits_when_imported_is_refused_by_name() -> None:
    """mlx-lm's olmo module calls sys.exit when its optional package is absent."""
    found = trace(request({"model_type": "olmo"}), timeout_s=30)
    assert found.failed is not None
    assert found.failed.kind == "not_supported"
    assert "'olmo' cannot be imported: SystemExit: 1" in found.failed.message


def test_a_probe_that_kills_the_worker_costs_only_itself(factories: None, tiny: dict[str, Any]) -> None:
    """The profile stands, the probe before and the one after are tried, the deadly ones say what they did."""
    found = trace(request(tiny, "engine_factory:deadly", "good", "crash", "exit", "also good"), timeout_s=60)
    assert found.profile is not None
    good, crash, exits, also_good = found.profile.probes
    assert good.packed == also_good.packed == (0, 1, 2, 3)
    assert "was killed by SIGSEGV" in str(crash.refused)
    assert "exited with status 9" in str(exits.refused)
    assert [probe.label for probe in found.profile.probes] == ["good", "crash", "exit", "also good"]
    assert found.died


def test_a_probe_that_hangs_leaves_the_others_untried(monkeypatch: pytest.MonkeyPatch, tiny: dict[str, Any]) -> None:
    """All time is gone, and each probe that was not tried says so."""
    layers = (CacheLayer(index=0, engine_class="KVCache", parts=()),)
    traced = Traced(profile=ModelProfile(model_id="m", layers=layers))
    outcome = bounded.Outcome(msgspec.json.encode(traced) + b"\n" + b'{"type":"pro', "was ended after 0.9 s")
    monkeypatch.setattr(bounded, "run", lambda *_, **__: outcome)
    found = trace(request(tiny, "any:thing", "hang", "good"), timeout_s=0.9)
    assert found.profile is not None
    hang, good = found.profile.probes
    assert hang.refused == "the trace was ended after 0.9 s during this probe"
    assert good.refused == "not tried: no time was left after hang"
    assert found.died


@pytest.mark.parametrize(
    ("factory", "refused"),
    [
        ("noisy", None),
        ("networked", "is not allowed while tracing"),
        ("unpickling", "pickle.find_class is not allowed"),
        ("forking", "os.fork is not allowed"),
        ("hungry", "the trace was "),
    ],
)
def test_plugins_can_neither_forge_answers_nor_reach_out(
    factories: None, tiny: dict[str, Any], factory: str, refused: str | None
) -> None:
    """What they print is no answer; network, pickles, copies of the process and memory without end are closed to them.

    MLX answers a refused allocation with a signal on some systems and an exception on others.
    """
    found = trace(request(tiny, f"engine_factory:{factory}", "a", memory_limit_bytes=512 * MIB), timeout_s=30)
    assert found.profile is not None
    (probe,) = found.profile.probes
    if refused is None:
        assert probe.packed == (0, 1, 2, 3)
    else:
        assert refused in str(probe.refused)


def test_failures_leave_nothing_behind() -> None:
    """After fifty programs that die there is no child and no open descriptor more than before."""
    before = open_descriptors(), children()
    for at in range(50):
        assert run("os._exit(5)" if at % 2 else "os.kill(os.getpid(), 11)").ended
    assert run("time.sleep(60)", timeout_s=0.1).ended
    assert (open_descriptors(), children()) == before


def children() -> int:
    """How many children this process has, dead ones that were not collected included, and `ps` itself."""
    parents = subprocess.run(["ps", "-A", "-o", "ppid="], capture_output=True, text=True, check=True)
    return parents.stdout.split().count(str(os.getpid()))


def open_descriptors() -> int:
    """How many files this process has open, by trying each number."""
    return sum(is_open(number) for number in range(256))


def is_open(number: int) -> bool:
    """Whether the descriptor can be looked at."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("count", [10**9, -1, "many"])
def test_a_config_no_model_has_is_refused_within_the_limits(tiny: dict[str, Any], count: Any) -> None:
    """A thousand million layers end at a limit; nonsense ends in the engine's own words."""
    found = trace(request({**tiny, "num_hidden_layers": count}, memory_limit_bytes=400 * MIB), timeout_s=60)
    assert found.profile is None
    assert found.died or found.failed is not None


def test_a_worker_whose_parent_is_gone_goes_too(fake_engine: Any, tiny: dict[str, Any]) -> None:
    """It reads the end of its standard input, and exits with 3 although the engine hangs."""
    fake_engine("import time; time.sleep(600)")
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", "veloxquant.models.trace_worker", "2"],
        env={**os.environ, "PYTHONPATH": sys.path[0]},
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert worker.stdin is not None
    worker.stdin.write(msgspec.json.encode(request(tiny)) + b"\n")
    worker.stdin.close()
    assert worker.wait(timeout=30) == 3
