"""Daemons in bad surroundings: an impostor among the plugins, a full disk, no engine. Planning goes on and says so."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from reliability.plugins import lay_out

from veloxquant.client import Client
from veloxquant.errors import EngineUnavailable
from veloxquant.methods import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DISTS = Path(__file__).parents[1] / "methods" / "dists"
IMPOSTOR = DISTS / "duplicate" / "vqtest_duplicate.py"
MACHINE = {"working_set_bytes": 2**33, "total_memory_bytes": 2**34}


_BOOT = "import sys; from veloxquant.daemon.main import main; sys.exit(main())"
_LIMITED = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); {_BOOT}"
"""A daemon whose files end at 4 KiB: what a full disk is to a program, where none can be mounted."""


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

    def begin(boot: str = _BOOT, **variables: str) -> Place:
        names = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VELOXQUANT_")}
        environment = {**kept, **dict.fromkeys(names, str(short_folder)), **variables}
        log = short_folder / "log"
        with log.open("wb") as file:
            command = [sys.executable, "-c", boot]
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


def test_an_impostor_hides_nothing(place: Callable[..., Place], short_folder: Path, tiny: dict[str, Any]) -> None:
    """A plugin that takes a built-in method's name is shown beside it, and never in its place."""
    site = short_folder / "site"
    lay_out(site, "vqtest-duplicate", IMPOSTOR.read_text(), module=IMPOSTOR.stem)
    there = place(PYTHONPATH=str(site))
    rows = there.client.methods("affine").methods
    ours = {method.name: len(method.variants()) for method in registry.load().methods}
    assert [(row.state, row.source, len(row.variants)) for row in rows] == [
        ("ready", "veloxquant", ours["affine"]),
        ("quarantined", "vqtest-duplicate", 0),
    ]
    methods = there.client.status().methods
    assert (methods.ready, list(methods.quarantined)) == (len(ours), ["affine (vqtest-duplicate)"])
    wide = {**tiny, "hidden_size": 256}  # heads of width 64, which groups of 64 divide
    plan = there.client.plan(wide, hardware=MACHINE, methods=["affine"])
    assert plan.chosen is not None
    assert plan.chosen.method == "affine"
    fenced = [(one.label, one.method) for one in plan.rejected if one.reason == "quarantined"]
    assert fenced == [("affine (vqtest-duplicate)", "affine")]
    listed = [line.split()[:1] + line.split()[2:4] for line in there.ctl("methods").stdout.splitlines()[1:]]
    assert listed == [
        *([name, "veloxquant", "ready"] for name in sorted(ours)),
        ["affine", "vqtest-duplicate", "quarantined"],
    ]
    shown = there.ctl("methods", "show", "affine").stdout
    assert shown.startswith("affine  ready\n")
    assert "\naffine  quarantined\n" in shown
    assert "affine (vqtest-duplicate)" in there.ctl("status").stdout


def test_an_upgraded_plugin_is_used_after_a_reload(place: Callable[..., Place], short_folder: Path) -> None:
    """Answers come from the new files, and there is nothing to warn of."""
    site = short_folder / "site"
    good = DISTS / "good" / "vqtest_good.py"
    lay_out(site, "vqtest-good", good.read_text(), module=good.stem)
    there = place(PYTHONPATH=str(site))
    (before,) = there.client.methods("halved").methods
    lay_out(
        site, "vqtest-good", good.read_text() + "\nHalved.summary = 'of another version'\n", "1.1", module=good.stem
    )
    assert there.client.reload().changed
    (after,) = there.client.methods("halved").methods
    assert before.summary != after.summary == "of another version"
    assert there.client.status().warnings == ()


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


@pytest.fixture
def full_disk(short_folder: Path) -> Iterator[tuple[Path, str]]:
    """A folder in which nothing can be written, and how to start a daemon that finds it so.

    A file system of 64 KiB that is full, where we may mount one; else a daemon whose files are cut short.
    """
    folder = short_folder / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        yield folder, _LIMITED
        return
    try:
        with contextlib.suppress(OSError), (folder / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        yield folder, _BOOT
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_costs_the_cache_and_says_so_everywhere(
    full_disk: tuple[Path, str], place: Callable[..., Place], tiny: dict[str, Any]
) -> None:
    """The plan is traced and made; plan, fit, status and log carry one warning each, with the way out."""
    folder, boot = full_disk
    there = place(boot, XDG_CACHE_HOME=str(folder), VELOXQUANT_TRACE_CACHE_DIRECTORY=str(folder / "traces"))
    question = {"config": tiny, "weights_bytes": 2**20}
    for answer in (there.client.plan(question, hardware=MACHINE), there.client.fit(question, hardware=MACHINE)):
        assert answer.model["source"] == "traced"
        (said,) = [note.text for note in answer.warnings if note.code == "trace_not_kept"]
        assert "trace.cache_directory" in said
        assert str(folder) in said
    assert there.client.status().warnings == (said,)
    log = [json.loads(line) for line in there.log.read_text().splitlines()]
    assert [(line["level"], line["text"]) for line in log if line["event"] == "trace.not_kept"] == [("warning", said)]
    assert not list((folder / "traces").glob("*.json"))
