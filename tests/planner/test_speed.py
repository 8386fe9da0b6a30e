"""The roofline against arithmetic done by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from planner_kit import GIB, Own, Synthetic, ask, candidate, kv, llama_8b, mac, model, offers, state, windowed

from veloxquant.planner.speed import efficiency
from veloxquant.profiles import HardwareProfile, ModelProfile

PLAIN = mac(512, 400, bandwidth_gbps=100.0, decode_efficiency={"f16": 0.9, "q8": 0.8, "q4": 0.5})
OVERHEAD_MS = 0.04
"""A layer; data/speed.json says where it is from."""


def _ms(profile: ModelProfile, **workload: Any) -> float:
    return ask(profile, PLAIN, on_offer=offers(Own()), **workload).chosen.speed.latency_ms_per_token


def test_decode_reads_weights_and_cache_once_a_token() -> None:
    """(4 GiB + 8192 x 131072 bytes) / (100 GB/s x 0.5) + 32 layers x 0.04 ms."""
    read = 4 * GIB + 8192 * 131072
    assert _ms(llama_8b(), context_length=8192) == pytest.approx(read / 50e6 + 32 * OVERHEAD_MS)


def test_decode_is_stated_at_the_end_of_the_context() -> None:
    """Generated tokens are read too; slack is not."""
    a, b = _ms(llama_8b(), context_length=8000, generation_length=500), _ms(llama_8b(), context_length=8500)
    assert a == pytest.approx(b)


def test_windows_and_states_are_read_as_they_are() -> None:
    """A full window reads its slots, a state its bytes, whatever the length."""
    hybrid = model([state(10**8)] * 10, read_bytes_per_token=10**9)
    assert _ms(hybrid, context_length=10**6) == pytest.approx((10**9 + 10**9) / 50e6 + 10 * OVERHEAD_MS)
    long, longer = _ms(windowed(), context_length=50_000), _ms(windowed(), context_length=60_000)
    assert longer - long == pytest.approx(10_000 * 4 * 4096 / 50e6)


def test_sequences_in_one_batch_share_the_weights() -> None:
    """Four sequences read the weights once and four caches."""
    read = 4 * GIB + 4 * 8192 * 131072
    for workload in ({"batch_size": 4}, {"num_concurrent_requests": 4}):
        ms = _ms(llama_8b(), context_length=8192, **workload)
        assert ms == pytest.approx(read / 50e6 + 32 * OVERHEAD_MS)


def test_requests_that_cannot_be_batched_wait_for_each_other() -> None:
    """mlx-lm's server serves them one after another: four requests take four times as long for each token."""
    alone, together = Synthetic("alone", 8, 0.001), Synthetic("together", 8, 0.001, batchable=True)
    variants = offers(Own(), alone, together)
    one, four = (
        ask(llama_8b(), PLAIN, on_offer=variants, context_length=8192, num_concurrent_requests=n) for n in (1, 4)
    )
    single = candidate(one, "alone").speed
    assert candidate(four, "alone").speed.latency_ms_per_token == pytest.approx(4 * single.latency_ms_per_token)
    assert candidate(four, "alone").speed.decode_tok_s == pytest.approx(single.decode_tok_s)
    assert candidate(four, "together").speed.decode_tok_s > 2 * single.decode_tok_s


def test_experts_read_by_several_sequences_are_independent_choices() -> None:
    """A tenth of 10 GB is read for one token; two read 1 - 0.9^2 = 0.19 of it."""
    sparse = model(
        [kv(1, 64)],
        weights_bytes=10**10,
        read_bytes_per_token=10**9,
        num_parameters=10**10,
        active_parameters=10**9,
    )
    one, two = (_ms(sparse, context_length=1, batch_size=n) - n * 256 / 50e6 for n in (1, 2))
    assert one - OVERHEAD_MS == pytest.approx(10**9 / 50e6)
    assert two - OVERHEAD_MS == pytest.approx(1.9e9 / 50e6)


