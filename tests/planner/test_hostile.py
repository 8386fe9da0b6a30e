"""Whatever machine, model, method or record comes in: an answer that is JSON, or a refusal that names the field."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_kit import (
    GIB,
    Own,
    Packed,
    Synthetic,
    ask,
    candidate,
    codes,
    every,
    kv,
    llama_8b,
    mac,
    model,
    offers,
    record,
    rejection,
    snapshot,
    state,
    window,
)

from veloxquant.errors import InvalidParams
from veloxquant.methods.guard import Guarded
from veloxquant.methods.method import QualityPrior
from veloxquant.planner import largest
from veloxquant.planner.explain import explain
from veloxquant.planner.fit import fit
from veloxquant.planner.plan import plan
from veloxquant.planner.request import PlanRequest
from veloxquant.planner.result import Plan
from veloxquant.planner.snapshot import Offer
from veloxquant.profiles import OBJECTIVES, HardwareProfile, ModelProfile, WorkloadProfile
from veloxquant.profiles.workload import MAX_CONTEXT_TOKENS, MAX_PREFILL_STEP, MAX_ROWS

if TYPE_CHECKING:
    from veloxquant.methods.method import Variant

BYTES = st.none() | st.sampled_from((0, 1, 2**20, 2**33, 2**53, 2**62))
MACHINES = st.builds(
    HardwareProfile,
    chip=st.sampled_from((None, "Apple M2", "")),
    backend=st.sampled_from((None, "metal", "cuda", "cpu")),
    total_memory_bytes=BYTES,
    working_set_bytes=BYTES,
    active_bytes=BYTES,
    max_buffer_bytes=BYTES,
    bandwidth_gbps=st.sampled_from((None, 0.0, 1e-9, 100.0, 1e15)),
    prefill_tflops=st.sampled_from((None, 0.0, 1e-9, 2.7)),
    decode_efficiency=st.sampled_from(({}, {"q4": 0.0}, {"q4": 1e-9}, {"f16": 0.9, "q4": 0.5}, {"odd": 3.0})),
)
CHUNKED = msgspec.structs.replace(window(8, 64, 8192), kind="chunked", engine_class="ChunkedKVCache")
CONCAT = msgspec.structs.replace(kv(2, 64), kind="concat", engine_class="ConcatenateKVCache")
PARTS = st.sampled_from(
    (
        *(kv(8, 128), kv(1, 1, itemsize=4), kv(0, 0), kv(1, 512, value=0, latent=True), CHUNKED, CONCAT),
        *(window(8, 128, 1), window(1, 64, 2**20), state(0), state(2**40)),
    )
)
MODELS = st.builds(
    model,
    st.lists(PARTS, max_size=6),
    weights_bytes=BYTES,
    read_bytes_per_token=BYTES,
    num_parameters=st.sampled_from((None, 0, 8 * 10**9)),
    active_parameters=st.sampled_from((None, 0, 10**9, 10**12)),
    query_heads=st.sampled_from((None, 0, 32)),
    head_width=st.sampled_from((None, 0, 128)),
    weight_bits=st.sampled_from((None, 0.0, 4.5, 64.0)),
    max_position=st.sampled_from((None, 0, 4096)),
    num_layers=st.sampled_from((0, 6, 10**6)),
    fused_attention=st.booleans(),
)
WORKLOADS = st.fixed_dictionaries(
    {
        "context_length": st.sampled_from((1, 2, 255, 131072, MAX_CONTEXT_TOKENS)),
        "generation_length": st.sampled_from((0, 1, 512, MAX_CONTEXT_TOKENS)),
        "batch_size": st.sampled_from((1, 3, MAX_ROWS)),
        "num_concurrent_requests": st.sampled_from((1, 7, 33, MAX_ROWS)),
        "objective": st.sampled_from(OBJECTIVES),
        "max_latency_ms": st.sampled_from((None, 1e-300, 50, 1e300)),
        "max_kl": st.sampled_from((None, 1e-300, 0.05, 1e300)),
        "prefill_step_size": st.sampled_from((1, 63, 300, 2048, MAX_PREFILL_STEP)),
    }
)
BUDGETS = st.none() | st.sampled_from((0, 1, 2**40))
RECORDS = st.lists(
    st.builds(
        record,
        st.sampled_from(("fp16", "affine4-g64", "evil")),
        id=st.sampled_from(("a", "b", "c")),
        context_length=st.sampled_from((1, 8192, MAX_CONTEXT_TOKENS)),
        batch_size=st.sampled_from((1, 2, MAX_ROWS)),
        model_id=st.sampled_from(("test/model", "other/model")),
        memory_bytes=st.sampled_from((0, 1, 2**30, 2**62)),
        memory_reduction=st.sampled_from((None, 1e-300, 0.25, 4.0)),
        throughput_tok_s=st.sampled_from((0.0, 1e-300, 20, 1e300)),
        latency_ms_per_token=st.sampled_from((0.0, 5e-324, 50, 1e300)),
        perplexity_delta=st.sampled_from((None, 0, -1e308, 1e308)),
        tags=st.sampled_from(([], ["kl_mean=0"], ["kl=999999"], ["tokens=0"], ["tokens=999999999"])),
    ).map(lambda one: (0.9, one)),
    max_size=4,
)


class Evil(Synthetic):
    """Answers what it is told to, or raises it."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__("evil", 4, 0.01, batchable=True)
        self._answers = answers

    def _tell(self, what: str, otherwise: Any) -> Any:
        answer = self._answers.get(what, otherwise)
        if isinstance(answer, type) and issubclass(answer, BaseException):
            raise answer
        return answer

    def key_bits(self, variant: Variant, part: Any) -> float:
        """As told."""
        return self._tell("key_bits", 4.5)

    def fixed_bytes(self, variant: Variant, part: Any) -> int:
        """As told."""
        return self._tell("fixed_bytes", 0)

    def slot_step(self, variant: Variant, part: Any) -> int:
        """As told."""
        return self._tell("slot_step", 256)

    def unpack_cost(self, variant: Variant) -> float:
        """As told."""
        return self._tell("unpack_cost", 0.0)

    def unpack_bytes(self, variant: Variant) -> float:
        """As told."""
        return self._tell("unpack_bytes", 0.0)

    def workspace_bytes(self, variant: Variant, part: Any, queries: int, slots: int) -> int:
        """As told."""
        return self._tell("workspace_bytes", 0)

    def engine_settings(self, variant: Variant) -> Any:
        """As told."""
        return self._tell("engine_settings", None)

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """As told."""
        return self._tell("quality_prior", QualityPrior(kl_mean=0.01, low=0.005, high=0.02, source="test"))


