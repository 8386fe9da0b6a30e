"""Slot arithmetic against mlx-lm's own cache objects, driven with lazy arrays, and against figures worked by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from veloxquant.profiles import CachePart
from veloxquant.profiles.slots import (
    bytes_per_token,
    chunked_peak_slots,
    chunked_slots,
    kv_growth_peak,
    kv_slots,
    part_bytes,
    part_peak_slots,
    part_slots,
    schedule,
    window_peak_slots,
    window_slots,
)

if TYPE_CHECKING:
    from veloxquant.profiles.model import PartKind

Runs = list[tuple[int, int]]
RUNS = st.lists(st.tuples(st.integers(1, 700), st.integers(1, 12)), min_size=1, max_size=4)
DECODE_RUNS = st.lists(
    st.tuples(st.one_of(st.just(1), st.integers(2, 700)), st.integers(1, 300)), min_size=1, max_size=3
)


def drive(cache: Any, runs: Runs, width: int = 1, *, trim_front: bool = False) -> list[int]:
    """Write the runs into a cache of mlx-lm without evaluating; return the slots held after each call."""
    held = []
    for tokens, calls in runs:
        for _ in range(calls):
            if trim_front:
                cache.maybe_trim_front()
            new = mx.zeros((1, 1, tokens, width))
            cache.update_and_fetch(new, new)
            keys = cache.keys[0] if isinstance(cache.keys, (tuple, list)) else cache.keys
            held.append(keys.shape[2])
    return held


def worst_replacement(held: list[int]) -> int:
    """The largest sum of an old and a new buffer over all calls that changed the slots; plain slots otherwise."""
    pairs = zip([0, *held], held, strict=False)
    return max(new if old == new else old + new for old, new in pairs)


@settings(max_examples=60, deadline=None)
@given(DECODE_RUNS)
def test_kv_slots_equal_the_engine(runs: Runs) -> None:
    """A KVCache holds exactly the slots computed, and its worst growth is the one computed."""
    held = drive(KVCache(), runs)
    assert kv_slots(runs) == held[-1]
    assert sum(kv_growth_peak(runs)) == worst_replacement(held)


@settings(max_examples=20, deadline=None)
@given(RUNS)
def test_quantized_cache_grows_by_the_same_rule(runs: Runs) -> None:
    """A QuantizedKVCache written from the start holds as many slots as a KVCache."""
    assert kv_slots(runs) == drive(QuantizedKVCache(group_size=32, bits=8), runs, width=32)[-1]


@settings(max_examples=80, deadline=None)
@given(DECODE_RUNS, st.integers(1, 900))
def test_window_slots_equal_the_engine(runs: Runs, window: int) -> None:
    """A RotatingKVCache holds exactly the slots computed after any mix of chunks and single tokens."""
    held = drive(RotatingKVCache(max_size=window), runs)
    assert window_slots(runs, window) == held[-1]
    assert worst_replacement(held) <= window_peak_slots(runs, window)


@settings(max_examples=30, deadline=None)
@given(DECODE_RUNS, st.integers(8, 900), st.integers(0, 7))
def test_sinks_inside_a_window_do_not_change_its_slots(runs: Runs, window: int, keep: int) -> None:
    """`keep` tokens kept in front are part of the window, not added to it."""
    assert window_slots(runs, window) == drive(RotatingKVCache(max_size=window, keep=keep), runs)[-1]


@settings(max_examples=60, deadline=None)
@given(DECODE_RUNS, st.integers(1, 900))
def test_chunked_slots_equal_the_engine(runs: Runs, chunk: int) -> None:
    """A ChunkedKVCache trimmed in front before each call holds exactly the slots computed."""
    held = drive(ChunkedKVCache(chunk), runs, trim_front=True)
    assert chunked_slots(runs, chunk) == held[-1]
    assert worst_replacement(held) <= chunked_peak_slots(runs, chunk)


@settings(max_examples=20, deadline=None)
@given(RUNS)
def test_concatenated_cache_holds_exactly_its_tokens(runs: Runs) -> None:
    """A ConcatenateKVCache has no slack; its last write copies everything."""
    part = CachePart(kind="concat", engine_class="ConcatenateKVCache")
    held = drive(ConcatenateKVCache(), runs)
    assert part_slots(part, runs) == held[-1]
    assert part_peak_slots(part, runs) == worst_replacement(held)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 2000)), min_size=1, max_size=3), st.integers(1, 300))
def test_jumping_over_periods_changes_nothing(runs: Runs, step: int) -> None:
    """The fast rule equals the rule applied call by call, for any step."""
    offset = slots = before = 0
    for tokens, calls in runs:
        for _ in range(calls):
            if offset + tokens > slots:
                before = slots
                slots = (offset if offset % step else slots) + -(-tokens // step) * step
            offset += tokens
    assert kv_slots(runs, step) == slots
    assert kv_growth_peak(runs, step) == (before, slots)


@given(st.integers(1, 2**27), st.integers(0, 2**27), st.integers(1, 2**20))
def test_schedule_feeds_every_token_once(context: int, generated: int, step: int) -> None:
    """Prompt and generated tokens are all written, no call is longer than the prefill step, none is empty."""
    runs = schedule(context, generated, step)
    assert sum(tokens * calls for tokens, calls in runs) == context + generated
    assert all(0 < tokens <= step and calls > 0 for tokens, calls in runs)


@settings(deadline=None)
@given(st.integers(1, 2**27), st.integers(0, 2**27), st.integers(1, 2**20))
def test_any_length_is_answered_with_enough_slots(context: int, generated: int, step: int) -> None:
    """Up to 2**27 tokens at any chunk size there is room for every token and never more than one call of slack."""
    runs = schedule(context, generated, step)
    slots = kv_slots(runs)
    assert context + generated <= slots <= context + generated + 2 * max(step, 256) + 256
    assert 0 <= kv_growth_peak(runs)[0] < slots
    assert window_slots(runs, 1024) <= 1024 + step
    assert chunked_slots(runs, 8192) <= 8192 + step + 256


def test_schedule_is_what_generation_does() -> None:
    """A prompt of 5000 in steps of 2048: two chunks, the rest but one, one token, then the generated ones."""
    assert schedule(5000, 100, 2048) == ((2048, 2), (903, 1), (1, 101))
    assert schedule(1, 0, 2048) == ((1, 1),)


def test_generation_calls_the_model_as_the_schedule_says() -> None:
    """mlx-lm's generate_step, run on a stand-in model, makes exactly the calls of the schedule."""
    from mlx_lm.generate import generate_step

    calls = []

    class Model:
        layers = ()

        def __call__(self, tokens: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
            calls.append(tokens.shape[1])
            return mx.zeros((1, tokens.shape[1], 4))

    list(generate_step(mx.zeros((37,), mx.int32), Model(), max_tokens=5, prefill_step_size=16, prompt_cache=[]))
    assert calls == [tokens for tokens, times in schedule(37, 5, 16) for _ in range(times)]


def test_slots_are_not_always_multiples_of_the_step() -> None:
    """300 tokens then 300 more: 512 slots, cut to 300, plus 512 (mlx-lm, KVCache.update_and_fetch)."""
    assert kv_slots([(300, 2)]) == 812
    assert kv_growth_peak([(300, 2)]) == (512, 812)


def test_a_window_keeps_the_whole_chunk_until_the_first_decoded_token() -> None:
    """Window 512: 2048 slots after one chunk of 2048, 2559 after two, 512 at the first single token."""
    assert window_slots([(2048, 1)], 512) == 2048
    assert window_slots([(2048, 2)], 512) == 2048 + 512 - 1
    assert window_slots([(2048, 2), (1, 1)], 512) == 512
    assert window_peak_slots([(2048, 3), (1, 1)], 512) == 2 * (2048 + 512 - 1)


def test_part_bytes_multiply_slots_by_both_widths() -> None:
    """One token of DeepSeek-V3's latent layer: 256 slots x (512 + 64) numbers x 2 bytes."""
    part = CachePart(
        kind="kv", engine_class="KVCache", heads=1, key_width=512, value_width=64, key_itemsize=2, value_itemsize=2
    )
    assert part_bytes(part, [(1, 1)]) == 256 * 576 * 2
    assert bytes_per_token(part) == 576 * 2


@pytest.mark.parametrize("kind", ["window", "chunked", "state"])
def test_only_growing_parts_cost_bytes_for_each_token(kind: PartKind) -> None:
    """Windows, chunks and states add nothing for one more token."""
    part = CachePart(
        kind=kind, engine_class="", heads=2, key_width=4, value_width=4, key_itemsize=2, value_itemsize=2, window=8
    )
    assert bytes_per_token(part) == 0


def test_a_state_costs_its_bytes_at_any_length() -> None:
    """A recurrent state neither grows nor has slots."""
    part = CachePart(kind="state", engine_class="ArraysCache", state_bytes=12345)
    assert part_bytes(part, [(1, 1)]) == part_bytes(part, [(4096, 1000)]) == 12345
    assert part_slots(part, [(4096, 10)]) == part_peak_slots(part, [(4096, 10)]) == 0
