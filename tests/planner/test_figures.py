"""Figures and their grounds, each by its own arithmetic: confidence, ranges, facts, budgets, and ids of plans."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from planner_kit import (
    GIB,
    KL,
    Own,
    Packed,
    Synthetic,
    ask,
    candidate,
    deepseek_v3,
    kv,
    llama_8b,
    mac,
    model,
    offers,
    qwen25_7b,
    qwen35_27b,
    record,
    rejection,
    snapshot,
    windowed,
)

from veloxquant.errors import InvalidParams
from veloxquant.planner.fit import fit
from veloxquant.planner.plan import plan
from veloxquant.planner.request import PlanRequest
from veloxquant.profiles import WorkloadProfile

if TYPE_CHECKING:
    from veloxquant.planner.result import Evidence, Plan, Quality

MACHINE = mac(64)
ONE = offers(Own(), Packed(bits=(8,), groups=(64,)))
RESERVE = GIB // 2


def measured(score: float = 0.9, **fields: Any) -> Evidence:
    """The grounds of a decode time that this record gives at 8,192 tokens."""
    seen = record("fp16", latency_ms_per_token=60.0, **fields)
    answer = ask(llama_8b(), MACHINE, on_offer=ONE, records=[(score, seen)], context_length=8192)
    return candidate(answer, "fp16").speed.evidence


def quality(*, profile: Any = None, **fields: Any) -> Quality:
    """The quality of eight bits in groups of 64 by this record; the method says 0.0004, published are 0.0002."""
    seen = record("affine8-g64", **fields)
    answer = ask(profile or llama_8b(), MACHINE, on_offer=ONE, records=[(0.9, seen)], context_length=8192, max_kl=100)
    return candidate(answer, "affine8-g64").quality


@pytest.mark.parametrize(
    ("changes", "factor", "note"),
    [
        ({"mlx_version": "0.31.4"}, 0.9, "measured on MLX 0.31.4, planned for 0.32.4"),
        ({"mlx_version": "1.32.4"}, 0.9, "measured on MLX 1.32.4, planned for 0.32.4"),
        ({"macos_version": "15.1"}, 0.95, "measured on macOS 15.1, planned for 26.1"),
        ({"chip": "Apple M2 Max"}, 0.8, "measured on Apple M2 Max, planned for Apple M2"),
        ({"context_length": 9100}, 0.9, "measured at a context of 9,100, extrapolated"),
        ({"tags": ["repeats=2"]}, 0.9, "few repeats (2)"),
        ({"tags": ["runs:1"]}, 0.9, "few repeats (1)"),
        ({"tags": ["on Battery"]}, 0.8, "the record notes on Battery"),
        ({"tags": ["low_power"]}, 0.8, "the record notes low_power"),
        ({"tags": ["throttled"]}, 0.8, "the record notes throttled"),
        ({"model_id": "m/Other-8B"}, 0.8, "measured on m/Other-8B, another model of this architecture and size"),
    ],
)
def test_each_doubt_has_its_factor(changes: Any, factor: float, note: str) -> None:
    """Confidence starts at the match score and is multiplied; what is alike costs nothing."""
    grounds = measured(**changes)
    assert grounds.confidence == pytest.approx(0.9 * factor, abs=5e-5)
    assert grounds.notes[0] == note


@pytest.mark.parametrize(
    "changes",
    [
        {"mlx_version": "0.32.9"},
        {"macos_version": "26.9"},
        {"mlx_version": "unknown", "macos_version": "unknown"},
        {"chip": "unknown"},
        {"context_length": 9000},
        {"context_length": 7450},
        {"tags": ["repeats=3"]},
        {"tags": ["a word"]},
    ],
)
def test_what_is_alike_costs_nothing(changes: Any) -> None:
    """Within a tenth it is one context: 8,192 x 1.1 are 9,011, / 1.1 are 7,447. An unknown version is no other."""
    grounds = measured(**changes)
    assert (grounds.confidence, grounds.notes, grounds.source) == (0.9, (), "measured")


def test_doubts_multiply() -> None:
    """0.9 x 0.9 x 0.95 x 0.8 x 0.8, each in its words."""
    grounds = measured(mlx_version="0.31", macos_version="15", tags=["battery", "thermal"])
    assert grounds.confidence == pytest.approx(0.9 * 0.9 * 0.95 * 0.8 * 0.8, abs=5e-5)
    assert len(grounds.notes) == 4


def test_the_range_of_a_measured_time_widens_with_doubt() -> None:
    """5 %, and 0.3 of what is lacking in confidence: 8 % at 0.9."""
    seen = [(0.9, record("fp16", latency_ms_per_token=60.0))]
    speed = candidate(ask(llama_8b(), MACHINE, on_offer=ONE, records=seen, context_length=8192), "fp16").speed
    assert (speed.low, speed.high) == (pytest.approx(60 * 0.92), pytest.approx(60 * 1.08))


def test_a_measured_divergence_has_a_range_by_its_confidence() -> None:
    """A factor of 1.1, and what is lacking in confidence: 1.2 at 0.9."""
    found = quality(tags=["kl_mean=0.012"])
    assert (found.kl_mean, found.low, found.high) == (0.012, pytest.approx(0.01), pytest.approx(0.0144))
    assert (found.perplexity_delta, found.evidence.confidence) == (None, 0.9)
    assert quality(tags=["kl=1.2e-3"], perplexity_delta=0.5).perplexity_delta == 0.5


def test_a_measured_perplexity_bounds_the_divergence() -> None:
    """Between log(1 + d / 40) / 2 and 2 log(1 + d): 1.3 nats for 500, at least 0.0124 for 1, at most 2e-4 for 1e-4."""
    published = 0.0002
    steep = quality(perplexity_delta=500.0)
    assert steep.kl_mean == pytest.approx(math.log(13.5) / 2)
    assert steep.perplexity_delta == 500.0
    assert steep.evidence.notes[0] == "perplexity measured; KL bounded by it"
    assert steep.low < published
    assert steep.high == steep.kl_mean
    gentle = quality(perplexity_delta=0.00005)
    assert gentle.kl_mean == pytest.approx(2 * math.log1p(0.00005))
    assert gentle.high == pytest.approx(2 * math.log1p(0.00005))
    within = quality(perplexity_delta=0.004)
    assert within.kl_mean == published
    assert within.evidence.notes[0] == "perplexity measured; KL is not"
    fallen = quality(perplexity_delta=-0.1)
    assert (fallen.kl_mean, fallen.perplexity_delta) == (published, -0.1)


def test_a_stand_in_bounds_from_below_alone() -> None:
    """Another model that did not suffer is no promise."""
    assert quality(perplexity_delta=0.00005, model_id="m/Other-8B").kl_mean == 0.0002
    assert quality(perplexity_delta=500.0, model_id="m/Other-8B").kl_mean == pytest.approx(math.log(13.5) / 2)


def test_the_methods_word_has_its_own_range_and_little_trust() -> None:
    """Half and twice of what it says, 0.3, and its source."""
    answer = ask(model([kv(8, 128)]), MACHINE, on_offer=ONE, max_kl=10)
    found = candidate(answer, "affine8-g64").quality
    assert (found.kl_mean, found.low, found.high) == (KL[8], KL[8] / 2, KL[8] * 2)
    assert (found.evidence.source, found.evidence.confidence, found.evidence.notes) == ("prior", 0.3, ("test",))


@pytest.mark.parametrize(
    ("asked", "seen", "kl", "told", "expected"),
    [
        # The method says 0.0004 of groups of 64, 1.5 times as much of 128 and as little of 32: a hundred times that.
        (
            "affine8-g128",
            "affine8-g64",
            0.04,
            "scaled from affine8-g64: 0.04 nats (measured) where the method says 0.0004",
            (0.06, 0.03, 0.12),
        ),
        (
            "affine8-g32",
            "affine8-g64",
            0.04,
            "scaled from affine8-g64: 0.04 nats (measured) where the method says 0.0004",
            (0.04 / 1.5, 0.02 / 1.5, 0.08 / 1.5),
        ),
        # 0.18 nats by the method, 0.09 to 0.36; measured 5 are 4.17 to 6.
        (
            "affine4-g128",
            "affine8-g128",
            5.0,
            "no less than affine8-g128, which is finer (5 nats, measured)",
            (5.0, 0.09, 6.0),
        ),
        # 0.000267 nats by the method, 0.000133 to 0.000533; measured 0.00001 are 0.0000083 to 0.000012.
        (
            "affine8-g32",
            "affine4-g32",
            0.00001,
            "no more than affine4-g32, which is coarser (1e-05 nats, measured)",
            (0.00001, 0.00001 / 1.2, 0.0008 / 1.5),
        ),
    ],
)
def test_what_a_sibling_says_moves_a_guess(
    asked: str, seen: str, kl: float, told: str, expected: tuple[float, float, float]
) -> None:
    """It stays a guess, with a range that holds both, and names whose record it rests on and the method's source."""
    one = record(seen, model_id="test/model", architecture="test", tags=[f"kl_mean={kl:.5f}"])
    variants = offers(Own(), Packed(bits=(8, 4)))
    answer = ask(
        model([kv(8, 128)]),
        mac(512, 400),
        on_offer=variants,
        records=[(0.9, one)],
        max_kl=100,
        context_length=8192,
    )
    found = candidate(answer, asked).quality
    assert (found.kl_mean, found.low, found.high) == pytest.approx(expected)
    assert found.evidence.notes == (told, "test")
    assert (found.evidence.source, found.evidence.confidence, found.evidence.record_ids) == ("prior", 0.3, (one.id,))


