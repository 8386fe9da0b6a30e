"""Records are the caller's to change: the store takes no key, order or match from an object that it gave out."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.eviction import Limits
from veloxquant.benchmarks.verify import verify
from veloxquant.errors import RecordInvalid
from veloxquant.profiles import ModelProfile, WorkloadProfile

Fill = Callable[..., list[str]]
MODEL = ModelProfile(model_id="m/x-1B", architecture="llama")


def record(record_id: str, **fields: Any) -> BenchmarkRecord:
    """A record that differs where it is said."""
    return BenchmarkRecord(**({"id": record_id, "method": "fp16", "model_id": "m/x-1B"} | fields))


def on_disk(db: BenchmarkDatabase) -> dict[str, dict[str, Any]]:
    """What the files say, by file."""
    return {path.stem: json.loads(path.read_text()) for path in db.records_dir.glob("*.json")}


def test_one_object_may_be_stored_again_and_again(db: BenchmarkDatabase) -> None:
    """A loop that fills in one record and stores it makes as many records, each as it was then."""
    one = record("a")
    for record_id, context, method in (("a", 1000, "m1"), ("b", 2000, "m2"), ("c", 3000, "m3")):
        one.id, one.context_length, one.method = record_id, context, method
        db.upsert(one)
    assert {key: (r.id, r.context_length) for key, r in db.records.items()} == {
        "a": ("a", 1000),
        "b": ("b", 2000),
        "c": ("c", 3000),
    }
    found = db.find_best_match(MODEL, WorkloadProfile(context_length=1000), threshold=0.0)
    assert {key: r.id for key, r in found.items()} == {"m1": "a", "m2": "b", "m3": "c"}
    assert db.remove("a")
    db.save()
    assert verify(db.storage_dir).sound
    assert {key: data["context_length"] for key, data in on_disk(db).items()} == {"b": 2000, "c": 3000}
    db.clear()
    assert db.records == {}


def test_what_find_gives_may_get_another_id_and_be_stored(db: BenchmarkDatabase) -> None:
    """Then there are two, and the first is as it was."""
    db.upsert(record("a", context_length=7))
    one = db.find("a")
    assert one is not None
    one.id = "b"
    db.upsert(one)
    db.save()
    assert {key: r.context_length for key, r in db.records.items()} == {"a": 7, "b": 7}
    assert {key: r.id for key, r in db.records.items()} == {"a": "a", "b": "b"}


def test_save_refuses_another_id(db: BenchmarkDatabase) -> None:
    """By name, with a way out, and nothing is written."""
    db.upsert(record("a"))
    before = on_disk(db)
    db.records["a"].id = "zz"
    with pytest.raises(RecordInvalid, match="id is 'zz', which is not 'a'") as caught:
        db.save()
    assert (caught.value.field, on_disk(db)) == ("id", before)
    assert "upsert" in caught.value.hint
    db.records["a"].id = "a"
    db.save()


def test_another_method_or_model_counts_from_save_on(db: BenchmarkDatabase) -> None:
    """It is written, listed and matched as what it then is, and the object stays the one that find gives."""
    db.upsert(record("a", method="old", context_length=64))
    one = db.find("a")
    assert one is not None
    one.method, one.model_id = "new", "m/y-3B"
    other = ModelProfile(model_id="m/y-3B", architecture="llama")
    workload = WorkloadProfile(context_length=64)
    assert set(db.find_best_match(MODEL, workload)) == {"old"}
    db.save()
    assert db.find_best_match(MODEL, workload) == {}
    assert db.find_best_match(other, workload) == {"new": one}
    assert db.find_best_match(other, workload)["new"] is one is db.find("a")
    assert json.loads(db.index_path.read_text())["records"]["a"]["method"] == "new" == on_disk(db)["a"]["method"]


@pytest.mark.parametrize("tags", [None, 7, "pinned", [1]])
def test_tags_that_are_none_stop_only_the_save(db: BenchmarkDatabase, tags: Any) -> None:
    """Pinning, storing and evicting go by what is stored; pin puts the tags right."""
    for key in ("a", "b"):
        db.upsert(record(key))
        db.records[key].tags = tags
    assert db.pin("a")
    assert db.upsert(record("a", context_length=5)).tags == ["pinned"]
    with pytest.raises(RecordInvalid) as caught:
        db.save()
    assert caught.value.field == "tags"
    assert on_disk(db)["b"]["tags"] == []


def test_a_pin_keeps_what_is_still_to_be_saved(db: BenchmarkDatabase) -> None:
    """The change in memory outlives it, pinned."""
    one = db.upsert(record("a"))
    one.throughput_tok_s = 5.0
    db.pin("a")
    db.save()
    assert (on_disk(db)["a"]["throughput_tok_s"], on_disk(db)["a"]["tags"]) == (5.0, ["pinned"])


def test_a_field_that_was_deleted_is_named(db: BenchmarkDatabase) -> None:
    """As any other that no measurement can have."""
    one = db.upsert(record("a"))
    del one.chip
    for attempt in (db.save, lambda: db.upsert(one), lambda: db.merge([one])):
        with pytest.raises(RecordInvalid) as caught:
            attempt()
        assert caught.value.field == "chip"


def test_unknown_keys_are_the_callers_to_change_too(db: BenchmarkDatabase) -> None:
    """What to_dict gives shares them with the caller's record, and never with the store."""
    db.save()
    (db.records_dir / "a.json").write_text(json.dumps(record("a").to_dict() | {"note": {"runs": [1]}}))
    db.load()
    db.records["a"].to_dict()["note"]["runs"].append(2)
    db.pin("a")
    assert on_disk(db)["a"]["note"] == {"runs": [1]}


