"""KVCacheProfiler: each documented rule, on a cache whose every byte is known."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest

import veloxquant
from veloxquant.caches.codecs import FloatCodec
from veloxquant.caches.standalone import StandaloneCache
from veloxquant.errors import InvalidParams
from veloxquant.profiling import KVCacheProfiler, MLXCacheProfiler, profile_layers

WIDTH = 64


class Plain:
    """Keys and values as given, one vector a call; reports what it holds."""

    def __init__(self) -> None:
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []

    def append_key(self, k: mx.array) -> None:
        """Keep it."""
        self.keys.append(k)

    def append_value(self, v: mx.array) -> None:
        """Keep it."""
        self.values.append(v)

    def attend(self, q: mx.array) -> mx.array:
        """softmax(q k / sqrt(width)) v."""
        keys, values = mx.stack(self.keys), mx.stack(self.values)
        return mx.softmax(keys @ q / WIDTH**0.5) @ values

    def memory_bytes(self) -> int:
        """What the lists take."""
        return sum(one.nbytes for one in [*self.keys, *self.values])

    def fused_sdpa(self) -> str:
        """Something of this cache alone."""
        return "mine"

    def __len__(self) -> int:
        return len(self.keys)


def vector(number: int) -> mx.array:
    """One float32 vector."""
    return mx.full((WIDTH,), float(number))


def run(profiled: Any, tokens: int = 3) -> Any:
    """Append that many tokens, attend once."""
    for number in range(tokens):
        profiled.append(vector(number), vector(-number))
    profiled.attend(vector(1))
    return profiled


def test_append_key_counts_one_call_one_token_and_two_bytes_a_number() -> None:
    """n_quantize_calls and tokens_written by one, fp16_baseline_bytes by 2 x 64, nothing on the other side."""
    profiled = KVCacheProfiler(Plain(), head_dim=WIDTH)
    profiled.append_key(vector(1))
    profile = profiled.profile()
    assert (profile.n_quantize_calls, profile.tokens_written, profile.fp16_baseline_bytes) == (1, 1, 128)
    assert profile.quantize_ms_total > 0
    assert (profile.write_ms_total, profile.n_dequantize_calls, profile.dequantize_ms_total) == (0.0, 0, 0.0)
    assert profile.peak_memory_bytes == WIDTH * 4


@pytest.mark.parametrize("shape", [(WIDTH,), (7, WIDTH), (2, 4, 7, WIDTH)])
def test_whatever_its_shape_a_key_append_is_one_documented_token(shape: tuple[int, ...]) -> None:
    """The honest figure beside it counts all numbers given: 2 bytes each, keys and values."""
    profiled = KVCacheProfiler(Plain(), head_dim=WIDTH)
    profiled.append(mx.zeros(shape), mx.zeros((*shape[:-1], 32)))
    profile = profiled.profile()
    assert (profile.tokens_written, profile.fp16_baseline_bytes) == (1, 128)
    assert profile.true_fp16_bytes == 2 * (mx.zeros(shape).size + mx.zeros(shape).size // 2)


def test_append_value_is_write_time_and_memory_only() -> None:
    """No token, no baseline, no quantize call."""
    profiled = KVCacheProfiler(Plain(), head_dim=WIDTH)
    profiled.append_value(vector(1))
    profile = profiled.profile()
    assert profile.write_ms_total > 0
    assert (profile.n_quantize_calls, profile.tokens_written, profile.fp16_baseline_bytes) == (0, 0, 0)
    assert (profile.quantize_ms_total, profile.peak_memory_bytes) == (0.0, WIDTH * 4)


def test_attend_is_one_dequantize_call_and_returns_the_caches_own_result() -> None:
    """The same object, not a copy."""
    made = vector(3)

    class Fixed(Plain):
        def attend(self, q: mx.array) -> mx.array:
            return made

    profiled = KVCacheProfiler(Fixed(), head_dim=WIDTH)
    assert profiled.attend(vector(1)) is made
    profile = profiled.profile()
    assert (profile.n_dequantize_calls, profile.n_quantize_calls) == (1, 0)
    assert profile.dequantize_ms_total == profile.dequantize_ms_mean > 0


def test_append_is_both_parts_each_timed_for_itself() -> None:
    """Three appends: three quantize calls, write time beside quantize time, one timeline point each."""
    profile = run(KVCacheProfiler(Plain(), head_dim=WIDTH)).profile()
    assert (profile.n_quantize_calls, profile.tokens_written, profile.n_dequantize_calls) == (3, 3, 1)
    assert profile.quantize_ms_mean == profile.quantize_ms_total / 3
    assert profile.write_ms_total > 0
    assert not profile.is_fused
    assert [point[:2] for point in profile.timeline] == [(1, 512), (2, 1024), (3, 1536)]
    total = sum(point.ms for point in profile.timeline)
    assert total == pytest.approx(profile.quantize_ms_total + profile.write_ms_total)


def test_a_key_append_that_sets_several_tokens_is_in_the_baseline_once_and_in_the_length_as_often() -> None:
    """sequence_tokens is the cache's own length."""

    class Blocks(Plain):
        def __len__(self) -> int:
            return sum(key.shape[0] for key in self.keys)

    profiled = KVCacheProfiler(Blocks(), head_dim=WIDTH)
    profiled.append(mx.zeros((5, WIDTH)), mx.zeros((5, WIDTH)))
    assert (profiled.profile().tokens_written, profiled.profile().sequence_tokens) == (1, 5)


