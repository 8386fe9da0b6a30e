"""Methods that count their own slots: what they store, what growing takes, bounded memory, and layers that differ."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_kit import (
    Counting,
    Own,
    Packed,
    PerLayer,
    ask,
    candidate,
    codes,
    kv,
    llama_8b,
    mac,
    model,
    offers,
    record,
    rejection,
    snapshot,
    window,
)

from veloxquant.methods.method import Method, Variant
from veloxquant.planner.fit import fit
from veloxquant.planner.growth import Reader, by_length, pace
from veloxquant.planner.plan import plan
from veloxquant.planner.request import PlanRequest
from veloxquant.profiles import Calibration, KeptLayer, LayerSensitivity, ModelProfile, Probe, WorkloadProfile

ROOMY = mac(4096)
SLOT = 8 * 2 * 128 * 4 // 8
"""Bytes of one slot of one Llama-3.1-8B layer at 4 bits a number."""
TIERED = Counting("tiered", 4, 0.001, step=64, lag=100, fixed=1000, fused=True)
BOUNDED = Counting("bounded", 4, 0.001, step=64, bound=1024, fixed=1000, fused=True)


def planned(method: Method, profile: Any = None, *, machine: Any = ROOMY, **workload: Any) -> Any:
    """The candidate of a method's one variant beside the engine's own cache."""
    answer = ask(profile or llama_8b(), machine, on_offer=offers(Own(), method), **workload)
    return candidate(answer, method.name)


@pytest.mark.parametrize("step", [64, 300, 2048])
def test_a_method_that_counts_stores_the_same_however_a_prompt_is_cut(step: int) -> None:
    """1,000 tokens, 100 of them recent: 15 steps of 64 for the 900 others, in every layer, and what is fixed."""
    memory = planned(TIERED, context_length=1000, prefill_step_size=step).memory
    assert memory.stored_bytes == 32 * (15 * 64 * SLOT + 1000)
    assert memory.fixed_bytes == 32 * 1000
    assert memory.bytes_per_token == 32 * SLOT
    assert [term.slots for term in memory.terms] == [960]


def test_generated_tokens_are_tokens() -> None:
    """900 of prompt and 100 generated end where 1,000 of prompt do."""
    one, two = (planned(TIERED, context_length=1000 - n, generation_length=n).memory.stored_bytes for n in (0, 100))
    assert one == two


def test_growing_keeps_the_next_smaller_buffer_of_one_layer() -> None:
    """960 slots grew from 896."""
    memory = planned(TIERED, context_length=1000).memory
    assert memory.peak_bytes - memory.stored_bytes == 896 * SLOT
    assert memory.largest_buffer_bytes == 960 * SLOT // 2, "K or V of one layer"


class Stairs(Method):
    """Any count that never falls: `rises` are (tokens from which, slots)."""

    name = "stairs"

    def __init__(self, rises: list[tuple[int, int]]) -> None:
        self.rises = rises

    def slots(self, variant: Variant, part: Any, tokens: int) -> int:
        """The last rise that was reached."""
        return max((slots for at, slots in self.rises if at <= tokens), default=0)


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 600)), max_size=12), st.integers(1, 700))
def test_the_old_buffer_is_the_largest_smaller_one_of_any_shorter_sequence(rises: Any, tokens: int) -> None:
    """Found among all shorter lengths one by one."""
    method = Stairs(rises)
    counted = [0, *(method.slots(Variant(method="stairs", label="s"), None, n) for n in range(1, tokens + 1))]
    held, old = counted[-1], max((slots for slots in counted if slots < counted[-1]), default=0)
    found = by_length(Reader(method, Variant(method="stairs", label="s")), kv(1, 64), tokens)
    assert (found.held, found.most, found.old) == (held, held, old)


@pytest.mark.parametrize(
    ("method", "expected"),
    [(TIERED, 1), (BOUNDED, 0), (Counting("odd", 4, 0.1, step=96), 1), (Stairs([(1, 8)]), 0)],
)
def test_the_pace_is_whole_where_growth_is(method: Method, expected: int) -> None:
    """Slack of a step that divides no power of two is no part of it."""
    assert pace(Reader(method, Variant(method=method.name, label=method.name)), kv(8, 128)) == expected


def test_bounded_memory_does_not_grow_beyond_its_bound() -> None:
    """1,024 slots a layer at any length, and none of it counts as growth."""
    for context in (1024, 10_000, 2**20):
        memory = planned(BOUNDED, context_length=context).memory
        assert memory.stored_bytes == memory.fixed_bytes == 32 * (1024 * SLOT + 1000)
        assert memory.bytes_per_token == 0
    assert planned(BOUNDED, context_length=640).memory.stored_bytes == 32 * (640 * SLOT + 1000)


def test_bounded_memory_fits_any_context_that_the_search_looks_at() -> None:
    """Where the bound fits, 2**27 tokens do; where it does not, what fits is below it, to the token."""
    assert planned(BOUNDED, context_length=1000).fit.max_context_tokens == 2**27
    tight = 32 * (640 * SLOT + 1000) + 576 * SLOT  # 640 slots, with the old 576 of one layer beside them
    answer = ask(llama_8b(), ROOMY, on_offer=offers(BOUNDED), context_length=5000, budget=tight)
    assert rejection(answer, "bounded").reason == "does_not_fit"
    assert [note.value["context_length"] for note in answer.suggestions if note.code == "largest_context"] == [640]


def test_the_largest_context_is_exact_where_some_layers_grow_and_others_are_bounded() -> None:
    """One token more does not fit, whatever of the model is packed."""
    probe = Probe(method="bounded", label="bounded", packed=tuple(range(16)))
    profile = llama_8b(probes=(probe,))
    machine = mac(16, 6.5)
    longest = planned(BOUNDED, profile, machine=machine, context_length=100).fit.max_context_tokens
    assert 10_000 < longest < 2**27
    there, beyond = (ask(profile, machine, on_offer=offers(BOUNDED), context_length=n) for n in (longest, longest + 1))
    assert (there.chosen.label, beyond.decision) == ("bounded", "no_fit")


def test_the_table_of_what_fits_has_bounded_rows_too() -> None:
    """No growth a token, and the same largest context for any number of requests that fit."""
    request = PlanRequest(model=llama_8b(), workload=WorkloadProfile(generation_length=0))
    row = next(r for r in fit(request, snapshot(mac(16, 11.8), on_offer=offers(BOUNDED))).rows)
    assert row.bytes_per_token == 0
    assert [cell.max_context_tokens for cell in row.cells] == [2**27] * 4


def test_a_bounded_cache_is_read_no_slower_at_a_longer_context() -> None:
    """Decode reads what is held; the engine's own cache takes ever longer."""
    times = [planned(BOUNDED, context_length=n).speed.latency_ms_per_token for n in (2000, 200_000)]
    assert times[0] == times[1]
    own = [
        ask(llama_8b(), ROOMY, on_offer=offers(Own()), context_length=n).chosen.speed.latency_ms_per_token
        for n in (2000, 200_000)
    ]
    assert own[1] > 2 * own[0]