def test_what_is_told_of_the_evicted_is_a_copy(directory: Path) -> None:
    """Whoever changes it changes nothing."""
    db = BenchmarkDatabase(directory, limits=Limits(2))
    db.add("fp16", "m/x", context_length=1, mlx_version="0.30")
    newest = db.add("fp16", "m/x", context_length=1, mlx_version="0.31")
    smaller = BenchmarkDatabase(directory, limits=Limits(1))
    (victim,) = smaller.prune(dry_run=True)
    assert victim.superseded_by == newest
    victim.record.id = victim.superseded_by.id = "x"  # type: ignore[union-attr]
    assert len(smaller.prune()) == 1
    assert set(smaller.records) == {newest.id}


IDS = st.sampled_from(("a", "b", "c"))
VALUES = st.sampled_from(
    (None, 7, -1.0, float("nan"), "", "x", "a", "b", [], ["pinned"], [None], {}, 2.5, True, 10**400)
)
FIELDS = st.sampled_from(tuple(BenchmarkRecord.__dataclass_fields__))


class Edits(RuleBasedStateMachine):
    """One database whose records are changed at will between the calls, and what its files should say."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="vq-"))
        self.db = BenchmarkDatabase(self.folder / "b", limits=Limits(3))
        self.expected: dict[str, float] = {}
        self.kept: list[BenchmarkRecord] = []
        self.refused: str | None = "nothing yet"
        self.unchanged = True

    def teardown(self) -> None:
        """What another program reads is what was stored."""
        self.holds()
        self.db.close()
        if self.expected:
            verdict = verify(self.folder / "b")
            assert verdict.sound, verdict
        shutil.rmtree(self.folder)

    @rule(key=IDS, speed=st.integers(1, 99).map(float))
    def upsert(self, key: str, speed: float) -> None:
        """Insert or replace; what comes back may be changed later."""
        self.kept.append(self.db.upsert(record(key, throughput_tok_s=speed)))
        self.expected[key] = speed

    @rule(which=st.integers(0, 30), field=FIELDS, value=VALUES)
    def edit(self, which: int, field: str, value: Any) -> None:
        """Any field of anything that was ever given out gets any value, or goes."""
        for one in (self.kept + list(self.db.records.values()))[which : which + 1]:
            if value == 7:
                one.__dict__.pop(field, None)
            else:
                setattr(one, field, value)

    @rule(which=st.integers(0, 30))
    def upsert_edited(self, which: int) -> None:
        """It is stored under the id that it has, or refused by name."""
        for one in self.kept[which : which + 1]:
            try:
                stored = self.db.upsert(one)
            except RecordInvalid as error:
                self.refused = error.field
            else:
                if len(self.expected | {stored.id: 0.0}) > 3:
                    self.expected = {key: self.expected.get(key, -1.0) for key in self.db.records}
                self.expected[stored.id] = one.throughput_tok_s

    @rule(key=IDS, pinned=st.booleans())
    def pin(self, key: str, pinned: bool) -> None:
        """By what is stored."""
        assert self.db.pin(key, pinned=pinned) == (key in self.expected)

    @rule(key=IDS)
    def remove(self, key: str) -> None:
        """By the id under which it is stored."""
        assert self.db.remove(key) == (self.expected.pop(key, None) is not None)

    @rule()
    def read(self) -> None:
        """Looking again, matching and asking what would go disturb nothing."""
        self.db.load()
        self.db.find_best_match(MODEL, WorkloadProfile(context_length=4096), threshold=0.0)
        self.db.record_set()
        assert self.db.prune() == []

    @rule()
    def save(self) -> None:
        """All edits are written, or one is refused by name and none is."""
        before = on_disk(self.db)
        try:
            self.db.save()
        except RecordInvalid as error:
            self.refused = error.field
            self.unchanged = on_disk(self.db) == before
        else:
            self.expected = {key: self.db.records[key].throughput_tok_s for key in self.expected}

    @invariant()
    def holds(self) -> None:
        """Keys and files are those of the calls, whatever the objects say."""
        assert set(self.db.records) == set(self.expected)
        assert {key: data["throughput_tok_s"] for key, data in on_disk(self.db).items()} == self.expected
        assert all(key == data["id"] for key, data in on_disk(self.db).items())
        assert self.refused is not None, "an error names the field"
        assert self.unchanged, "what was refused wrote something"


TestEdits = Edits.TestCase
TestEdits.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
