"""`throughput`: the most tokens a second over all slots that fit, by arithmetic on a machine of round numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_kit import GIB, Own, Synthetic, ask, candidate, codes, every, llama_8b, mac, offers, record, snapshot

from veloxquant.planner.option import Option, consider
from veloxquant.planner.request import PlanRequest
from veloxquant.planner.setting import set_up
from veloxquant.planner.tables import speed
from veloxquant.profiles import WorkloadProfile

if TYPE_CHECKING:
    from veloxquant.planner.result import Plan
    from veloxquant.profiles import HardwareProfile

CONTEXT = 8192
OWN = CONTEXT * 131072
"""Bytes of one sequence in the engine's own cache: 1 GiB."""
PACKED = Synthetic("packed", 8, 0.001, batchable=True, fused=True)
"""Half of it."""
ALONE = Synthetic("alone", 4, 0.001, fused=True)
"""A quarter, one request after another."""
VARIANTS = offers(Own(), PACKED, ALONE)


def _machine(room_gib: float, **fields: Any) -> HardwareProfile:
    """50 million bytes a ms; 4.5 GiB of weights and 0.5 of reserve beside the room."""
    return mac(512, 5 + room_gib, **{"decode_efficiency": {"q4": 0.5}} | fields)


THREE = _machine(3.2)
"""Three of 1 GiB with the old buffers of one layer (3 x 32 MiB); six of half a GiB with theirs (6 x 16 MiB)."""


def _ms(sequences: int, cache_bytes: float) -> float:
    """A step reads 4 GiB of weights and every cache; 32 layers take 0.04 ms each."""
    return (4 * GIB + sequences * cache_bytes) / 50e6 + 32 * 0.04


def _ask(machine: HardwareProfile = THREE, **fields: Any) -> Plan:
    asked = {"on_offer": VARIANTS, "context_length": CONTEXT, "objective": "throughput"}
    return ask(llama_8b(), machine, **asked | fields)


def _more(answer: Plan) -> Any:
    return next(s.value for s in answer.suggestions if s.code == "more_slots")


def _note(answer: Plan, label: str) -> str:
    return next(n for n in candidate(answer, label).speed.evidence.notes if n.startswith("throughput: "))


def test_slots_that_fit_count_and_not_the_asked_ones_alone() -> None:
    """Three of the engine's own caches: three tokens in the time in which 4 + 3 GiB are read."""
    answer = _ask(on_offer=offers(Own()))
    assert _more(answer) == {"label": "fp16", "slots": 3, "tok_s": pytest.approx(3000 / _ms(3, OWN))}
    assert f"{3000 / _ms(3, OWN):.4g} tokens a second over 3 slots" in _note(answer, "fp16")
    assert answer.chosen.speed.decode_tok_s == pytest.approx(1000 / _ms(1, OWN)), (
        "the figures are those of the question"
    )


def test_twice_the_slots_for_the_same_bytes_win() -> None:
    """Six half-size caches are read in the time of three whole ones: twice the tokens, beyond any doubt."""
    answer = _ask()
    assert _more(answer) == {"label": "packed", "slots": 6, "tok_s": pytest.approx(6000 / _ms(6, OWN / 2))}
    assert speed().analytic_high < 2
    assert _ask(objective="latency").chosen.label == "fp16"


def test_fewer_bytes_that_let_in_no_more_slots_do_not_win() -> None:
    """With room for 32 of each, what is left is a gain in time that nobody measured."""
    answer = _ask(_machine(100))
    assert _more(answer)["label"] == "fp16"
    assert {"32 slots" in _note(answer, label) for label in ("fp16", "packed")} == {True}


def test_caches_that_cannot_be_batched_gain_nothing_by_more_slots() -> None:
    """They are served one after another, which the notes say."""
    answer = _ask()
    assert "cannot be batched" in _note(answer, "alone")
    only = _ask(methods=("alone",))
    assert only.chosen.label == "alone"
    assert "more_slots" not in codes(only.suggestions)


def test_asked_slots_that_are_not_batched_are_one_after_another() -> None:
    """Three requests fit either way: batched ones read the weights once, the others three times."""
    answer = _ask(num_concurrent_requests=3)
    assert candidate(answer, "alone").speed.decode_tok_s == pytest.approx(1000 / _ms(1, OWN / 4))
    assert [c.label for c in every(answer)] == ["packed", "fp16", "alone"]


@pytest.mark.parametrize(("batch", "asked", "slots"), [(1, 1, 32), (4, 1, 8), (5, 2, 6), (1, 31, 32)])
def test_no_more_sequences_are_counted_than_the_server_decodes_together(batch: int, asked: int, slots: int) -> None:
    """32 sequences, mlx-lm's --decode-concurrency, in requests of `batch` each."""
    answer = _ask(_machine(100), batch_size=batch, num_concurrent_requests=asked)
    assert _more(answer)["slots"] == slots


