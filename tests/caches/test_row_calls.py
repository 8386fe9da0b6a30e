"""A decode step of a batch costs Python as much for many rows, and many heads, as for few: its calls are counted."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.caches.affine_codec import AffineCodec
from veloxquant.caches.evicting import EvictingKVCache
from veloxquant.caches.eviction import HeavyHitters, Rule, SnapKV
from veloxquant.caches.packed import PackedKVCache
from veloxquant.caches.per_channel import PerChannelCodec
from veloxquant.caches.tiered import TieredKVCache
from veloxquant.caches.tiered_layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 32


class Case(NamedTuple):
    """A kind of cache, and lengths that its rows have in turn when the step comes, the longest first."""

    make: Callable[[], Any]
    lengths: tuple[int, ...]


def packed() -> PackedKVCache:
    """Four bits a number, buffers that grow by 64 tokens."""
    return PackedKVCache(AffineCodec(WIDTH, 4, 32), AffineCodec(WIDTH, 4, 32), 64)


def tiered() -> TieredKVCache:
    """Keys by channel, values by token: 4 sinks, 32 recent tokens, groups of 32."""
    return TieredKVCache(PerChannelCodec(WIDTH, 4, 32), AffineCodec(WIDTH, 4, 32), recent=32)


def bounded(policy: Any) -> EvictingKVCache:
    """40 tokens are kept whenever the length is a multiple of 16."""
    return EvictingKVCache(AffineCodec(WIDTH, 4, 32), AffineCodec(WIDTH, 4, 32), policy, 40, 16)


CASES = {
    "packed": Case(packed, (120, 70)),
    "packed, buffers grow": Case(packed, (128, 70)),
    "packed, equal rows": Case(packed, (120,)),
    "tiered": Case(tiered, (120, 105)),
    "tiered, half the rows pack a group": Case(tiered, (131, 105)),
    "tiered, all rows pack a group": Case(tiered, (131, 99)),
    "tiered, half the rows fill sinks": Case(tiered, (120, 2)),
    "tiered, equal rows": Case(tiered, (120,)),
    "bounded": Case(lambda: bounded(HeavyHitters(recent=20)), (104, 50)),
    "bounded, half the rows evict": Case(lambda: bounded(HeavyHitters(recent=20)), (111, 50)),
    "bounded, all rows evict": Case(lambda: bounded(SnapKV(recent=8, kernel=5)), (111, 79)),
    "bounded, equal rows": Case(lambda: bounded(SnapKV(recent=8, kernel=5)), (104,)),
}


def attended(cache: Any, heads: int, rows: int, tokens: int) -> None:
    """One call, as a layer makes it: of several tokens for one sequence, or of one token for each row."""
    keys, values = (mx.random.normal((rows, heads, tokens, WIDTH)) for _ in range(2))
    queries = mx.random.normal((rows, 2 * heads, tokens, WIDTH))
    mask = "causal" if tokens > 1 else cache.make_mask(1, return_array=False, window_size=None)
    assert cache.offset is not None
    ours = cache.update_and_fetch(keys, values)
    mx.eval(ours[0].attend(queries, ours[1], 0.2, mask), cache.state)


def step(case: Case, rows: int, heads: int) -> Counter[str]:
    """How often each function, of Python or of C, is called in one decode step."""
    singles = [case.make() for _ in range(rows)]
    for row, cache in enumerate(singles):
        attended(cache, heads, 1, case.lengths[row % len(case.lengths)])
    twin = singles[0].merge(singles)
    calls: Counter[str] = Counter()

    def seen(frame: Any, event: str, called: Any) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            calls[called.__name__] += 1

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what it would call is not the step's
    try:
        sys.setprofile(seen)
        attended(twin, heads, rows, 1)
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


@pytest.mark.parametrize("name", CASES)
def test_a_step_makes_as_many_python_calls_for_any_rows_and_heads(name: str) -> None:
    """2, 8 and 32 rows, 2 and 8 heads: call for call the same functions, those of Python and those of C."""
    case = CASES[name]
    step(case, 2, 2)  # what is imported and looked up once
    few = step(case, 2, 2)
    assert sum(few.values()) > 20
    for rows, heads in ((8, 2), (32, 2), (2, 8)):
        assert step(case, rows, heads) == few, (rows, heads)


SIZES = st.integers(1, 300)


@given(budget=SIZES, stride=SIZES, lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=20))
def test_when_rows_evict_and_what_they_hold_is_said_as_of_one(budget: int, stride: int, lengths: list[int]) -> None:
    """`due_rows` and `held_rows` of many lengths are `due` and `held` of each."""
    rule, rows = Rule(budget, stride), np.array(lengths)
    assert rule.due_rows(rows).tolist() == [rule.due(length) for length in lengths]
    assert rule.held_rows(rows).tolist() == [rule.held(length) for length in lengths]


@given(sinks=SIZES, group=st.sampled_from([32, 64]), lengths=st.lists(st.integers(-50, 3000), min_size=1, max_size=20))
def test_packed_groups_of_rows_are_counted_as_of_one(sinks: int, group: int, lengths: list[int]) -> None:
    """`groups` of many lengths, negative ones in padding among them, are the groups of `packed` of each."""
    layout = Layout.checked(sinks, 96, group, None)
    assert (layout.groups(np.array(lengths)) * group).tolist() == [layout.packed(length) for length in lengths]