def test_memory_bytes_len_and_foreign_functions_pass_through() -> None:
    """The wrapper is used as the cache is."""
    profiled = run(KVCacheProfiler(Plain(), head_dim=WIDTH))
    assert profiled.memory_bytes() == 3 * 2 * WIDTH * 4
    assert len(profiled) == 3
    assert profiled.fused_sdpa() == "mine"
    assert not hasattr(profiled, "update_and_fetch")


def test_head_dim_falls_back_to_the_caches_own_then_to_none() -> None:
    """cache._d where it is a width; else 0, and the documented ratio is 0.0."""
    with_d, without = Plain(), Plain()
    with_d._d = 32  # type: ignore[attr-defined]
    assert run(KVCacheProfiler(with_d)).profile().fp16_baseline_bytes == 3 * 2 * 32
    assert run(KVCacheProfiler(with_d, head_dim=8)).profile().fp16_baseline_bytes == 3 * 2 * 8
    profile = run(KVCacheProfiler(without)).profile()
    assert (profile.fp16_baseline_bytes, profile.compression_ratio) == (0, 0.0)
    without._d = "wide"  # type: ignore[attr-defined]
    assert run(KVCacheProfiler(without)).profile().fp16_baseline_bytes == 0


@pytest.mark.parametrize("wrong", [-1, 1.5, "64", True, float("nan")])
def test_a_head_dim_that_is_no_width_is_refused(wrong: Any) -> None:
    """By name."""
    with pytest.raises(InvalidParams) as caught:
        KVCacheProfiler(Plain(), head_dim=wrong)
    assert caught.value.field == "head_dim"


def test_peaks_are_the_largest_ever_not_the_last() -> None:
    """A cache that drops its tokens keeps its peak in the figures; what it holds now stands beside it."""
    cache = Plain()
    profiled = run(KVCacheProfiler(cache, head_dim=WIDTH))
    cache.keys, cache.values = cache.keys[-1:], cache.values[-1:]
    profiled.attend(vector(1))
    profile = profiled.profile()
    assert (profile.peak_memory_bytes, profile.peak_resident_bytes) == (1536, 1536)
    assert (profile.resident_bytes, profile.reported_bytes, profile.sequence_tokens) == (512, 512, 1)


def test_documented_and_honest_ratio_of_a_float32_cache() -> None:
    """3 keys x 128 bytes over 1,536 held = 0.25; 1,536 held over 768 that 16 bits take = 2."""
    profile = run(KVCacheProfiler(Plain(), head_dim=WIDTH)).profile()
    assert profile.compression_ratio == 0.25
    assert (profile.true_fp16_bytes, profile.resident_ratio) == (768, 2.0)


def test_a_profile_is_a_snapshot() -> None:
    """What comes later does not change it, and changing it changes nothing."""
    profiled = run(KVCacheProfiler(Plain(), head_dim=WIDTH))
    early = profiled.profile()
    kept = copy.deepcopy(early)
    run(profiled)
    assert early == kept
    early.n_quantize_calls = 99
    assert profiled.profile().n_quantize_calls == 6