def test_impossible_records_are_named_with_their_figure() -> None:
    """What no machine does, and what this one cannot."""
    for fields, why in (
        ({"latency_ms_per_token": 5e-5}, "no machine takes 5e-05 ms for a token"),
        ({"throughput_tok_s": 1e-9}, "no machine takes 1e+12 ms for a token"),
        ({"memory_reduction": 4.5}, "its ratio to the 16-bit cache is 4.5, not within 0 to 4"),
        ({"memory_bytes": -1}, "a figure is negative or not a number"),
        ({"perplexity_delta": math.inf}, "its perplexity is not a number"),
        ({"throughput_tok_s": 30.0}, f"30 tokens a second are more than the bandwidth allows ({1e11 / 2**32:.4g})"),
    ):
        seen = [(1.0, record("fp16", **fields))]
        answer = ask(llama_8b(), MACHINE, on_offer=ONE, records=seen, context_length=8192)
        (note,) = answer.warnings
        assert (note.code, note.value) == ("record_ignored", "fp16-8192")
        assert note.text == f"record fp16-8192 of fp16 is left out: {why}"


@pytest.mark.parametrize(
    ("fields", "machine"),
    [
        ({"throughput_tok_s": 25.6}, MACHINE),
        ({"throughput_tok_s": 200.0, "batch_size": 8}, MACHINE),
        ({"throughput_tok_s": 30.0, "chip": "Apple M4 Max"}, MACHINE),
        ({"throughput_tok_s": 30.0, "model_id": "m/Other-8B"}, MACHINE),
        ({"throughput_tok_s": 30.0}, mac(64, backend="cpu")),
        ({"throughput_tok_s": 30.0}, mac(64, bandwidth_gbps=None)),
        ({"latency_ms_per_token": 1e8}, MACHINE),
        ({"latency_ms_per_token": 50.0, "memory_reduction": 4.0}, MACHINE),
    ],
)
def test_what_may_have_been_measured_is_used(fields: Any, machine: Any) -> None:
    """100 GB/s over 4 GiB are 23.3 readings a second, a tenth of doubt, one for each sequence; elsewhere no bound."""
    answer = ask(llama_8b(), machine, on_offer=ONE, records=[(1.0, record("fp16", **fields))], context_length=8192)
    assert "record_ignored" not in [note.code for note in answer.warnings]
    assert candidate(answer, "fp16").speed.evidence.record_ids == ("fp16-8192",)