def test_what_a_counting_method_keeps_beside_its_slots_is_read_too() -> None:
    """1,000 tokens: 900 slots at most are read, and the 1,000 bytes of the others; times by the machine's bandwidth."""
    plain = Counting("plain", 4, 0.001, step=1, lag=100, fused=True)
    beside = Counting("beside", 4, 0.001, step=1, lag=100, fixed=10**6, fused=True)
    one, two = (planned(m, context_length=1000).speed.latency_ms_per_token for m in (plain, beside))
    efficiency = 0.84  # of 4.5-bit weights on this machine: its q4 figure is the one at 4.5 bits
    assert two - one == pytest.approx(32 * 10**6 / (100e6 * efficiency), rel=0.02)


def test_a_record_of_bounded_memory_holds_at_every_longer_context() -> None:
    """A tenth more than the arithmetic at the bound is a tenth more for ever; below the bound it is in proportion."""
    stored = 32 * 1024 * SLOT
    bare = Counting("bounded", 4, 0.001, step=64, bound=1024, fused=True)
    seen = [(0.9, record("bounded", context_length=8192, memory_bytes=round(1.1 * stored)))]

    def measured(context: int) -> int:
        answer = ask(llama_8b(), ROOMY, on_offer=offers(bare), records=seen, context_length=context)
        return int(candidate(answer, "bounded").memory.stored_bytes)

    assert measured(8192) == measured(10**6) == round(1.1 * stored)
    assert measured(512) == round(1.1 * stored / 2)


def by_layer(**options: Any) -> PerLayer:
    """1,024 slots in the first half of the layers, 512 in the others."""
    return PerLayer("pyramid", 4, 0.001, step=64, bound=1024, fused=True, **options)


def test_layers_with_parameters_of_their_own_are_sized_with_them() -> None:
    """16 layers of 1,024 slots and 16 of 512; the plan names each layer's parameters, and the terms theirs."""
    one = planned(by_layer(), context_length=5000)
    assert one.memory.stored_bytes == 16 * (1024 + 512) * SLOT
    assert [(t.layers, t.slots, t.params) for t in one.memory.terms] == [
        (16, 1024, {"bound": 1024}),
        (16, 512, {"bound": 512}),
    ]
    assert one.cache_config["layer_params"] == [{"bound": 1024}] * 16 + [{"bound": 512}] * 16
    assert one.cache_config["packed_layers"] == list(range(32))
    assert one.params == {}


def test_layers_that_are_alike_need_no_list() -> None:
    """The field is absent, so that an older reader sees what it always saw."""
    one = planned(TIERED, context_length=5000)
    assert "layer_params" not in one.cache_config
    assert [term.params for term in one.memory.terms] == [{}]


def test_only_packed_layers_count_among_the_places() -> None:
    """Every other layer is a window: the two growing ones are first and last, with the budgets of those."""
    profile = model([window(8, 128, 512), kv(8, 128)] * 2)
    one = planned(by_layer(), profile, context_length=5000)
    assert one.cache_config["layer_params"] == [{"bound": 1024}, {"bound": 512}]