def test_reset_forgets_the_counts_and_keeps_label_and_cache() -> None:
    """Counting goes on from zero; what was held before is marked, so that no ratio pretends to know it."""
    profiled = run(KVCacheProfiler(Plain(), head_dim=WIDTH, layer_id="first"))
    profiled.reset()
    profile = profiled.profile()
    assert (profile.n_quantize_calls, profile.peak_memory_bytes, profile.true_fp16_bytes) == (0, 0, 0)
    assert (profile.layer_id, profile.timeline, profile.quantize_ms_total) == ("first", (), 0.0)
    assert (len(profiled), profile.resident_bytes, profile.tokens_before) == (3, 1536, 3)
    run(profiled, tokens=1)
    after = profiled.profile()
    assert (after.fp16_baseline_bytes, after.peak_memory_bytes, after.resident_ratio) == (128, 2048, 0.0)


def test_a_copy_keeps_the_width_of_its_baseline() -> None:
    """Deep copies count on as the first would have."""
    twin = copy.deepcopy(run(KVCacheProfiler(Plain(), head_dim=WIDTH)))
    twin.append_key(vector(1))
    assert twin.profile().fp16_baseline_bytes == 4 * 128


def test_a_cache_that_reports_less_than_it_holds_is_found_out() -> None:
    """6 tokens are held, two are admitted."""

    class Lying(Plain):
        def memory_bytes(self) -> int:
            return super().memory_bytes() // 3

    profile = run(KVCacheProfiler(Lying(), head_dim=WIDTH), tokens=6).profile()
    assert (profile.reported_bytes, profile.resident_bytes, profile.reported_difference) == (1024, 3072, -2048)
    assert profile.is_lying
    assert not run(KVCacheProfiler(Plain(), head_dim=WIDTH)).profile().is_lying


@pytest.mark.parametrize("answer", [None, "much", float("nan"), float("inf"), RuntimeError("no")])
def test_a_cache_that_cannot_say_its_bytes_is_profiled_all_the_same(answer: Any) -> None:
    """No claim is no lie, and the walk knows."""

    class Silent(Plain):
        def memory_bytes(self) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    profile = run(KVCacheProfiler(Silent(), head_dim=WIDTH)).profile()
    assert (profile.reported_bytes, profile.reported_difference, profile.is_lying) == (None, None, False)
    assert (profile.peak_memory_bytes, profile.peak_resident_bytes) == (0, 1536)


def test_a_cache_with_only_some_of_the_functions_is_taken_as_it_is() -> None:
    """What it lacks, its wrapper lacks."""

    class KeysOnly:
        def append_key(self, k: Any) -> None:
            """Forget it."""

    profiled = KVCacheProfiler(KeysOnly())
    profiled.append_key([1.0, 2.0])
    assert not hasattr(profiled, "attend")
    assert not hasattr(profiled, "append_value")
    profile = profiled.profile()
    assert (profile.n_quantize_calls, profile.true_fp16_bytes, profile.sequence_tokens) == (1, 4, 0)


def test_a_pair_that_is_refused_leaves_no_key() -> None:
    """With check_pair, the profiled append is as whole as the cache's own; no figure moves."""
    cache = StandaloneCache(FloatCodec(WIDTH), FloatCodec(WIDTH))
    profiled = KVCacheProfiler(cache)
    profiled.append(vector(1), vector(2))
    for wrong in (mx.zeros(32), mx.zeros((2, WIDTH))):
        before = profiled.profile()
        with pytest.raises(InvalidParams):
            profiled.append(vector(3), wrong)
        assert profiled.profile() == before
        assert mx.array_equal(profiled.attend(vector(1)), vector(2))
    assert profiled.profile().tokens_written == len(profiled) == 1


def test_a_cache_that_cannot_tell_keeps_the_key() -> None:
    """Without check_pair it is append_key and then append_value, as documented."""

    class Refusing(Plain):
        def append_value(self, v: mx.array) -> None:
            raise ValueError(v.shape)

        def append(self, k: mx.array, v: mx.array) -> None:
            raise AssertionError((k, v))

    cache = Refusing()
    with pytest.raises(ValueError, match="64"):
        KVCacheProfiler(cache).append(vector(1), vector(2))
    assert len(cache.keys) == 1


