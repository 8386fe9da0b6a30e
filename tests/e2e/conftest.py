"""One real daemon in a process of its own, the real command line, and published model configs as files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from veloxquant.client import Client
from veloxquant.ctl import main as program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
PUBLISHED = {
    model["model"]: model
    for model in json.loads((ROOT / "tests" / "data" / "model_configs.json").read_text(encoding="utf-8"))["models"]
}


class Running(NamedTuple):
    """A daemon under test."""

    socket: str
    records: Path
    process: subprocess.Popen[bytes]
    environment: dict[str, str]


class Answer(NamedTuple):
    """What one call of the command line gave: its exit code and the JSON on stdout."""

    code: int
    value: dict[str, Any]


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """A short private folder for everything the daemon keeps."""
    folder = Path(tempfile.mkdtemp(prefix="vq", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def running(home: Path) -> Iterator[Running]:
    """The daemon, started as a user would: `veloxquantctl daemon`; it must stop cleanly in the end."""
    names = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VELOXQUANT_")}
    environment = {**kept, **dict.fromkeys(names, str(home))}
    socket, records = str(home / "d.sock"), home / "records"
    command = [sys.executable, "-m", "veloxquant.ctl.main", "--socket", socket, "daemon", "--records", str(records)]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            Client(socket, timeout_s=30, wait_s=30, fallback=False).ping()
            yield Running(socket, records, process, environment)
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait()
    assert "Traceback" not in (home / "log").read_text(encoding="utf-8")


@pytest.fixture
def ask(running: Running, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Run veloxquantctl against the daemon with --json; every answer must come over the socket."""

    def run(*words: str) -> Answer:
        capsys.readouterr()
        code = program.main([*words, "--json", "--socket", running.socket])
        shown = capsys.readouterr()
        assert shown.err == ""
        return Answer(code, json.loads(shown.out))

    return run


@pytest.fixture
def client(running: Running) -> Iterator[Client]:
    """A client of the daemon that never plans by itself."""
    with Client(running.socket, timeout_s=60, fallback=False) as asking:
        yield asking


@pytest.fixture
def tiny() -> dict[str, Any]:
    """The config of a llama of two layers with 2 KV heads of width 16."""
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "rms_norm_eps": 1e-5,
    }


@pytest.fixture
def tiny_model(tiny: dict[str, Any]) -> dict[str, Any]:
    """The tiny llama as the protocol names a model, with weights of 1 MiB."""
    return {"config": tiny, "weights_bytes": 2**20}


@pytest.fixture(scope="session")
def published(home: Path) -> Callable[..., str]:
    """Write a model's config to a file, with changes to it or its text part, and name the file."""

    def write(model: str, **changes: Any) -> str:
        config = json.loads(json.dumps(PUBLISHED[model]["config"]))
        (config.get("text_config", config)).update(changes)
        place = home / f"{model.partition('/')[2]}{'-changed' if changes else ''}.json"
        place.write_text(json.dumps(config), encoding="utf-8")
        return str(place)

    return write


@pytest.fixture(scope="session")
def inline(home: Path) -> Callable[[str, dict[str, Any]], str]:
    """Write a config of the test's own and name the file."""

    def write(name: str, config: dict[str, Any]) -> str:
        place = home / f"{name}.json"
        place.write_text(json.dumps(config), encoding="utf-8")
        return str(place)

    return write