_UGLY = {
    "key_bits": (RuntimeError, SystemExit, math.nan, math.inf, -1, None, 1e-300),
    "fixed_bytes": (RuntimeError, -1, 1.5, math.nan, 2**53),
    "slot_step": (RuntimeError, 0, -1, 2**40, 1),
    "unpack_cost": (RuntimeError, math.nan, math.inf, -1.0),
    "unpack_bytes": (RuntimeError, math.nan, math.inf, -1.0),
    "workspace_bytes": (RuntimeError, -1, 1.5, math.nan, 2**53),
    "engine_settings": (RuntimeError, {"kv_bits": math.nan}, {1: 2}),
    "quality_prior": (
        RuntimeError,
        None,
        QualityPrior(kl_mean=math.nan, low=0, high=1, source="x"),
        QualityPrior(kl_mean=0, low=0, high=0, source="x"),
    ),
}
EVIL = st.sampled_from(sorted(_UGLY)).flatmap(lambda what: st.tuples(st.just(what), st.sampled_from(_UGLY[what])))


def _guarded(what: str, answer: Any) -> tuple[Offer, ...]:
    """A foreign method as the registry hands it out: behind the fence."""
    evil = Evil({what: answer})
    guarded = Guarded(evil, evil.variants())
    return tuple(Offer(guarded, variant) for variant in guarded.variants())


