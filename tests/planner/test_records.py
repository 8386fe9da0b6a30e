"""What a measured record changes, how far it is trusted, and which records are never used."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from planner_kit import (
    GIB,
    Own,
    Packed,
    ask,
    candidate,
    codes,
    kv,
    llama_8b,
    mac,
    model,
    offers,
    phi3_mini,
    record,
    rejection,
)

from veloxquant.benchmarks.record_set import RecordSet
from veloxquant.planner.explain import explain
from veloxquant.planner.fit import fit
from veloxquant.planner.plan import plan
from veloxquant.planner.request import PlanRequest
from veloxquant.planner.snapshot import Snapshot
from veloxquant.planner.speed import fit_line
from veloxquant.profiles import WorkloadProfile

if TYPE_CHECKING:
    from veloxquant.planner.result import Candidate, Plan
    from veloxquant.profiles import HardwareProfile, ModelProfile

MACHINE = mac(64)
ONE = offers(Own(), Packed(bits=(8,), groups=(64,)))


def _own(*scored: Any, **workload: Any) -> Candidate:
    return candidate(ask(llama_8b(), MACHINE, on_offer=ONE, records=scored, **workload), "fp16")


def test_a_memory_record_at_this_workload_is_taken_as_it_is() -> None:
    """The measured bytes, for as many sequences as are asked for."""
    seen = record("fp16", memory_bytes=2 * GIB)
    assert _own((0.9, seen), context_length=8192).memory.stored_bytes == 2 * GIB
    assert _own((0.9, seen), context_length=8192, num_concurrent_requests=3).memory.stored_bytes == 6 * GIB


def test_a_batched_record_counts_for_each_of_its_sequences() -> None:
    """Bytes of four sequences are bytes of one, four times."""
    seen = record("fp16", memory_bytes=8 * GIB, batch_size=4)
    assert _own((0.9, seen), context_length=8192).memory.stored_bytes == 2 * GIB


def test_one_record_scales_with_length_by_its_own_bytes_a_token() -> None:
    """Twice the traced bytes at 8k is twice the traced bytes at 16k: 2 x 16384 x 131072."""
    seen = record("fp16", memory_bytes=2 * 8192 * 131072)
    own = _own((0.9, seen), context_length=16384)
    assert own.memory.stored_bytes == 2 * 16384 * 131072
    assert own.memory.bytes_per_token == 2 * 131072


def test_several_records_are_joined_by_lines_that_keep_the_fixed_part() -> None:
    """1 GB fixed + 200,000 bytes a token at 4k and 16k gives just that at 8k and at 32k."""
    seen = [(0.9, record("fp16", context_length=n, memory_bytes=10**9 + 200_000 * n)) for n in (4096, 16384)]
    for asked in (2048, 8192, 32768):
        own = _own(*seen, context_length=asked)
        assert own.memory.stored_bytes == 10**9 + 200_000 * asked
        assert own.memory.bytes_per_token == 200_000
        assert set(own.memory.evidence.record_ids) == {r.id for _, r in seen}


def test_slack_does_not_flatten_growth() -> None:
    """Runs of 20 and 200 tokens hold 256 slots alike: that says nothing of growth, and the trace's is kept."""
    seen = [(0.9, record("fp16", context_length=n, memory_bytes=256 * 131072)) for n in (20, 200)]
    own = _own(*seen, context_length=1024)
    assert own.memory.stored_bytes == 1024 * 131072


def test_neighbouring_records_do_not_give_a_slope() -> None:
    """8,192 and 8,704 tokens with a little noise between them: the longer one alone scales the trace."""
    seen = [
        (0.9, record("fp16", context_length=8192, memory_bytes=8192 * 131072)),
        (0.9, record("fp16", context_length=8704, memory_bytes=8192 * 131072 + 1)),
    ]
    own = _own(*seen, context_length=65536)
    assert own.memory.stored_bytes == pytest.approx(65536 * 131072 * 8192 / 8704)


def test_our_own_runs_count_what_they_generated() -> None:
    """A run of 8192 + 256 tokens that held what the trace says agrees with the trace at every length."""
    workload = WorkloadProfile(context_length=8192, generation_length=256)
    seen = record("fp16", source="veloxquant", workload=workload, memory_bytes=(8192 + 256) * 131072)
    assert _own((0.9, seen), context_length=32768).memory.stored_bytes == 32768 * 131072


