"""Daemons in bad surroundings: an impostor among the plugins, a full disk, no engine. Planning goes on and says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from veloxquant.client import Client
from veloxquant.errors import EngineUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IMPOSTOR = Path(__file__).parents[1] / "methods" / "dists" / "duplicate" / "vqtest_duplicate.py"
MACHINE = {"working_set_bytes": 2**33, "total_memory_bytes": 2**34}


class Place(NamedTuple):
    """A daemon in surroundings of its own, and the command line in the same ones."""

    client: Client
    log: Path
    environment: dict[str, str]

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run veloxquantctl there."""
        command = [sys.executable, "-m", "veloxquant.ctl.main", *words]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def place(short_folder: Path) -> Iterator[Callable[..., Place]]:
    """Start a daemon with these variables in its environment; its default socket is found without a flag."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(**variables: str) -> Place:
        names = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VELOXQUANT_")}
        environment = {**kept, **dict.fromkeys(names, str(short_folder)), **variables}
        log = short_folder / "log"
        with log.open("wb") as file:
            command = [sys.executable, "-m", "veloxquant.daemon.main"]
            started.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        client = Client(short_folder / "veloxquant" / "d.sock", timeout_s=60, wait_s=60, fallback=False)
        client.ping()
        return Place(client, log, environment)

    yield begin
    for process in started:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait()


def distribution(folder: Path, name: str, module: Path) -> None:
    """What an installer leaves of a distribution with one plugin: its module and its metadata."""
    facts = folder / f"{name}-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[veloxquant.methods]\naffine = {module.stem}\n")
    shutil.copy(module, folder)


def test_an_impostor_hides_nothing(place: Callable[..., Place], short_folder: Path, tiny: dict[str, Any]) -> None:
    """A plugin that takes a built-in method's name is shown beside it, and never in its place."""
    site = short_folder / "site"
    distribution(site, "vqtest-duplicate", IMPOSTOR)
    there = place(PYTHONPATH=str(site))
    rows = there.client.methods("affine").methods
    assert [(row.state, row.source, len(row.variants)) for row in rows] == [
        ("ready", "veloxquant", 18),
        ("quarantined", "vqtest-duplicate", 0),
    ]
    methods = there.client.status().methods
    assert (methods.ready, list(methods.quarantined)) == (2, ["affine (vqtest-duplicate)"])
    wide = {**tiny, "hidden_size": 256}  # heads of width 64, which groups of 64 divide
    plan = there.client.plan(wide, hardware=MACHINE, methods=["affine"])
    assert plan.chosen is not None
    assert plan.chosen.method == "affine"
    fenced = [(one.label, one.method) for one in plan.rejected if one.reason == "quarantined"]
    assert fenced == [("affine (vqtest-duplicate)", "affine")]
    listed = [line.split()[:1] + line.split()[2:4] for line in there.ctl("methods").stdout.splitlines()[1:]]
    assert listed == [
        ["affine", "veloxquant", "ready"],
        ["fp16", "veloxquant", "ready"],
        ["affine", "vqtest-duplicate", "quarantined"],
    ]
    shown = there.ctl("methods", "show", "affine").stdout
    assert shown.startswith("affine  ready\n")
    assert "\naffine  quarantined\n" in shown
    assert "affine (vqtest-duplicate)" in there.ctl("status").stdout


WITHOUT_ENGINE = """
import importlib.metadata, sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mlx_lm":
            raise ModuleNotFoundError("No module named 'mlx_lm'", name="mlx_lm")


found = importlib.metadata.Distribution.from_name


def from_name(name):
    if name.replace("_", "-") == "mlx-lm":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)


sys.meta_path.insert(0, Blocked())
importlib.metadata.Distribution.from_name = from_name
"""
"""A sitecustomize for every process of a test: mlx-lm is neither found nor imported, as where it is not installed."""


def test_without_the_engine_the_plan_says_so_and_what_to_do(
    place: Callable[..., Place], short_folder: Path, tiny: dict[str, Any], inline: Callable[..., str]
) -> None:
    """Over the socket and on the command line, with a daemon and without; an unknown family is refused by its field."""
    (short_folder / "sitecustomize.py").write_text(WITHOUT_ENGINE)
    there = place(PYTHONPATH=str(short_folder))
    plan = there.client.plan({"config": tiny, "weights_bytes": 2**20}, hardware=MACHINE)
    assert plan.model["source"] == "static"
    said = [note.text for note in plan.warnings if note.code == "model_not_traced"]
    assert len(said) == 1
    assert "mlx-lm is not installed: pip install mlx-lm" in said[0]
    with pytest.raises(EngineUnavailable) as caught:
        there.client.plan({"config": {**tiny, "model_type": "lama"}})
    assert (caught.value.field, caught.value.hint) == ("model.config", "pip install mlx-lm")
    question = ("--working-set", "8GiB", "--memory", "16GiB", "--weights", "1MiB", "--config")
    unknown = inline("unknown", {**tiny, "model_type": "lama"})
    for door in ((), ("--no-daemon",)):
        done = there.ctl("plan", *door, *question, inline("tiny", tiny))
        assert done.returncode == 0
        assert "mlx-lm is not installed: pip install mlx-lm" in done.stdout
        refused = there.ctl("plan", *door, "--json", *question, unknown)
        error = json.loads(refused.stdout)["error"]
        assert (refused.returncode, error["name"], error["field"]) == (2, "engine_unavailable", "model.config")
