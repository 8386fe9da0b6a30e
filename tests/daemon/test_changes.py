"""The world changes under a running daemon: records, configuration, plugins; clients hear of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from daemon_kit import TINY_LLAMA, Daemon, Wire, in_process, wait_for

from veloxquant import errors
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.config import load
from veloxquant.daemon.record_feed import RecordFeed
from veloxquant.methods import registry
from veloxquant.planner.snapshot import NoRecords

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from veloxquant.daemon.application import Application
    from veloxquant.daemon.server import Server

TINY = {"model": {"config": TINY_LLAMA, "model_id": "org/tiny"}}
CAPPED = TINY | {"workload": {"context_length": 4096, "objective": "memory"}, "methods": ["affine"]}


def notice(wire: Wire) -> dict[str, Any]:
    """The next notice."""
    line = json.loads(wire.line())
    assert (line["method"], "id" in line) == ("notice", False)
    found: dict[str, Any] = line["params"]
    return found


@pytest.fixture
def configured(start: Callable[..., Daemon], short_folder: Path) -> Callable[[str], Daemon]:
    """Start with this configuration file, or rewrite it."""
    file = short_folder / "veloxquant.toml"

    def configure(text: str) -> Daemon:
        fresh = not file.exists()
        file.write_text(text)
        file.chmod(0o600)
        return start("--config", str(file), env={"VELOXQUANT_RECORDS": ""}).ready() if fresh else None  # type: ignore[return-value]

    return configure


def test_a_record_that_appears_is_in_the_next_plan(start: Callable[..., Daemon]) -> None:
    """A subscriber hears of the new generation, and the plan made then names the record."""
    daemon = start().ready()
    wire = daemon.connect()
    before = wire.call("plan", CAPPED)
    assert before["chosen"]["memory"]["evidence"]["record_ids"] == []
    listener = daemon.connect()
    listener.call("subscribe", {"topics": ["generation", "records"]})
    assert notice(listener)["state"]["records"] == {"used": 0, "skipped": 0}
    record = BenchmarkDatabase(daemon.records).add(
        before["chosen"]["label"],
        "org/tiny",
        context_length=4096,
        memory_bytes=123_456,
        chip=wire.call("hardware")["chip"],
    )
    told = notice(listener)
    assert (told["event"], told["full"], told["state"]["records"]["used"]) == ("changed", False, 1)
    assert told["generation"] > before["generation"]
    after = wire.call("plan", CAPPED)
    assert after["generation"] >= told["generation"]
    candidates = [after["chosen"], *after["alternatives"]]
    assert record.id in [one for c in candidates for one in c["memory"]["evidence"]["record_ids"]]


def test_records_are_listed_with_filters_and_pages(start: Callable[..., Daemon], short_folder: Path) -> None:
    """Newest first; files that are not used have their reason."""
    database = BenchmarkDatabase(short_folder / "benchmarks")
    for number in range(5):
        database.add("fp16" if number % 2 else "affine4-g64", f"org/m{number}", context_length=1024, memory_bytes=1000)
    (database.records_dir / "broken.json").write_text("{")
    wire = start().ready().connect()
    everything = wire.call("records")
    assert (everything["total"], everything["skipped_total"], everything["skipped"]) == (5, 1, [])
    page = wire.call("records", {"limit": 2, "offset": 1, "skipped": True})
    assert [row["id"] for row in page["records"]] == [row["id"] for row in everything["records"]][1:3]
    assert page["skipped"][0]["file"] == "records/broken.json"
    assert page["skipped"][0]["reason"]
    assert {row["method"] for row in wire.call("records", {"method": "fp16"})["records"]} == {"fp16"}
    assert wire.call("records", {"model_id": "org/m3"})["total"] == 1
    assert wire.call("records", {"source": "lab"})["total"] == 0
    assert wire.call("records", {"since": "2000-01-01", "chip": "unknown", "pinned": True})["total"] == 0
    assert wire.call("records", {"since": "2000-01-01", "chip": "unknown"})["total"] == 5
    state = wire.call("status")["records"]
    assert 0 <= state["newest_age_s"] < 120
    assert state | {"scan_age_s": 0, "newest_age_s": 0} == {
        "directory": str(short_folder / "benchmarks"),
        "used": 5,
        "skipped": 1,
        "scan_age_s": 0,
        "newest_age_s": 0,
        "watcher": "native",
    }


def test_a_subscriber_gets_the_full_state_first(configured: Callable[[str], Daemon]) -> None:
    """After the answer to its call; then silence until something changes, and after unsubscribing for good."""
    daemon = configured("")
    wire = daemon.connect()
    assert wire.call("subscribe") == {"topics": ["generation", "hardware", "methods", "records", "warnings"]}
    first = notice(wire)
    assert (first["event"], first["full"], first["generation"]) == ("state", True, 0)
    assert first["state"]["methods"] == {"ready": len(registry.load().methods), "quarantined": {}}
    assert first["state"]["hardware"]["sources"]
    assert wire.call("unsubscribe", {"topics": ["hardware", "warnings"]}) == {
        "topics": ["generation", "methods", "records"]
    }
    assert wire.call("unsubscribe") == {"topics": []}
    configured("[planner]\nreserve_bytes = 1000\n")
    assert daemon.call("reload")["changed"]
    assert wire.call("ping")["generation"] >= 1  # no notice came in between


def test_a_reload_that_finds_nothing_new_changes_nothing(start: Callable[..., Daemon]) -> None:
    """The generation stays, and so does what was answered; memory that moves on a busy machine would be a change."""
    daemon = start().ready()

    def unchanged() -> bool:
        before = daemon.call("plan", TINY)["generation"], daemon.call("status")["cache"]
        done = daemon.call("reload")
        after = daemon.call("plan", TINY)["generation"], daemon.call("status")["cache"]
        if before[0] != after[0]:
            assert done["changed"]
            return False
        assert (done["changed"], done["generation"], after[1]["entries"]) == (False, before[0], before[1]["entries"])
        return bool(after[1]["hits"] == before[1]["hits"] + 1)

    wait_for(unchanged, "a reload on a machine at rest")


def test_reload_uses_the_new_configuration(configured: Callable[[str], Daemon]) -> None:
    """The reserve is in the next plan, under a higher generation; the level of the log changes at once."""
    daemon = configured("[planner]\nreserve_bytes = 1000\n")
    before = daemon.call("plan", TINY)
    assert before["budget"]["reserve_bytes"] == 1000
    configured('[planner]\nreserve_bytes = 2000\n\n[methods]\ndisabled = ["affine"]\n\n[daemon]\nlog_level = "debug"\n')
    answer = daemon.call("reload")
    assert (answer["changed"], answer["generation"]) == (True, before["generation"] + 1)
    after = daemon.call("plan", TINY)
    assert (after["budget"]["reserve_bytes"], after["generation"]) == (2000, answer["generation"])
    assert daemon.call("status")["methods"]["quarantined"] == {"affine": "disabled in the configuration"}
    assert daemon.events("reload.asked")[0]["peer_pid"]


def test_r31_sighup_reloads_and_a_wrong_configuration_keeps_the_old_one(configured: Callable[[str], Daemon]) -> None:
    """The status says so until a good one is read."""
    daemon = configured("[planner]\nreserve_bytes = 1000\n")
    configured("[planner]\nreserve_byte = 2000\n")
    daemon.signal(signal.SIGHUP)
    wait_for(lambda: daemon.events("reload.failed"), "the refusal")
    assert [asked["signal"] for asked in daemon.events("reload.asked")] == ["SIGHUP"]
    assert daemon.call("plan", TINY)["budget"]["reserve_bytes"] == 1000
    (warning,) = daemon.call("status")["warnings"]
    assert "reserve_byte" in warning
    with pytest.raises(errors.ConfigInvalid) as caught:
        daemon.call("reload")
    assert caught.value.field == "planner.reserve_byte"
    configured("[planner]\nreserve_bytes = 3000\n")
    daemon.signal(signal.SIGHUP)
    wait_for(lambda: daemon.call("status")["generation"] >= 1, "the reload")
    assert daemon.call("plan", TINY)["budget"]["reserve_bytes"] == 3000
    assert daemon.call("status")["warnings"] == []


def test_the_status_names_the_file_that_a_reload_reads(start: Callable[..., Daemon], short_folder: Path) -> None:
    """However it is named; none while there is none."""
    file = short_folder / "veloxquant.toml"
    daemon = start(env={"VELOXQUANT_CONFIG": str(file), "VELOXQUANT_RECORDS": ""})
    file.touch(0o600)
    assert daemon.ready().call("status")["config_path"] == str(file)
    file.unlink()
    assert daemon.call("status")["config_path"] is None


def test_a_setting_that_needs_a_restart_says_so(configured: Callable[[str], Daemon]) -> None:
    """The socket is not moved under its clients."""
    daemon = configured("")
    configured("[daemon]\nmax_connections = 7\n")
    assert any("daemon.max_connections" in warning for warning in daemon.call("reload")["warnings"])


def test_another_records_directory_is_watched_after_a_reload(
    configured: Callable[[str], Daemon], short_folder: Path
) -> None:
    """The environment names none here."""
    first, second = short_folder / "r1", short_folder / "r2"
    daemon = configured(f'[records]\ndirectory = "{first}"\n')
    BenchmarkDatabase(second).add("fp16", "org/m", context_length=1024, memory_bytes=1000)
    configured(f'[records]\ndirectory = "{second}"\n')
    daemon.call("reload")
    assert daemon.call("status")["records"]["used"] == 1
    BenchmarkDatabase(second).add("fp16", "org/n", context_length=1024, memory_bytes=1000)
    wait_for(lambda: daemon.call("status")["records"]["used"] == 2, "the second record")


def test_a_directory_that_cannot_be_let_go_does_not_keep_the_next_from_being_watched(short_folder: Path) -> None:
    """The system gives no thread in which to close it: the answer says so, and the new one is in use."""

    def scenario(server: Server) -> None:
        loop, app = server.app._loop, server.app
        other = dataclasses.replace(
            app.state.world, config=load(env={}, flags={"records.directory": short_folder / "r"})
        )

        def refuse() -> None:
            raise RuntimeError("can't start new thread")

        app.feed.close = refuse  # type: ignore[method-assign]
        moved = asyncio.run_coroutine_threadsafe(app._move_in(other, RecordFeed(other.config)), loop)
        with pytest.raises(RuntimeError):
            moved.result(30)
        assert app.feed.state().watcher != "off"
        loop.call_soon_threadsafe(app.ask_to_stop, "shutdown")

    assert in_process(short_folder, scenario) == 0


MAC = {"hardware": {"chip": "Apple M2", "gpu_cores": 10, "total_memory_bytes": 2**34}}
"""Another machine than any that runs this test."""


def test_r10_memory_here_moves_no_answer_about_another_machine(short_folder: Path) -> None:
    """It stays remembered with its generation and id, until something changes that it depends on."""
    bare = {"model": TINY["model"]}
    here, there = [("plan", TINY), ("fit", bare)], [("plan", TINY | MAC), ("fit", bare | MAC)]

    def scenario(server: Server) -> None:
        app, wire = server.app, Wire(server.app._socket)
        app._hardware.touch = lambda: None  # type: ignore[method-assign]
        machine = app.state.world.snapshot.hardware
        taken = msgspec.structs.replace(machine, active_bytes=(machine.total_memory_bytes or 0) // 2)

        def ask() -> tuple[list[Any], list[Any], int]:
            before = app._questions.answers.hits
            answers = [[wire.call(*question) for question in half] for half in (here, there)]
            return *answers, app._questions.answers.hits - before

        (old, first, _), began = ask(), app.state.generation
        on_loop(app, app.state.use_hardware, taken)
        new, second, hits = ask()
        assert (second, hits) == (first, len(there))
        assert [one["generation"] for one in (*old, *new)] == [began] * 2 + [began + 1] * 2
        assert {one["budget"]["active_bytes"] for one in new} == {taken.active_bytes}
        on_loop(app, app.state.use_records, NoRecords())
        both = [one for half in ask()[:2] for one in half]
        assert [one["generation"] for one in both] == [began + 2] * 4
        assert both[2]["plan_id"] != first[0]["plan_id"]
        wire.call("shutdown")
        wire.close()

    assert in_process(short_folder, scenario) == 0


def test_a_reload_that_finds_the_same_plugins_keeps_what_is_remembered_of_them(short_folder: Path) -> None:
    """Other settings make a new world of the same method objects; a disabled one is off all the same."""

    def scenario(server: Server) -> None:
        app, wire = server.app, Wire(server.app._socket)
        before = app.state.world
        app._read_config = lambda: load(env={}, flags={"planner.reserve_bytes": 1, "methods.disabled": ["kivi"]})
        assert wire.call("reload")["changed"]
        after = app.state.world
        assert after.snapshot.reserve_bytes == 1
        assert after.loaded is before.loaded
        assert {method.name for method in before.ready} - {method.name for method in after.ready} == {"kivi"}
        asyncio.run_coroutine_threadsafe(app._load_plugins(), app._loop).result(30)
        assert app.state.world is after
        wire.call("shutdown")
        wire.close()

    assert in_process(short_folder, scenario) == 0


def on_loop(app: Application, act: Callable[..., Any], *given: Any) -> None:
    """Do it in the daemon's own thread."""

    async def run() -> None:
        act(*given)

    asyncio.run_coroutine_threadsafe(run(), app._loop).result(30)


def test_r31_no_plan_fails_while_reloading(configured: Callable[[str], Daemon]) -> None:
    """Thirty changes under the questions of two clients; every answer is whole and of one generation."""
    daemon = configured("")
    daemon.call("plan", TINY)
    done = threading.Event()
    seen: list[list[int]] = [[], []]

    def ask(generations: list[int]) -> None:
        wire = Wire(daemon.socket)
        while not done.is_set():
            generations.append(wire.call("plan", TINY)["generation"])
        wire.close()

    threads = [threading.Thread(target=ask, args=(one,)) for one in seen]
    for thread in threads:
        thread.start()
    for number in range(30):
        configured(f"[planner]\nreserve_bytes = {number}\n")
        assert daemon.call("reload")["changed"]
    done.set()
    for thread in threads:
        thread.join()
    for generations in seen:
        assert generations == sorted(generations)
        assert generations[-1] > 0
    assert daemon.call("status")["requests"]["errors"] == {}
