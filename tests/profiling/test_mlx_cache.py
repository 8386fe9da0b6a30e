"""MLXCacheProfiler on mlx-lm's own caches: each documented rule, and the honest figures beside it."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from veloxquant.errors import InvalidParams
from veloxquant.profiling import MLXCacheProfiler, TimelinePoint, profile_layers, unwrapped

SLOT = 2 * 2 * 64 * 2  # bytes of a slot: K and V, 2 heads, width 64, 16 bits


def test_an_update_counts_one_call_its_tokens_and_two_bytes_a_key_number_of_one_head(kv: Any) -> None:
    """5 tokens of 2 heads, width 64: one call, 5 tokens, 5 x 2 x 64 bytes of baseline, all time in one figure."""
    profiled = MLXCacheProfiler(KVCache(), layer_id=4)
    profiled.update_and_fetch(*kv(tokens=5))
    profile = profiled.profile()
    assert (profile.layer_id, profile.is_fused) == (4, True)
    assert (profile.n_quantize_calls, profile.tokens_written, profile.fp16_baseline_bytes) == (1, 5, 640)
    assert profile.quantize_ms_total == profile.quantize_ms_mean > 0
    assert (profile.n_dequantize_calls, profile.dequantize_ms_total, profile.write_ms_total) == (0, 0.0, 0.0)
    assert profile.peak_memory_bytes == 256 * SLOT


def test_the_documented_baseline_is_tokens_written_times_two_times_width(kv: Any) -> None:
    """It holds after any mix of prompt chunks and steps, whatever the rows and heads."""
    profiled = MLXCacheProfiler(KVCache())
    for tokens in (7, 1, 300, 1):
        profiled.update_and_fetch(*kv(rows=3, heads=4, tokens=tokens, width=32))
    profile = profiled.profile()
    assert (profile.n_quantize_calls, profile.tokens_written) == (4, 309)
    assert profile.fp16_baseline_bytes == profile.tokens_written * 2 * 32


def test_the_result_is_the_caches_own(kv: Any) -> None:
    """Arrays, and tuples of arrays, as a twin that is not profiled returns them."""
    for make in (KVCache, lambda: QuantizedKVCache(32, 4)):
        profiled, plain = MLXCacheProfiler(make()), make()
        for tokens in (3, 1):
            ours, theirs = (one.update_and_fetch(*kv(tokens=tokens)) for one in (profiled, plain))
            assert repr(ours) == repr(theirs)


def test_true_bytes_count_rows_heads_and_both_widths(kv: Any) -> None:
    """3 rows x 4 heads x 7 tokens x (64 + 32) numbers x 2 bytes, though they came in 32 bits."""
    profiled = MLXCacheProfiler(KVCache())
    profiled.update_and_fetch(*kv(rows=3, heads=4, tokens=7, value_width=32, dtype=mx.float32))
    assert profiled.profile().true_fp16_bytes == 3 * 4 * 7 * (64 + 32) * 2


def test_a_window_of_64_peaks_in_the_prefill_and_shrinks_at_the_first_step(kv: Any) -> None:
    """512 slots of 512 bytes = 262,144 after the prefill; 64 slots = 32,768 from the first generated token on."""
    profiled = MLXCacheProfiler(RotatingKVCache(max_size=64))
    profiled.update_and_fetch(*kv(tokens=512))
    assert profiled.profile().resident_bytes == 512 * SLOT == 262_144
    for _ in range(3):
        profiled.update_and_fetch(*kv())
        profile = profiled.profile()
        assert (profile.resident_bytes, profile.reported_bytes) == (64 * SLOT, 32_768)
    assert (profile.peak_resident_bytes, profile.peak_memory_bytes) == (262_144, 262_144)
    assert (profile.sequence_tokens, profile.true_fp16_bytes) == (515, 515 * SLOT)
    assert [point[:2] for point in profile.timeline] == [
        (512, 262_144), (513, 32_768), (514, 32_768), (515, 32_768)
    ]  # fmt: skip


def test_a_packed_cache_holds_words_scales_and_biases(kv: Any) -> None:
    """4 bits in groups of 64: 32 + 2 x 2 bytes a row where 16 bits take 128; 256 slots for 256 tokens."""
    profiled = MLXCacheProfiler(QuantizedKVCache(64, 4))
    profiled.update_and_fetch(*kv(tokens=256))
    profile = profiled.profile()
    assert profile.resident_bytes == profile.reported_bytes == 2 * 2 * 256 * 36
    assert profile.resident_ratio == 36 / 128


def test_an_empty_packed_cache_reports_nothing() -> None:
    """mlx-lm's own nbytes raises there; that is neither an error nor a lie."""
    profile = MLXCacheProfiler(QuantizedKVCache(64, 4)).profile()
    assert (profile.reported_bytes, profile.resident_bytes, profile.is_lying) == (None, 0, False)