def _unstated(profile: ModelProfile, machine: HardwareProfile) -> str | None:
    """What keeps a budget from being stated."""
    if profile.weights_bytes is None:
        return "model.weights_bytes"
    memory = (machine.total_memory_bytes, machine.working_set_bytes)
    return "hardware.total_memory_bytes" if memory == (None, None) else None


@settings(max_examples=300, deadline=None)
@given(MODELS, MACHINES, st.tuples(WORKLOADS, BUDGETS), RECORDS, EVIL)
def test_every_question_has_an_answer(
    profile: ModelProfile,
    machine: HardwareProfile,
    asked: tuple[dict[str, Any], int | None],
    records: list[Any],
    evil: tuple[str, Any],
) -> None:
    """Finite JSON in which every variant is accounted for; or InvalidParams with the field that is missing."""
    on_offer = (*offers(Own(), Packed(bits=(4,))), *_guarded(*evil))
    workload, budget = asked
    request = PlanRequest(model=profile, workload=WorkloadProfile(**workload), memory_budget_bytes=budget)
    known = snapshot(machine, on_offer=on_offer, records=records)
    if budget is None and (unstated := _unstated(profile, machine)):
        with pytest.raises(InvalidParams) as caught:
            plan(request, known)
        assert caught.value.field == unstated
        return
    answer, table = plan(request, known), fit(request, known)
    told = msgspec.json.encode(answer)
    json.loads(told, parse_constant=pytest.fail)
    json.loads(msgspec.json.encode(table), parse_constant=pytest.fail)
    assert msgspec.json.encode(msgspec.json.decode(told, type=Plan)) == told
    labels = [c.label for c in every(answer)] + [r.label for r in answer.rejected]
    assert sorted(labels) == sorted(o.variant.label for o in on_offer)
    assert all(explain(answer, label) for label in labels)
    for one in every(answer):
        assert 0 <= one.memory.stored_bytes <= one.memory.peak_bytes <= answer.budget.kv_budget_bytes
        assert one.speed.latency_ms_per_token is None or one.speed.low > 0


@pytest.mark.parametrize(
    ("what", "answer"), [(what, answer) for what in sorted(_UGLY) for answer in _UGLY[what]], ids=str
)
def test_a_foreign_method_that_breaks_harms_no_other(what: str, answer: Any) -> None:
    """It is used with figures that pass for ones, or listed as quarantined; the others are planned as without it."""
    with_it = ask(llama_8b(), mac(64), on_offer=(*offers(Own(), Packed()), *_guarded(what, answer)))
    without = ask(llama_8b(), mac(64))
    assert [c for c in every(with_it) if c.label != "evil"] == every(without)
    assert [r for r in with_it.rejected if r.label != "evil"] == list(without.rejected)
    refused = [r.reason for r in with_it.rejected if r.label == "evil"]
    assert refused in ([], ["quarantined"], ["does_not_fit"])


@pytest.mark.parametrize("parts", [[], [state(1000)] * 3, [window(8, 128, 512)] * 3], ids=["none", "states", "windows"])
def test_models_without_a_growing_layer_keep_what_they_have(parts: list[Any]) -> None:
    """Nothing can be packed, and any context fits that the windows fit."""
    answer = ask(model(parts), mac(64), context_length=MAX_CONTEXT_TOKENS)
    assert answer.decision == "nothing_to_quantize"
    assert answer.chosen.fit.max_context_tokens == MAX_CONTEXT_TOKENS
    assert answer.chosen.memory.stored_bytes == sum(p.state_bytes + p.window * p.slot_bytes for p in parts)


@pytest.mark.parametrize("fields", [{"working_set_bytes": 0}, {"active_bytes": 2**50}, {"total_memory_bytes": 1}])
def test_a_machine_without_room_says_by_how_much(fields: dict[str, Any]) -> None:
    """More is held than there is: the shortfall is weights + other work + reserve - limit."""
    machine = mac(16, 11, **fields)
    answer = ask(llama_8b(), machine)
    held = int(4.5 * GIB) + machine.active_bytes + 512 * 2**20
    limit = min(machine.working_set_bytes, machine.total_memory_bytes)
    assert answer.decision == "weights_do_not_fit"
    assert next(w.value for w in answer.warnings if w.code == "weights_do_not_fit") == held - limit