def test_a_ratio_without_bytes_is_a_ratio_to_the_engines_own_cache() -> None:
    """memory_reduction 0.25 at 8k: a quarter of 8192 x 131072 bytes."""
    seen = record("affine8-g64", memory_reduction=0.25)
    answer = ask(llama_8b(), MACHINE, on_offer=ONE, records=[(0.9, seen)], context_length=8192)
    assert candidate(answer, "affine8-g64").memory.stored_bytes == 8192 * 131072 / 4


def test_a_ratio_is_one_to_16_bits_in_a_model_of_32() -> None:
    """Four float32 layers of 8 heads of 128 hold 4 x 8,192 bytes a token, and half in 16 bits; a quarter of that."""
    wide = model([kv(8, 128, itemsize=4)] * 4, num_parameters=134_515_008)
    seen = record("affine8-g64", model_id=wide.model_id, memory_reduction=0.25)
    answer = ask(wide, MACHINE, on_offer=ONE, records=[(0.9, seen)], context_length=8192)
    assert candidate(answer, "affine8-g64").memory.stored_bytes == 8192 * 4 * 8192 / 2 / 4


def test_memory_of_another_model_is_not_taken() -> None:
    """A stand-in may speak for speed, not for bytes: those are traced exactly."""
    seen = record("fp16", model_id="other/Llama-8B", memory_bytes=2 * GIB, latency_ms_per_token=77.0)
    own = _own((0.7, seen), context_length=8192)
    assert own.memory.stored_bytes == GIB
    assert own.speed.latency_ms_per_token == 77.0
    assert any("another model" in note for note in own.speed.evidence.notes)


def test_latency_and_throughput_records_override_decode() -> None:
    """50 ms a token, said either way, is 20 tokens a second."""
    for figure in ({"latency_ms_per_token": 50.0}, {"throughput_tok_s": 20.0}):
        speed = _own((0.9, record("fp16", **figure)), context_length=8192).speed
        assert speed.latency_ms_per_token == pytest.approx(50.0)
        assert speed.decode_tok_s == pytest.approx(20.0)
        assert speed.evidence.source == "measured"


def test_three_records_on_this_machine_replace_the_table() -> None:
    """60, 62 and 66 ms at 4k, 8k and 16k lie on 58 ms + 2 ms / 4096 tokens; at 32k that is 74."""
    points = ((4096, 60), (8192, 62), (16384, 66))
    seen = [(0.9, record("fp16", context_length=n, latency_ms_per_token=ms)) for n, ms in points]
    speed = _own(*seen, context_length=32768).speed
    assert speed.latency_ms_per_token == pytest.approx(74.0)
    assert speed.evidence.source == "calibrated"
    assert len(speed.evidence.record_ids) == 3


def test_the_fit_is_the_least_squares_line() -> None:
    """Against the textbook normal equations on points that lie on no line."""
    points = [(1000, 10.0), (2000, 13.0), (4000, 14.0), (8000, 21.0)]
    n, sx, sy = len(points), sum(x / 1000 for x, _ in points), sum(y for _, y in points)
    sxx, sxy = sum((x / 1000) ** 2 for x, _ in points), sum(x / 1000 * y for x, y in points)
    b = (n * sxy - sx * sy) / (n * sxx - sx**2)
    assert fit_line(points) == pytest.approx(((sy - b * sx) / n, b))
    assert fit_line([(1000, 10.0), (1000, 11.0), (1000, 12.0)]) is None


def test_two_records_that_bracket_the_context_are_interpolated() -> None:
    """60 ms at 4k and 72 ms at 16k: a third of the way is 64 ms."""
    seen = [(0.9, record("fp16", context_length=n, latency_ms_per_token=ms)) for n, ms in ((4096, 60), (16384, 72))]
    speed = _own(*seen, context_length=8192).speed
    assert speed.latency_ms_per_token == pytest.approx(64.0)
    assert len(speed.evidence.record_ids) == 2


