"""The soak in short: every kind of client and of abuse against one daemon, counted; nothing of them stays."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING

import psutil
from daemon_kit import TINY_LLAMA
from soak_load import Job, Line, Load, one_round

from veloxquant import config
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.daemon.connection import Connection, Patience
from veloxquant.daemon.server import Server, Timing, serve

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

ROUNDS = {"calls": 5, "broken frames": 20, "clients that hang up": 10, "records": 6, "reloads": 2}
"""Rounds of each job; one where nothing is said."""


async def soaked(load: Load, jobs: list[Job]) -> None:
    """Every round of every job, the jobs side by side."""

    async def rounds(job: Job) -> None:
        for number in range(ROUNDS.get(job.name, 1)):
            await one_round(job, load.tally, number)

    await asyncio.gather(*(rounds(job) for job in jobs))
    await load.end()


def beside(load: Load) -> list[Job]:
    """Records that appear, and reloads."""
    database = BenchmarkDatabase()

    async def publish(number: int) -> None:
        await asyncio.to_thread(database.add, "fp16", "org/soak", context_length=1024 + number, throughput_tok_s=50.0)

    async def reload(_: int) -> None:
        line = await Line.open(load.path)
        await line.call("reload")
        await line.close()

    return [Job("records", publish, 0), Job("reloads", reload, 0)]


def held() -> dict[str, int]:
    """What of this process could leak."""
    gc.collect()
    return {
        "files": psutil.Process().num_fds(),
        "tasks": len(asyncio.all_tasks()),
        "threads": len([one for one in threading.enumerate() if not one.name.startswith(("asyncio_", "vq-question"))]),
        "connections": sum(isinstance(one, Connection) for one in gc.get_objects()),
    }


def test_r32_mixed_load_leaves_nothing_behind(
    short_folder: Path, traced: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty clients, abuse, records and reloads: every answer right, and no file, task, thread or connection more."""
    for name, value in traced.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VELOXQUANT_RECORDS", str(short_folder / "benchmarks"))
    load = Load(short_folder / "s" / "d.sock", {"config": TINY_LLAMA, "weights_bytes": 2**20})
    settings = config.load(flags={"socket.path": str(load.path)})
    seen: list[dict[str, int]] = []

    async def scenario(server: Server) -> None:
        try:
            await load.begin()
            await server.app.clients.nobody.wait()
            seen.append(held())
            await soaked(load, [*await load.jobs(), *beside(load)])
            await server.app.clients.nobody.wait()
            seen.append(held())
        finally:
            server.app.ask_to_stop("shutdown")

    async def run() -> int:
        playing: list[asyncio.Task[None]] = []
        status = await serve(
            settings,
            on_ready=lambda server: playing.append(asyncio.create_task(scenario(server))),
            signals=False,
            timing=Timing(patience=Patience(half_frame_s=0.1, stalled_s=0.1)),
        )
        await playing[0]
        return status

    assert asyncio.run(run()) == 0
    assert load.tally.trouble == []
    assert load.tally.counts["calls"] == 40 * ROUNDS["calls"]
    before, after = seen
    assert {name: after[name] - before[name] for name in before if after[name] > before[name]} == {}