def test_the_facts_of_a_plan() -> None:
    """Qwen3.5-27B: every fourth of 64 layers grows by 4 heads x 256 x 2 x 2 bytes a token, the others hold a state."""
    profile = qwen35_27b(
        notes=("a", "b"),
        config_hash="abc",
        dtype="bfloat16",
        max_position=262_144,
        weights_source="file",
        confidence=0.9,
    )
    workload = WorkloadProfile(context_length=1000, generation_length=0)
    request = PlanRequest(model=profile, workload=workload, engine_version="0.32.2")
    world = snapshot(mac(64, sources={"chip": "x", "backend": "y"}), generation=7, source="daemon")
    for answer in (plan(request, world), fit(request, world)):
        assert (answer.generation, answer.source) == (7, "daemon")
        assert answer.model == {
            "model_id": "Qwen/Qwen3.5-27B",
            "model_type": "qwen3_5",
            "source": "traced",
            "confidence": 0.9,
            "config_hash": "abc",
            "dtype": "bfloat16",
            "weights_bytes": 4 * GIB,
            "weights_source": "file",
            "num_parameters": 8_000_000_000,
            "active_parameters": 8_000_000_000,
            "max_position": 262_144,
            "layers": {
                "total": 64,
                "growing": 16,
                "windowed": 0,
                "recurrent": 48,
                "latent": 0,
                "shared": 0,
                "bytes_per_token": 16 * 4 * 256 * 2 * 2,
                "state_bytes": 48 * 3_244_032,
            },
            "notes": ["a", "b"],
        }
        assert answer.workload == msgspec.structs.asdict(workload)
        assert answer.hardware == msgspec.structs.asdict(world.hardware)
        assert list(answer.hardware["sources"]) == ["backend", "chip"]
        assert answer.engine == {"name": "mlx-lm", "version": "0.32.2"}
    counted = ask(windowed(shared_layers=3), MACHINE).model["layers"]
    assert (counted["growing"], counted["windowed"], counted["shared"]) == (4, 20, 3)
    assert ask(deepseek_v3(), mac(512, 400)).model["layers"]["latent"] == 61
    assert ask(llama_8b(engine_version="0.1"), MACHINE).engine["version"] == "0.1"