def test_one_record_at_another_context_is_moved_by_the_roofline() -> None:
    """Its ratio to the roofline stays, and the confidence falls, in words."""
    plain = {n: _own(context_length=n).speed.latency_ms_per_token for n in (8192, 32768)}
    speed = _own((0.8, record("fp16", latency_ms_per_token=2 * plain[8192])), context_length=32768).speed
    assert speed.latency_ms_per_token == pytest.approx(2 * plain[32768])
    assert speed.evidence.confidence < 0.8
    assert any("extrapolated" in note for note in speed.evidence.notes)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"mlx_version": "0.31.0"}, "MLX 0.31"),
        ({"macos_version": "15.5"}, "macOS 15"),
        ({"chip": "Apple M2 Pro"}, "Apple M2 Pro"),
        ({"context_length": 16384}, "extrapolated"),
        ({"tags": ["repeats=1"]}, "few repeats"),
        ({"tags": ["on-battery"]}, "battery"),
        ({"tags": ["low-power"]}, "low-power"),
        ({"tags": ["thermal-throttled"]}, "thermal"),
    ],
)
def test_confidence_falls_with_words(changes: Any, word: str) -> None:
    """Each thing that makes a record less like the plan lowers the trust in it and is named."""
    trusted = _own((0.9, record("fp16", latency_ms_per_token=60.0)), context_length=8192).speed.evidence
    doubted = _own((0.9, record("fp16", **{"latency_ms_per_token": 60.0} | changes)), context_length=8192)
    assert trusted.confidence == 0.9
    assert trusted.notes == ()
    assert doubted.speed.evidence.confidence < 0.9
    assert any(word in note for note in doubted.speed.evidence.notes)


def test_a_patch_version_of_mlx_costs_nothing() -> None:
    """0.32.2 and 0.32.4 count as one."""
    own = _own((0.9, record("fp16", latency_ms_per_token=60.0, mlx_version="0.32.2")), context_length=8192)
    assert own.speed.evidence.confidence == 0.9


@pytest.mark.parametrize(
    ("figures", "word"),
    [
        ({"throughput_tok_s": 1000.0}, "bandwidth"),
        ({"latency_ms_per_token": 1.0}, "bandwidth"),
        ({"memory_reduction": 4.5}, "ratio"),
        ({"latency_ms_per_token": math.nan}, "not a number"),
        ({"memory_bytes": -1}, "negative"),
        ({"perplexity_delta": math.inf}, "perplexity"),
    ],
)
def test_impossible_records_are_left_out_with_a_warning(figures: Any, word: str) -> None:
    """4 GiB of weights at 100 GB/s allow 23 tokens a second: 1000 were never measured."""
    answer = ask(llama_8b(), MACHINE, on_offer=ONE, records=[(1.0, record("fp16", **figures))], context_length=8192)
    ignored = [w for w in answer.warnings if w.code == "record_ignored"]
    assert len(ignored) == 1
    assert word in ignored[0].text
    assert candidate(answer, "fp16").speed.evidence.record_ids == ()
    assert candidate(answer, "fp16").memory.evidence.record_ids == ()


def test_the_bandwidth_bound_counts_sequences() -> None:
    """Eight sequences share each reading of the weights: 8 x 23 tokens a second are possible."""
    seen = record("fp16", throughput_tok_s=150.0, batch_size=8)
    answer = ask(llama_8b(), MACHINE, on_offer=ONE, records=[(1.0, seen)], context_length=8192, batch_size=8)
    assert "record_ignored" not in codes(answer.warnings)
    assert candidate(answer, "fp16").speed.decode_tok_s == pytest.approx(150.0)


def test_a_measured_rise_in_perplexity_is_not_ignored() -> None:
    """+500: a base perplexity of at most 40 makes that at least log(1 + 500 / 40) / 2 = 1.3 nats."""
    seen = record("affine8-g64", perplexity_delta=500.0)
    answer = ask(llama_8b(), MACHINE, on_offer=ONE, records=[(0.9, seen)], context_length=8192, objective="memory")
    assert rejection(answer, "affine8-g64").reason == "quality_below_floor"
    assert "1.3 nats" in rejection(answer, "affine8-g64").detail


def test_a_small_rise_in_perplexity_is_reported_and_leaves_the_estimate() -> None:
    """The record has no KL: the published figure stays, the measured perplexity is shown."""
    seen = record("affine8-g64", perplexity_delta=0.004)
    answer = ask(llama_8b(), MACHINE, on_offer=ONE, records=[(0.9, seen)], context_length=8192)
    quality = candidate(answer, "affine8-g64").quality
    assert (quality.perplexity_delta, quality.kl_mean) == (0.004, 0.0002)


def test_a_kl_tag_is_the_figure() -> None:
    """kl_mean=0.012 in the tags wins over published figures and priors."""
    seen = record("affine8-g64", tags=["kl_mean=0.012"])
    answer = ask(llama_8b(), MACHINE, on_offer=ONE, records=[(1.0, seen)], context_length=8192)
    quality = candidate(answer, "affine8-g64").quality
    assert quality.kl_mean == 0.012
    assert quality.evidence.source == "measured"