def test_unpacking_costs_what_the_method_says() -> None:
    """10 ps a number: 8192 x 32 layers x 8 heads x 256 numbers take 5.4 ms more."""
    variants = offers(Own(), Synthetic("free", 8, 0.001), Synthetic("dear", 8, 0.001, unpack=10.0))
    answer = ask(llama_8b(), PLAIN, on_offer=variants, context_length=8192)
    free, dear = (candidate(answer, label).speed.latency_ms_per_token for label in ("free", "dear"))
    assert dear - free == pytest.approx(8192 * 32 * 8 * 256 * 10e-9)


def test_bytes_moved_to_unpack_cost_less_where_memory_is_faster() -> None:
    """8,192 tokens of 65,536 numbers, 20 bytes each, at half of 100 GB/s and of 400 GB/s."""
    variants = offers(Synthetic("free", 8, 0.001), Synthetic("dear", 8, 0.001, moved=20.0))
    for gbps in (100.0, 400.0):
        machine = msgspec.structs.replace(PLAIN, bandwidth_gbps=gbps)
        answer = ask(llama_8b(), machine, on_offer=variants, context_length=8192, objective="memory")
        free, dear = (candidate(answer, label).speed.latency_ms_per_token for label in ("free", "dear"))
        assert dear - free == pytest.approx(8192 * 65_536 * 20 / (gbps * 0.5e6))


@pytest.mark.parametrize(
    ("bits", "expected"), [(2.0, 0.5), (4.5, 0.5), (6.5, 0.65), (8.5, 0.8), (16.0, 0.9), (None, 0.9)]
)
def test_efficiency_lies_between_the_measured_weight_kinds(bits: int, expected: float) -> None:
    """Half way between 4.5 and 8.5 bits is half way between their efficiencies."""
    assert efficiency(PLAIN, bits) == pytest.approx(expected)


def test_a_chip_without_figures_gets_a_stated_assumption() -> None:
    """And less confidence."""
    bare = mac(512, 400, decode_efficiency={})
    speed = ask(llama_8b(), bare, on_offer=offers(Own())).chosen.speed
    assert any("assumed" in note for note in speed.evidence.notes)
    assert speed.evidence.confidence < ask(llama_8b(), PLAIN, on_offer=offers(Own())).chosen.speed.evidence.confidence
    assert efficiency(HardwareProfile(), 4.5) == 0.7


def test_prefill_counts_weights_and_causal_attention() -> None:
    """2 x parameters x n + 32 layers x 2 x 32 heads x 128 x n^2 FLOPs at 2.7 TFLOPS."""
    n, parameters = 8192, 8_030_261_248
    profile = llama_8b(active_parameters=parameters)
    flops = 2 * parameters * n + 32 * 2 * 32 * 128 * n**2
    speed = ask(profile, PLAIN, on_offer=offers(Own()), context_length=n).chosen.speed
    assert speed.prefill_tok_s == pytest.approx(n * 2.7e12 / flops)


def test_prefill_is_unknown_without_tflops() -> None:
    """No figure is better than an invented one."""
    assert ask(llama_8b(), mac(64, prefill_tflops=None)).chosen.speed.prefill_tok_s is None


def test_a_published_run_lies_within_the_stated_range() -> None:
    """Qwen3-4B in 4 bit on an M4 Max, 40 cores, mlx-lm: 134.5 tokens a second at 2048 tokens (mlx-lm BENCHMARKS.md)."""
    machine = mac(64, bandwidth_gbps=546.0, decode_efficiency={"f16": 0.78, "q8": 0.71, "q4": 0.58})
    qwen3_4b = model([kv(8, 128)] * 36, read_bytes_per_token=2_263_000_000, weights_bytes=2_263_000_000)
    speed = ask(qwen3_4b, machine, on_offer=offers(Own()), context_length=2048, generation_length=128).chosen.speed
    assert speed.low <= 1000 / 134.5 <= speed.high