def test_a_cache_that_hides_a_copy_is_lying(kv: Any) -> None:
    """Its nbytes names the packed arrays and not the float ones kept beside them."""

    class Shadow(QuantizedKVCache):  # type: ignore[misc]
        def update_and_fetch(self, keys: Any, values: Any) -> Any:
            self.kept = [*getattr(self, "kept", []), {"k": keys, "v": values}]
            return super().update_and_fetch(keys, values)

    profiled = MLXCacheProfiler(Shadow(64, 4))
    profiled.update_and_fetch(*kv(tokens=256))
    profile = profiled.profile()
    assert profile.is_lying
    assert profile.reported_difference == -256 * SLOT


@pytest.mark.parametrize(
    ("make", "difference"),
    [
        (lambda: BatchKVCache([0, 0]), -2 * 2 * 4),
        (lambda: BatchRotatingKVCache(8, [0]), -2 * 4),
        (lambda: ArraysCache(1, left_padding=[0]), -4),
    ],
)
def test_bookkeeping_that_the_engine_leaves_out_is_no_lie(make: Any, difference: int) -> None:
    """Offsets and paddings, int32 a row, are told to the byte and accuse nobody, also of an empty cache."""
    profile = MLXCacheProfiler(make()).profile()
    assert (profile.reported_difference, profile.is_lying) == (difference, False)


def test_further_arguments_reach_the_cache(kv: Any) -> None:
    """By position and by name; the documented ones also by their names. Only K and V count."""

    class Asked(KVCache):  # type: ignore[misc]
        said: tuple[Any, ...] = ()

        def update_and_fetch(self, keys: Any, values: Any, extra: Any = None, *, other: Any = None) -> Any:
            self.said += (extra, other)
            return super().update_and_fetch(keys, values)

    profiled = MLXCacheProfiler(Asked())
    keys, values = kv(tokens=2)
    profiled.update_and_fetch(keys, values, 1, other=2)
    profiled.update_and_fetch(keys=keys, values=values, extra=mx.ones(9))
    assert profiled.said[:2] == (1, 2)
    assert profiled.said[2].shape == (9,)
    profile = profiled.profile()
    assert (profile.n_quantize_calls, profile.true_fp16_bytes, profiled.offset) == (2, 4 * SLOT, 4)


def test_trimming_takes_tokens_back_and_no_bytes(kv: Any) -> None:
    """What was given stays counted; the sequence is shorter; the buffers stay."""
    profiled = MLXCacheProfiler(KVCache())
    profiled.update_and_fetch(*kv(tokens=5))
    assert profiled.trim(2) == 2
    profile = profiled.profile()
    assert (profile.sequence_tokens, profile.tokens_written) == (3, 5)
    assert (profile.resident_bytes, profile.true_fp16_bytes) == (256 * SLOT, 5 * SLOT)


def test_counting_that_begins_late_says_so(kv: Any) -> None:
    """A filled cache has no known ratio: what came before was not seen."""
    cache = KVCache()
    cache.update_and_fetch(*kv(tokens=6))
    profiled = MLXCacheProfiler(cache)
    profiled.update_and_fetch(*kv())
    profile = profiled.profile()
    assert (profile.tokens_before, profile.sequence_tokens, profile.resident_ratio) == (6, 7, 0.0)
    assert profile_layers([profiled], 0.5).sequence_tokens_per_sec == 2.0