CALIBRATION = Calibration(
    model_id="meta-llama/Llama-3.1-8B",
    architecture="llama",
    config_hash="abc",
    tokens=1000,
    text="a test",
    bits=(2, 4),
    layers=(LayerSensitivity(index=0, key=((0.2, 0.1),), value=((0.2, 0.1),)),),
)


class Needy(PerLayer):
    """Needs a calibration."""

    needs = True


def calibrated(profile: ModelProfile, *known: Calibration) -> Any:
    """A plan made where these calibrations are known."""
    needy = Needy("needy", 4, 0.001, step=64, bound=1024)
    held = {(one.model_id, one.config_hash): one for one in known}
    request = PlanRequest(model=profile, workload=WorkloadProfile(context_length=5000, generation_length=0))
    return plan(request, with_calibrations(needy, held))


def with_calibrations(method: Method, held: Any) -> Any:
    """A roomy machine, the engine's own caches, one method, these calibrations."""
    return snapshot(ROOMY, on_offer=offers(Own(), method), calibrations=held)


def test_a_variant_that_lacks_a_calibration_is_rejected_with_the_way_out() -> None:
    """A reason of its own, the method's sentence and its hint."""
    refused = rejection(calibrated(llama_8b(config_hash="abc")), "needy")
    assert refused.reason == "not_calibrated"
    assert refused.detail == "this model was not calibrated: run a calibration"


def test_a_calibration_that_nobody_made_promises_no_packing() -> None:
    """Where the engine refuses all that was tried, an untried variant does not make "nothing to quantize" a choice."""
    probe = Probe(method="affine", label="affine4-g64", kept=(KeptLayer(index=0, reason="sinks", detail="why"),))
    needy = Needy("needy", 4, 0.001, step=64, bound=1024)
    on_offer = offers(Own(), Packed(bits=(4,), groups=(64,)), needy)
    answer = ask(model([kv(8, 128)], probes=(probe,)), ROOMY, on_offer=on_offer)
    assert rejection(answer, "needy").reason == "not_calibrated"
    assert answer.decision == "nothing_to_quantize"


def test_a_calibration_is_of_one_model_and_one_config() -> None:
    """Another config under the same name is another model."""
    assert candidate(calibrated(llama_8b(config_hash="abc"), CALIBRATION), "needy").layers.packed == 32
    assert rejection(calibrated(llama_8b(config_hash="def"), CALIBRATION), "needy").reason == "not_calibrated"
    assert rejection(calibrated(llama_8b(model_id="m", config_hash="abc"), CALIBRATION), "needy").label == "needy"


def test_a_plan_with_a_calibration_has_another_id() -> None:
    """It may say something else."""
    with_it, without = calibrated(llama_8b(config_hash="abc"), CALIBRATION), calibrated(llama_8b(config_hash="abc"))
    assert with_it.plan_id != without.plan_id


def test_a_trace_proves_the_parameters_it_tried_and_no_others() -> None:
    """The layout of the trace is kept; that these very parameters run is then the method's word."""
    tried = tuple((("bound", 1024 if 2 * i < 32 else 512),) for i in range(32))
    packed = tuple(range(32))
    for params, proven in ((tried, True), (tried[::-1], False), ((), False)):
        probe = Probe(method="pyramid", label="pyramid", packed=packed, layer_params=params)
        answer = ask(llama_8b(probes=(probe,)), ROOMY, on_offer=offers(by_layer()), context_length=5000)
        assert ("not_proven_by_trace" in codes(answer.warnings)) is not proven


def test_a_variant_the_trace_did_not_try_is_asked_about_as_without_a_trace() -> None:
    """A calibration that came after the trace counts at once, with a warning."""
    untried = Probe(method="needy", label="needy", untried="no calibration")
    answer = calibrated(llama_8b(config_hash="abc", probes=(untried,)), CALIBRATION)
    assert candidate(answer, "needy").layers.packed == 32
    assert candidate(answer, "needy").memory.evidence.source == "analytic"


def test_a_method_that_refuses_a_layer_under_its_own_parameters_is_out() -> None:
    """In its own words."""

    class Refusing(PerLayer):
        def refuses(self, variant: Variant, part: Any) -> Any:
            small = variant.params.get("bound") == 512
            return ("not_supported_by_engine", "512 slots are too few") if small else None

    answer = ask(
        llama_8b(),
        ROOMY,
        on_offer=offers(Own(), Refusing("picky", 4, 0.001, step=64, bound=1024)),
        context_length=5000,
    )
    assert rejection(answer, "picky").reason == "not_supported_by_engine"
    assert "512 slots are too few" in rejection(answer, "picky").detail


def test_a_cache_config_with_layer_parameters_is_plain_json() -> None:
    """It travels as it is."""
    config = planned(by_layer(), context_length=5000).cache_config
    assert msgspec.json.decode(msgspec.json.encode(config)) == config
