"""Remembered answers: only for the same bytes, the same world and the same files, and never too many."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.daemon import answer_cache
from veloxquant.daemon.answer_cache import Answer, Answers, Packed, Plans, look, pack, unchanged
from veloxquant.daemon.application import Application
from veloxquant.daemon.state import Era
from veloxquant.errors import PlanNotFound

if TYPE_CHECKING:
    from pathlib import Path


def answer(result: bytes, generation: int = 1, *, elsewhere: bool = False) -> Answer:
    """One that depends on no file."""
    return Answer(pack(result), (), generation, elsewhere)


def test_an_answer_is_kept_for_its_generation() -> None:
    """And its method, and its bytes."""
    answers = Answers()
    answers.put(Era(3, 3), "plan", b"{}", answer(b"result", 3))
    assert answers.get(Era(3, 3), "plan", b"{}") == b"result"
    for other in ((3, "fit", b"{}"), (3, "plan", b"{ }"), (4, "plan", b"{}"), (2, "plan", b"{}")):
        assert answers.get(Era(other[0], other[0]), *other[1:]) is None
    assert (answers.hits, answers.misses) == (1, 4)


def test_a_new_generation_forgets_the_old_one() -> None:
    """An answer that arrives late, for a world gone by, is not kept."""
    answers = Answers()
    answers.put(Era(3, 3), "plan", b"a", answer(b"old", 3))
    answers.put(Era(4, 4), "plan", b"b", answer(b"new", 4))
    answers.put(Era(4, 4), "plan", b"c", answer(b"late", 3))
    assert answers.get(Era(4, 4), "plan", b"a") is None
    assert answers.get(Era(4, 4), "plan", b"c") is None
    assert answers.state().entries == 1


def test_when_memory_alone_moved_answers_about_other_machines_hold() -> None:
    """Here 5, elsewhere 3: memory moved twice since. Then records changed, at 6, and nothing holds."""
    answers = Answers()
    answers.put(Era(3, 3), "plan", b"here", answer(b"old", 3))
    answers.put(Era(3, 3), "plan", b"elsewhere", answer(b"kept", 3, elsewhere=True))
    assert answers.get(Era(5, 3), "plan", b"elsewhere") == b"kept"
    answers.put(Era(5, 3), "plan", b"here too", answer(b"new", 5))
    assert [answers.get(Era(5, 3), "plan", name) for name in (b"here", b"elsewhere", b"here too")] == [
        *(None, b"kept", b"new")
    ]
    assert [answers.get(Era(6, 6), "plan", name) for name in (b"elsewhere", b"here too")] == [None, None]
    assert (answers.state().entries, answers.state().bytes) == (0, 0)


def test_the_cache_is_bounded_and_the_least_used_goes_first() -> None:
    """Counted in bytes, keys and overhead included."""
    answers = Answers(limit_bytes=10_000)
    for name in (b"a", b"b", b"c"):
        answers.put(Era(1, 1), "plan", name, answer(os.urandom(2500)))
    assert answers.get(Era(1, 1), "plan", b"a") is not None
    answers.put(Era(1, 1), "plan", b"d", answer(os.urandom(2500)))
    assert answers.get(Era(1, 1), "plan", b"b") is None
    assert answers.get(Era(1, 1), "plan", b"a") is not None
    assert answers.packed_bytes <= 10_000
    before = answers.state()
    answers.put(Era(1, 1), "plan", b"huge", answer(os.urandom(20_000)))
    assert answers.get(Era(1, 1), "plan", b"huge") is None
    assert (answers.state().entries, answers.state().bytes) == (before.entries, before.bytes)


def test_the_same_question_again_is_not_counted_twice() -> None:
    """Two clients may have computed it side by side."""
    answers = Answers()
    answers.put(Era(1, 1), "plan", b"a", answer(b"result"))
    once = answers.packed_bytes
    answers.put(Era(1, 1), "plan", b"a", answer(b"result"))
    assert (answers.packed_bytes, answers.state().entries) == (once, 1)


@pytest.fixture
def folder(short_folder: Path) -> Path:
    """A model folder."""
    made = short_folder / "m"
    made.mkdir()
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"):
        (made / name).write_text("one")
    return made


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_file_that_decides_is_watched(folder: Path, name: str) -> None:
    """Rewritten in place, replaced, or removed."""
    for change in ("rewrite", "replace", "remove"):
        seen = look(str(folder))
        assert unchanged(seen)
        if change == "rewrite":
            (folder / name).write_text(change * 2)
        elif change == "replace":
            (folder / "new").write_text("one")
            os.replace(folder / "new", folder / name)  # noqa: PTH105 -- the name says what the test means
        else:
            (folder / name).unlink()
        assert not unchanged(seen)


def test_a_new_shard_is_noticed(folder: Path) -> None:
    """It moves the folder's own time."""
    seen = look(str(folder))
    (folder / "model-00002-of-00002.safetensors").write_text("two")
    assert not unchanged(seen)