def test_reset_keeps_label_kind_and_cache(kv: Any) -> None:
    """Only the figures go."""
    profiled = MLXCacheProfiler(KVCache(), "deep")
    profiled.update_and_fetch(*kv(tokens=5))
    profiled.reset()
    profile = profiled.profile()
    assert (profile.layer_id, profile.is_fused, profile.n_quantize_calls, profile.timeline) == ("deep", True, 0, ())
    assert (profile.peak_memory_bytes, profile.resident_bytes, profiled.offset) == (0, 256 * SLOT, 5)


def test_states_are_counted_though_nothing_is_timed() -> None:
    """A recurrent layer: bytes and peak from the entries set, no calls, no tokens."""
    profiled = MLXCacheProfiler(ArraysCache(2), 1)
    profiled[0] = mx.zeros((1, 100))
    profiled[1] = mx.zeros((1, 50))
    profiled[0] = mx.zeros((1, 10))
    profiled.advance(1)
    profile = profiled.profile()
    assert (profile.n_quantize_calls, profile.quantize_ms_total, profile.tokens_written) == (0, 0.0, 0)
    assert (profile.resident_bytes, profile.reported_bytes, profile.peak_resident_bytes) == (240, 240, 600)
    assert (profile.peak_memory_bytes, profile.sequence_tokens, profile.resident_ratio) == (600, 0, 0.0)


def test_attributes_set_from_outside_are_seen() -> None:
    """Some models write arrays into attributes of their caches: the peak remembers them."""
    cache = ArraysCache(1)
    profiled = MLXCacheProfiler(cache)
    profiled.lengths = mx.zeros((25,))
    profiled.lengths = None
    assert (profiled.profile().peak_resident_bytes, profiled.profile().resident_bytes) == (100, 0)


def test_parts_of_a_composite_count_for_the_layer(kv: Any) -> None:
    """cache[0] and cache[1] are updated by the model; time, tokens and bytes are the layer's."""
    profiled = MLXCacheProfiler(CacheList(KVCache(), QuantizedKVCache(64, 8), ArraysCache(1)), "mixed")
    profiled[0].update_and_fetch(*kv(tokens=3))
    profiled[1].update_and_fetch(*kv(tokens=3))
    profiled[2][0] = mx.zeros((4,))
    assert isinstance(profiled[0], MLXCacheProfiler)
    assert isinstance(profiled[1], QuantizedKVCache)
    profile = profiled[1].profile()
    assert profile == profiled.profile()
    assert (profile.n_quantize_calls, profile.tokens_written, profile.sequence_tokens) == (2, 6, 3)
    assert profile.resident_bytes == profile.reported_bytes == 256 * SLOT + 2 * 2 * 256 * (64 + 4) + 16
    assert unwrapped(profiled[0]) is profiled.caches[0]


@pytest.mark.parametrize(
    ("make", "batch"), [(KVCache, BatchKVCache), (lambda: RotatingKVCache(8), BatchRotatingKVCache)]
)
def test_a_batch_of_profiled_caches_is_profiled(make: Any, batch: Any, kv: Any) -> None:
    """Merged, extended, filtered and extracted as mlx-lm does it; the batch's figures are at each row taken out."""
    first, second, third = (MLXCacheProfiler(make(), "layer") for _ in range(3))
    first.update_and_fetch(*kv(tokens=3))
    merged, alone = first.merge([first, second]), third.merge([third])
    assert isinstance(merged, MLXCacheProfiler)
    assert isinstance(merged, batch)
    merged.update_and_fetch(*kv(rows=2))
    alone.update_and_fetch(*kv(rows=1))
    merged.extend(alone)
    merged.update_and_fetch(*kv(rows=3))
    merged.filter(mx.array([0, 2]))
    row = merged.extract(0)
    assert isinstance(row, MLXCacheProfiler)
    assert type(row).__name__ == type(first).__name__
    assert row.offset == 5
    profile = merged.profile()
    assert (profile.n_quantize_calls, profile.true_fp16_bytes, profile.sequence_tokens) == (2, (2 + 3) * SLOT, 5)
    assert row.batch_profile() == profile
    assert row.profile().n_quantize_calls == 0
    assert merged.batch_profile() is None