@pytest.mark.parametrize("asked", [32, 40])
def test_more_slots_than_that_count_when_they_are_asked_for(asked: int) -> None:
    """Then there is nothing to suggest."""
    answer = _ask(_machine(100), num_concurrent_requests=asked)
    assert f"over {asked} slots" in _note(answer, "fp16")
    assert "more_slots" not in codes(answer.suggestions)


def test_suggested_slots_asked_for_give_what_was_promised() -> None:
    """The same variant at the same tokens a second; with one slot more it does not fit."""
    promised = _more(_ask())
    again = _ask(num_concurrent_requests=promised["slots"])
    assert (again.chosen.label, again.chosen.speed.decode_tok_s) == ("packed", pytest.approx(promised["tok_s"]))
    beyond = _ask(num_concurrent_requests=promised["slots"] + 1, methods=("packed",))
    assert beyond.decision == "no_fit"


def test_slots_keep_within_the_latency_ceiling() -> None:
    """More sequences take longer for a token each: two may keep within it where three cannot."""
    ceiling = speed().analytic_low * (_ms(2, OWN) + _ms(3, OWN)) / 2
    answer = _ask(on_offer=offers(Own()), max_latency_ms=ceiling)
    assert _more(answer)["slots"] == 2


def test_without_times_the_requests_of_one_step_count_in_doublings() -> None:
    """Three fit, or six: twice as many. Four would be a gain that unpacking may eat."""
    unknown = {"bandwidth_gbps": None}
    answer = _ask(_machine(3.2, **unknown))
    assert [c.label for c in every(answer)] == ["packed", "fp16", "alone"]
    assert _more(answer) == {"label": "packed", "slots": 6, "tok_s": None}
    assert "unknown" in _note(answer, "packed")
    # Room for two of 1 GiB and three of 0.7.
    some = Synthetic("some", 11.2, 0.001, batchable=True, fused=True)
    assert _ask(_machine(2.4, **unknown), on_offer=offers(Own(), some)).chosen.label == "fp16"


def test_a_record_of_just_so_many_sequences_is_believed() -> None:
    """Three at once took 600 ms a token, 5 tokens a second: two, by the record of one, are better."""
    seen = [
        (1.0, record("fp16", latency_ms_per_token=100.0)),
        (1.0, record("fp16", id="three", batch_size=3, latency_ms_per_token=600.0)),
    ]
    answer = _ask(on_offer=offers(Own()), records=seen)
    assert _more(answer) == {
        "label": "fp16",
        "slots": 2,
        "tok_s": pytest.approx(2000 / (100 * _ms(2, OWN) / _ms(1, OWN))),
    }


def test_a_record_without_a_bandwidth_promises_no_gain_by_more_sequences() -> None:
    """100 ms for one: four of them may have to wait for each other."""
    seen = [(1.0, record("fp16", latency_ms_per_token=100.0))]
    machine = _machine(100, bandwidth_gbps=None)
    answer = _ask(machine, records=seen, num_concurrent_requests=4, methods=("fp16",))
    assert answer.chosen.speed.latency_ms_per_token == 400.0
    assert answer.chosen.speed.decode_tok_s == 10.0
    assert "more_slots" not in codes(answer.suggestions)


RECORDS = st.lists(
    st.tuples(st.sampled_from(("fp16", "packed", "alone")), st.integers(1, 8), st.floats(80, 2000)), max_size=5
)


@settings(max_examples=150, deadline=None)
@given(RECORDS, st.floats(0.3, 12), st.floats(0.3, 12), st.integers(1, 3), st.none() | st.floats(50, 3000))
def test_more_memory_never_lowers_the_tokens_a_second(
    rows: list[tuple[str, int, float]], one: float, other: float, asked: int, ceiling: float | None
) -> None:
    """Of any variant, whatever was measured at which number of sequences."""
    seen = [
        (1.0, record(label, id=f"r{i}", batch_size=n, latency_ms_per_token=ms)) for i, (label, n, ms) in enumerate(rows)
    ]
    workload = {"context_length": CONTEXT, "generation_length": 0, "objective": "throughput"}
    workload |= {"num_concurrent_requests": asked, "max_latency_ms": ceiling}
    less, more = (_sure(_machine(room), seen, workload) for room in sorted((one, other)))
    assert less.keys() <= more.keys()
    assert all(more[label] >= rate for label, rate in less.items())


def _sure(machine: HardwareProfile, seen: Any, workload: dict[str, Any]) -> dict[str, float]:
    """What each variant that fits is ordered by."""
    request = PlanRequest(model=llama_8b(), workload=WorkloadProfile(**workload))
    setting = set_up(request, snapshot(machine, on_offer=VARIANTS, records=seen))
    options = [o for o in (consider(setting, offer) for offer in VARIANTS) if isinstance(o, Option)]
    return {o.label: o.served.sure_tok_s or 0.0 for o in options if not o.sizing.short_by}
