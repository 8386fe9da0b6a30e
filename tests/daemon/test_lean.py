"""What the daemon does without, and what it gives back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from daemon_kit import TINY_LLAMA, environment

from veloxquant import config, local
from veloxquant.benchmarks import storage
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.daemon import lean
from veloxquant.daemon.record_feed import RecordFeed
from veloxquant.daemon.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon_kit import Daemon

RECORDS = 40


@pytest.fixture
def settings(short_folder: Path) -> config.Config:
    """A configuration whose directory holds RECORDS records."""
    database = BenchmarkDatabase(short_folder / "b")
    for number in range(RECORDS):
        database.add("fp16", f"org/m{number}", context_length=1024, memory_bytes=1000)
    database.close()
    return config.load(env={}, flags={"records.directory": str(short_folder / "b")})


def test_r01_a_start_reads_each_record_once(settings: config.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the lock to the world that answers, however many there are."""
    opened: list[str] = []
    real = os.open

    def counting(path: str | Path, *arguments: int, **more: int | None) -> int:
        opened.append(str(path))
        return real(path, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(storage.os, "open", counting)
    feed = RecordFeed(settings)
    feed.read()
    local.open_world(settings, records=feed.records, calibrations=feed.calibrations)
    assert len([name for name in opened if name.endswith(".json") and "index" not in name]) == RECORDS


def test_r02_records_are_held_once(settings: config.Config) -> None:
    """Those that plans are made with are those that are listed, without a copy of each."""
    feed = RecordFeed(settings)
    feed.read()
    feed.close()
    assert feed._database is not None
    held = feed._database.as_held()
    assert len(held) == RECORDS
    assert all(feed._by_id[one] is record for one, record in held.items())
    assert not feed._database._store.handed._pairs


def test_r02_the_daemon_imports_no_engine_and_no_openssl(start: Callable[..., Daemon]) -> None:
    """After a plan that needed a trace as well, which a worker made."""
    daemon = start().ready()
    daemon.call("plan", {"model": {"config": TINY_LLAMA}})
    assert daemon.call("status")["process"]["engine_modules"] == []
    maps = Path(f"/proc/{daemon.process.pid}/maps")
    if maps.exists():  # Linux shows what is loaded
        assert "libcrypto" not in maps.read_text()


def test_who_needs_openssl_later_has_it(short_folder: Path) -> None:
    """A plugin that imports ssl; and the digests are the same."""
    code = (
        "from veloxquant.daemon import lean; lean.import_without_openssl(); import sys, asyncio, hashlib; "
        "assert '_hashlib' not in sys.modules; import ssl, hmac; ssl.create_default_context(); "
        "print(hashlib.sha256(b'abc').hexdigest(), hashlib.new('sha1', b'abc').hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment(short_folder)
    )
    # FIPS 180-4, the example "abc"
    assert done.stdout.split() == [
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "a9993e364706816aba3e25717850c26c9cd0d89d",
    ]


def test_where_openssl_is_in_use_nothing_is_hidden() -> None:
    """A daemon inside a test or another program."""
    import hashlib

    before = dict(sys.modules)
    lean.import_without_openssl()
    assert sys.modules["hashlib"] is hashlib
    assert {name: sys.modules[name] for name in before} == before


def test_r02_memory_is_given_back_once_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while there is work, and once for each piece of work."""
    trims: list[int] = []
    monkeypatch.setattr(lean, "trim", lambda: trims.append(1))
    busy = 0
    seen = []
    for answered in (0, 5, 3, 0, 0, 1, 0):
        busy = Server._tidy(busy, answered)
        seen.append(len(trims))
    assert seen == [0, 0, 0, 1, 1, 1, 2]


def test_r32_memory_is_given_back_though_it_is_never_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each five minutes of looks five seconds apart, and once more when it is quiet."""
    trims: list[int] = []
    monkeypatch.setattr(lean, "trim", lambda: trims.append(1))
    busy = 0
    for _ in range(181):
        busy = Server._tidy(busy, 7)
    assert len(trims) == 3
    assert Server._tidy(busy, 0) == 0
    assert len(trims) == 4


def test_without_glibc_nothing_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of musl has neither call, and a Mac none at all."""
    for library in (SimpleNamespace(), None):
        monkeypatch.setattr(lean, "_library", lambda library=library: library)
        lean.one_arena()
        lean.trim()


def test_r22_a_thread_that_computes_gives_way_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten turns in the time of one of Python's own; the daemon's main asks for it before anything else runs."""
    asked: list[float] = []
    monkeypatch.setattr(lean, "sys", SimpleNamespace(setswitchinterval=asked.append))
    lean.short_turns()
    assert asked == [lean.TURN_S]
    assert lean.TURN_S == 0.005 / 10


def test_r22_what_is_there_after_the_start_is_seldom_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the start left is left out for good; full collections are a tenth, young ones as many as ever."""
    asked: list[tuple[int, ...]] = []

    def set_threshold(*counts: int) -> None:
        asked.append(counts)

    stand_in = SimpleNamespace(
        freeze=lambda: asked.append(()), get_threshold=lambda: (700, 10, 10), set_threshold=set_threshold
    )
    monkeypatch.setattr(lean, "gc", stand_in)
    lean.settle()
    assert asked == [(), (700, 10, 100)]
