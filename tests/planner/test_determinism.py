"""R35: the same request in the same world gives the same bytes, also where the answers of interpreters are compared."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from veloxquant.planner.plan import plan

_SCRIPT = Path(__file__).parents[2] / "bench" / "reliability" / "answers_of.py"
_spec = importlib.util.spec_from_file_location("answers_of", _SCRIPT)
assert _spec is not None
assert _spec.loader is not None
answers: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(answers)


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    """The frozen world of the script."""
    found: dict[str, Any] = json.loads(answers.WORLD.read_text(encoding="utf-8"))
    return found


def test_r35_repeats_give_the_same_bytes(world: dict[str, Any]) -> None:
    """Plans of one model for three workloads on two machines, three times over; the last time from values made anew."""
    known = answers.snapshot(world)
    told = [
        [msgspec.json.encode(plan(one, known)) for one in answers.quick(answers.questions(world))] for _ in range(2)
    ]
    fresh = json.loads(json.dumps(world))
    known = answers.snapshot(fresh)
    told.append([msgspec.json.encode(plan(one, known)) for one in answers.quick(answers.questions(fresh))])
    assert told[0] == told[1] == told[2]
    assert len(set(told[0])) == 6


def test_r35_the_compared_world_says_something(world: dict[str, Any]) -> None:
    """Every announced method is on offer, and records weigh in: a world that plans nothing would prove nothing."""
    known = answers.snapshot(world)
    assert {offer.method.name for offer in known.offers} >= {"fp16", "affine", "kivi", "turboquant_mse", "snapkv"}
    made = answers.whole(answers.questions(world)[0], known)
    assert all(f"record-{number}".encode() in made for number in (1, 2, 3))
    assert len(json.loads(made)[0]["alternatives"]) > 5
