"""Whatever is done to a directory, by us and around us, it holds what a plain dictionary would."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord, benchmark_fingerprint
from veloxquant.benchmarks.verify import verify

IDS = st.sampled_from(("a", "b", "c.2", "d"))
SPEEDS = st.integers(1, 10**6).map(float)


class Store(RuleBasedStateMachine):
    """Two databases on one directory, other programs beside them, and the dictionary to compare with."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="vq-"))
        self.dbs = [BenchmarkDatabase(self.folder / "b") for _ in range(2)]
        self.expected: dict[str, float] = {}
        self.damaged: set[str] = set()

    def teardown(self) -> None:
        """Close, and find index and directory in agreement."""
        for db in self.dbs:
            db.load()
            db.save()
        if self.expected or self.damaged:
            assert verify(self.folder / "b").index_differs == ()
        shutil.rmtree(self.folder)

    @rule(which=st.integers(0, 1), context=st.integers(1, 3), speed=SPEEDS)
    def add(self, which: int, context: int, speed: float) -> None:
        """One version, so the newest figure replaces."""
        made = self.dbs[which].add("fp16", "m/x", context_length=context, throughput_tok_s=speed)
        assert made.id == benchmark_fingerprint("fp16", "m/x", context, 1)
        self.expected[made.id] = speed

    @rule(which=st.integers(0, 1), record_id=IDS, speed=SPEEDS)
    def upsert(self, which: int, record_id: str, speed: float) -> None:
        """Under an id of one's own."""
        self.dbs[which].upsert(BenchmarkRecord(record_id, "fp16", "m/y", throughput_tok_s=speed))
        self.expected[record_id] = speed

    @rule(which=st.integers(0, 1), record_id=IDS)
    def remove(self, which: int, record_id: str) -> None:
        """True when it was there, whoever had put it."""
        assert self.dbs[which].remove(record_id) == (record_id in self.expected)
        self.expected.pop(record_id, None)

    @rule(which=st.integers(0, 1))
    def clear(self, which: int) -> None:
        """All that can be used."""
        self.dbs[which].clear()
        self.expected.clear()

    @rule(which=st.integers(0, 1), record_id=IDS, speed=SPEEDS)
    def edit_and_save(self, which: int, record_id: str, speed: float) -> None:
        """A change in memory of what is up to date is written."""
        self.dbs[which].load()
        record = self.dbs[which].find(record_id)
        if record is not None:
            record.throughput_tok_s = speed
            self.expected[record_id] = speed
        self.dbs[which].save()

    @rule(record_id=st.sampled_from(("p", "q")), speed=SPEEDS)
    def publish(self, record_id: str, speed: float) -> None:
        """By another program."""
        records = self.folder / "b" / "records"
        records.mkdir(parents=True, exist_ok=True)
        (records / ".other.tmp").write_text(
            json.dumps({"id": record_id, "method": "fp16", "model_id": "m/z", "throughput_tok_s": speed})
        )
        (records / ".other.tmp").rename(records / f"{record_id}.json")
        self.expected[record_id] = speed

    @rule(name=st.sampled_from(("x.json", "y.json")), data=st.binary(max_size=5))
    def damage(self, name: str, data: bytes) -> None:
        """A file that is no record stays where it is."""
        if (self.folder / "b" / "records").is_dir():
            (self.folder / "b" / "records" / name).write_bytes(data)
            self.damaged.add(f"records/{name}")

    @rule(data=st.none() | st.binary(max_size=40) | st.just(b'{"version": 1, "records": {"ghost": {}}}'))
    def break_index(self, data: bytes | None) -> None:
        """Gone, cut off, or telling of what is not there."""
        path = self.folder / "b" / "index.json"
        if data is None:
            path.unlink(missing_ok=True)
        elif path.parent.is_dir():
            path.write_bytes(data)

    @rule(which=st.integers(0, 1))
    def open_again(self, which: int) -> None:
        """As a new process would."""
        self.dbs[which].close()
        self.dbs[which] = BenchmarkDatabase(self.folder / "b")

    @invariant()
    def holds(self) -> None:
        """The directory is the truth, for both."""
        for db in self.dbs:
            db.load()
            assert {key: record.throughput_tok_s for key, record in db.records.items()} == self.expected
            assert set(db.skipped) == self.damaged


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