def test_a_row_of_the_table_of_contexts() -> None:
    """Method, parameters in order, bytes a token and divergence; and how far the model was made to go."""
    request = PlanRequest(model=llama_8b(max_position=131_072), workload=WorkloadProfile(generation_length=0))
    table = fit(request, snapshot(mac(16, 11.8), on_offer=ONE))
    own, packed = table.rows
    assert (own.method, own.label, dict(own.params), own.kl_mean, own.bytes_per_token) == (
        "fp16",
        "fp16",
        {},
        0,
        131_072,
    )
    assert (packed.method, packed.label, packed.params) == ("affine", "affine8-g64", {"bits": 8, "group": 64})
    assert list(packed.params) == ["bits", "group"]
    assert (packed.bytes_per_token, packed.kl_mean) == (131_072 * 8.5 / 16, 0.0002)
    assert (table.schema, table.max_position) == ("veloxquant.fit/1", 131_072)
    assert table.budget.kv_budget_bytes == int(11.8 * GIB) - int(4.5 * GIB) - RESERVE


def test_the_bytes_of_a_token_are_whole_and_rounded_up() -> None:
    """A record of 131,072.5 bytes a token is shown as 131,073."""
    seen = [(0.9, record("fp16", memory_bytes=8192 * 131_072 + 4096))]
    answer = ask(llama_8b(), MACHINE, on_offer=ONE, records=seen, context_length=8192)
    assert candidate(answer, "fp16").memory.bytes_per_token == 131_073


def test_an_id_is_a_digest_of_all_that_was_asked() -> None:
    """16 hex digits of SHA-256 over JSON with the keys of mappings in order, written here by json."""
    request = PlanRequest(
        model=llama_8b(),
        workload=WorkloadProfile(),
        memory_budget_bytes=GIB,
        methods=("fp16",),
        engine_version="0.32.2",
    )
    world = snapshot(MACHINE, generation=5, reserve_bytes=7)

    def text(value: Any) -> str:
        plain = msgspec.to_builtins(value, order="deterministic")
        return json.dumps(plain, separators=(",", ":"), ensure_ascii=False)

    parts = (
        hashlib.sha256(text(request.model).encode()).hexdigest(),
        request.workload,
        MACHINE,
        ("0.32.2", GIB, ("fp16",)),
        (5, 7),
    )
    assert plan(request, world).plan_id == hashlib.sha256(text(parts).encode()).hexdigest()[:16]


def told(answer: Plan) -> dict[str, str]:
    """Warnings by code."""
    return {note.code: note.text for note in answer.warnings}