def test_the_cache_itself_never_meets_a_wrapper() -> None:
    """A class that compares types when it merges or extends sees its own."""

    class Strict(KVCache):  # type: ignore[misc]
        rows = 1

        @classmethod
        def merge(cls, caches: list[Any]) -> Any:
            assert [type(cache) for cache in caches] == [cls] * len(caches)
            merged = cls()
            merged.rows = len(caches)
            return merged

        def extend(self, other: Any) -> None:
            assert type(other) is type(self)
            self.rows += other.rows

    merged = MLXCacheProfiler(Strict()).merge([MLXCacheProfiler(Strict()), MLXCacheProfiler(Strict())])
    merged.extend(MLXCacheProfiler(Strict()))
    assert merged.rows == 3


def test_a_converted_cache_goes_on_with_the_figures(kv: Any) -> None:
    """What mlx-lm's kv_bits puts in the list: the float peak stays, the packed bytes are what is held now."""
    profiled = MLXCacheProfiler(KVCache(), 2)
    profiled.update_and_fetch(*kv(tokens=5))
    packed = profiled.to_quantized(group_size=64, bits=4)
    assert isinstance(packed, QuantizedKVCache)
    packed.update_and_fetch(*kv())
    profile = packed.profile()
    assert (profile.layer_id, profile.n_quantize_calls, profile.true_fp16_bytes) == (2, 2, 6 * SLOT)
    assert (profile.peak_resident_bytes, profile.resident_bytes) == (256 * SLOT, 2 * 2 * 256 * 36)
    assert profiled.profile().n_quantize_calls == 1


def test_totals_of_layers_do_not_multiply_the_sequence(kv: Any) -> None:
    """Documented tokens are summed over layers, the sequence's are not; bytes are summed in both."""
    profilers = [MLXCacheProfiler(KVCache(), layer) for layer in range(4)]
    for profiled in profilers:
        profiled.update_and_fetch(*kv(tokens=8))
    report = profile_layers(profilers, elapsed_s=2.0)
    assert (report.total_tokens, report.tokens_per_sec) == (32, 16.0)
    assert (report.sequence_tokens, report.sequence_tokens_per_sec) == (8, 4.0)
    assert report.total_bytes_written == report.resident_bytes == report.reported_bytes == 4 * 256 * SLOT
    assert report.true_fp16_bytes == 4 * 8 * SLOT
    assert math.isclose(report.resident_ratio, 256 / 8)
    early = [layer.n_quantize_calls for layer in report.layers]
    profilers[0].update_and_fetch(*kv())
    assert [layer.n_quantize_calls for layer in report.layers] == early


def test_any_iterable_of_wrappers_is_a_list_of_layers() -> None:
    """A generator is not used up before its profiles are taken."""
    report = profile_layers(MLXCacheProfiler(KVCache(), layer) for layer in range(3))
    assert [layer.layer_id for layer in report.layers] == [0, 1, 2]


def test_a_list_that_is_not_profiled_is_refused() -> None:
    """By position, with what to do."""
    with pytest.raises(InvalidParams, match=r"profilers\[1\]") as caught:
        profile_layers([MLXCacheProfiler(KVCache()), KVCache()])
    assert caught.value.field == "profilers"


def test_timeline_points_carry_tokens_bytes_and_ms(kv: Any) -> None:
    """One for each update; their times add up to the total."""
    profiled = MLXCacheProfiler(KVCache())
    for tokens in (256, 1):
        profiled.update_and_fetch(*kv(tokens=tokens))
    profile = profiled.profile()
    assert profile.timeline == (
        TimelinePoint(256, 256 * SLOT, profile.timeline[0].ms, 1),
        TimelinePoint(257, 512 * SLOT, profile.timeline[1].ms, 1),
    )
    assert sum(point.ms for point in profile.timeline) == pytest.approx(profile.quantize_ms_total)
