"""Directories shared with the public tool, VeloxQuant-MLX.

The recorded one was written by that tool. The live tests run it in a venv of its own: set VELOXQUANT_PEER_PYTHON to
the python of a venv that has `veloxquant-mlx`.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord, benchmark_fingerprint
from veloxquant.profiles import WorkloadProfile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PEER = os.environ.get("VELOXQUANT_PEER_PYTHON", "")
live = pytest.mark.skipif(not PEER, reason="VELOXQUANT_PEER_PYTHON names no python that has veloxquant-mlx")


def files(directory: Path) -> dict[str, dict[str, Any]]:
    """The records as JSON, read with nothing of ours: id by file name."""
    return {path.stem: json.loads(path.read_text()) for path in (directory / "records").glob("*.json")}


def peer(script: str, *arguments: object) -> Any:
    """What the public tool answers, as JSON."""
    head = (
        "import dataclasses, json, sys\n"
        "from veloxquant_mlx.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord, benchmark_fingerprint\n"
    )
    command = [PEER, "-c", head + script, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_a_directory_of_the_public_tool_opens_here(recorded: Path, in_index: Callable[[Path], set[str]]) -> None:
    """Every record and every id, field by field."""
    db = BenchmarkDatabase(recorded)
    assert {key: record.to_dict() for key, record in db.records.items()} == files(recorded)
    assert set(db.records) == in_index(recorded)
    assert db.skipped == {}


def test_opening_it_changes_nothing(recorded: Path) -> None:
    """Not a byte of records or index."""
    before = {path: path.read_bytes() for path in recorded.rglob("*.json")}
    BenchmarkDatabase(recorded).close()
    assert {path: path.read_bytes() for path in recorded.rglob("*.json")} == before


def test_its_ids_are_what_we_compute(recorded: Path) -> None:
    """For every record that was keyed by its fingerprint."""
    for record in BenchmarkDatabase(recorded).records.values():
        key = (record.method, record.model_id, record.context_length, record.batch_size, record.chip)
        assert record.id in (benchmark_fingerprint(*key), "by-hand_1.0")


def test_our_records_have_its_form(recorded: Path, db: BenchmarkDatabase) -> None:
    """The same keys in the same order at both levels, and the same shape of time stamp."""
    theirs = next(iter(files(recorded).values()))
    db.add("fp16", "m/x", context_length=1)
    ours = next(iter(files(db.storage_dir).values()))
    assert list(ours) == list(theirs)
    assert list(ours["workload"]) == list(theirs["workload"])
    measured_or_not = ("memory_reduction", "perplexity_delta")
    for key in set(ours) - set(measured_or_not):
        assert type(ours[key]) is type(theirs[key])
    assert len(ours["created_at"]) == len(theirs["created_at"])


@live
def test_the_public_tool_opens_ours(db: BenchmarkDatabase, recorded: Path) -> None:
    """Every field of every record, those it wrote and those we added."""
    db.load()
    workload = WorkloadProfile(context_length=4096, batch_size=2, objective="latency", max_latency_ms=30.5, max_kl=0.1)
    db.add("affine4-g64", "m/é", context_length=4096, batch_size=2, chip="Apple M4", workload=workload, tags=["a"])
    db.upsert(BenchmarkRecord("own.id", "fp16", "m/x", memory_reduction=1.0, perplexity_delta=-0.5))
    db.close()
    answer = peer(
        "db = BenchmarkDatabase(sys.argv[1]); print(json.dumps({k: r.to_dict() for k, r in db.records.items()}))",
        recorded,
    )
    ours = {key: record.to_dict() for key, record in db.records.items()}
    for record in ours.values():
        record["workload"].pop("max_kl", None)
    assert len(answer) == 7
    assert answer == ours


@live
def test_both_write_to_one_directory(db: BenchmarkDatabase) -> None:
    """We add, it adds, we add, and both see all; ids agree."""
    mine = db.add("fp16", "m/x", context_length=1024, chip="M4")
    db.close()
    theirs = peer(
        "db = BenchmarkDatabase(sys.argv[1])\n"
        "a = db.add('kivi', 'm/x', context_length=2048, chip='M4 Max', tags=['t'])\n"
        "print(json.dumps([a.to_dict(), benchmark_fingerprint('fp16', 'm/x', 1024, 1, 'M4')]))",
        db.storage_dir,
    )
    assert theirs[1] == mine.id
    assert theirs[0]["id"] == benchmark_fingerprint("kivi", "m/x", 2048, 1, "M4 Max")
    db.load()
    assert {key: record.to_dict() for key, record in db.records.items()} == {
        mine.id: mine.to_dict(),
        theirs[0]["id"]: theirs[0],
    }
    last = db.add("fp16", "m/y", context_length=1)
    db.close()
    seen = peer("print(json.dumps(sorted(BenchmarkDatabase(sys.argv[1]).records)))", db.storage_dir)
    assert seen == sorted([mine.id, theirs[0]["id"], last.id])