def test_what_does_not_decide_is_not_watched(folder: Path) -> None:
    """A tokenizer rewritten in place changes no plan."""
    seen = look(str(folder))
    (folder / "tokenizer.json").write_text("another")
    assert unchanged(seen)


def test_the_hubs_choice_of_a_snapshot_is_watched(short_folder: Path) -> None:
    """A download moves refs/main; the old snapshot stays as it was."""
    home = short_folder / "models--o--n"
    snapshot = home / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    seen = look(str(snapshot))
    assert unchanged(seen)
    (home / "refs" / "main").write_text("def1")
    assert not unchanged(seen)


def test_a_folder_that_appears_is_noticed(short_folder: Path) -> None:
    """Not being there is also a look."""
    seen = look(str(short_folder / "later"))
    assert unchanged(seen)
    (short_folder / "later").mkdir()
    assert not unchanged(seen)


def test_an_inline_config_depends_on_no_file() -> None:
    """It is in the question."""
    assert look(None) == ()
    assert unchanged(())


def test_an_answer_about_changed_files_is_forgotten(folder: Path) -> None:
    """The memory it took is free again."""
    answers = Answers()
    answers.put(Era(1, 1), "plan", b"a", Answer(pack(b"result"), look(str(folder)), 1))
    assert answers.get(Era(1, 1), "plan", b"a") == b"result"
    (folder / "config.json").write_text("changed")
    assert answers.get(Era(1, 1), "plan", b"a") is None
    assert (answers.state().entries, answers.packed_bytes) == (0, 0)


def test_nothing_is_remembered_for_ever() -> None:
    """Each answer says until when."""
    answers = Answers()
    answers.put(Era(1, 1), "plan", b"a", Answer(pack(b"result"), (), 1, until=time.monotonic() - 1))
    answers.put(Era(1, 1), "plan", b"b", Answer(pack(b"result"), (), 1, until=time.monotonic() + 1000))
    assert answers.get(Era(1, 1), "plan", b"a") is None
    assert answers.get(Era(1, 1), "plan", b"b") == b"result"


def test_plans_are_remembered_by_id_within_bounds() -> None:
    """The newest and the lately asked for."""
    plans = Plans(limit_bytes=250)
    kept = Packed(pack(b"plan").data.ljust(100, b"\0"), 4)  # a stream may be followed by anything
    plans.put("a", kept)
    plans.put("a", kept)
    plans.put("b", kept)
    assert plans.get("a") == b"plan"
    plans.put("c", kept)
    with pytest.raises(PlanNotFound) as caught:
        plans.get("b")
    assert caught.value.field == "plan_id"
    assert plans.get("a")
    assert plans.get("c")


LENGTHS = [0, 1, 6600, 13_200, 40_000, 90_000]


def result_of(number: int) -> bytes:
    """An answer of that length, like no other's."""
    return (b'{"bytes_per_token":%d}' % number * LENGTHS[number])[: LENGTHS[number]]


