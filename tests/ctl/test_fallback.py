"""The command line beside a daemon that is gone or hangs: an answer within --timeout, with a note on its origin."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from veloxquant.ctl.daemon import _without_answer_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import SimpleNamespace

    Run = Callable[..., Any]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, example: SimpleNamespace) -> list[float]:
    """Planning in this process is the example; the seconds it was given each time."""
    given: list[float] = []
    local = msgspec.structs.replace(example.plan, source="local")

    def answer(_self: Any, _method: str, _params: Any, left_s: float) -> Any:
        given.append(left_s)
        return local

    monkeypatch.setattr("veloxquant._fallback.LocalPlanner.answer", answer)
    return given


@pytest.fixture
def hung(short_folder: Path) -> Iterator[Path]:
    """The socket of a daemon that takes connections and never reads them, as one does after SIGSTOP."""
    path = short_folder / "d.sock"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        listener.listen(8)
        yield path


@pytest.fixture
def config(short_folder: Path) -> str:
    """A file to ask about."""
    file = short_folder / "config.json"
    file.write_text('{"model_type": "llama"}', encoding="utf-8")
    return str(file)


def test_r36_plan_beside_a_hung_daemon(ctl: Run, hung: Path, config: str, planned: list[float]) -> None:
    """Within its time limit the plan of this process, marked local, and a note that names the reason."""
    done = ctl("plan", "--config", config, "--socket", str(hung), "--timeout", "400ms", "--json")
    assert done.code == 0
    assert json.loads(done.out)["source"] == "local"
    assert "did not answer in time; answered in this process" in done.err
    assert 0 < planned[0] <= 0.4


def test_r36_plan_without_a_daemon(ctl: Run, short_folder: Path, config: str, planned: list[float]) -> None:
    """At once, or after the time that --wait gives a daemon to come; with most of the limit left either way."""
    for wait in ([], ["--wait", "20ms"], ["--wait=0"]):
        done = ctl("plan", "--config", config, "--socket", str(short_folder / "none"), *wait)
        assert done.code == 0
        assert "no socket is there; answered in this process" in done.err
    assert len(planned) == 3
    done = ctl("plan", "--config", config, "--wait", "soon")
    assert done.code == 2
    assert "--wait" in done.err


def test_r36_planning_here_is_under_the_limit_too(
    ctl: Run, short_folder: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 4 and what to do, while the work still hangs."""
    over = threading.Event()
    monkeypatch.setattr("veloxquant._fallback.LocalPlanner.answer", lambda *_args: over.wait(30))
    try:
        done = ctl("plan", "--config", config, "--socket", str(short_folder / "none"), "--timeout", "50ms")
    finally:
        over.set()
    assert done.code == 4
    assert "longer timeout" in done.err


def test_the_daemon_is_not_handed_flags_that_speak_of_answers() -> None:
    """--wait among them, with its value or glued to it."""
    given = ["--wait", "3s", "--socket", "/s", "--timeout=5", "--wait=1s", "--color", "never", "--json", "--verbose"]
    assert _without_answer_flags(given) == ["--socket", "/s", "--verbose"]
