"""The daemon keeps the configured bounds of a directory that other programs fill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant import config
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase
from veloxquant.daemon.record_feed import RecordFeed

if TYPE_CHECKING:
    from pathlib import Path


def test_the_daemon_prunes_what_others_publish(tmp_path: Path) -> None:
    """Beyond records.max_records the oldest go when it reads, pinned ones stay; another bound is another feed."""
    others = BenchmarkDatabase(tmp_path)
    made = [others.add("fp16", "m/x", context_length=1 + n, tags=["pinned"] * (n == 0)).id for n in range(5)]
    others.close()
    settings = config.load(env={}, flags={"records.directory": str(tmp_path), "records.max_records": 3})
    feed = RecordFeed(settings)
    assert feed.read()
    assert feed.counts() == {"used": 3, "skipped": 0}
    assert set(BenchmarkDatabase(tmp_path).records) == {made[0], *made[3:]}
    assert feed.serves(settings)
    assert not feed.serves(config.load(env={}, flags={"records.directory": str(tmp_path)}))
    feed.close()


def test_what_is_not_used_is_counted_in_a_sentence(tmp_path: Path) -> None:
    """One record or several, with the command that says why."""
    BenchmarkDatabase(tmp_path).close()
    (tmp_path / "records").mkdir(exist_ok=True)
    feed = RecordFeed(config.load(env={}, flags={"records.directory": str(tmp_path), "records.watch": False}))
    for count, words in ((1, "1 benchmark record is not used"), (2, "2 benchmark records are not used")):
        (tmp_path / "records" / f"broken{count}.json").write_text("{")
        feed.read()
        assert feed.warnings() == (f"{words}: veloxquantctl records --skipped says why",)
    feed.close()
