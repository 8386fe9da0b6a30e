"""What lies on the disk, to the byte; how little of it a question reads; bounds and the order in which records go."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from typing import Any

import pytest

from veloxquant.benchmarks import collector, folder
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord
from veloxquant.benchmarks.collector import no_collections
from veloxquant.benchmarks.eviction import EvictionOrder, Limits
from veloxquant.benchmarks.merging import version_id
from veloxquant.benchmarks.record_names import names_of, rank
from veloxquant.benchmarks.record_text import encode


def record(key: str, **fields: Any) -> BenchmarkRecord:
    """One of this id."""
    return BenchmarkRecord(**({"id": key, "method": "fp16", "model_id": "m/x"} | fields))


def test_the_index_is_what_json_would_write(db: BenchmarkDatabase) -> None:
    """In order of ids, letters as they are, with another program's keys after ours; empty too."""
    db.save()
    empty = {"version": 1, "records": {}}
    assert db.index_path.read_text() == json.dumps(empty, indent=2) + "\n"
    db.close()
    kept = {"fleet": {"host": "caf\u00e9", "many": [1, 2]}, "note": None}
    db.index_path.write_text(json.dumps(kept | empty))
    for key, method in (("b", "fp16"), ("a", "caf\u00e9"), ("ab", 'a"b'), ("A", "fp16"), ("aa", "fp16")):
        db.upsert(record(key, method=method))
    db.save()
    listed = {
        one.id: {"method": one.method, "model_id": "m/x", "path": f"records/{one.id}.json"}
        for one in sorted(db.records.values(), key=lambda one: one.id)
    }
    expected = {"version": 1, "records": listed} | kept
    assert db.index_path.read_text(encoding="utf-8") == json.dumps(expected, indent=2, ensure_ascii=False) + "\n"


def test_a_record_is_what_json_would_write(db: BenchmarkDatabase) -> None:
    """Indented, letters as they are, and a line's end."""
    one = db.upsert(record("a", source="caf\u00e9", tags=["b", "a"]))
    expected = json.dumps(one.to_dict(), indent=2, ensure_ascii=False) + "\n"
    assert (db.records_dir / "a.json").read_text(encoding="utf-8") == expected
    assert sorted(path.name for path in db.records_dir.iterdir()) == ["a.json"]


def test_a_question_reads_two_names(db: BenchmarkDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one after the id, and its first stand-in; more of these while there are any."""
    db.save()
    (db.records_dir / "b.json").write_text("{")
    (db.records_dir / "b.2.json").write_bytes(encode(record("b")))
    db.load()
    reads: list[str] = []
    really = folder.read_small
    monkeypatch.setattr(
        folder, "read_small", lambda path, at: reads.append(str(path).rsplit("/", 1)[-1]) or really(path, at)
    )
    assert db._store.find("a") is None
    assert reads == ["a.json", "a.2.json"]
    reads.clear()
    found = db._store.find("b")
    assert found is not None
    assert reads == ["b.json", "b.2.json", "b.3.json"]


def test_the_names_of_an_id_and_their_order() -> None:
    """Its own, then 998 numbered ones, then any other by its name."""
    names = list(names_of("a"))
    assert (names[:3], names[-1], len(names)) == (["a.json", "a.2.json", "a.3.json"], "a.999.json", 999)
    others = ["a.10.json", "b.json", "a.2.json", "a.json", "a.x.json", "A.json"]
    assert sorted(others, key=lambda name: rank("a", name)) == [
        "a.json",
        "a.2.json",
        "a.10.json",
        "A.json",
        "a.x.json",
        "b.json",
    ]
    assert rank("a.2", "a.2.json") < rank("a.2", "a.2.2.json") < rank("a.2", "a.json")


def test_the_id_of_a_version_is_made_of_both() -> None:
    """As they are up to 80 and 40 letters; else cut, with eight digits of SHA-1 of the whole."""

    def digest(text: str) -> str:
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:8]

    assert version_id("i" * 80, "1." * 20) == "i" * 80 + "-mlx" + "1." * 20
    long, odd = "i" * 81, "0.32.4+local build"
    assert version_id(long, "1") == f"{'i' * 71}-{digest(long)}-mlx1"
    assert version_id("a", odd) == f"a-mlx0.32.4_local_build-{digest(odd)}"
    assert version_id("a", "1" * 41) == f"a-mlx{'1' * 31}-{digest('1' * 41)}"


def test_limits(db: BenchmarkDatabase) -> None:
    """Nine tenths are nearly; what takes another's place may take as many bytes as there were."""
    assert Limits(10, 109).nearly() == Limits(9, 98)
    assert Limits(10, 100).after_replacing(50) == Limits(sys.maxsize, 100)
    assert Limits(10, 100).after_replacing(101) == Limits(sys.maxsize, 101)
    assert db.limits == Limits(100_000, 2**30)


def test_an_order_is_made_so_many_at_a_time() -> None:
    """Until all are placed; what came by a change meanwhile is placed once."""
    held = {key: record(key) for key in "abcde"}
    order = EvictionOrder(held)
    held["f"] = record("f")
    order.change(None, held["f"])
    order.advance(2)
    assert order.is_waiting
    order.change(held.pop("a"), None)
    order.advance(100)
    assert not order.is_waiting
    gone = []
    while (one := order.pop()) is not None:
        gone.append(one.id)
        order.change(held.pop(one.id), None)
    assert gone == ["b", "c", "d", "e", "f"]


@pytest.mark.parametrize(("count", "collections"), [(100_000, 0), (100_001, 1)])
def test_no_collections_while_many_records_come(monkeypatch: pytest.MonkeyPatch, count: int, collections: int) -> None:
    """After it as before, and what has heaped up is collected once; where it was off it stays off."""
    done: list[int] = []
    monkeypatch.setattr(collector.gc, "get_count", lambda: (count, 0, 0))
    monkeypatch.setattr(collector.gc, "collect", lambda: done.append(1))
    was = gc.isenabled()
    try:
        gc.enable()
        with no_collections():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert len(done) == collections
        gc.disable()
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
        assert len(done) == collections
    finally:
        if was:
            gc.enable()