def test_what_is_kept_takes_less_and_comes_back_the_same() -> None:
    """Before anybody asks again it is packed alone."""
    answers = Answers()
    for number in range(len(LENGTHS)):
        answers.put(Era(1, 1), "plan", b"%d" % number, answer(result_of(number)))
    assert answers.state().bytes < sum(LENGTHS) / 4
    for _ in range(3):
        assert [answers.get(Era(1, 1), "plan", b"%d" % number) for number in range(len(LENGTHS))] == list(
            map(result_of, range(len(LENGTHS)))
        )


def test_r10_what_is_asked_for_again_is_not_unpacked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question of its own for each of 256 clients, 60 kB an answer: each is unpacked once in three rounds."""
    unpacked: list[int] = []
    unpack = Packed.unpack
    monkeypatch.setattr(Packed, "unpack", lambda self: unpacked.append(1) or unpack(self))
    answers = Answers()
    for number in range(256):
        answers.put(Era(1, 1), "plan", b"%d" % number, answer(b"%060000d" % number))
    for _ in range(3):
        for number in range(256):
            assert answers.get(Era(1, 1), "plan", b"%d" % number) == b"%060000d" % number
    assert len(unpacked) == 256


def test_r02_at_rest_answers_are_packed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for within the time stays as it is; the status counts both."""
    now = [100.0]
    monkeypatch.setattr(answer_cache.time, "monotonic", lambda: now[0])
    answers = Answers()
    for number in (3, 4):
        answers.put(Era(1, 1), "plan", b"%d" % number, answer(result_of(number)))
    packed = answers.state().bytes
    answers.get(Era(1, 1), "plan", b"3")
    now[0] = 103.0
    answers.get(Era(1, 1), "plan", b"4")
    assert answers.state().bytes == packed + LENGTHS[3] + LENGTHS[4]
    now[0] = 106.0
    answers.rest(5.0)
    assert answers.state().bytes == packed + LENGTHS[4]
    now[0] = 120.0
    answers.rest(5.0)
    assert answers.state().bytes == packed
    assert [answers.get(Era(1, 1), "plan", b"%d" % number) for number in (3, 4)] == [result_of(3), result_of(4)]


asked = st.tuples(
    st.sampled_from(["put here", "put elsewhere", "get", "rest", "memory", "world"]), st.integers(0, len(LENGTHS) - 1)
)


@given(st.lists(asked, max_size=60), st.integers(0, 150_000), st.integers(0, 4_000))
def test_whatever_is_asked_limits_hold_and_answers_are_those_given(
    steps: list[tuple[str, int]], plain: int, limit: int
) -> None:
    """Against a dictionary that forgets nothing within a world: what comes back was given, and bytes are counted."""
    answers = Answers(limit_bytes=limit, plain_bytes=plain)
    era, holding = Era(1, 1), dict[int, bool]()
    for what, number in steps:
        key = b"%d" % number
        if what.startswith("put"):
            elsewhere = what == "put elsewhere"
            made = answer(result_of(number), era.elsewhere if elsewhere else era.here, elsewhere=elsewhere)
            answers.put(era, "plan", key, made)
            holding[number] = elsewhere
        elif what == "get":
            found = answers.get(era, "plan", key)
            assert found is None or (number in holding and found == result_of(number))
        elif what == "rest":
            answers.rest(0.0)
        else:
            era = Era(era.here + 1, era.elsewhere if what == "memory" else era.here + 1)
            holding = {one: True for one, elsewhere in holding.items() if elsewhere and what == "memory"}
            assert number in holding or answers.get(era, "plan", key) is None
        assert answers.packed_bytes <= limit
        assert answers.state().bytes <= limit + plain
    answers.rest(-1.0)
    assert answers.state().bytes == answers.packed_bytes


def test_a_question_for_which_the_machine_is_looked_at_first_is_a_miss() -> None:
    """It has to be worked out, whatever is remembered of a machine seen long ago."""
    answers = Answers()
    app: Any = SimpleNamespace(_hardware=SimpleNamespace(stale=True), _questions=SimpleNamespace(answers=answers))
    assert Application.remembered(app, "plan", b"{}") is None
    assert (answers.state().hits, answers.state().misses) == (0, 1)