class Together:
    """Stores pairs only."""

    def __init__(self) -> None:
        self.pairs: list[Any] = []

    def append(self, k: mx.array, v: mx.array, *, at: int = 0) -> None:
        """Keep both."""
        self.pairs.append((k, v, at))

    def attend(self, q: mx.array) -> mx.array:
        """The last value."""
        return self.pairs[-1][1]

    def __len__(self) -> int:
        return len(self.pairs)


def test_a_cache_that_stores_pairs_only_is_timed_as_a_whole() -> None:
    """One call, one token, 2 x 64 of baseline, 16-bit bytes of both, no write time; attend is still its own."""
    profiled = run(KVCacheProfiler(Together(), head_dim=WIDTH))
    profile = profiled.profile()
    assert (profile.n_quantize_calls, profile.tokens_written, profile.fp16_baseline_bytes) == (3, 3, 3 * 128)
    assert profile.quantize_ms_total > 0
    assert (profile.write_ms_total, profile.is_fused, profile.n_dequantize_calls) == (0.0, False, 1)
    assert (profile.true_fp16_bytes, profile.resident_bytes) == (3 * 2 * WIDTH * 2, 3 * 2 * WIDTH * 4)
    assert [point.calls for point in profile.timeline] == [1, 1, 1]


def test_append_is_there_where_it_can_work() -> None:
    """Both halves or an append of its own; keys alone, or attend alone, are not enough."""

    class KeysOnly:
        def append_key(self, k: Any) -> None:
            """Forget it."""

    class QueriesOnly:
        def attend(self, q: Any) -> Any:
            """Nothing."""

    class KeysAndPairs(KeysOnly, Together):
        """No append_value."""

    for cache, has in ((Plain(), True), (Together(), True), (KeysAndPairs(), True), (KeysOnly(), False)):
        profiled = KVCacheProfiler(cache)
        assert hasattr(profiled, "append") == ("append" in dir(profiled)) == has
    with pytest.raises(AttributeError, match="'QueriesOnly' object has no attribute 'append'"):
        KVCacheProfiler(QueriesOnly()).append(vector(1), vector(1))
    mixed = KVCacheProfiler(KeysAndPairs(), head_dim=WIDTH)
    mixed.append(vector(1), vector(2))
    assert len(mixed) == 1


def test_further_arguments_reach_the_cache() -> None:
    """By position and by name, of each function; the documented ones also by their names."""

    class Asked(Plain):
        said: tuple[Any, ...] = ()

        def append_key(self, k: mx.array, position: int = 0) -> None:
            super().append_key(k)
            self.said += (position,)

        def append_value(self, v: mx.array, *, weight: int = 0) -> None:
            super().append_value(v)
            self.said += (weight,)

        def append(self, k: mx.array, v: mx.array, position: int) -> None:
            self.append_key(k, position)
            self.append_value(v)

        def attend(self, q: mx.array, scale: float = 1.0) -> mx.array:
            return q * scale

    profiled = KVCacheProfiler(Asked())
    profiled.append_key(k=vector(1), position=7)
    profiled.append_value(vector(1), weight=8)
    profiled.append(vector(1), v=vector(2), position=9)
    assert profiled.said == (7, 8, 9, 0)
    assert mx.array_equal(profiled.attend(q=vector(2), scale=1.5), vector(3))
    assert mx.array_equal(profiled.attend(vector(2), 2.0), vector(4))
    assert profiled.profile().n_quantize_calls == 2
    with pytest.raises(TypeError, match="colour"):
        profiled.attend(vector(1), colour="red")


def test_both_kinds_of_wrapper_go_into_one_report() -> None:
    """Their profiles have one shape."""
    from mlx_lm.models.cache import KVCache

    mixed = [run(KVCacheProfiler(Plain(), head_dim=WIDTH)), MLXCacheProfiler(KVCache(), 1)]
    report = profile_layers(mixed, elapsed_s=1.0)
    assert [layer.is_fused for layer in report.layers] == [False, True]


def test_the_names_are_exported_from_the_package() -> None:
    """As the documentation imports them."""
    assert veloxquant.KVCacheProfiler is KVCacheProfiler
    assert veloxquant.profile_layers is profile_layers
