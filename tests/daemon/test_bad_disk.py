"""The disk of the benchmark records takes no writes, or gives no reads: planning goes on, and it is said once."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from daemon_kit import TINY_LLAMA, Wire, in_process

from veloxquant.benchmarks import storage
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.errors import StoreUnavailable

if TYPE_CHECKING:
    from veloxquant.daemon.server import Server

PLAN = {"model": {"config": TINY_LLAMA, "model_id": "org/tiny"}, "methods": ["affine"]}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_r34_planning_goes_on_where_nothing_can_be_written(
    short_folder: Path, traced: dict[str, str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A record that others published is used, one warning says that the index is behind, publishing is refused."""
    records = short_folder / "benchmarks"
    publisher = BenchmarkDatabase(records)
    publisher.add("affine4-g64", "org/tiny", context_length=4096, memory_bytes=123_456)
    publisher.close()
    (records / "index.json").write_text("{")
    really, refused = os.open, {code}

    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if refused and flags & (os.O_WRONLY | os.O_RDWR) and Path(os.fsdecode(path)).is_relative_to(records):
            raise OSError(code, os.strerror(code))
        return really(path, flags, *arguments, **options)

    def scenario(_server: Server) -> None:
        wire = Wire(short_folder / "s" / "d.sock")
        try:
            answers = [wire.call("plan", PLAN) for _ in range(3)]
            assert len({answer["generation"] for answer in answers}) == 1
            assert wire.call("status")["records"]["used"] == 1
            (warning,) = [one for one in wire.call("status")["warnings"] if "record" in one]
            assert "index.json" in warning
            assert os.strerror(code) in warning
            with pytest.raises(StoreUnavailable, match=os.strerror(code)) as caught:
                publisher.add("affine4-g64", "org/tiny", context_length=8192, memory_bytes=1)
            assert caught.value.hint
            assert wire.call("reload")["generation"] >= answers[0]["generation"]
            assert wire.call("plan", PLAN)["chosen"]["label"] == answers[0]["chosen"]["label"]
            refused.clear()
            publisher.add("affine4-g64", "org/tiny", context_length=8192, memory_bytes=1)
            wire.call("reload")
            assert wire.call("status")["records"]["used"] == 2
        finally:
            wire.call("shutdown")
            wire.close()

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setenv("VELOXQUANT_RECORDS_WATCH", "false")
    monkeypatch.setenv("VELOXQUANT_RECORDS", str(records))  # for a reload, which knows no flags of this start
    flags = {"records.directory": str(records), "trace.cache_directory": traced["VELOXQUANT_TRACE_CACHE_DIRECTORY"]}
    assert in_process(short_folder, scenario, flags=flags) == 0


def test_r34_records_that_cannot_be_read_any_more(
    short_folder: Path, traced: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The volume is gone: what was read last is planned with, one warning says so, and it heals with the volume."""
    records = short_folder / "benchmarks"
    BenchmarkDatabase(records).add("affine4-g64", "org/tiny", context_length=4096, memory_bytes=123_456)

    def gone(*_arguments: Any, **_options: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def scenario(_server: Server) -> None:
        wire = Wire(short_folder / "s" / "d.sock")
        try:
            before = wire.call("plan", PLAN)
            with monkeypatch.context() as unmounted:
                unmounted.setattr(storage.os, "scandir", gone)
                wire.call("reload")
                (warning,) = [one for one in wire.call("status")["warnings"] if "records" in one]
                assert "Input/output error" in warning
                assert wire.call("status")["records"]["used"] == 1
                after = wire.call("plan", PLAN)
            assert after["chosen"]["memory"]["evidence"] == before["chosen"]["memory"]["evidence"]
            wire.call("reload")
            assert not [one for one in wire.call("status")["warnings"] if "records" in one]
        finally:
            wire.call("shutdown")
            wire.close()

    monkeypatch.setenv("VELOXQUANT_RECORDS_WATCH", "false")
    monkeypatch.setenv("VELOXQUANT_RECORDS", str(records))  # for a reload, which knows no flags of this start
    flags = {"records.directory": str(records), "trace.cache_directory": traced["VELOXQUANT_TRACE_CACHE_DIRECTORY"]}
    assert in_process(short_folder, scenario, flags=flags) == 0
