"""The world is swapped as a whole, and only for a reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.config import Config, load
from veloxquant.daemon.state import State, moved
from veloxquant.local import World
from veloxquant.methods.registry import Loaded
from veloxquant.planner.snapshot import NoRecords, QuarantinedMethod, Snapshot
from veloxquant.profiles import Calibration, HardwareProfile

GIB = 2**30
MACHINE = HardwareProfile(
    chip="Apple M2", total_memory_bytes=16 * GIB, active_bytes=4 * GIB, available_bytes=12 * GIB, mlx_version="0.32.4"
)
RECORDS = NoRecords()
LOADED = Loaded((), (), (), "a")


def calibration() -> Calibration:
    """Of a model without layers."""
    return Calibration(
        model_id="org/model", architecture="llama", config_hash="0", tokens=1, text="a test", bits=(4,), layers=()
    )


def world(**snapshot: Any) -> World:
    """A world without methods, always with the same records."""
    shot = Snapshot(hardware=MACHINE, offers=(), records=RECORDS, **snapshot)
    return World(config=Config(), snapshot=shot, loaded=LOADED)


@pytest.fixture
def heard() -> list[frozenset[str]]:
    """Topics a listener was told."""
    return []


@pytest.fixture
def state(heard: list[frozenset[str]]) -> State:
    """A state with a listener."""
    state = State(world(generation=7))
    state.on_change(heard.append)
    return state


def test_new_records_are_a_new_generation(state: State, heard: list[frozenset[str]]) -> None:
    """The old world is untouched, for the answers still being made from it."""
    before = state.world
    records = NoRecords()
    state.use_records(records)
    assert state.world.snapshot.records is records
    assert (state.generation, before.snapshot.generation) == (8, 7)
    assert heard == [{"generation", "records"}]


def test_the_same_records_change_nothing(state: State, heard: list[frozenset[str]]) -> None:
    """A look that found nothing new."""
    state.use_records(state.world.snapshot.records)
    assert (state.generation, heard) == (7, [])


def test_other_calibrations_are_a_new_generation(state: State, heard: list[frozenset[str]]) -> None:
    """Told as such; equal ones, read again, change nothing."""
    for _ in range(2):
        state.use_calibrations({("org/model", "0"): calibration()})
        assert state.world.snapshot.calibration("org/model", "0") == calibration()
        assert (state.generation, heard) == (8, [{"generation"}])


@pytest.mark.parametrize(
    ("found", "topics"),
    [
        ({"snapshot": Snapshot(MACHINE, (), RECORDS, calibrations={("m", "0"): calibration()})}, set()),
        ({"config": load(flags={"planner.reserve_bytes": 7})}, set()),
        ({"snapshot": Snapshot(MACHINE, (), records=NoRecords())}, {"records"}),
        ({"loaded": dataclasses.replace(LOADED, fingerprint="b")}, {"methods"}),
        ({"loaded": dataclasses.replace(LOADED, warnings=("foo: its files changed",))}, {"methods"}),
        (
            {"snapshot": Snapshot(MACHINE, (), RECORDS, quarantined=(QuarantinedMethod("foo", "it hangs"),))},
            {"methods"},
        ),
        (
            {"snapshot": Snapshot(msgspec.structs.replace(MACHINE, mlx_version="0.33.0"), (), RECORDS)},
            {"hardware"},
        ),
    ],
    ids=["calibrations", "config", "records", "other methods", "a warning", "a fenced one", "hardware"],
)
def test_a_reload_that_found_something_goes_on_counting(
    state: State, heard: list[frozenset[str]], found: dict[str, Any], topics: set[str]
) -> None:
    """Whatever generation the new world was built with; listeners hear what differs."""
    after = dataclasses.replace(world(generation=0), **found)
    assert state.use_world(after)
    assert state.generation == 8
    assert heard == [{"generation", *topics}]


def test_a_reload_that_found_nothing_leaves_the_world(state: State, heard: list[frozenset[str]]) -> None:
    """What was answered stays remembered; memory that moved by less than a hundredth is nothing."""
    before = state.world
    calm = msgspec.structs.replace(MACHINE, active_bytes=4 * GIB + 1)
    assert not state.use_world(dataclasses.replace(world(), snapshot=Snapshot(calm, (), RECORDS)))
    assert (state.world is before, state.generation, heard) == (True, 7, [])


def test_warnings_are_told_once(state: State, heard: list[frozenset[str]]) -> None:
    """Set, set again, changed, cleared, cleared again; the generation stays, for plans do not change."""
    for text in ("a", "a", "b", None, None):
        state.warn("records", text)
    assert heard == [{"warnings"}] * 3
    assert (state.warnings, state.generation) == ({}, 7)


@pytest.mark.parametrize(
    ("change", "material"),
    [
        ({}, False),
        ({"sources": {"chip": "elsewhere"}}, False),
        ({"available_bytes": 12 * GIB - 16 * GIB // 100}, False),  # exactly one hundredth of the total
        ({"available_bytes": 12 * GIB - 16 * GIB // 100 - 1}, True),
        ({"active_bytes": 4 * GIB + 16 * GIB // 50}, True),
        ({"active_bytes": None}, True),
        ({"working_set_bytes": 11 * GIB}, True),
        ({"mlx_version": "0.33.0"}, True),
        ({"total_memory_bytes": 32 * GIB}, True),
    ],
)
def test_what_moves_the_generation(state: State, change: dict[str, Any], *, material: bool) -> None:
    """Memory by more than a hundredth of the total; anything else at all, but not where a figure is from."""
    assert state.use_hardware(msgspec.structs.replace(MACHINE, **change)) is material
    assert state.generation == 7 + material


@pytest.mark.parametrize(
    ("change", "settled"),
    [
        ({"available_bytes": 2 * GIB, "active_bytes": 14 * GIB}, 7),
        ({"available_bytes": None, "sources": {"available_bytes": "psutil: failed"}}, 7),
        ({"available_bytes": 2 * GIB, "sources": {"chip": "elsewhere"}}, 8),
        ({"available_bytes": 2 * GIB, "mlx_version": "0.33.0"}, 8),
        ({"working_set_bytes": 11 * GIB}, 8),
    ],
)
def test_answers_about_other_machines_hold_while_memory_alone_moves(change: dict[str, Any], settled: int) -> None:
    """They show all else that is known of this one, and where from."""
    state = State(world(generation=7, settled_generation=7))
    assert state.use_hardware(msgspec.structs.replace(MACHINE, **change))
    assert state.era == (8, settled)
    state.use_records(NoRecords())
    assert state.era == (9, 9)


def test_slow_drift_is_noticed(state: State) -> None:
    """Small steps are measured from what answers are made of, not from each other."""
    step = GIB // 20
    moves = [
        state.use_hardware(msgspec.structs.replace(MACHINE, available_bytes=12 * GIB - step * number))
        for number in range(1, 41)
    ]
    assert sum(moves) >= 5
    shown = state.world.snapshot.hardware.available_bytes
    assert shown is not None
    assert abs(shown - 10 * GIB) <= 0.01 * 16 * GIB


def test_without_a_total_any_step_counts() -> None:
    """There is nothing to take a share of."""
    machine = HardwareProfile(available_bytes=5)
    assert moved(machine, HardwareProfile(available_bytes=6))
    assert not moved(machine, machine)


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_moving_is_symmetric(before: int, after: int) -> None:
    """Freed memory is as material as memory taken."""
    first, second = (msgspec.structs.replace(MACHINE, available_bytes=size) for size in (before, after))
    assert moved(first, second) == moved(second, first)