@pytest.mark.parametrize("budget", [0, 1])
def test_a_budget_of_nothing_fits_nothing(budget: int) -> None:
    """The weights are the caller's business then; what the caches need is told."""
    answer = ask(llama_8b(), mac(64), budget=budget, methods=("fp16",), context_length=256)
    assert answer.decision == "no_fit"
    needed = next(s.value for s in answer.suggestions if s.code == "raise_budget")
    assert needed == 256 * 131072
    assert ask(llama_8b(), mac(64), budget=needed, methods=("fp16",), context_length=256).decision == "keep_fp16"


@pytest.mark.parametrize("figures", [{"latency_ms_per_token": 1e-5}, {"throughput_tok_s": 1e-6}])
def test_times_of_no_machine_are_not_used(figures: dict[str, float]) -> None:
    """A ten-billionth of a second, or eleven days, for a token: a slip of units, whatever the bandwidth."""
    seen = [(1.0, record("fp16", **figures))]
    answer = ask(llama_8b(), mac(64, bandwidth_gbps=None), records=seen, context_length=8192)
    assert "record_ignored" in codes(answer.warnings)
    assert candidate(answer, "fp16").speed.latency_ms_per_token is None


def test_records_that_contradict_each_other_never_shrink_a_cache() -> None:
    """More bytes at 4k than at 16k: the higher figure holds for the longer one too."""
    seen = [(0.9, record("fp16", context_length=n, memory_bytes=size)) for n, size in ((4096, 2**31), (16384, 2**30))]
    stored = [
        candidate(ask(llama_8b(), mac(64), records=seen, context_length=n), "fp16").memory.stored_bytes
        for n in (2048, 4096, 8192, 16384, 32768)
    ]
    assert stored == sorted(stored)
    assert stored[1] == stored[3] == 2**31


def test_the_order_of_offers_does_not_matter_for_what_is_said_of_records() -> None:
    """Warnings go by label."""
    seen = [(1.0, record(label, latency_ms_per_token=1e-9)) for label in ("fp16", "affine8-g64", "affine4-g64")]
    known = offers(Own(), Packed(groups=(64,)))
    one, two = (ask(llama_8b(), mac(64), on_offer=o, records=seen) for o in (known, known[::-1]))
    assert msgspec.json.encode(one) == msgspec.json.encode(two)


def test_two_methods_with_one_label_are_both_listed_in_one_order() -> None:
    """The registry refuses such a pair; a hand-made snapshot gets the same bytes for either order all the same."""
    one, two = Synthetic("one", 4, 0.01), Synthetic("two", 4, 0.01)
    named = [Offer(method, msgspec.structs.replace(method.variants()[0], label="same")) for method in (one, two)]
    answers = [ask(llama_8b(), mac(64), on_offer=on_offer) for on_offer in (named, named[::-1])]
    assert [c.method for c in every(answers[0])] == ["one", "two"]
    assert msgspec.json.encode(answers[0]) == msgspec.json.encode(answers[1])


def test_a_single_buffer_bounds_the_search_for_the_largest_context_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows much more slowly than all caches together; a straight line by the latter would crawl for 1,300 turns."""
    sized: list[int] = []
    footprint = largest.footprint

    def counted(shape: Any, context: int, *rest: Any) -> Any:
        sized.append(context)
        return footprint(shape, context, *rest)

    monkeypatch.setattr(largest, "footprint", counted)
    machine = mac(2**20, max_buffer_bytes=2**26 + 17)
    answer = ask(model([kv(1, 128)] * 80), machine, context_length=2**22, prefill_step_size=64, methods=("fp16",))
    # K of one layer takes 256 bytes a token in steps of 256 slots: 262,144 tokens are exactly 2**26 bytes.
    assert rejection(answer, "fp16").reason == "buffer_too_large"
    assert next(s.value for s in answer.suggestions if s.code == "largest_context")["context_length"] == 2**18
    assert len(set(sized)) < 100