def test_the_record_room_and_the_planner_agree() -> None:
    """Through the real record set: the record is found, used and cited."""
    seen = record("fp16", latency_ms_per_token=60.0)
    world = Snapshot(hardware=MACHINE, offers=ONE, records=RecordSet([seen]))
    request = PlanRequest(model=llama_8b(), workload=WorkloadProfile(context_length=8192, generation_length=0))
    answer = plan(request, world)
    assert answer.chosen.speed.evidence.record_ids == (seen.id,)
    assert answer.chosen.speed.latency_ms_per_token == 60.0


HEAVY = record("fp16", id="heavy", context_length=32768, memory_bytes=32768 * 237 * 1024)
"""237 KiB a token where the trace of the small model below says 28."""


def _small_model() -> ModelProfile:
    return llama_8b(layers=model([kv(2, 128)] * 28).layers, weights_bytes=GIB, read_bytes_per_token=GIB)


def _answer(machine: HardwareProfile, **workload: Any) -> Plan:
    world = Snapshot(hardware=machine, offers=ONE, records=RecordSet([HEAVY]))
    asked = WorkloadProfile(**{"generation_length": 0} | workload)
    return plan(PlanRequest(model=_small_model(), workload=asked), world)


def test_a_record_that_pushes_a_variant_out_is_named() -> None:
    """In the sentence, in the evidence, and in the explanation."""
    answer = _answer(mac(16, 8), context_length=32768)
    out = rejection(answer, "fp16")
    assert out.reason == "does_not_fit"
    assert out.evidence is not None
    assert (out.evidence.source, out.evidence.record_ids) == ("measured", ("heavy",))
    assert "by record heavy" in out.detail
    assert any("record heavy" in line for line in explain(answer, "fp16"))


def test_a_measured_quality_that_keeps_a_variant_out_is_named() -> None:
    """By the record's id, as a measured latency is."""
    seen = [(1.0, record("affine8-g64", id="rough", tags=["kl_mean=0.4"], latency_ms_per_token=900.0))]
    rough = rejection(ask(llama_8b(), MACHINE, on_offer=ONE, records=seen, max_kl=0.01), "affine8-g64")
    slow = rejection(ask(llama_8b(), MACHINE, on_offer=ONE, records=seen, max_latency_ms=100), "affine8-g64")
    for out, reason in ((rough, "quality_below_floor"), (slow, "too_slow")):
        assert out.reason == reason
        assert out.evidence is not None
        assert out.evidence.record_ids == ("rough",)
        assert "measured by record rough" in out.detail


def test_a_variant_that_cannot_run_rests_on_no_figure() -> None:
    """Nothing was compared, so that there is nothing to cite."""
    answer = ask(phi3_mini(), MACHINE, on_offer=offers(Own(), Packed(groups=(64,))))
    assert rejection(answer, "affine8-g64").evidence is None


@pytest.mark.parametrize("asked", [512, 4096, 8192, 32768, 524288])
def test_a_record_tells_the_bytes_of_a_token_at_every_context(asked: int) -> None:
    """237 KiB a token, and so one largest context, however many tokens are asked for; far from the run it is said."""
    own = candidate(_answer(mac(512, 400), context_length=asked), "fp16")
    assert own.memory.bytes_per_token == 237 * 1024
    assert own.memory.evidence.record_ids == ("heavy",)
    # 400 GiB - 1 of weights - 0.5 of reserve, of which one layer's buffer is held twice while it grows.
    assert own.fit.max_context_tokens == candidate(_answer(mac(512, 400)), "fp16").fit.max_context_tokens
    assert own.fit.max_context_tokens <= (398.5 * GIB) / (237 * 1024)
    assert any("extrapolated" in note for note in own.memory.evidence.notes) == (asked != 32768)
    assert (own.memory.evidence.confidence < 1) == (asked != 32768)


def test_fit_and_plan_agree_on_a_measured_variant() -> None:
    """The same record, the same largest context, whatever either was asked for."""
    for slots in (1, 2, 4, 8):
        answer = _answer(mac(512, 400), context_length=4096, num_concurrent_requests=slots)
        request = PlanRequest(model=_small_model(), workload=WorkloadProfile(generation_length=0))
        table = fit(request, Snapshot(hardware=mac(512, 400), offers=ONE, records=RecordSet([HEAVY])))
        row = next(row for row in table.rows if row.label == "fp16")
        cell = next(cell for cell in row.cells if cell.slots == slots)
        assert cell.max_context_tokens == candidate(answer, "fp16").fit.max_context_tokens
        assert row.bytes_per_token == 237 * 1024