def test_what_is_unknown_of_memory() -> None:
    """Each in words, with the reason where one is known."""
    silent = mac(16, working_set_bytes=None, active_bytes=None)
    assert told(ask(llama_8b(), silent, context_length=1000)) == {
        "working_set_unknown": "the GPU working set is unknown (not reported): planned with the total memory of 16 GiB",
        "active_unknown": "memory held by other work is unknown (not reported): taken as 0",
    }
    given = {"working_set_bytes": "no driver", "active_bytes": "no rights"}
    spoken = mac(16, working_set_bytes=None, active_bytes=None, sources=given)
    assert told(ask(llama_8b(), spoken, context_length=1000)) == {
        "working_set_unknown": "the GPU working set is unknown (no driver): planned with the total memory of 16 GiB",
        "active_unknown": "memory held by other work is unknown (no rights): taken as 0",
    }
    bare = mac(16, working_set_bytes=None, total_memory_bytes=None)
    light = llama_8b(weights_bytes=None)
    assert told(ask(light, bare, context_length=1000, budget=GIB)) == {
        "weights_unknown": "weight bytes are unknown: only memory_budget_bytes was held against the caches",
        "memory_unknown": "working set and total memory are unknown: only memory_budget_bytes was held against the "
        "caches",
    }


def test_what_cannot_be_planned() -> None:
    """The field, why, and what to give instead."""
    with pytest.raises(InvalidParams) as caught:
        ask(llama_8b(weights_bytes=None, weights_source=None), MACHINE)
    assert caught.value.message == (
        "the weight bytes of meta-llama/Llama-3.1-8B are unknown, so what is left for caches is unknown too"
    )
    assert caught.value.hint == "give weights_bytes with the model, or memory_budget_bytes for caches alone"
    assert caught.value.field == "model.weights_bytes"
    with pytest.raises(InvalidParams) as caught:
        ask(llama_8b(), mac(16, working_set_bytes=None, total_memory_bytes=None))
    assert caught.value.message == "neither the GPU working set nor the total memory of this machine is known"
    assert caught.value.hint == "give hardware.working_set_bytes or hardware.total_memory_bytes, or memory_budget_bytes"
    assert caught.value.field == "hardware.total_memory_bytes"


def test_a_budget_is_told_by_its_parts() -> None:
    """11 GiB less 4.5 of weights, 1 of other work and the reserve; a cap of the caller's own is what binds."""
    machine = mac(16, 11, active_bytes=GIB)
    budget = ask(llama_8b(), machine, context_length=1000).budget
    assert msgspec.structs.asdict(budget) == {
        "working_set_bytes": 11 * GIB,
        "weights_bytes": int(4.5 * GIB),
        "active_bytes": GIB,
        "reserve_bytes": RESERVE,
        "kv_budget_bytes": 5 * GIB,
    }
    chosen = ask(llama_8b(), machine, context_length=1024, on_offer=offers(Own())).chosen
    assert chosen.fit.total_bytes == 6 * GIB + GIB // 8
    assert chosen.fit.headroom_bytes == 5 * GIB - GIB // 8


def test_rejections_in_their_own_words() -> None:
    """What was left out of the request, what a family is known not to bear, and a buffer that is too large."""
    named = rejection(ask(llama_8b(), MACHINE, methods=("fp16",)), "affine8-g64")
    assert (named.reason, named.detail) == ("not_requested", "the request names other methods")
    assert (named.method, dict(named.params), named.short_by_bytes) == ("affine", {"bits": 8, "group": 64}, None)
    broken = rejection(ask(qwen25_7b(), mac(512, 400)), "affine4-g64")
    assert broken.reason == "family_rule"
    assert broken.detail.startswith("Qwen2")
    assert "; sources: http" in broken.detail
    limited = mac(64, max_buffer_bytes=2**20)
    large = rejection(ask(llama_8b(), limited, context_length=8192, on_offer=offers(Own())), "fp16")
    assert large.reason == "buffer_too_large"
    assert large.detail == "one buffer takes 16 MiB, the device allows 1 MiB"
    assert large.short_by_bytes == 15 * 2**20
    assert large.evidence is not None
    assert large.evidence.source == "traced"


def test_requests_that_wait_for_each_other_are_not_slow_for_that() -> None:
    """Each is held against the engine's own cache with one request: that four take turns does not make it slow."""
    waits = offers(Own(), Synthetic("waits", 8, 0.001, fused=True))
    answer = ask(llama_8b(), MACHINE, on_offer=waits, context_length=8192, num_concurrent_requests=4)
    assert [one.label for one in (answer.chosen, *answer.alternatives)] == ["fp16", "waits"]
    assert answer.rejected == ()
