"""Merging at the limits: what comes in, what goes for it, and that the same source again changes nothing."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import example, given, settings
from hypothesis import strategies as st

from veloxquant.benchmarks import merge_plan
from veloxquant.benchmarks.benchmark_db import BenchmarkDatabase, BenchmarkRecord, benchmark_fingerprint
from veloxquant.benchmarks.eviction import Limits, recorded_at
from veloxquant.benchmarks.merge_plan import MergePlan, plan_merge
from veloxquant.benchmarks.merging import content, kind, version_id
from veloxquant.benchmarks.record_text import encode

if TYPE_CHECKING:
    import random

    import pytest

Records = dict[str, BenchmarkRecord]


def record(record_id: str = "", day: int = 1, **fields: object) -> BenchmarkRecord:
    """A measurement of a day in January, under its fingerprint or under the id given."""
    at = {"created_at": f"2026-01-{day:02}T00:00:00+00:00"}
    made = BenchmarkRecord(**({"id": "x", "method": "fp16", "model_id": "m/x-1B"} | at | fields))  # type: ignore[arg-type]
    own = benchmark_fingerprint(made.method, made.model_id, made.context_length, made.batch_size, made.chip)
    return replace(made, id=record_id or own)


def planned(held: Records, incoming: list[BenchmarkRecord], limits: Limits) -> MergePlan:
    """The plan where a record takes as many bytes as it is written with."""
    return plan_merge(held, lambda key: len(encode(held[key])), incoming, limits)


def carried_out(held: Records, plan: MergePlan) -> Records:
    """The records after a plan, whose ids never clash: what is written is not deleted or evicted as well."""
    written = {one.id for one in plan.puts}
    away = {*plan.deletes, *(victim.record.id for victim in plan.evicted)} - written
    return {key: one for key, one in held.items() if key not in away} | {one.id: one for one in plan.puts}


def directory_of(records: list[BenchmarkRecord]) -> Records:
    """As a directory: one record an id."""
    return {one.id: one for one in records}


RECORDS = st.lists(
    st.builds(
        record,
        record_id=st.sampled_from(("", "", "", "own", version_id("own", "0.31.0"))),
        day=st.integers(1, 4),
        context_length=st.sampled_from((1024, 2048, 4096)),
        mlx_version=st.sampled_from(("0.30.0", "0.31.0", "unknown")),
        throughput_tok_s=st.sampled_from((1.0, 2.0)),
        source=st.sampled_from(("manual", "x" * 400)),
        tags=st.sampled_from(([], [], [], ["pinned"])),
    ),
    max_size=10,
)
LIMITS = (
    st.just(Limits()) | st.builds(Limits, st.integers(1, 6)) | st.builds(Limits, st.just(99), st.integers(300, 6000))
)
TAKEN_IN = {"added", "replaced", "kept beside"}


# An id given by hand that comes free in the course of the merge.
FREED = version_id("own", "0.31.0")


@settings(max_examples=400)
@given(RECORDS, RECORDS, LIMITS)
@example(
    [record(FREED, context_length=2048, mlx_version="0.31.0")],
    [record(), record(FREED), record("own", 2, context_length=2048, mlx_version="0.31.0")],
    Limits(),
)
def test_merging_again_changes_nothing_at_the_limits(
    ours: list[BenchmarkRecord], theirs: list[BenchmarkRecord], limits: Limits
) -> None:
    """Not a file, and the report says so: nothing is added, nothing evicted."""
    held, source = directory_of(ours), list(directory_of(theirs).values())
    once = carried_out(held, planned(held, source, limits))
    again = planned(once, source, limits)
    assert (again.puts, again.deletes, again.evicted) == ((), (), ())
    assert not TAKEN_IN & set(again.outcomes)


@settings(max_examples=200)
@given(RECORDS, RECORDS, LIMITS)
def test_a_merge_that_grows_a_store_leaves_it_within_its_limits(
    ours: list[BenchmarkRecord], theirs: list[BenchmarkRecord], limits: Limits
) -> None:
    """Or no larger than it was where all that was there is pinned; and nothing pinned is evicted."""
    held, source = directory_of(ours), list(directory_of(theirs).values())
    plan = planned(held, source, limits)
    after = carried_out(held, plan)
    assert len(after) <= max(limits.max_records, len(held))
    assert not [victim for victim in plan.evicted if "pinned" in victim.record.tags]
    assert not {victim.record.id for victim in plan.evicted} & set(plan.deletes)
    if len(after) > len(held):
        assert sum(len(encode(one)) for one in after.values()) <= limits.max_bytes


@settings(max_examples=400)
@given(RECORDS, RECORDS, LIMITS, st.randoms(use_true_random=False))
def test_the_order_in_which_records_come_does_not_matter(
    ours: list[BenchmarkRecord], theirs: list[BenchmarkRecord], limits: Limits, chance: random.Random
) -> None:
    """To the files, to what is pinned, to what becomes of each record, and to what goes; at the limits, too."""
    held, numbers = directory_of(ours), list(range(len(theirs)))
    chance.shuffle(numbers)
    plan, other = planned(held, theirs, limits), planned(held, [theirs[number] for number in numbers], limits)
    assert carried_out(held, other) == carried_out(held, plan)
    assert other.evicted == plan.evicted
    assert {text(theirs[number]): outcome for number, outcome in zip(numbers, other.outcomes, strict=True)} == {
        text(one): outcome for one, outcome in zip(theirs[::-1], plan.outcomes[::-1], strict=True)
    } or len({text(one) for one in theirs}) < len(theirs)


@settings(max_examples=400)
@given(RECORDS, RECORDS, LIMITS)
@example([record(tags=["pinned"]), record(FREED)], [record(day=9)], Limits())
def test_no_pin_is_lost_and_nothing_goes_untold(
    ours: list[BenchmarkRecord], theirs: list[BenchmarkRecord], limits: Limits
) -> None:
    """What was pinned is there and pinned, or a later one of its kind is; each id and figure that goes is told."""
    held = directory_of(ours)
    plan = planned(held, theirs, limits)
    after = carried_out(held, plan)
    for one in held.values():
        heirs = [other for other in after.values() if kind(other) == kind(one)]
        pinned = [other for other in heirs if "pinned" in other.tags]
        assert "pinned" not in one.tags or [other for other in pinned if recorded_at(other) >= recorded_at(one)]
        is_told = content(one) in {content(victim.record) for victim in plan.evicted}
        assert one.id in {*after, *plan.deletes, *(victim.record.id for victim in plan.evicted)}
        assert is_told or [other for other in heirs if recorded_at(other) >= recorded_at(one)]
    pins = [one for one in held.values() if "pinned" in one.tags]
    assert len(after) <= max(limits.max_records, len(held), len(pins))
    taken = [one for one, outcome in zip(theirs, plan.outcomes, strict=True) if outcome in TAKEN_IN]
    assert {kind(one) for one in after.values()} <= {kind(one) for one in (*held.values(), *taken)}


def test_an_older_pinned_newcomer_hands_its_pin_to_a_later_one() -> None:
    """Whichever of the two comes first; but what was here is pinned by no newcomer."""
    older, later = record(day=1, tags=["pinned"]), record(day=2)
    for source in ([older, later], [later, older]):
        assert planned({}, source, Limits()).puts == (replace(later, tags=["pinned"]),)
    assert planned(directory_of([later]), [older], Limits()) == MergePlan(("older",), (), (), ())
    assert planned(directory_of([later]), [replace(later, tags=["pinned"])], Limits()).puts == ()


def test_a_pin_moves_on_where_two_of_one_version_were_held() -> None:
    """In front and beside it: the older one, which was pinned, gives way when the front is taken."""
    front, side = record(day=1, tags=["pinned"]), record(version_id(record().id, "unknown"), day=2)
    newest = record(day=3, mlx_version="0.31.0")
    after = carried_out(directory_of([front, side]), planned(directory_of([front, side]), [newest], Limits()))
    assert after == directory_of([newest, replace(side, tags=["pinned"])])


def test_a_pinned_newcomer_stays_out_where_the_pinned_alone_would_be_too_many() -> None:
    """With two pinned here and room for two, also one that goes beside ours under an id of its own."""
    held = directory_of([record(day=1, tags=["pinned"]), record(day=1, context_length=9, tags=["pinned"])])
    for other in (record(day=9, mlx_version="0.33.0", tags=["pinned"]), record("own", day=9, tags=["pinned"])):
        assert planned(held, [other], Limits(2)) == MergePlan(("no room",), (), (), ())


def text(one: BenchmarkRecord) -> str:
    """All of a record."""
    return repr(one.to_dict())


@settings(max_examples=40, deadline=None)
@given(RECORDS, RECORDS, LIMITS)
def test_a_dry_run_tells_what_the_real_one_does(
    ours: list[BenchmarkRecord], theirs: list[BenchmarkRecord], limits: Limits
) -> None:
    """Counts and evicted records are those of the directory, in which the second merge changes no file."""
    with tempfile.TemporaryDirectory() as folder:
        filling = BenchmarkDatabase(folder)
        for one in directory_of(ours).values():
            filling.upsert(one)
        filling.close()
        db, source = BenchmarkDatabase(folder, limits=limits), list(directory_of(theirs).values())
        foretold, before = db.merge(source, dry_run=True), contents(folder)
        assert before.keys() == db.records.keys() == directory_of(ours).keys()
        assert db.merge(source) == foretold
        db.close()
        after = contents(folder)
        assert not {
            victim.record.id for victim in foretold.evicted if before[victim.record.id] == after.get(victim.record.id)
        }
        db = BenchmarkDatabase(folder, limits=limits)
        assert not TAKEN_IN & set(db.merge(source).counts)
        db.close()
        assert contents(folder) == after


def contents(folder: str) -> dict[str, bytes]:
    """Every record file with its bytes."""
    return {path.stem: path.read_bytes() for path in (Path(folder) / "records").glob("*.json")}


def test_what_would_be_the_next_to_go_is_not_taken_in() -> None:
    """Older than all that is there: there is no room, and nothing is evicted for it."""
    held = directory_of([record(day=2, context_length=1), record(day=3, context_length=2)])
    plan = planned(held, [record(day=1, context_length=3)], Limits(2))
    assert plan == MergePlan(("no room",), (), (), ())


def test_what_goes_for_a_newer_record_is_told_with_the_reason() -> None:
    """The oldest, superseded by nothing."""
    oldest, later, newest = (record(day=day, context_length=day) for day in (1, 2, 3))
    plan = planned(directory_of([oldest, later]), [newest], Limits(2))
    assert (plan.outcomes, plan.puts, plan.deletes) == (("added",), (newest,), ())
    assert [(victim.record, victim.superseded_by) for victim in plan.evicted] == [(oldest, None)]


def test_our_record_keeps_its_id_when_what_would_stand_in_front_of_it_has_no_room() -> None:
    """A later day on an older MLX is superseded by ours from the start."""
    ours, theirs = record(day=1, mlx_version="0.32.0"), record(day=9, mlx_version="0.31.0")
    assert planned(directory_of([ours]), [theirs], Limits(1)) == MergePlan(("no room",), (), (), ())


def test_a_pinned_record_from_elsewhere_evicts_nothing_pinned() -> None:
    """Where all that is here is pinned there is no room for it, and no error either."""
    ours, theirs = record(tags=["pinned"], context_length=1), record(tags=["pinned"], context_length=2, day=9)
    assert planned(directory_of([ours]), [theirs], Limits(1)) == MergePlan(("no room",), (), (), ())


def test_of_pinned_newcomers_the_latest_find_room() -> None:
    """As many as there is room for, by number and by bytes, and no more are turned away."""
    days = [record(day=day, context_length=day, tags=["pinned"]) for day in (1, 2, 3)]
    size = len(encode(days[0]))
    for limits in (Limits(2), Limits(max_bytes=2 * size)):
        plan = planned({}, days, limits)
        assert plan.outcomes == ("no room", "added", "added")
        assert {one.id for one in plan.puts} == {one.id for one in days[1:]}
    assert planned({}, days, Limits(3)).outcomes == ("added",) * 3
    assert planned({}, days, Limits(max_bytes=3 * size)).outcomes == ("added",) * 3


def test_a_pin_stays_on_what_was_pinned_when_its_twin_takes_the_place() -> None:
    """Two of one moment that differ both stay, the greater in front: it was here for nobody to pin."""
    ours, theirs = record(throughput_tok_s=1.0, tags=["pinned"]), record(throughput_tok_s=2.0)
    after = carried_out(directory_of([ours]), planned(directory_of([ours]), [theirs], Limits()))
    assert after[ours.id] == theirs
    assert {one.throughput_tok_s: one.tags for one in after.values()} == {1.0: ["pinned"], 2.0: []}


def test_a_merge_that_only_replaces_leaves_an_overfull_directory_as_full() -> None:
    """What others put beyond the limits is not its affair."""
    held = directory_of([record(context_length=n) for n in range(1, 6)])
    later = record(context_length=1, day=2)
    plan = planned(held, [later], Limits(2))
    assert plan == MergePlan(("replaced",), (later,), (), ())


def test_a_circle_ends_in_one_place_wherever_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a merge lead from one state to another and back, any of them ends in the one that is spelt first."""
    first, second = ({"x": record("x", source=source)} for source in ("a", "b"))
    outside = {"x": record("x", source="0")}

    def around(before: Records, *_: object) -> merge_plan._Round:
        after = first if before["x"].source == "b" else second
        return merge_plan._Round(dict(after), [], set(), [], moved=True)

    monkeypatch.setattr(merge_plan, "_merge", around)
    for held in (first, second, outside):
        assert carried_out(held, planned(held, [], Limits())) == first


def test_of_two_of_the_source_the_later_one_counts() -> None:
    """The other is older than one that is taken in, and is not told to be added."""
    assert planned({}, [record(day=1), record(day=2)], Limits()).outcomes == ("older", "added")


def test_what_another_process_does_meanwhile_is_not_undone(tmp_path: Path) -> None:
    """It put a later record of the same id while the merge was decided, and a newer one of another: both stay."""
    db, other = BenchmarkDatabase(tmp_path, limits=Limits(3)), BenchmarkDatabase(tmp_path)
    ours = [db.upsert(record(day=day, context_length=day)) for day in (1, 2, 3)]
    latest, further = replace(ours[2], created_at="2026-02-01T00:00:00+00:00"), record(day=28, context_length=9)

    told: list[int] = []

    def between(done: int, _: int) -> None:
        told.append(done)
        if len(told) == 1:
            other.upsert(latest)
            other.upsert(further)

    merged = db.merge([record(day=4, context_length=3), record(day=5, context_length=4)], on_step=between)
    assert merged.counts == {"replaced": 1, "added": 1}
    assert [victim.record for victim in merged.evicted] == [ours[0]]
    db.save()
    other.load()
    assert other.records == {one.id: one for one in (latest, further, record(day=5, context_length=4))}
