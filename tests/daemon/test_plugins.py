"""Other people's plugins in a daemon: bad ones beside good ones, upgrades while it runs, secrets they could tell."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from reliability.plugins import lay_out, sound

from veloxquant import local
from veloxquant.config import Config
from veloxquant.ctl.main import main as veloxquantctl
from veloxquant.daemon import plugin_watch
from veloxquant.daemon.application import Application
from veloxquant.daemon.record_feed import RecordFeed
from veloxquant.errors import VeloxError
from veloxquant.planner.snapshot import NoRecords
from veloxquant.profiles import HardwareProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from daemon_kit import Daemon

CANARY = "canary-71c2"
SECRETS = dict.fromkeys(("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "HOUSE_RENT"), CANARY)

TELLING = f"import os\nraise RuntimeError(*[os.environ.get(name) for name in {list(SECRETS)}])\n"


def good(name: str) -> str:
    """One with nothing wrong."""
    return sound(name) + "Mine.summary = 'of the first version'\n"


def upgraded(name: str) -> str:
    """The next version of the good one."""
    return sound(name) + "Mine.summary = 'of another version'\n"


def test_r27_bad_plugins_are_listed_with_their_reasons_and_the_good_one_serves(
    start: Callable[..., Daemon], short_folder: Path
) -> None:
    """And what they know of the environment is in no answer, no log line and no status; an upgrade is used."""
    site = short_folder / "site"
    lay_out(site, "good", good("good"))
    lay_out(site, "telling", TELLING)
    lay_out(site, "leaving", "import os\nos._exit(3)\n")
    lay_out(site, "flooding", "while True: print('x' * 10_000)\n")
    daemon = start(env={"PYTHONPATH": str(site), **SECRETS}).ready()
    wire = daemon.connect()
    status = wire.call("status")
    assert sorted(status["methods"]["quarantined"]) == ["flooding", "leaving", "telling"]
    assert status["methods"]["quarantined"]["telling"] == f"import failed: RuntimeError: {(None,) * len(SECRETS)}"
    assert len(daemon.events("plugin.quarantined")) == 3
    said = [status, *(wire.call(method) for method in ("hello", "methods", "hardware", "records", "metrics"))]
    for model in ({"id": "a/b"}, {"path": "/proc/self"}, {"config": {"model_type": "x"}}):
        with pytest.raises(VeloxError) as error:
            wire.call("plan", {"model": model})
        said.append({"message": error.value.message, "hint": error.value.hint})
    lay_out(site, "good", upgraded("good"), version="1.1")
    said += [wire.call("reload"), wire.call("methods")]
    (row,) = [row for row in said[-1]["methods"] if row["name"] == "good"]
    assert (row["state"], row["summary"]) == ("ready", "of another version")
    files = [path.read_text(errors="replace") for path in short_folder.rglob("*") if path.is_file()]
    assert CANARY not in json.dumps(said)
    assert CANARY not in daemon.log()
    assert not [text for text in files if CANARY in text]


def test_doctor_and_a_crash_tell_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], short_folder: Path
) -> None:
    """What veloxquantctl prints about this machine, and the traceback of a failure that was asked to be shown."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VELOXQUANT_TRACEBACK", "1")
    site = short_folder / "site"
    lay_out(site, "telling", TELLING)
    monkeypatch.syspath_prepend(str(site))
    veloxquantctl(["doctor", "--json"])
    veloxquantctl(["plan", "--model", str(short_folder / "no-model")])
    monkeypatch.setattr("veloxquant.ctl.doctor.run", lambda _: {}["no such key"])
    with pytest.raises(KeyError) as crash:
        veloxquantctl(["doctor"])
    said = capsys.readouterr()
    assert "telling" in said.out
    assert CANARY not in said.out + said.err + "".join(traceback.format_exception(crash.value))


@pytest.fixture
def site(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of distributions that this process imports from."""
    folder = short_folder / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def in_application(work: Callable[[Application], Coroutine[Any, Any, None]], folder: Path) -> None:
    """Run a test with the parts of a daemon, on a loop, and no socket."""

    async def run() -> None:
        world = local.open_world(Config(), hardware=HardwareProfile(), records=NoRecords(), calibrations={})
        await work(Application(world, RecordFeed(Config()), socket=folder / "d.sock"))

    asyncio.run(run())


def summaries(app: Application) -> dict[str, str]:
    """Of the methods that are ready and not ours."""
    return {one.name: one.summary for one in app.state.world.ready if one.name.startswith("vq")}


def test_an_upgrade_is_noticed_within_two_looks_and_used(
    site: Path, short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """First it may still be under way; seen twice alike it is loaded, and answers come from the new version."""
    lay_out(site, "upgrading", good("vq-up"))

    async def work(app: Application) -> None:
        await app.plugins.look()
        await app.plugins.look()
        assert (summaries(app), app.state.generation) == ({"vq-up": "of the first version"}, 0)
        lay_out(site, "upgrading", upgraded("vq-up"), version="1.1")
        lay_out(site, "arriving", good("vq-new"))
        await app.plugins.look()
        assert (summaries(app), app.state.generation) == ({"vq-up": "of the first version"}, 0)
        with caplog.at_level(logging.INFO):
            await app.plugins.look()
        assert summaries(app) == {"vq-up": "of another version", "vq-new": "of the first version"}
        assert app.state.generation == 1
        await app.plugins.look()
        await app.plugins.look()
        assert app.state.generation == 1

    in_application(work, short_folder)
    (line,) = [record for record in caplog.records if record.getMessage() == "plugins.changed"]
    assert line.fields["plugins"] == ["arriving 1.0 is new", "upgrading 1.0 became 1.1"]  # type: ignore[attr-defined]


def test_a_plugin_that_changes_all_the_time_is_loaded_once_in_ten_minutes(
    site: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that writes into itself must not keep the daemon busy; a warning says how to have it at once."""
    now = [1000.0]
    monkeypatch.setattr(plugin_watch.time, "monotonic", lambda: now[0])
    module = lay_out(site, "writing", good("vq-writing"))
    loads: list[int] = []

    async def work(app: Application) -> None:
        async def load_again() -> None:
            loads.append(1)
            with module.open("a") as file:
                file.write("# written by itself\n")

        app.plugins._load_again = load_again
        await load_again()
        loads.clear()
        for _ in range(20):
            await app.plugins.look()
        assert len(loads) == 1
        assert app.state.warnings["plugins"].startswith("files of writing 1.0 changed on disk, again: veloxquantctl")
        now[0] += plugin_watch.AGAIN_S
        await app.plugins.look()
        assert len(loads) == 2
        assert "plugins" not in app.state.warnings

    in_application(work, short_folder)


def test_the_daemon_itself_forgets_what_it_does_not_know_before_it_reads_anything() -> None:
    """Trials of plugins get a clean environment of their own; those that passed run here."""
    code = (
        "import os; from veloxquant.daemon import main; from veloxquant.errors import ConfigInvalid\n"
        "try: main.run(['--config', '/nowhere/at/all'])\n"
        f"except ConfigInvalid: print(*sorted(os.environ.keys() & {set(SECRETS) | {'HOME'}}))\n"
    )
    env = {**os.environ, **SECRETS, "HOME": "/"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "HOME\n"


def test_a_plugin_is_noticed_within_a_minute() -> None:
    """What two looks in turn see alike is loaded."""
    assert 0 < 2 * plugin_watch.LOOK_S <= 60
